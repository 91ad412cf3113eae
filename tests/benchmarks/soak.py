"""Many hangs in a row: ``python -m tests.benchmarks.soak [--minutes 30]``.

A real server receives heartbeats of 64 simulated hosts, and of the node agent of a real job. Each
job hangs, continues once an alert with its culprit's stack is open, and hangs again some seconds
after that alert is resolved; after some incidents a job ends and another one begins. Every planted
hang must be in the store once, with its culprit, and resolved, and the alert channel must have
received one message when it opened and one when it was resolved.

Memory counts in the second half of the run: by then the server has filled its buffers (1000
incidents, 4096 events, 20 ended jobs). It is flat if the median of the last quarter is at most
`GROWTH_LIMIT_MB` above that of the quarter before.
"""

from __future__ import annotations

import argparse
import json
import random
import sqlite3
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import httpx

from tests.harness import job
from tests.harness.processes import find_agents, read_resident_mb
from tests.harness.server import Server, run_server
from tests.simulation.http_receiver import WebhookReceiver
from tests.simulation.job_reporter import JobReporter
from tests.simulation.simulated_job import SimulatedJob
from tests.simulation.waiting import wait_until

from .process_cost import read_family_cpu_s

PROGRAM = Path(__file__).with_name("soaked.py")
JOB_COUNT, HOSTS_PER_JOB, RANKS_PER_HOST = 32, 2, 8  # jobs at a time
HEARTBEAT_INTERVAL_S = 2.0  # of a host
STALL_AFTER_S = 8
RECOVERY_PAUSE_S = 3.0  # from the end of an incident to the next hang of its job
INCIDENTS_PER_JOB = 5
INCIDENT_TIMEOUT_S = 120.0  # for an incident to open, and to resolve
SAMPLE_INTERVAL_S = 5.0
GROWTH_LIMIT_MB = 1.0

PlantedHang = tuple[str, int]  # a job and its late rank


class HangableJob(Protocol):
    name: str

    def hang_ranks(self, *ranks: int) -> None: ...
    def resume_training(self) -> None: ...


@dataclass(slots=True)
class RealJob:
    """Two ranks under torchrun; rank 1 is late while the hold file exists."""

    hold_file: Path
    name: str = "real"

    def hang_ranks(self, *ranks: int) -> None:
        self.hold_file.touch()

    def resume_training(self) -> None:
        self.hold_file.unlink(missing_ok=True)


@dataclass(slots=True)
class SoakJob:
    """A job that hangs again and again."""

    job: HangableJob
    choose_late_rank: Callable[[], int] = lambda: 1
    state_since: float = field(default_factory=time.monotonic)
    state: str = "trains"  # or "hangs", or "recovers"
    planted_hangs: list[PlantedHang] = field(default_factory=list)
    overdue_incidents: list[str] = field(default_factory=list)

    def advance_state(self, alerted_jobs: set[str], *, plant: bool) -> None:
        """Plants a hang or ends it when that is due. ``alerted_jobs`` are the names of the jobs with
        an open alert that has its culprit's stack.
        """
        now, is_alerted = time.monotonic(), self.job.name in alerted_jobs
        if self.state == "trains":
            if plant and now - self.state_since > RECOVERY_PAUSE_S:
                self.planted_hangs.append((self.job.name, self.choose_late_rank()))
                self.job.hang_ranks(self.planted_hangs[-1][1])
                self.state, self.state_since = "hangs", now
            return
        is_detected = is_alerted is (self.state == "hangs")
        if is_detected or now - self.state_since > INCIDENT_TIMEOUT_S:
            if not is_detected:
                self.overdue_incidents.append(
                    f"{self.job.name} {self.state}, which no incident shows"
                )
            self.job.resume_training()
            self.state = "recovers" if self.state == "hangs" else "trains"
            self.state_since = now


