"""What a job of any size costs the server: ``python -m tests.benchmarks.fleet [--ranks 100000]
[--kinds KIND ...] [--table]``.

A real server receives heartbeats over HTTP of a simulated job (`tests.simulation.parallel_job`);
other processes run its node agents (`tests.simulation.agent_pool`), one for each 8 ranks. Faults of
each kind are planted one after the other, each with one culprit among all ranks. Measured are the
time until the right verdict, the CPU time and memory of the server, and the response time of its
API.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import httpx

from hangwatch.model.kinds import VerdictKind
from tests.harness.server import Server, running_server
from tests.simulation import agent_pool
from tests.simulation.parallel_job import (
    HARMLESS_KINDS,
    IMMEDIATE_KINDS,
    NEIGHBOURS_WAIT_AFTER_S,
    STEP_S,
    TENSOR_PARALLEL_SIZE,
    JobRun,
    JobShape,
    SimulatedFault,
)
from tests.simulation.simulated_node_agent import AgentCounts

from .dashboard import read_cpu_s

STALL_AFTER_S = 20.0  # seconds: the server's default of 60 would only make this take longer
MAX_VERDICT_DELAY_S, MAX_API_S, MAX_CORE_PERCENT, MAX_MB = 10.0, 0.2, 100.0, 2000.0
AGENT_PROCESSES = 2  # processes
HEALTHY_S = 20.0
HEADINGS = (
    "ranks", "hosts", "interval", "heartbeats/s", "bytes each", "server, healthy", "at worst", "memory", "right verdicts, the latest",
    "API: median, 99 %, worst",
)  # fmt: skip
# What is planted in each run of the job, in turn. A launcher ends the run after the last of them
# and starts the next.
RUN_FAULTS: tuple[tuple[VerdictKind, ...], ...] = (
    (
        VerdictKind.CONCURRENT_USE, VerdictKind.FROZEN_RANK, VerdictKind.MISSING_RANK, VerdictKind.SLOW_RANK, VerdictKind.DEADLOCK, VerdictKind.LOST_NODE, VerdictKind.NO_PROGRESS,
        VerdictKind.MISMATCH,
    ),
    (VerdictKind.STARTUP_STALL, VerdictKind.EXITED_RANK),
    (VerdictKind.GROUP_MISMATCH, VerdictKind.DEAD_RANK),
)  # fmt: skip


@dataclass(slots=True)
class ApiProbe:
    """Asks the API as people and scripts do, twice a second, and notes how long each answer takes."""

    url: str
    activity: str = "healthy"  # what goes on meanwhile
    response_times: list[tuple[float, str]] = field(default_factory=list)  # seconds, and what
    open_incidents: list[dict[str, Any]] = field(default_factory=list)
    _stopped: threading.Event = field(default_factory=threading.Event)

    def run_probe(self) -> None:
        paths = ("jobs", "ranks?limit=100", "ranks?rank=77", "incidents?status=open")
        with httpx.Client(timeout=30.0, trust_env=False) as page:
            while not self._stopped.wait(0.5):
                for path in paths:
                    answer = self._send_request(page, path)
                    if (
                        path.startswith("incidents")
                        and answer is not None
                        and answer.status_code == 200
                    ):
                        self.open_incidents = answer.json()["items"]
                with httpx.Client(timeout=30.0, trust_env=False) as script:
                    self._send_request(script, "jobs", " on a new connection")

    def _send_request(
        self, client: httpx.Client, path: str, note: str = ""
    ) -> httpx.Response | None:
        began, problem, answer = time.monotonic(), "", None
        try:
            answer = client.get(f"{self.url}/api/v1/{path}")
        except httpx.HTTPError as error:
            problem = f": {error!r}"
        self.response_times.append(
            (time.monotonic() - began, f"{path}{note} ({self.activity}){problem}")
        )
        return answer

    def stop_probe(self) -> None:
        self._stopped.set()


@dataclass(slots=True, kw_only=True)
class FaultResult:
    """What became of one planted fault."""

    kind: VerdictKind
    verdict_delay_s: (
        float | None
    )  # from when it was due until the API told the right verdict; None: it never did
    other_verdicts: list[str]  # what was claimed beside it
    core_share: float
    counts: AgentCounts  # from when it was planted


@dataclass(slots=True)
class AgentProcesses:
    """The processes that play the node agents."""

    pipes: list[Connection]
    total: AgentCounts = field(
        default_factory=AgentCounts
    )  # as of the last time that they were asked

    def send_order(self, order: str, value: object = None) -> None:
        for pipe in self.pipes:
            pipe.send((order, value))

    def collect_counts(self) -> tuple[AgentCounts, float, int]:
        """Since they were last asked; their CPU seconds in all; and how many hosts have told their
        end.
        """
        self.send_order("counts")
        told = [pipe.recv() for pipe in self.pipes]
        found = AgentCounts()
        for counts, _, _ in told:
            found.add_counts(counts)
        self.total.add_counts(found)
        return found, sum(spent for _, spent, _ in told), sum(over for _, _, over in told)


@contextmanager
def play_agents(port: int, run: JobRun, ramp_s: float) -> Iterator[AgentProcesses]:
    context = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    for n in range(AGENT_PROCESSES):
        mine, theirs = context.Pipe()
        hosts = range(
            n * run.shape.hosts // AGENT_PROCESSES, (n + 1) * run.shape.hosts // AGENT_PROCESSES
        )
        processes.append(
            context.Process(
                target=agent_pool.run_agent_pool,
                args=(port, hosts, run, ramp_s, theirs),
                daemon=True,
            )
        )
        processes[-1].start()
        theirs.close()
        pipes.append(mine)
    try:
        yield AgentProcesses(pipes)
    finally:
        for pipe in pipes:
            pipe.close()
        for process in processes:
            process.join(10.0)
            process.kill()


@dataclass(slots=True, kw_only=True)
class FaultTrial:
    server: Server
    probe: ApiProbe
    players: AgentProcesses
    run: JobRun
    results: list[FaultResult] = field(default_factory=list)

    def wait_until_reported(self) -> float:
        """Seconds until the server knows every rank of this run."""
        began = time.monotonic()
        jobs: list[dict[str, Any]] = []
        while time.monotonic() - began < 300:
            jobs = self.server.get_items("jobs")
            if (
                jobs
                and jobs[0]["heard_of"] == self.run.shape.ranks
                and jobs[0]["attempt"] == self.run.number
            ):
                return time.monotonic() - began
            time.sleep(0.5)
        raise TimeoutError(
            f"not all ranks are known: {jobs[:1]} {self.players.collect_counts()} {self.server.read_log()}"[
                :2000
            ]
        )

    def plant_fault(self, kind: VerdictKind, index: int) -> None:
        shape, self.probe.activity = self.run.shape, kind.value
        # Somewhere in the middle: a stage with neighbours on both sides, a replica and a lane of
        # its own for each fault.
        rank = ((index + 1) * shape.data // 12 * shape.pipeline + 2) * TENSOR_PARALLEL_SIZE + (
            index * 3
        ) % TENSOR_PARALLEL_SIZE
        if kind is VerdictKind.DEADLOCK:
            rank -= rank % TENSOR_PARALLEL_SIZE
        at = time.monotonic() + 1.0
        while (
            kind not in (VerdictKind.STARTUP_STALL, *HARMLESS_KINDS)
            and not 0.2 < self.run.count_steps(at) % 1.0 < 0.6
        ):
            at += 0.1
        fault = SimulatedFault(
            kind=kind,
            rank=rank,
            starts_at=self.run.started_at if kind is VerdictKind.STARTUP_STALL else at,
        )
        if (
            kind is VerdictKind.STARTUP_STALL and self.run.faults
        ):  # the very first run began with it
            fault = self.run.faults[0]
        self._change_run(faults=[*[f for f in self.run.faults if f is not fault], fault])
        due = (
            fault.starts_at
            + (0.0 if kind in IMMEDIATE_KINDS else STALL_AFTER_S)
            + NEIGHBOURS_WAIT_AFTER_S
        )
        self.players.collect_counts()
        used, began = read_cpu_s(self.server.pid), time.monotonic()
        seen: float | None = None  # through the API
        others: dict[str, str] = {}  # by incident
        while seen is None and time.monotonic() < due + 3 * MAX_VERDICT_DELAY_S:
            time.sleep(0.1)
            for incident in self.probe.open_incidents:
                if (
                    incident["kind"] == kind.value
                    and set(incident["culprits"]) == fault.list_culprits()
                ):
                    seen = time.monotonic()
                    others.pop(incident["id"], None)  # the same one: a warning has become an alert
                elif _to_monotonic(incident["opened_at"]) > fault.starts_at:
                    others[incident["id"]] = f"{incident['kind']} {incident['culprits'][:4]}"
        time.sleep(2.0)
        core = (read_cpu_s(self.server.pid) - used) / (time.monotonic() - began)
        late_s = None if seen is None else max(0.0, seen - due)
        counts, _, _ = self.players.collect_counts()
        self.results.append(
            FaultResult(
                kind=kind,
                verdict_delay_s=late_s,
                other_verdicts=sorted(others.values()),
                core_share=core,
                counts=counts,
            )
        )
        print(f"  {_describe_result(self.results[-1])}", flush=True)
        if kind not in HARMLESS_KINDS and kind not in (
            VerdictKind.MISMATCH,
            VerdictKind.EXITED_RANK,
            VerdictKind.DEAD_RANK,
        ):
            self._change_run(
                faults=[*self.run.faults[:-1], replace(fault, ends_at=time.monotonic() + 0.5)]
            )
            self._wait_until_resolved(kind)

    def _wait_until_resolved(self, kind: VerdictKind) -> None:
        deadline = time.monotonic() + 60
        while (
            any(i["kind"] == kind.value for i in self.probe.open_incidents)
            and time.monotonic() < deadline
        ):
            time.sleep(0.5)

    def _change_run(self, **changes: Any) -> None:
        self.run = replace(self.run, **changes)
        self.players.send_order("change", self.run)

    def restart_job(self) -> None:
        """All processes are told to end, and the next attempt is started."""
        self.probe.activity = "restart"
        self._change_run(ended_at=time.monotonic() + 1.0)
        deadline = time.monotonic() + 120
        while (
            self.players.collect_counts()[2] < self.run.shape.hosts - 1
            and time.monotonic() < deadline
        ):
            time.sleep(1.0)
        self.run = JobRun(
            shape=self.run.shape, number=self.run.number + 1, started_at=time.monotonic()
        )


def _to_monotonic(date: str) -> float:
    """A date of the API's on this machine's monotonic clock."""
    return (
        time.monotonic()
        - (
            datetime.now(timezone.utc) - datetime.fromisoformat(date.replace("Z", "+00:00"))
        ).total_seconds()
    )


def _describe_result(result: FaultResult) -> str:
    late = (
        "no right verdict"
        if result.verdict_delay_s is None
        else f"right {result.verdict_delay_s:5.1f} s after it was due"
    )
    ok = (
        result.verdict_delay_s is not None
        and result.verdict_delay_s <= MAX_VERDICT_DELAY_S
        and not result.other_verdicts
    )
    told, counts = [*result.other_verdicts], result.counts
    if counts.refused or counts.failures:
        told.append(f"{counts.refused:,} heartbeats refused, {counts.failures:,} lost")
    if counts.max_delay_s > 1.0:
        told.append(f"the simulation itself was {counts.max_delay_s:.1f} s late")
    return (
        f"{result.kind.value:16} {late:36} server {100 * result.core_share:5.1f} %"
        f" {'ok' if ok else 'WRONG'} {'; '.join(told)}"
    )


def run_benchmark(
    folder: Path, ranks: int, runs: tuple[tuple[VerdictKind, ...], ...]
) -> tuple[str, bool]:
    """A row of the table, and whether everything was as it should be."""
    shape = JobShape.largest_within(ranks)
    ramp_s = max(2.0, shape.hosts / 800)
    with running_server(folder, stall_after_s=STALL_AFTER_S) as server:
        probe = ApiProbe(server.url)
        first = JobRun(shape=shape, number=0, started_at=time.monotonic() + 1.0)
        if VerdictKind.STARTUP_STALL in runs[0]:
            first.faults = [
                SimulatedFault(kind=VerdictKind.STARTUP_STALL, rank=77, starts_at=first.started_at)
            ]
        asking = threading.Thread(target=probe.run_probe, daemon=True)
        with play_agents(server.port, first, ramp_s) as players:
            trial = FaultTrial(server=server, probe=probe, players=players, run=first)
            print(
                f"{shape.ranks} ranks, {shape.hosts} hosts: all heard of after"
                f" {trial.wait_until_reported():.0f} s",
                flush=True,
            )
            time.sleep(10.0)
            asking.start()
            players.collect_counts()
            used, began = read_cpu_s(server.pid), time.monotonic()
            time.sleep(HEALTHY_S)
            spent = time.monotonic() - began
            core, (counts, _, _) = (read_cpu_s(server.pid) - used) / spent, players.collect_counts()
            print(f"  healthy: server {100 * core:.1f} %, {counts}", flush=True)
            for n, kinds in enumerate(runs):
                if n:
                    trial.restart_job()
                    players.send_order("start", (trial.run, ramp_s))
                    if kinds[0] is not VerdictKind.STARTUP_STALL:
                        trial.wait_until_reported()
                        time.sleep(STEP_S)
                for place, kind in enumerate(kinds):
                    trial.plant_fault(kind, place)
            probe.stop_probe()
            asking.join()
            players.collect_counts()
        peak_mb = _read_peak_mb(server.pid)
    slow = sorted(probe.response_times, reverse=True)
    took = sorted(seconds for seconds, _ in probe.response_times)
    late = [f.verdict_delay_s for f in trial.results if f.verdict_delay_s is not None]
    hung = max(f.core_share for f in trial.results)
    print(
        f"  the slowest answers: {'; '.join(f'{1000 * s:.0f} ms {path}' for s, path in slow[:12])}"
    )
    print(f"  in all: {players.total}")
    good = (
        len(late) == len(trial.results)
        and max(late) <= MAX_VERDICT_DELAY_S
        and not any(f.other_verdicts for f in trial.results)
    )
    good &= (
        took[-1] <= MAX_API_S and 100 * max(core, hung) <= MAX_CORE_PERCENT and peak_mb <= MAX_MB
    )
    cells = (
        f"{shape.ranks:,}", f"{shape.hosts:,}", f"{counts.interval_s:.1f} s", f"{counts.heartbeats / spent:,.0f}",
        f"{counts.bytes / max(1, counts.heartbeats):,.0f}", f"{100 * core:.0f} %", f"{100 * hung:.0f} %", f"{peak_mb:,.0f} MB",
        f"{len(late)} of {len(trial.results)}, {max(late, default=0.0):.1f} s",
        f"{1000 * statistics.median(took):.0f}, {1000 * took[int(0.99 * len(took))]:.0f}, {1000 * took[-1]:.0f} ms",
    )  # fmt: skip
    return f"| {' | '.join(cells)} |", good


def _read_peak_mb(pid: int) -> float:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) / 1024


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.fleet", description=(__doc__ or "").partition(":")[0]
    )
    parser.add_argument("--ranks", type=int, default=100_000)
    parser.add_argument("--table", action="store_true", help="1,000, 10,000 and 100,000 ranks")
    parser.add_argument(
        "--kinds",
        nargs="+",
        type=VerdictKind,
        metavar="KIND",
        help="plant only these, all in one run",
    )
    told = parser.parse_args()
    good, rows = True, []
    for ranks in (1_000, 10_000, 100_000) if told.table else (told.ranks,):
        with tempfile.TemporaryDirectory(prefix="hangwatch-fleet-") as folder:
            row, fine = run_benchmark(
                Path(folder), ranks, (tuple(told.kinds),) if told.kinds else RUN_FAULTS
            )
        good &= fine
        rows.append(row)
    print(f"\n{os.cpu_count()} cores, the simulation on them too\n")
    print(f"| {' | '.join(HEADINGS)} |")
    print("|" + "---|" * len(HEADINGS))
    print("\n".join(rows))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
