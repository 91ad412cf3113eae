"""Runs one of the programs and says whether its verdict came, came in time, and came alone."""

from __future__ import annotations

import json
import os
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from . import expected as programs
from .job import Job, launch
from .processes import clear, eventually, parent
from .server import Server, serving

START_S = 90.0  # until the fault, on a busy machine
HEALTHY_S = 120.0
AFTERMATH_S = 2.0
CHECKS = ("replica_divergence", "nonfinite")  # warnings that a healthy job must not get either


@dataclass(slots=True, kw_only=True)
class Outcome:
    name: str
    verdict: str = "none"
    seconds: float | None = None  # from the fault to the verdict
    problems: list[str] = field(default_factory=list)
    incidents: list[dict[str, Any]] = field(default_factory=list)
    log: str = ""

    @property
    def ok(self) -> bool:
        return not self.problems

    def __str__(self) -> str:
        """All that is needed to see what went wrong."""
        lines = [f"{self.name}: {self.verdict}", *(f"  - {problem}" for problem in self.problems)]
        lines += [json.dumps(incident, indent=1) for incident in self.incidents]
        return "\n".join([*lines, self.log[-6000:]])


def check(name: str, folder: Path, stall_after: float = 4.0) -> Outcome:
    """Runs the program `name` with a server of its own; everything either writes goes to `folder`."""
    told = programs.load(name)
    outcome = Outcome(name=name)
    with serving(folder / "server", stall_after) as server:
        job = launch(
            programs.program(name),
            told.ranks,
            folder,
            server.url,
            name=name,
            launcher=told.launcher,
            max_restarts=told.max_restarts,
        )
        try:
            if told.healthy:
                _watch_healthy(told, job, server, outcome)
            else:
                _watch_hang(told, job, server, outcome)
            outcome.incidents = _incidents(server, name)
        finally:
            left = clear(job.run_dir)
            job.process.wait()
        outcome.problems += left
        logs = [path.read_text(errors="replace") for path in job.run_dir.rglob("agent.log")]
        outcome.log = "\n--- ".join([server.log(), job.stderr, *logs])
    return outcome


def _incidents(server: Server, job: str) -> list[dict[str, Any]]:
    return [server.get(f"incidents/{item['id']}") for item in server.items("incidents", job=job)]


def _alerts(server: Server, job: str, severity: str = "alert") -> list[dict[str, Any]]:
    """Its incidents of that severity; where warnings are asked for, alerts as well, which must not
    be beside them.
    """
    return [
        incident
        for incident in _incidents(server, job)
        if incident["severity"] in (severity, "alert")
    ]


def _watch_hang(told: programs.Expected, job: Job, server: Server, outcome: Outcome) -> None:
    name, limit = outcome.name, told.within(server.stall_after)
    if (
        not eventually(lambda: job.planted_at is not None, START_S)
        or (fault := job.planted_at) is None
    ):
        outcome.problems.append(
            f"the program never came to its fault (exit status {job.process.poll()})"
        )
        return
    closest = [f"no {told.severity} within {limit:g} s"]
    while time.time() < fault + limit + 1.0:
        found = [
            (programs.differences(name, told, alert), alert)
            for alert in _alerts(server, name, told.severity)
        ]
        seconds = time.time() - fault
        closest, alert = min(found, key=lambda pair: len(pair[0]), default=(closest, None))
        if alert is not None:
            outcome.verdict = f"{alert['kind']} {alert['culprits']}"
        if alert is not None and not closest:
            outcome.seconds = seconds
            break
        time.sleep(0.1)
    outcome.problems += closest
    if outcome.seconds is not None and outcome.seconds > limit:
        outcome.problems.append(
            f"came {outcome.seconds:.1f} s after the fault, not within {limit:g} s"
        )
    if outcome.seconds is not None:
        _watch_aftermath(told, job, server, outcome, fault)


def _watch_aftermath(
    told: programs.Expected, job: Job, server: Server, outcome: Outcome, fault: float
) -> None:
    """The verdict stands, and nothing else is blamed for the same cause: neither later, nor when
    the job is torn down.
    """
    late = (
        fault + server.stall_after + AFTERMATH_S + 1.0
        if told.latency == "at_once"
        else time.time() + AFTERMATH_S
    )
    if told.exit is not None:
        if (
            not eventually(lambda: job.process.poll() is not None, 60.0)
            or job.process.returncode != told.exit
        ):
            outcome.problems.append(
                f"the job's exit status is {job.process.returncode}, not {told.exit}"
            )
        late = time.time() + AFTERMATH_S
    while time.time() < late:
        time.sleep(0.2)
        alerts = _alerts(server, outcome.name, told.severity)
        if len(alerts) != 1:
            outcome.problems.append(
                f"{len(alerts)} incidents: "
                + "; ".join(f"{a['kind']} {a['culprits']}" for a in alerts)
            )
            return
        if changed := programs.differences(outcome.name, told, alerts[0]):
            outcome.problems.append(
                f"it changed {time.time() - fault:.1f} s after the fault: {'; '.join(changed)}"
            )
            return


@dataclass(slots=True)
class _Seen:
    """The processes that the server showed as ranks, and whether it saw each do anything."""

    pids: dict[int, set[int]] = field(default_factory=dict)
    busy: set[int] = field(default_factory=set)
    strangers: set[int] = field(default_factory=set)

    def look(self, job: Job, server: Server) -> None:
        for rank in server.items("ranks", job=job.name):
            if (pid := rank["pid"]) is None:
                continue
            self.pids.setdefault(rank["rank"], set()).add(pid)
            if any(group["entered"] for group in rank["groups"]):
                self.busy.add(rank["rank"])
            if parent(pid) not in (None, job.process.pid, 1):
                self.strangers.add(pid)


def _watch_healthy(told: programs.Expected, job: Job, server: Server, outcome: Outcome) -> None:
    seen, deadline, interrupted = _Seen(), time.monotonic() + HEALTHY_S, False
    while job.process.poll() is None and time.monotonic() < deadline:
        seen.look(job, server)
        if told.interrupt and job.planted_at is not None and not interrupted:
            interrupted = True
            os.killpg(job.process.pid, signal.SIGINT)
        time.sleep(0.2)
    time.sleep(AFTERMATH_S)
    seen.look(job, server)
    status = job.process.poll()
    if status is None:
        outcome.problems.append(f"the job did not end within {HEALTHY_S:g} s")
    elif interrupted != (status != 0):
        outcome.problems.append(f"the job's exit status is {status}")
    for alert in [
        i for i in _incidents(server, job.name) if i["severity"] == "alert" or i["kind"] in CHECKS
    ]:
        outcome.verdict = f"{alert['kind']} {alert['culprits']}"
        outcome.problems.append(f"a healthy job got an alert: {alert['summary']}")
    outcome.problems += [
        f"hangwatch had an error: {line}"
        for line in job.stderr.splitlines()
        if line.startswith("hangwatch: exam")
    ]
    if seen.busy != set(range(told.ranks)):
        outcome.problems.append(
            f"collectives were seen of ranks {sorted(seen.busy)} only, of {told.ranks}"
        )
    if (
        seen.strangers
        or any(len(pids) > 1 for pids in seen.pids.values())
        or len(seen.pids) > told.ranks
    ):
        outcome.problems.append(
            f"processes that are no ranks were shown as such: {seen.pids}, strangers {seen.strangers}"
        )