@dataclass(slots=True)
class SoakFleet:
    """All jobs: those of the simulated hosts, and the real one."""

    url: str
    real_job: SoakJob
    reporters: list[JobReporter] = field(init=False)  # of jobs on hosts of their own
    soak_jobs: list[SoakJob] = field(init=False)
    jobs_started: int = 0

    def __post_init__(self) -> None:
        self.reporters = [self._start_job() for _ in range(JOB_COUNT)]
        self.soak_jobs = [
            SoakJob(reporter.job, self._choose_late_rank) for reporter in self.reporters
        ]

    def _start_job(self) -> JobReporter:
        self.jobs_started += 1
        name = f"job{self.jobs_started}"
        job = SimulatedJob(
            ranks=HOSTS_PER_JOB * RANKS_PER_HOST,
            ranks_per_host=RANKS_PER_HOST,
            name=name,
            host=f"{name}-{{}}",
        )
        return JobReporter.connect(self.url, job)

    def _choose_late_rank(self) -> int:
        return random.randrange(HOSTS_PER_JOB * RANKS_PER_HOST)

    @property
    def all_jobs(self) -> list[SoakJob]:
        return [self.real_job, *self.soak_jobs]

    @property
    def planted_hangs(self) -> list[PlantedHang]:
        return [hang for soak_job in self.all_jobs for hang in soak_job.planted_hangs]

    def send_heartbeats(self) -> None:
        """Sends one heartbeat of each host, evenly over `HEARTBEAT_INTERVAL_S`."""
        due = time.monotonic()
        for reporter in self.reporters:
            for host in reporter.job.hosts:
                reporter.send_heartbeat(host)
                due += HEARTBEAT_INTERVAL_S / (JOB_COUNT * HOSTS_PER_JOB)
                time.sleep(max(0.0, due - time.monotonic()))

    def advance_states(self, alerted_jobs: set[str], *, plant: bool) -> None:
        for soak_job in self.all_jobs:
            soak_job.advance_state(alerted_jobs, plant=plant)
        for index, soak_job in enumerate(self.soak_jobs):
            job_name = soak_job.job.name
            hang_count = sum(name == job_name for name, _ in soak_job.planted_hangs)
            if soak_job.state == "trains" and hang_count >= INCIDENTS_PER_JOB:
                self.reporters[index].end_job()
                self.reporters[index] = self._start_job()
                soak_job.job = self.reporters[index].job


