"""Compares ways to serve the connections of thousands of node agents: ``python -m
tests.benchmarks.serving [--hosts 12500] [--only uvloop nginx]``.

Each way serves the same load, that of `tests.benchmarks.fleet` in ``--jobs`` jobs of equal size, one
way after the other:

- asyncio: one hangwatch-server, with asyncio's event loop
- uvloop: one with uvloop's
- nginx: the first one, behind nginx with deploy/nginx.conf
- servers: a hangwatch-server for each job, on one PostgreSQL

A way whose programs are not installed is left out, with the remedy. CPU time and memory are those of
all processes that serve: nginx and PostgreSQL are among them.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from hangwatch.model.kinds import VerdictKind
from tests.harness.postgres import find_postgres_bin, running_postgres
from tests.harness.server import Server
from tests.simulation.parallel_job import TENSOR_PARALLEL_SIZE, JobRun, JobShape
from tests.simulation.waiting import wait_until

from .fleet import (
    AGENT_PROCESSES,
    STALL_AFTER_S,
    STARTED_PER_S,
    AgentProcesses,
    ApiProbe,
    FaultTrial,
    describe_responses,
    measure_healthy,
    read_peak_mb,
    run_agents,
)
from .process_cost import list_family

VARIANT = Path(__file__).with_name("serving_variant.py")
NGINX_CONF = Path(__file__).parents[2] / "deploy" / "nginx.conf"
NGINX_FILES = 32_768  # two connections for each host
MIN_HOSTS_PER_JOB = 10  # a stage with neighbours on both sides, and replicas
HEADINGS = (
    "connections served by", "server, healthy", "at worst", "memory", "API: median, 99 %, worst", "right verdicts, the latest", "heartbeats refused, lost",
    "simulation late: median, worst",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """What serves the jobs. ``server`` answers the API about the first one."""

    server: Server
    ports: tuple[int, ...]  # where the node agents of each job report
    pids: tuple[int, ...]  # the processes that serve, without their children


Deploy = Callable[[Path, int], contextlib.AbstractContextManager[Deployment]]


@contextlib.contextmanager
def run_variant(folder: Path, way: str, *flags: str) -> Iterator[Server]:
    options = ("--stall-after", str(STALL_AFTER_S), "--host", "127.0.0.1", *flags)
    server = Server(folder, options, command=(sys.executable, str(VARIANT), way))
    try:
        server.start()
        yield server
    finally:
        server.stop()


def deploy_one(way: str) -> Deploy:
    """One server for all jobs."""

    @contextlib.contextmanager
    def deploy(folder: Path, jobs: int) -> Iterator[Deployment]:
        with run_variant(folder, way) as server:
            yield Deployment(server=server, ports=(server.port,) * jobs, pids=(server.pid,))

    return deploy


@contextlib.contextmanager
def deploy_behind_nginx(folder: Path, jobs: int) -> Iterator[Deployment]:
    with run_variant(folder, "asyncio") as server, socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        conf = write_nginx_conf(folder, port, server.port)
        command = ["nginx", "-p", str(folder), "-c", str(conf), "-e", str(folder / "nginx.log")]
        nginx = subprocess.Popen([*command, "-g", "daemon off;"])
        try:
            if not wait_until(lambda: _is_listening(port) or nginx.poll() is not None, 10.0, 0.05):
                raise TimeoutError(f"nginx does not listen: {(folder / 'nginx.log').read_text()}")
            yield Deployment(server=server, ports=(port,) * jobs, pids=(server.pid, nginx.pid))
        finally:
            nginx.terminate()
            nginx.wait(10.0)


def write_nginx_conf(folder: Path, port: int, server_port: int) -> Path:
    """deploy/nginx.conf for this server, without TLS: it is the same work for each way."""
    site = NGINX_CONF.read_text()
    for pattern, replacement in (
        (r"listen 443 ssl;", f"listen 127.0.0.1:{port} backlog=4096;"),
        (r"ssl_certificate(_key)? .*;", ""),
        (r"proxy_pass http://127.0.0.1:8642;", f"proxy_pass http://127.0.0.1:{server_port};"),
    ):
        site, count = re.subn(pattern, replacement, site)
        if not count:
            raise ValueError(f"{NGINX_CONF} has no {pattern}")
    user = "user root;" if os.getuid() == 0 else ""  # the server trusts its own user's connections
    temporary = "\n".join(
        f"{name}_temp_path {folder / name};"
        for name in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    path = folder / "nginx.conf"
    path.write_text(
        f"{user}\npid {folder / 'nginx.pid'};\nworker_rlimit_nofile {NGINX_FILES};\n"
        f"events {{ worker_connections {NGINX_FILES}; }}\nhttp {{\n{temporary}\n{site}\n}}\n"
    )
    return path


def _is_listening(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@contextlib.contextmanager
def deploy_by_job(folder: Path, jobs: int) -> Iterator[Deployment]:
    programs = find_postgres_bin()
    assert programs is not None
    with contextlib.ExitStack() as running:
        url = running.enter_context(running_postgres(programs))
        pid_file = Path(url.partition("host=")[2]) / "data" / "postmaster.pid"
        servers = []
        for number in range(jobs):
            flags = ("--database", url, "--name", f"server{number}")
            server = run_variant(folder / str(number), "asyncio", *flags)
            servers.append(running.enter_context(server))
        yield Deployment(
            server=servers[0],
            ports=tuple(server.port for server in servers),
            pids=(*(server.pid for server in servers), int(pid_file.read_text().split()[0])),
        )


def find_missing(way: str) -> str:
    """What is not installed for a way, with the remedy; empty if it can run."""
    if way == "uvloop" and importlib.util.find_spec("uvloop") is None:
        return f"uvloop is not installed: {sys.executable} -m pip install uvloop"
    if way == "nginx" and shutil.which("nginx") is None:
        return "nginx is not installed: apt-get install nginx-light"
    if way == "servers" and find_postgres_bin() is None:
        return "PostgreSQL is not installed: apt-get install postgresql"
    return ""


WAYS: dict[str, Deploy] = {
    "asyncio": deploy_one("asyncio"),
    "uvloop": deploy_one("uvloop"),
    "nginx": deploy_behind_nginx,
    "servers": deploy_by_job,
}


def measure_way(way: str, folder: Path, options: argparse.Namespace) -> str:
    """Returns the row of the table."""
    ranks_per_job = TENSOR_PARALLEL_SIZE * options.hosts // options.jobs
    shape = JobShape.largest_within(ranks_per_job)
    ramp_s = max(2.0, options.jobs * shape.hosts / STARTED_PER_S)
    started_at = time.monotonic() + 1.0
    runs = [
        JobRun(name=f"job{number}", shape=shape, number=0, started_at=started_at)
        for number in range(options.jobs)
    ]
    with WAYS[way](folder, options.jobs) as served, contextlib.ExitStack() as running:
        agents_by_job = [
            running.enter_context(
                run_agents(port, run, ramp_s, max(1, AGENT_PROCESSES // options.jobs))
            )
            for port, run in zip(served.ports, runs, strict=True)
        ]
        everyone = AgentProcesses([pipe for agents in agents_by_job for pipe in agents.pipes])
        probe = ApiProbe(served.server.url)
        trial = FaultTrial(
            server=served.server,
            pids=served.pids,
            probe=probe,
            agents=agents_by_job[0],
            run=runs[0],
            ramp_s=ramp_s,
        )
        print(f"{way}: {shape.hosts * options.jobs} hosts in {options.jobs} jobs", flush=True)
        trial.wait_until_reported()
        time.sleep(min(10.0, options.seconds))  # the load of the start is over
        probing = threading.Thread(target=probe.run_probe, daemon=True)
        probing.start()
        healthy = measure_healthy(served.pids, everyone, options.seconds)
        for index, kind in enumerate(options.kinds):
            trial.try_fault(kind, index)
        probe.stop_probe()
        probing.join()
        everyone.collect_counts()
        peak_mb = read_peak_mb(served.pids)
        families = sum(len(list_family(pid)) for pid in served.pids)
    delays_s = [r.verdict_delay_s for r in trial.results if r.verdict_delay_s is not None]
    shares = [healthy.core_share, *trial.recovery_shares, *(r.core_share for r in trial.results)]
    counts = everyone.total
    counts.add_counts(agents_by_job[0].total)
    cells = (
        f"{way}, processes: {families}",
        f"{100 * healthy.core_share:.1f} %",
        f"{100 * max(shares):.0f} %",
        f"{peak_mb:,.0f} MB",
        describe_responses(probe.list_responses_ms()),
        f"{len(delays_s)} of {len(trial.results)}, {max(delays_s, default=0.0):.1f} s",
        f"{counts.refused:,}, {counts.failures:,}",
        counts.lag_text,
    )
    return f"| {' | '.join(cells)} |"


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.serving",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--hosts", type=int, default=12_500, help="default: %(default)s")
    parser.add_argument("--jobs", type=int, default=2, help="default: %(default)s")
    parser.add_argument(
        "--seconds", type=float, default=60.0, help="of the healthy jobs; default: %(default)s"
    )
    parser.add_argument("--only", nargs="+", choices=WAYS, default=list(WAYS), metavar="WAY")
    parser.add_argument(
        "--kinds",
        nargs="*",
        type=VerdictKind,
        default=[VerdictKind.FROZEN_RANK, VerdictKind.MISSING_RANK, VerdictKind.NO_PROGRESS],
        metavar="KIND",
        help="the faults that are planted in the first job; default: frozen_rank missing_rank"
        " no_progress",
    )
    options = parser.parse_args()
    if options.hosts < MIN_HOSTS_PER_JOB * options.jobs:
        parser.error(f"each job needs {MIN_HOSTS_PER_JOB} hosts")
    rows, notes = [], []
    for way in options.only:
        if missing := find_missing(way):
            notes.append(f"{way} was left out: {missing}")
            continue
        with tempfile.TemporaryDirectory(prefix="hangwatch-serving-") as folder:
            rows.append(measure_way(way, Path(folder), options))
    print(f"\n{len(os.sched_getaffinity(0))} cores, the simulation on them too\n")
    print(f"| {' | '.join(HEADINGS)} |")
    print("|" + "---|" * len(HEADINGS))
    print("\n".join([*rows, "", *notes]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
