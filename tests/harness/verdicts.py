"""Runs one of the programs and checks that its verdict is reported, in time, and alone."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import httpx

from tests.simulation.waiting import wait_until

from . import expected as programs
from . import launchers
from .depth import NO_EARLIER_CALLS, Depth, shift_call_numbers
from .job import THIS_RUNTIME, LaunchedJob, TorchRuntime, launch_job
from .processes import clean_up_job, parent_pid
from .server import Server, running_server

START_S = 150.0  # the time to the fault, on a busy machine
POLL_S = 0.2
HEALTHY_S = 120.0
SETTLE_AFTER_VERDICT_S = 2.0
STATUS_DELAY_S = 3.0  # how late a job's status is, compared with the table of its ranks
EXIT_S = 120.0  # NCCL's watchdog ends a process a minute after the timeout
_INDIRECT_LAUNCHERS = ("ray", "deepspeed", "deepspeed-nodes", "torchrun-nodes")
CHECK_KINDS = ("replica_divergence", "nonfinite")  # warnings that a healthy job must not get either


@dataclass(slots=True, kw_only=True)
class ProgramOutcome:
    name: str
    earlier_calls: int = 0
    verdict: str = "none"
    verdict_after_s: float | None = None  # the time from the fault to the verdict
    problems: list[str] = field(default_factory=list)
    incidents: list[dict[str, Any]] = field(default_factory=list)
    log: str = ""

    @property
    def is_ok(self) -> bool:
        return not self.problems

    def __str__(self) -> str:
        """The problems, the incidents and the end of the log."""
        depth = f" after {self.earlier_calls} calls" if self.earlier_calls else ""
        lines = [f"{self.name}{depth}: {self.verdict}"]
        lines += [f"  - {problem}" for problem in self.problems]
        lines += [json.dumps(incident, indent=1) for incident in self.incidents]
        return "\n".join([*lines, self.log[-6000:]])


def check_program(
    name: str,
    folder: Path,
    stall_after_s: float = 4.0,
    runtime: TorchRuntime = THIS_RUNTIME,
    depth: Depth = NO_EARLIER_CALLS,
    *,
    env: Mapping[str, str] | None = None,
    use_server: Callable[[float], AbstractContextManager[Server]] | None = None,
    launch_turn: AbstractContextManager[object] | None = None,
) -> ProgramOutcome:
    """Runs the program `name` with a server of its own; everything either writes goes to `folder`.

    ``use_server`` gives another server, by its ``--stall-after``, to which the job's name, that of
    its folder, must be new. The job is launched, and comes to
    its fault or its first calls, in its ``launch_turn``: the imports of its ranks keep all cores
    busy.
    """
    expected = shift_call_numbers(programs.load_expected(name), depth.calls)
    outcome = ProgramOutcome(name=name, earlier_calls=depth.calls)
    if expected.stall_after_s is not None:
        stall_after_s = expected.stall_after_s
    launcher = runtime.choose_launcher(expected.launcher)
    with (use_server or partial(running_server, folder / "server"))(stall_after_s) as server:
        log_start = len(server.read_log())
        try:
            with launch_turn or nullcontext():
                job = launch_job(
                    programs.program_path(name),
                    expected.ranks,
                    folder,
                    server.url,
                    name=folder.name,
                    env={**depth.env, **expected.env, **(env or {})},
                    launcher=launcher,
                    max_restarts=expected.max_restarts,
                    runtime=runtime,
                )
                wait_until(lambda: _has_begun(expected, job, server), START_S, POLL_S)
            if expected.healthy:
                has_daemon = launcher in _INDIRECT_LAUNCHERS
                _watch_healthy(expected, job, server, outcome, has_daemon)
            else:
                _watch_hang(expected, job, server, outcome)
            outcome.incidents = _list_incidents(server, job.name)
        except launchers.MissingLauncherError as error:
            outcome.problems.append(str(error))
            return outcome
        except httpx.HTTPError as error:  # a failed server must not end the other programs
            outcome.problems.append(f"the server failed: {error}")
        finally:
            cleanup_problems = clean_up_job(folder / "run")
        job.process.wait()
        outcome.problems += cleanup_problems
        logs = [path.read_text(errors="replace") for path in job.run_dir.rglob("agent.log")]
        server_log = server.read_log()[log_start:]
        if "Traceback" in server_log:
            outcome.problems.append("an error of the server, see its log")
        outcome.log = "\n--- ".join([server_log, job.stderr, *logs])
    return outcome


def _has_begun(expected: programs.ExpectedVerdict, job: LaunchedJob, server: Server) -> bool:
    """Whether the job has come to its fault, or a healthy one to its first calls, or has ended. All ranks
    of a healthy job without calls must have imported torch.
    """
    if job.process.poll() is not None or job.planted_at is not None:
        return True
    if not expected.healthy:
        return False
    ranks = server.get_items("ranks", job=job.name)
    if not expected.makes_calls:
        return sum(rank["pid"] is not None for rank in ranks) >= expected.ranks
    return any(group["entered"] for rank in ranks for group in rank["groups"])


def _list_incidents(server: Server, job: str) -> list[dict[str, Any]]:
    return [
        server.get(f"incidents/{item['id']}") for item in server.get_items("incidents", job=job)
    ]


def _list_alerts(server: Server, job: str, severity: str = "alert") -> list[dict[str, Any]]:
    """The job's incidents of that severity. With ``warning``, alerts as well, so that an unexpected
    alert is noticed.
    """
    return [
        incident
        for incident in _list_incidents(server, job)
        if incident["severity"] in (severity, "alert")
    ]


def _check_status(server: Server, job: str, outcome: ProgramOutcome) -> None:
    """No job's status is healthy while the ranks' table shows one that waits for too long."""
    waits_s = [rank["waiting_s"] or 0.0 for rank in server.get_items("ranks", job=job)]
    longest_s = max(waits_s, default=0.0)
    summaries = [item["summary"] for item in server.get_items("jobs", job=job)]
    is_overdue = longest_s > server.stall_after_s + STATUS_DELAY_S
    if is_overdue and any(summary.startswith("All is well") for summary in summaries):
        problem = f"said to be well while a rank waits: {summaries[0]}"
        if problem not in outcome.problems:
            outcome.problems.append(problem)


def _watch_hang(
    expected: programs.ExpectedVerdict, job: LaunchedJob, server: Server, outcome: ProgramOutcome
) -> None:
    name, limit_s = outcome.name, expected.verdict_deadline_s(server.stall_after_s)
    if (fault := job.planted_at) is None:
        outcome.problems.append(
            f"the program never came to its fault (exit status {job.process.poll()})"
        )
        return
    problems = [f"no {expected.severity} within {limit_s:g} s"]
    while time.time() < fault + limit_s + 1.0:
        candidates = [
            (programs.compare_incident(name, expected, alert), alert)
            for alert in _list_alerts(server, job.name, expected.severity)
        ]
        elapsed_s = time.time() - fault
        problems, alert = min(candidates, key=lambda pair: len(pair[0]), default=(problems, None))
        if alert is not None:
            outcome.verdict = f"{alert['kind']} {alert['culprits']}"
        if alert is not None and not problems:
            outcome.verdict_after_s = elapsed_s
            break
        _check_status(server, job.name, outcome)
        time.sleep(POLL_S)
    outcome.problems += problems
    if outcome.verdict_after_s is not None and outcome.verdict_after_s > limit_s:
        outcome.problems.append(
            f"came {outcome.verdict_after_s:.1f} s after the fault, not within {limit_s:g} s"
        )
    if outcome.verdict_after_s is not None:
        _watch_aftermath(expected, job, server, outcome, fault)


def _watch_aftermath(
    expected: programs.ExpectedVerdict,
    job: LaunchedJob,
    server: Server,
    outcome: ProgramOutcome,
    fault_at: float,
) -> None:
    """Checks that the verdict does not change and that no second incident opens for the same cause,
    either later or when the job is torn down.
    """
    late = (
        fault_at + server.stall_after_s + SETTLE_AFTER_VERDICT_S + 1.0
        if expected.latency == "at_once"
        else time.time() + SETTLE_AFTER_VERDICT_S
    )
    if expected.exit is not None:
        if (
            not wait_until(lambda: job.process.poll() is not None, EXIT_S)
            or job.process.returncode != expected.exit
        ):
            outcome.problems.append(
                f"the job's exit status is {job.process.returncode}, not {expected.exit}"
            )
        late = time.time() + SETTLE_AFTER_VERDICT_S
    while time.time() < late:
        time.sleep(0.2)
        alerts = _list_alerts(server, job.name, expected.severity)
        if len(alerts) != 1:
            outcome.problems.append(
                f"{len(alerts)} incidents: "
                + "; ".join(f"{a['kind']} {a['culprits']}" for a in alerts)
            )
            return
        if changed := programs.compare_incident(outcome.name, expected, alerts[0]):
            outcome.problems.append(
                f"it changed {time.time() - fault_at:.1f} s after the fault: {'; '.join(changed)}"
            )
            return


@dataclass(slots=True)
class _ObservedProcesses:
    """The processes that the server showed as ranks, and whether it saw each do anything."""

    has_daemon: bool  # another process than the launched one starts the ranks
    pids: dict[int, set[int]] = field(default_factory=dict)
    communicating_ranks: set[int] = field(default_factory=set)
    unexpected_pids: set[int] = field(default_factory=set)

    def observe_ranks(self, job: LaunchedJob, server: Server) -> None:
        for rank in server.get_items("ranks", job=job.name):
            if (pid := rank["pid"]) is None:
                continue
            self.pids.setdefault(rank["rank"], set()).add(pid)
            if any(group["entered"] for group in rank["groups"]):
                self.communicating_ranks.add(rank["rank"])
            is_launched = pid == job.process.pid  # rank 0 itself, which starts the others
            if is_launched or self.has_daemon:
                continue
            if parent_pid(pid) not in (None, job.process.pid, 1):
                self.unexpected_pids.add(pid)


def _watch_healthy(
    expected: programs.ExpectedVerdict,
    job: LaunchedJob,
    server: Server,
    outcome: ProgramOutcome,
    has_daemon: bool,
) -> None:
    observed = _ObservedProcesses(has_daemon=has_daemon)
    deadline, interrupted = time.monotonic() + HEALTHY_S, False
    while job.process.poll() is None and time.monotonic() < deadline:
        observed.observe_ranks(job, server)
        _check_status(server, job.name, outcome)
        if expected.interrupt and job.planted_at is not None and not interrupted:
            interrupted = True
            os.killpg(job.process.pid, signal.SIGINT)
        time.sleep(0.2)
    time.sleep(SETTLE_AFTER_VERDICT_S)
    observed.observe_ranks(job, server)
    status = job.process.poll()
    if status is None:
        outcome.problems.append(f"the job did not end within {HEALTHY_S:g} s")
    elif interrupted != (status != 0):
        outcome.problems.append(f"the job's exit status is {status}")
    for alert in [
        i
        for i in _list_incidents(server, job.name)
        if i["severity"] == "alert" or i["kind"] in CHECK_KINDS
    ]:
        outcome.verdict = f"{alert['kind']} {alert['culprits']}"
        outcome.problems.append(f"a healthy job got an alert: {alert['summary']}")
    outcome.problems += [
        f"hangwatch had an error: {line}"
        for line in job.stderr.splitlines()
        if line.startswith("hangwatch: exam")
    ]
    if observed.communicating_ranks != expected.recorded_ranks:
        outcome.problems.append(
            f"collectives were seen of ranks {sorted(observed.communicating_ranks)}, not of"
            f" {sorted(expected.recorded_ranks)}"
        )
    if not expected.makes_calls and observed.pids.keys() != set(range(expected.ranks)):
        outcome.problems.append(f"only ranks {sorted(observed.pids)} were seen")
    if (
        observed.unexpected_pids
        or any(len(pids) > 1 for pids in observed.pids.values())
        or len(observed.pids) > expected.ranks
    ):
        outcome.problems.append(
            f"processes that are no ranks were shown as such: {observed.pids}, strangers"
            f" {observed.unexpected_pids}"
        )