@dataclass(slots=True)
class ProcessUsage:
    """The resident memory of a process over the time of the run, and its CPU time."""

    name: str
    pid: int
    started_at: float = field(default_factory=time.monotonic)
    cpu_at_start_s: float = 0.0
    resident_mb: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.cpu_at_start_s = read_family_cpu_s(self.pid)

    def sample_memory(self) -> None:
        self.resident_mb.append(read_resident_mb(self.pid))

    def report_flatness(self) -> bool:
        """Prints the usage. Returns whether the memory is flat."""
        quarter = max(1, len(self.resident_mb) // 4)
        medians = [
            statistics.median(self.resident_mb[n * quarter :][:quarter] or self.resident_mb)
            for n in range(4)
        ]
        good = medians[3] <= medians[2] + GROWTH_LIMIT_MB
        took_s = time.monotonic() - self.started_at
        quarters = " ".join(f"{median:7.2f}" for median in medians)
        share = 100 * (read_family_cpu_s(self.pid) - self.cpu_at_start_s) / took_s
        print(
            f"{self.name:12} {quarters} MB (max {max(self.resident_mb):.2f}), {share:4.1f} % of a core:"
            f" {'flat' if good else 'GROWS'}",
            flush=True,
        )
        return good


def list_alerted_jobs(client: httpx.Client) -> set[str]:
    """The jobs with an open alert that has its culprit's stack."""
    jobs: set[str] = set()
    page = client.get("/api/v1/incidents", params={"status": "open"}).raise_for_status().json()
    while True:
        for incident in page["items"]:
            ranks_with_stack = {
                rank for stack in incident["stacks"] if stack["frames"] for rank in stack["ranks"]
            }
            has_stacks = ranks_with_stack.issuperset(incident["culprits"])
            if incident["severity"] == "alert" and has_stacks:
                jobs.add(incident["job"])
        if not page["next"]:
            return jobs
        page = client.get(page["next"]).raise_for_status().json()


def find_wrong_incidents(
    planted: Iterable[PlantedHang],
    stored_incidents: Sequence[dict[str, Any]],
    messages: Iterable[tuple[str, str]],
) -> list[str]:
    """What is wrong in the store and in the messages, which are pairs of an incident's id and an
    event.
    """
    expected = Counter(planted)
    stored = Counter(
        (incident["job"], incident["culprits"][0] if len(incident["culprits"]) == 1 else -1)
        for incident in stored_incidents
    )
    problems = [
        f"{count} x no incident names rank {rank} of {name}"
        for (name, rank), count in (expected - stored).items()
    ]
    problems += [
        f"{count} x an incident names rank {rank} of {name}, which did not hang"
        for (name, rank), count in (stored - expected).items()
    ]
    problems += [
        f"incident {incident['id']} is {incident['status']}"
        for incident in stored_incidents
        if incident["status"] != "resolved"
    ]
    incidents = {
        i["id"]: f"{i['id']}, {i['severity']} {i['kind']} of {i['job']}" for i in stored_incidents
    }
    due = Counter((name, event) for name in incidents for event in ("opened", "resolved"))
    sent = Counter(messages)
    problems += [f"no message {event!r} of {incidents[name]}" for name, event in due - sent]
    problems += [f"a superfluous message {event!r} of {name}" for name, event in sent - due]
    return problems


def load_stored_incidents(data: Path) -> list[dict[str, Any]]:
    with sqlite3.connect(data / "hangwatch.sqlite3") as db:
        return [json.loads(body) for (body,) in db.execute("SELECT body FROM incidents")]


def run_jobs(server: Server, fleet: SoakFleet, usages: list[ProcessUsage], minutes: float) -> None:
    began = sampled = said = time.monotonic()
    with httpx.Client(base_url=server.url, trust_env=False, timeout=60) as client:
        while True:
            fleet.send_heartbeats()
            now = time.monotonic()
            over = now - began > 60 * minutes
            fleet.advance_states(list_alerted_jobs(client), plant=not over)
            if now - sampled >= SAMPLE_INTERVAL_S:
                sampled += SAMPLE_INTERVAL_S
                client.get("/metrics").raise_for_status()  # as Prometheus does
                for usage in usages:
                    usage.sample_memory()
            if now - said >= 60:
                said += 60
                memory = ", ".join(
                    f"{usage.name} {usage.resident_mb[-1]:.2f} MB" for usage in usages
                )
                print(
                    f"minute {(now - began) / 60:.0f}: {len(fleet.planted_hangs)} hangs of"
                    f" {fleet.jobs_started + 1} jobs; {memory}",
                    flush=True,
                )
            if over and all(soak_job.state == "trains" for soak_job in fleet.all_jobs):
                return


def run_soak(folder: Path, minutes: float) -> bool:
    with (
        WebhookReceiver() as hook,
        run_server(folder, "--stall-after", str(STALL_AFTER_S), "--alert", hook.url) as server,
    ):
        continue_file, hold_file = folder / "goes_on", folder / "held"
        continue_file.touch()
        with job.running_job(
            PROGRAM,
            2,
            folder / "job",
            server.url,
            name="real",
            args=[str(continue_file), str(hold_file)],
        ) as real:
            assert wait_until(lambda: len(find_agents(real.run_dir)) == 1, 120), real.stderr
            fleet = SoakFleet(server.url, SoakJob(RealJob(hold_file)))
            [agent] = find_agents(real.run_dir)
            usages = [ProcessUsage("server", server.pid), ProcessUsage("node agent", agent)]
            run_jobs(server, fleet, usages, minutes)
            count = len(fleet.planted_hangs)
            print(
                f"\n{minutes:g} minutes, {JOB_COUNT * HOSTS_PER_JOB} simulated hosts of"
                f" {RANKS_PER_HOST} ranks, {fleet.jobs_started + 1} jobs, {count} hangs"
            )
            print("medians of the resident memory in each quarter:")
            flat = [usage.report_flatness() for usage in usages]
            continue_file.unlink()
            assert real.process.wait(60) == 0, real.stderr
        wait_until(lambda: len(hook.requests) >= 2 * count, 30)
        assert server.stop() == 0, server.read_log()
    kept = load_stored_incidents(folder / "data")
    messages = [
        (alert["id"], alert["event"])
        for alert in (request.parse_json() for request in hook.requests)
    ]
    wrong = [
        text for soak_job in fleet.all_jobs for text in soak_job.overdue_incidents
    ] + find_wrong_incidents(fleet.planted_hangs, kept, messages)
    print(f"{len(kept)} incidents in the store, {len(messages)} messages", *wrong[:50], sep="\n")
    print(f"{len(wrong)} missing, repeated or still open")
    return all(flat) and not wrong


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.soak", description=(__doc__ or "").partition(":")[0]
    )
    parser.add_argument("--minutes", type=float, default=30)
    with tempfile.TemporaryDirectory(prefix="hangwatch-soak-") as folder:
        return 0 if run_soak(Path(folder), parser.parse_args().minutes) else 1


if __name__ == "__main__":
    sys.exit(main())
