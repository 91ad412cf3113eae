"""What a job of any size costs the server: ``python -m tests.benchmarks.fleet [--ranks 100000]
[--kinds KIND ...] [--table]``.

A real server hears, over HTTP, of a job that exists only as numbers (`fleet_job`): other processes
play its node agents (`fleet_agents`), one for each 8 ranks. Kinds of fault are planted one after
the other, each with one culprit among all ranks, and the server's time to the right verdict, its
CPU time and memory, and the time that its API takes to answer are measured meanwhile.
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
from tests.harness.server import Server, serving

from . import fleet_agents
from .dashboard import cpu_s
from .fleet_agents import Counts
from .fleet_job import AT_ONCE, HARMLESS, NEIGHBOURS_WAIT, STEP_S, TENSOR, Fault, Run, Shape

STALL_AFTER = 20.0  # seconds: the server's default of 60 would only make this take longer
WITHIN_S, MAX_API_S, MAX_CORE_PERCENT, MAX_MB = 10.0, 0.2, 100.0, 2000.0
PLAYERS = 2  # processes
HEALTHY_S = 20.0
HEADINGS = (
    "ranks", "hosts", "interval", "heartbeats/s", "bytes each", "server, healthy", "at worst", "memory", "right verdicts, the latest",
    "API: median, 99 %, worst",
)  # fmt: skip
# What is planted in each run of the job, in turn. A launcher ends the run after the last of them
# and starts the next.
RUNS: tuple[tuple[VerdictKind, ...], ...] = (
    (
        VerdictKind.CONCURRENT_USE, VerdictKind.FROZEN_RANK, VerdictKind.MISSING_RANK, VerdictKind.SLOW_RANK, VerdictKind.DEADLOCK, VerdictKind.LOST_NODE, VerdictKind.NO_PROGRESS,
        VerdictKind.MISMATCH,
    ),
    (VerdictKind.STARTUP_STALL, VerdictKind.EXITED_RANK),
    (VerdictKind.GROUP_MISMATCH, VerdictKind.DEAD_RANK),
)  # fmt: skip


@dataclass(slots=True)
class Probe:
    """Asks the API as people and scripts do, twice a second, and notes how long each answer takes."""

    url: str
    doing: str = "healthy"  # what goes on meanwhile
    took: list[tuple[float, str]] = field(default_factory=list)  # seconds, and what
    open_: list[dict[str, Any]] = field(default_factory=list)
    _over: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        paths = ("jobs", "ranks?limit=100", "ranks?rank=77", "incidents?status=open")
        with httpx.Client(timeout=30.0, trust_env=False) as page:
            while not self._over.wait(0.5):
                for path in paths:
                    answer = self._ask(page, path)
                    if (
                        path.startswith("incidents")
                        and answer is not None
                        and answer.status_code == 200
                    ):
                        self.open_ = answer.json()["items"]
                with httpx.Client(timeout=30.0, trust_env=False) as script:
                    self._ask(script, "jobs", " on a new connection")

    def _ask(self, client: httpx.Client, path: str, how: str = "") -> httpx.Response | None:
        began, problem, answer = time.monotonic(), "", None
        try:
            answer = client.get(f"{self.url}/api/v1/{path}")
        except httpx.HTTPError as error:
            problem = f": {error!r}"
        self.took.append((time.monotonic() - began, f"{path}{how} ({self.doing}){problem}"))
        return answer

    def stop(self) -> None:
        self._over.set()


@dataclass(slots=True, kw_only=True)
class Found:
    """What became of one planted fault."""

    kind: VerdictKind
    late_s: (
        float | None
    )  # from when it was due until the API told the right verdict; None: it never did
    others: list[str]  # what was claimed beside it
    core: float
    counts: Counts  # from when it was planted


@dataclass(slots=True)
class Players:
    """The processes that play the node agents."""

    pipes: list[Connection]
    total: Counts = field(default_factory=Counts)  # as of the last time that they were asked

    def tell(self, what: str, value: object = None) -> None:
        for pipe in self.pipes:
            pipe.send((what, value))

    def counts(self) -> tuple[Counts, float, int]:
        """Since they were last asked; their CPU seconds in all; and how many hosts have told their
        end.
        """
        self.tell("counts")
        told = [pipe.recv() for pipe in self.pipes]
        found = Counts()
        for counts, _, _ in told:
            found.add(counts)
        self.total.add(found)
        return found, sum(spent for _, spent, _ in told), sum(over for _, _, over in told)


@contextmanager
def playing(port: int, run: Run, ramp_s: float) -> Iterator[Players]:
    context = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    for n in range(PLAYERS):
        mine, theirs = context.Pipe()
        hosts = range(n * run.shape.hosts // PLAYERS, (n + 1) * run.shape.hosts // PLAYERS)
        processes.append(
            context.Process(
                target=fleet_agents.play, args=(port, hosts, run, ramp_s, theirs), daemon=True
            )
        )
        processes[-1].start()
        theirs.close()
        pipes.append(mine)
    try:
        yield Players(pipes)
    finally:
        for pipe in pipes:
            pipe.close()
        for process in processes:
            process.join(10.0)
            process.kill()


@dataclass(slots=True, kw_only=True)
class Trial:
    server: Server
    probe: Probe
    players: Players
    run: Run
    found: list[Found] = field(default_factory=list)

    def until_heard(self) -> float:
        """Seconds until the server knows every rank of this run."""
        began = time.monotonic()
        jobs: list[dict[str, Any]] = []
        while time.monotonic() - began < 300:
            jobs = self.server.items("jobs")
            if (
                jobs
                and jobs[0]["heard_of"] == self.run.shape.ranks
                and jobs[0]["attempt"] == self.run.number
            ):
                return time.monotonic() - began
            time.sleep(0.5)
        raise TimeoutError(
            f"not all ranks are known: {jobs[:1]} {self.players.counts()} {self.server.log()}"[
                :2000
            ]
        )

    def plant(self, kind: VerdictKind, place: int) -> None:
        shape, self.probe.doing = self.run.shape, kind.value
        # Somewhere in the middle: a stage with neighbours on both sides, a replica and a lane of
        # its own for each fault.
        rank = ((place + 1) * shape.data // 12 * shape.pipeline + 2) * TENSOR + (place * 3) % TENSOR
        if kind is VerdictKind.DEADLOCK:
            rank -= rank % TENSOR
        at = time.monotonic() + 1.0
        while (
            kind not in (VerdictKind.STARTUP_STALL, *HARMLESS)
            and not 0.2 < self.run.steps(at) % 1.0 < 0.6
        ):
            at += 0.1
        fault = Fault(
            kind=kind, rank=rank, at=self.run.began if kind is VerdictKind.STARTUP_STALL else at
        )
        if (
            kind is VerdictKind.STARTUP_STALL and self.run.faults
        ):  # the very first run began with it
            fault = self.run.faults[0]
        self._change(faults=[*[f for f in self.run.faults if f is not fault], fault])
        due = fault.at + (0.0 if kind in AT_ONCE else STALL_AFTER) + NEIGHBOURS_WAIT
        self.players.counts()
        used, began = cpu_s(self.server.pid), time.monotonic()
        seen: float | None = None  # through the API
        others: dict[str, str] = {}  # by incident
        while seen is None and time.monotonic() < due + 3 * WITHIN_S:
            time.sleep(0.1)
            for incident in self.probe.open_:
                if incident["kind"] == kind.value and set(incident["culprits"]) == fault.culprits(
                    shape
                ):
                    seen = time.monotonic()
                    others.pop(incident["id"], None)  # the same one: a warning has become an alert
                elif _monotonic(incident["opened_at"]) > fault.at:
                    others[incident["id"]] = f"{incident['kind']} {incident['culprits'][:4]}"
        time.sleep(2.0)
        core = (cpu_s(self.server.pid) - used) / (time.monotonic() - began)
        late_s = None if seen is None else max(0.0, seen - due)
        counts, _, _ = self.players.counts()
        self.found.append(
            Found(
                kind=kind, late_s=late_s, others=sorted(others.values()), core=core, counts=counts
            )
        )
        print(f"  {_said(self.found[-1])}", flush=True)
        if kind not in HARMLESS and kind not in (
            VerdictKind.MISMATCH,
            VerdictKind.EXITED_RANK,
            VerdictKind.DEAD_RANK,
        ):
            self._change(
                faults=[*self.run.faults[:-1], replace(fault, until=time.monotonic() + 0.5)]
            )
            self._until_resolved(kind)

    def _until_resolved(self, kind: VerdictKind) -> None:
        deadline = time.monotonic() + 60
        while (
            any(i["kind"] == kind.value for i in self.probe.open_) and time.monotonic() < deadline
        ):
            time.sleep(0.5)

    def _change(self, **changes: Any) -> None:
        self.run = replace(self.run, **changes)
        self.players.tell("tell", self.run)

    def restart(self) -> None:
        """All processes are told to end, and the next attempt is started."""
        self.probe.doing = "restart"
        self._change(ended_at=time.monotonic() + 1.0)
        deadline = time.monotonic() + 120
        while self.players.counts()[2] < self.run.shape.hosts - 1 and time.monotonic() < deadline:
            time.sleep(1.0)
        self.run = Run(shape=self.run.shape, number=self.run.number + 1, began=time.monotonic())


def _monotonic(told: str) -> float:
    """A date of the API's on this machine's monotonic clock."""
    return (
        time.monotonic()
        - (
            datetime.now(timezone.utc) - datetime.fromisoformat(told.replace("Z", "+00:00"))
        ).total_seconds()
    )


def _said(found: Found) -> str:
    late = (
        "no right verdict"
        if found.late_s is None
        else f"right {found.late_s:5.1f} s after it was due"
    )
    ok = found.late_s is not None and found.late_s <= WITHIN_S and not found.others
    told, counts = [*found.others], found.counts
    if counts.refused or counts.failures:
        told.append(f"{counts.refused:,} heartbeats refused, {counts.failures:,} lost")
    if counts.late_s > 1.0:
        told.append(f"the simulation itself was {counts.late_s:.1f} s late")
    return f"{found.kind.value:16} {late:36} server {100 * found.core:5.1f} % {'ok' if ok else 'WRONG'} {'; '.join(told)}"


def measure(
    folder: Path, ranks: int, runs: tuple[tuple[VerdictKind, ...], ...]
) -> tuple[str, bool]:
    """A row of the table, and whether everything was as it should be."""
    shape = Shape.of(ranks)
    ramp_s = max(2.0, shape.hosts / 800)
    with serving(folder, stall_after=STALL_AFTER) as server:
        probe = Probe(server.url)
        first = Run(shape=shape, number=0, began=time.monotonic() + 1.0)
        if VerdictKind.STARTUP_STALL in runs[0]:
            first.faults = [Fault(kind=VerdictKind.STARTUP_STALL, rank=77, at=first.began)]
        asking = threading.Thread(target=probe.run, daemon=True)
        with playing(server.port, first, ramp_s) as players:
            trial = Trial(server=server, probe=probe, players=players, run=first)
            print(
                f"{shape.ranks} ranks, {shape.hosts} hosts: all heard of after {trial.until_heard():.0f} s",
                flush=True,
            )
            time.sleep(10.0)
            asking.start()
            players.counts()
            used, began = cpu_s(server.pid), time.monotonic()
            time.sleep(HEALTHY_S)
            spent = time.monotonic() - began
            core, (counts, _, _) = (cpu_s(server.pid) - used) / spent, players.counts()
            print(f"  healthy: server {100 * core:.1f} %, {counts}", flush=True)
            for n, kinds in enumerate(runs):
                if n:
                    trial.restart()
                    players.tell("start", (trial.run, ramp_s))
                    if kinds[0] is not VerdictKind.STARTUP_STALL:
                        trial.until_heard()
                        time.sleep(STEP_S)
                for place, kind in enumerate(kinds):
                    trial.plant(kind, place)
            probe.stop()
            asking.join()
            players.counts()
        peak_mb = _peak_mb(server.pid)
    slow = sorted(probe.took, reverse=True)
    took = sorted(seconds for seconds, _ in probe.took)
    late = [f.late_s for f in trial.found if f.late_s is not None]
    hung = max(f.core for f in trial.found)
    print(
        f"  the slowest answers: {'; '.join(f'{1000 * s:.0f} ms {path}' for s, path in slow[:12])}"
    )
    print(f"  in all: {players.total}")
    good = (
        len(late) == len(trial.found)
        and max(late) <= WITHIN_S
        and not any(f.others for f in trial.found)
    )
    good &= (
        took[-1] <= MAX_API_S and 100 * max(core, hung) <= MAX_CORE_PERCENT and peak_mb <= MAX_MB
    )
    cells = (
        f"{shape.ranks:,}", f"{shape.hosts:,}", f"{counts.interval_s:.1f} s", f"{counts.beats / spent:,.0f}",
        f"{counts.bytes / max(1, counts.beats):,.0f}", f"{100 * core:.0f} %", f"{100 * hung:.0f} %", f"{peak_mb:,.0f} MB",
        f"{len(late)} of {len(trial.found)}, {max(late, default=0.0):.1f} s",
        f"{1000 * statistics.median(took):.0f}, {1000 * took[int(0.99 * len(took))]:.0f}, {1000 * took[-1]:.0f} ms",
    )  # fmt: skip
    return f"| {' | '.join(cells)} |", good


def _peak_mb(pid: int) -> float:
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
            row, fine = measure(Path(folder), ranks, (tuple(told.kinds),) if told.kinds else RUNS)
        good &= fine
        rows.append(row)
    print(f"\n{os.cpu_count()} cores, the simulation on them too\n")
    print(f"| {' | '.join(HEADINGS)} |")
    print("|" + "---|" * len(HEADINGS))
    print("\n".join(rows))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
