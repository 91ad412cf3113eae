"""What a job of any size costs the server: ``python -m tests.benchmarks.fleet [--ranks 100000]
[--backend nccl] [--kinds KIND ...] [--table]``.

A real server receives heartbeats over HTTP of a simulated job (`tests.simulation.parallel_job`);
other processes run its node agents (`tests.simulation.agent_pool`), one for each 8 ranks. Faults of
each kind are planted one after the other, each with one culprit among all ranks; in between, all
hosts report that their ranks go on. Measured are the time until the right verdict, the CPU time and
memory of the server, the response time of its API, and how late the simulation itself sent its
heartbeats: a verdict can be late because of the server, or because of a simulation without a core.
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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import httpx

from hangwatch.model.kinds import VerdictKind
from hangwatch.model.limits import MIN_WAIT_S, UNTIMED_GRACE_S
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
from tests.simulation.queued_streams import get_devices_stopped_at, get_wait_began_at
from tests.simulation.simulated_node_agent import AgentCounts
from tests.simulation.waiting import wait_until

from .process_cost import list_family, read_family_cpu_s

STALL_AFTER_S = 20.0  # the default of 60 would only make this take longer
DEADLOCK_AFTER_S = 3 * MIN_WAIT_S  # for shorter times, ranks of healthy jobs wait for each other
MAX_VERDICT_DELAY_S, MAX_API_S, MAX_CORE_PERCENT = 10.0, 0.2, 100.0
MAX_KB_PER_RANK, MAX_MB_OF_SMALL_JOBS = 20.0, 300.0
TABLE_RANKS = (1_000, 10_000, 100_000, 250_000)
AGENT_PROCESSES = 2
HEALTHY_S = 20.0
STARTED_PER_S = 250  # hosts whose node agents start in a second
REPORTED_WITHIN_S, RESOLVED_WITHIN_S, ENDED_WITHIN_S = 300.0, 60.0, 120.0
# After these a real job cannot continue.
ENDING_KINDS = (VerdictKind.MISMATCH, VerdictKind.EXITED_RANK, VerdictKind.DEAD_RANK)
HEADINGS = (
    "ranks", "hosts", "interval", "heartbeats/s", "bytes each", "server, healthy", "for 1,000 ranks", "at worst", "memory", "right verdicts, the latest",
    "API: median, 99 %, worst", "simulation late: median, worst",
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
# On NCCL no host is blocked by receives that wait for each other.
KINDS_ON_NCCL = {VerdictKind.DEADLOCK: VerdictKind.DEVICE_STUCK}
# These need no rank that waits.
EVIDENT_KINDS = frozenset(
    {
        VerdictKind.CONCURRENT_USE,
        VerdictKind.DEAD_RANK,
        VerdictKind.GROUP_MISMATCH,
        VerdictKind.MISMATCH,
        VerdictKind.STARTUP_STALL,
    }
)


@dataclass(slots=True)
class ApiProbe:
    """Requests the API as a page and a script do, twice a second, and records the response times."""

    url: str
    activity: str = "healthy"  # of the job at this time
    response_times: list[tuple[float, str]] = field(default_factory=list)  # seconds and request
    open_incidents: list[dict[str, Any]] = field(default_factory=list)
    _stopped: threading.Event = field(default_factory=threading.Event)

    def run_probe(self) -> None:
        paths = ("jobs", "ranks?limit=100", "ranks?rank=77", "incidents?status=open")
        with httpx.Client(timeout=30.0, trust_env=False) as page:
            while not self._stopped.wait(0.5):
                for path in paths:
                    response = self._send_request(page, path)
                    is_good = response is not None and response.status_code == 200
                    if response is not None and is_good and path.startswith("incidents"):
                        self.open_incidents = response.json()["items"]
                with httpx.Client(timeout=30.0, trust_env=False) as script:
                    self._send_request(script, "jobs", " on a new connection")

    def _send_request(
        self, client: httpx.Client, path: str, note: str = ""
    ) -> httpx.Response | None:
        began_at, problem, response = time.monotonic(), "", None
        try:
            response = client.get(f"{self.url}/api/v1/{path}")
        except httpx.HTTPError as error:
            problem = f": {error!r}"
        request = f"{path}{note} ({self.activity}){problem}"
        self.response_times.append((time.monotonic() - began_at, request))
        return response

    def stop_probe(self) -> None:
        self._stopped.set()

    def list_responses_ms(self) -> list[float]:
        """The response times, the slowest last."""
        return sorted(1000 * seconds for seconds, _ in self.response_times)


def describe_responses(responses_ms: list[float]) -> str:
    """The median, 99 % and the slowest of sorted response times."""
    late_ms = responses_ms[int(0.99 * len(responses_ms))]
    return f"{statistics.median(responses_ms):.0f}, {late_ms:.0f}, {responses_ms[-1]:.0f} ms"


@dataclass(slots=True, kw_only=True)
class FaultResult:
    """What the server reported of one planted fault."""

    kind: VerdictKind
    # From when the verdict was due until the API had the right one; None: it never had.
    verdict_delay_s: float | None
    other_verdicts: list[str]  # of the same time, which are wrong
    core_share: float
    took_s: float  # since it was planted
    counts: AgentCounts  # of that time

    @property
    def is_good(self) -> bool:
        is_in_time = (
            self.verdict_delay_s is not None and self.verdict_delay_s <= MAX_VERDICT_DELAY_S
        )
        return is_in_time and not self.other_verdicts


@dataclass(slots=True)
class AgentProcesses:
    """The processes with the node agents."""

    pipes: list[Connection]
    total: AgentCounts = field(default_factory=AgentCounts)  # as of the last `collect_counts`

    def send_order(self, order: str, value: object = None) -> None:
        for pipe in self.pipes:
            pipe.send((order, value))

    def collect_counts(self) -> tuple[AgentCounts, float, int]:
        """The counts since the last call, the CPU seconds of all processes, and the number of hosts
        that have reported their end.
        """
        self.send_order("counts")
        replies = [pipe.recv() for pipe in self.pipes]
        sums = AgentCounts()
        for counts, _, _ in replies:
            sums.add_counts(counts)
        self.total.add_counts(sums)
        cpu_s = sum(process_cpu_s for _, process_cpu_s, _ in replies)
        return sums, cpu_s, sum(finished for _, _, finished in replies)


@contextmanager
def run_agents(
    port: int, run: JobRun, ramp_s: float, process_count: int = AGENT_PROCESSES
) -> Iterator[AgentProcesses]:
    context = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    for n in range(process_count):
        mine, theirs = context.Pipe()
        hosts = range(
            n * run.shape.hosts // process_count, (n + 1) * run.shape.hosts // process_count
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


@dataclass(slots=True)
class CpuMeasurement:
    """How much of a core the server used; known at the end of `measure_core_share`."""

    core_share: float = 0.0
    took_s: float = 0.0

    def __str__(self) -> str:
        return f"{100 * self.core_share:5.1f} %"


@contextmanager
def measure_core_share(pids: Sequence[int]) -> Iterator[CpuMeasurement]:
    """``pids`` are the processes that serve, each of which counts with its children."""
    measured = CpuMeasurement()
    cpu_before_s, began_at = sum(map(read_family_cpu_s, pids)), time.monotonic()
    yield measured
    measured.took_s = time.monotonic() - began_at
    measured.core_share = (sum(map(read_family_cpu_s, pids)) - cpu_before_s) / measured.took_s


@dataclass(slots=True, kw_only=True)
class FaultTrial:
    server: Server
    pids: Sequence[int]  # see `measure_core_share`
    probe: ApiProbe
    agents: AgentProcesses
    run: JobRun
    ramp_s: float  # from the start of a run until its last host reports
    results: list[FaultResult] = field(default_factory=list)
    recovery_shares: list[float] = field(default_factory=list)  # of a core, after each fault

    def wait_until_reported(self) -> float:
        """Waits until the server knows every rank of this run. Returns the seconds that it took."""
        began_at = time.monotonic()

        def is_reported() -> bool:
            return any(
                (job["job"], job["attempt"], job["reported_ranks"])
                == (self.run.name, self.run.number, self.run.shape.ranks)
                for job in self.server.get_items("jobs")
            )

        if not wait_until(is_reported, REPORTED_WITHIN_S, 0.5):
            counts = self.agents.collect_counts()
            raise TimeoutError(f"not all ranks are known: {counts} {self.server.read_log()}"[:2000])
        return time.monotonic() - began_at

    def try_fault(self, kind: VerdictKind, index: int) -> None:
        """Plants a fault, waits for its verdict, and lets the job continue if a real one could."""
        self.probe.activity = kind.value
        fault = self._plant_fault(kind, index)
        result = self._measure_fault(fault)
        self.results.append(result)
        print(f"  {_describe_result(result)}", flush=True)
        if kind not in HARMLESS_KINDS and kind not in ENDING_KINDS:
            healed = replace(fault, ends_at=time.monotonic() + 0.5)
            self._change_run(faults=[*self.run.faults[:-1], healed])
            self._measure_recovery(kind)

    def _measure_recovery(self, kind: VerdictKind) -> None:
        """Waits until the incident is resolved, and until each host has reported since."""
        self.probe.activity = f"after {kind.value}"
        with measure_core_share(self.pids) as measured:
            wait_until(lambda: not self._is_open(kind), RESOLVED_WITHIN_S, 0.5)
            time.sleep(self.agents.total.interval_s)
        self.recovery_shares.append(measured.core_share)
        print(f"  {'':16} {'until all hosts have reported again':36} server {measured}", flush=True)

    def _plant_fault(self, kind: VerdictKind, index: int) -> SimulatedFault:
        """Somewhere in the middle: a stage with neighbours on both sides, and a replica and a lane
        of its own for each fault.
        """
        if kind is VerdictKind.STARTUP_STALL and self.run.faults:
            return self.run.faults[0]  # the first run began with it
        shape = self.run.shape
        host = (index + 1) * shape.data // 12 * shape.pipeline + 2
        lane = 0 if kind is VerdictKind.DEADLOCK else (index * 3) % TENSOR_PARALLEL_SIZE
        starts_at = time.monotonic() + 1.0
        if kind is VerdictKind.STARTUP_STALL:
            starts_at = self.run.started_at
        elif kind not in HARMLESS_KINDS:
            earliest, latest = (0.05, 0.15) if shape.queues_calls else (0.2, 0.6)
            while not earliest < self.run.count_steps(starts_at) % 1.0 < latest:
                starts_at += 0.1
        fault = SimulatedFault(
            kind=kind, rank=host * TENSOR_PARALLEL_SIZE + lane, starts_at=starts_at
        )
        self._change_run(faults=[*self.run.faults, fault])
        return fault

    def _measure_fault(self, fault: SimulatedFault) -> FaultResult:
        due_at = self._find_due_time(fault)
        self.agents.collect_counts()
        other_verdicts: dict[str, str] = {}  # by incident
        reported_at: float | None = None
        # The fault that a run begins with may have been due before this.
        wait_until_at = max(due_at, time.monotonic()) + 3 * MAX_VERDICT_DELAY_S
        with measure_core_share(self.pids) as measured:
            while reported_at is None and time.monotonic() < wait_until_at:
                time.sleep(0.1)
                if self._find_verdict(fault, other_verdicts):
                    reported_at = time.monotonic()
            time.sleep(2.0)
        counts, _, _ = self.agents.collect_counts()
        return FaultResult(
            kind=fault.kind,
            verdict_delay_s=None if reported_at is None else max(0.0, reported_at - due_at),
            other_verdicts=sorted(other_verdicts.values()),
            core_share=measured.core_share,
            took_s=measured.took_s,
            counts=counts,
        )

    def _find_due_time(self, fault: SimulatedFault) -> float:
        """When its verdict is due."""
        stall_s = 0.0 if fault.kind in IMMEDIATE_KINDS else STALL_AFTER_S
        waits_at = fault.starts_at
        if fault.kind is VerdictKind.DEADLOCK:
            stall_s = DEADLOCK_AFTER_S
        elif self.run.shape.queues_calls and fault.kind not in EVIDENT_KINDS:
            waits_at = get_wait_began_at(self.run, fault)
            if fault.kind is VerdictKind.NO_PROGRESS:  # which is a claim about all devices
                waits_at = get_devices_stopped_at(self.run, fault)
                stall_s += UNTIMED_GRACE_S
        # A rank whose host has not started yet is missing from the start as well.
        all_started_at = self.run.started_at + self.ramp_s
        return max(waits_at + stall_s, all_started_at) + NEIGHBOURS_WAIT_AFTER_S

    def _find_verdict(self, fault: SimulatedFault, other_verdicts: dict[str, str]) -> bool:
        """Whether the right verdict is open. Adds others since the fault to ``other_verdicts``."""
        is_reported = False
        for incident in self.probe.open_incidents:
            if incident["job"] != self.run.name:
                continue
            culprits = set(incident["culprits"])
            if incident["kind"] == fault.kind.value and culprits == fault.list_culprits():
                is_reported = True
                other_verdicts.pop(incident["id"], None)  # it has become more precise
            elif _to_monotonic(incident["opened_at"]) > fault.starts_at:
                verdict = f"{incident['kind']} {incident['culprits'][:4]}"
                other_verdicts[incident["id"]] = verdict
        return is_reported

    def _is_open(self, kind: VerdictKind) -> bool:
        return any(incident["kind"] == kind.value for incident in self.probe.open_incidents)

    def _change_run(self, **changes: Any) -> None:
        self.run = replace(self.run, **changes)
        self.agents.send_order("change", self.run)

    def restart_job(self) -> None:
        """Ends all processes and starts the next attempt."""
        self.probe.activity = "restart"
        self._change_run(ended_at=time.monotonic() + 1.0)

        def have_all_ended() -> bool:
            return self.agents.collect_counts()[2] >= self.run.shape.hosts - 1

        wait_until(have_all_ended, ENDED_WITHIN_S, 1.0)
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
    delay = "no right verdict"
    if result.verdict_delay_s is not None:
        delay = f"right {result.verdict_delay_s:5.1f} s after it was due"
    remarks, counts = [*result.other_verdicts], result.counts
    if counts.refused or counts.failures:
        remarks.append(f"{counts.refused:,} heartbeats refused, {counts.failures:,} lost")
    remarks.append(f"simulation late by {counts.lag_text}")
    return (
        f"{result.kind.value:16} {delay:36} server {100 * result.core_share:5.1f} %"
        f" at {result.counts.heartbeats / result.took_s:5.0f} heartbeats/s {'ok' if result.is_good else 'WRONG'} {'; '.join(remarks)}"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthyResult:
    """The load of the server before the first fault."""

    core_share: float
    heartbeats_per_s: float
    counts: AgentCounts


def run_benchmark(
    folder: Path, shape: JobShape, runs: tuple[tuple[VerdictKind, ...], ...]
) -> tuple[str, bool]:
    """Returns a row of the table, and whether all results are within the limits."""
    ramp_s = max(2.0, shape.hosts / STARTED_PER_S)
    with running_server(folder, stall_after_s=STALL_AFTER_S) as server:
        probe, pids = ApiProbe(server.url), (server.pid,)
        first = JobRun(shape=shape, number=0, started_at=time.monotonic() + 1.0)
        if VerdictKind.STARTUP_STALL in runs[0]:
            first.faults = [
                SimulatedFault(kind=VerdictKind.STARTUP_STALL, rank=77, starts_at=first.started_at)
            ]
        probing = threading.Thread(target=probe.run_probe, daemon=True)
        with run_agents(server.port, first, ramp_s) as agents:
            trial = FaultTrial(
                server=server, pids=pids, probe=probe, agents=agents, run=first, ramp_s=ramp_s
            )
            print(
                f"{shape.ranks} ranks, {shape.hosts} hosts: all reported after"
                f" {trial.wait_until_reported():.0f} s",
                flush=True,
            )
            time.sleep(10.0)
            probing.start()
            healthy = measure_healthy(pids, agents)
            for number, kinds in enumerate(runs):
                if number:
                    trial.restart_job()
                    agents.send_order("start", (trial.run, ramp_s))
                    if kinds[0] is not VerdictKind.STARTUP_STALL:
                        trial.wait_until_reported()
                        time.sleep(STEP_S)
                for index, kind in enumerate(kinds):
                    trial.try_fault(kind, index)
            probe.stop_probe()
            probing.join()
            agents.collect_counts()
        peak_mb = read_peak_mb(pids)
    print(f"  in all: {agents.total}, simulation late by {agents.total.lag_text}")
    return _summarize_results(shape, healthy, trial, peak_mb)


def measure_healthy(
    pids: Sequence[int], agents: AgentProcesses, seconds: float = HEALTHY_S
) -> HealthyResult:
    agents.collect_counts()
    with measure_core_share(pids) as measured:
        time.sleep(seconds)
    counts, _, _ = agents.collect_counts()
    print(
        f"  healthy: server {measured}, {counts}, simulation late by {counts.lag_text}", flush=True
    )
    return HealthyResult(
        core_share=measured.core_share,
        heartbeats_per_s=counts.heartbeats / measured.took_s,
        counts=counts,
    )


def _summarize_results(
    shape: JobShape, healthy: HealthyResult, trial: FaultTrial, peak_mb: float
) -> tuple[str, bool]:
    """Returns the row of the table, and whether all results are within the limits."""
    slowest = sorted(trial.probe.response_times, reverse=True)[:12]
    print(f"  slowest: {'; '.join(f'{1000 * s:.0f} ms {request}' for s, request in slowest)}")
    responses_ms = trial.probe.list_responses_ms()
    delays_s = [r.verdict_delay_s for r in trial.results if r.verdict_delay_s is not None]
    worst_core_share = max([*(r.core_share for r in trial.results), *trial.recovery_shares])
    core_percent = 100 * max(healthy.core_share, worst_core_share)
    is_good = (
        all(result.is_good for result in trial.results)
        and responses_ms[-1] <= 1000 * MAX_API_S
        and core_percent <= MAX_CORE_PERCENT
        and peak_mb <= max(MAX_MB_OF_SMALL_JOBS, MAX_KB_PER_RANK * shape.ranks / 1000)
    )
    counts = healthy.counts
    cells = (
        f"{shape.ranks:,}",
        f"{shape.hosts:,}",
        f"{counts.interval_s:.1f} s",
        f"{healthy.heartbeats_per_s:,.0f}",
        f"{counts.bytes / max(1, counts.heartbeats):,.0f}",
        f"{100 * healthy.core_share:.1f} %",
        f"{100 * healthy.core_share / shape.ranks * 1000:.2f} %",
        f"{100 * worst_core_share:.0f} %",
        f"{peak_mb:,.0f} MB",
        f"{len(delays_s)} of {len(trial.results)}, {max(delays_s, default=0.0):.1f} s",
        describe_responses(responses_ms),
        trial.agents.total.lag_text,
    )
    return f"| {' | '.join(cells)} |", is_good


def read_peak_mb(pids: Sequence[int]) -> float:
    """The most memory that these processes and their children have used, added up."""
    statuses = [
        Path(f"/proc/{member}/status").read_text() for pid in pids for member in list_family(pid)
    ]
    return sum(int(status.partition("VmHWM:")[2].split()[0]) for status in statuses) / 1024


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.fleet", description=(__doc__ or "").partition(":")[0]
    )
    parser.add_argument("--ranks", type=int, default=100_000, help="default: %(default)s")
    parser.add_argument(
        "--table",
        action="store_true",
        help=f"run with {', '.join(f'{ranks:,}' for ranks in TABLE_RANKS)} ranks",
    )
    parser.add_argument(
        "--backend", choices=("gloo", "nccl"), default="gloo", help="default: %(default)s"
    )
    parser.add_argument(
        "--kinds",
        nargs="+",
        type=VerdictKind,
        metavar="KIND",
        help="plant only faults of these kinds, all in one run",
    )
    options = parser.parse_args()
    runs = (tuple(options.kinds),) if options.kinds else RUN_FAULTS
    if options.backend == "nccl" and not options.kinds:
        runs = tuple(tuple(KINDS_ON_NCCL.get(kind, kind) for kind in kinds) for kinds in runs)
    all_good, rows = True, []
    for ranks in TABLE_RANKS if options.table else (options.ranks,):
        with tempfile.TemporaryDirectory(prefix="hangwatch-fleet-") as folder:
            shape = JobShape.largest_within(ranks, options.backend)
            row, is_good = run_benchmark(Path(folder), shape, runs)
        all_good &= is_good
        rows.append(row)
    print(f"\n{len(os.sched_getaffinity(0))} cores, the simulation on them too\n")
    print(f"| {' | '.join(HEADINGS)} |")
    print("|" + "---|" * len(HEADINGS))
    print("\n".join(rows))
    return 0 if all_good else 1


if __name__ == "__main__":
    sys.exit(main())
