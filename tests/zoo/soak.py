"""Healthy programs at random, several at a time, on one server that ends hung ranks: none of them may
get an alert. ``python -m tests.zoo --soak MINUTES``.
"""

from __future__ import annotations

import random
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import httpx

from hangwatch.server.recovery.policy import POSSIBLE_KINDS
from tests.harness.expected import ExpectedVerdict
from tests.harness.processes import clean_up_job
from tests.harness.server import Server, ServerPool
from tests.harness.verdicts import ProgramOutcome

# Any alert kills within two seconds, so that a false one costs the job what it would cost a user.
SERVER_FLAGS = (
    *("--on-hang", "abort", "--abort-after", "2"),
    *("--abort-kinds", ",".join(sorted(POSSIBLE_KINDS))),
)
JOB_ENV = {"HANGWATCH_ON_HANG": "abort"}  # or the node agents would refuse to end their ranks
WAIT_INTERVAL_S = 0.5
EXIT_INTERRUPTED = 130

# Runs a program in a folder, which names its job, with the calls that a seed draws.
RunProgram = Callable[[str, Path, int], ProgramOutcome]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRun:
    """``--seed SEED PROGRAM`` makes the same calls again."""

    number: int  # from 1
    program: str
    seed: int

    @property
    def job(self) -> str:
        """The name of its job and of its folder."""
        return f"{self.program.replace('/', '-')}-{self.number}"


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedRun:
    plan: PlannedRun
    outcome: ProgramOutcome
    seconds: float  # from its launch until its node agent has exited


def plan_runs(programs: Sequence[str], seed: int) -> Iterator[PlannedRun]:
    """Yields runs without end: all programs in an order drawn from the seed, then all of them in
    another order and with other calls, and so on.
    """
    draw, number = random.Random(f"{seed} soak"), 0
    while programs:
        for program in draw.sample(sorted(programs), len(programs)):
            number += 1
            yield PlannedRun(
                number=number, program=program, seed=seed + (number - 1) // len(programs)
            )


def describe_aborts(incident: Mapping[str, Any]) -> str:
    """The ranks that the server ordered to be ended, or tried to; empty if there are none."""
    recovery = incident.get("recovery") or {}
    aborts = [f"{abort['rank']} ({abort['result']})" for abort in recovery.get("aborts", ())]
    return f"; ended ranks {', '.join(aborts)}" if aborts else ""


def list_failures(
    runs: Iterable[FinishedRun], incidents: Iterable[Mapping[str, Any]], folder: Path
) -> list[str]:
    """The runs that were not as they are without hangwatch, and the alerts among ``incidents``,
    those of the server, that no outcome has: of a job that was stopped, or after its end.
    """
    failures, known_ids = [], set()
    for run in runs:
        known_ids |= {incident["id"] for incident in run.outcome.incidents}
        if not run.outcome.is_ok:
            aborts = "".join(map(describe_aborts, run.outcome.incidents))
            failures.append(
                f"{run.plan.program} (--seed {run.plan.seed}):"
                f" {'; '.join(run.outcome.problems)}{aborts}\n    {folder / run.plan.job}"
            )
    failures += [
        f"{incident['job']}: {incident['kind']} {incident['culprits']}: {incident['summary']}"
        f"{describe_aborts(incident)}\n    {folder / incident['job'].partition('/')[0]}"
        for incident in incidents
        if incident["severity"] == "alert" and incident["id"] not in known_ids
    ]
    return failures


def format_mix(
    runs: Sequence[FinishedRun], programs: Mapping[str, ExpectedVerdict]
) -> Iterator[str]:
    """Yields a line for each program that ran, and one for each warning that it got, with the first of
    its texts.
    """
    yield f"{'program':<34} {'ranks':>5} {'launcher':<9} {'runs':>4} {'median s':>8} {'longest s':>9}"
    by_program: dict[str, list[FinishedRun]] = {}
    for run in runs:
        by_program.setdefault(run.plan.program, []).append(run)
    for name, own_runs in sorted(by_program.items()):
        seconds = [run.seconds for run in own_runs]
        expected = programs[name]
        yield (
            f"{name:<34} {expected.ranks:>5} {expected.launcher:<9} {len(own_runs):>4}"
            f" {median(seconds):>8.1f} {max(seconds):>9.1f}"
        )
    rank_count = sum(programs[run.plan.program].ranks for run in runs)
    yield f"{len(runs)} runs of {len(by_program)} programs, {rank_count} ranks"
    texts: dict[tuple[str, str], list[str]] = {}
    for run in runs:
        for warning, text in list_warnings(run.outcome):
            texts.setdefault((run.plan.program, warning), []).append(text)
    yield f"{sum(map(len, texts.values()))} warnings" + (":" if texts else "")
    for (name, warning), own_texts in sorted(texts.items()):
        yield f"{name:<34} {len(own_texts):>4} x {warning}: {own_texts[0]}"


def list_warnings(outcome: ProgramOutcome) -> list[tuple[str, str]]:
    """The kind and the culprits of each warning, and its text."""
    return [
        (f"{incident['kind']} {sorted(incident['culprits'])}", incident["summary"])
        for incident in outcome.incidents
        if incident["severity"] == "warning"
    ]


@dataclass(slots=True, kw_only=True)
class Soak:
    """Runs programs until its time is over or it is stopped. Their folders are in ``folder``."""

    folder: Path
    run_program: RunProgram
    plans: Iterator[PlannedRun]
    deadline: float  # monotonic; no run begins later
    finished: list[FinishedRun] = field(default_factory=list)
    running: set[str] = field(default_factory=set)  # jobs
    is_stopped: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def run_in_turn(self) -> None:
        """Runs one program after another."""
        while (plan := self._begin_next_run()) is not None:
            began = time.monotonic()
            try:
                outcome = self.run_program(plan.program, self.folder / plan.job, plan.seed)
            except httpx.HTTPError as error:
                problem = f"the server did not answer: {type(error).__name__}: {error}"
                outcome = ProgramOutcome(name=plan.program, problems=[problem])
            run = FinishedRun(plan=plan, outcome=outcome, seconds=time.monotonic() - began)
            with self._lock:
                if self.is_stopped:
                    return
                self.running.discard(plan.job)
                self.finished.append(run)
                print(_format_run(run), flush=True)

    def _begin_next_run(self) -> PlannedRun | None:
        with self._lock:
            if self.is_stopped or time.monotonic() >= self.deadline:
                return None
            plan = next(self.plans)
            self.running.add(plan.job)
            return plan

    def stop(self) -> None:
        """Begins no further run, and lets those under way not count."""
        with self._lock:
            self.is_stopped = True


def run_soak(
    programs: Mapping[str, ExpectedVerdict],
    names: Sequence[str],
    run_program: RunProgram,
    servers: ServerPool,
    *,
    minutes: float,
    seed: int,
    job_count: int,
) -> int:
    """Runs these programs and prints which ran how often. The exit status is 1 if any of them got an
    alert, was killed, or did not end as it does without hangwatch.
    """
    folder = Path(tempfile.mkdtemp(prefix="hangwatch-soak-"))
    soak = Soak(
        folder=folder,
        run_program=run_program,
        plans=plan_runs(names, seed),
        deadline=time.monotonic() + 60 * minutes,
    )
    is_interrupted = False
    with ThreadPoolExecutor(job_count) as pool:
        workers = [pool.submit(soak.run_in_turn) for _ in range(job_count)]
        try:
            while not all(worker.done() for worker in workers):
                wait(workers, WAIT_INTERVAL_S)
        except (KeyboardInterrupt, SystemExit):
            is_interrupted = True
        soak.stop()
        # Before the jobs under way are killed, which is an alert of its own.
        incidents = [item for server in servers.servers for item in _list_incidents(server)]
        _kill_jobs(soak, workers)
    failures = list_failures(soak.finished, incidents, folder)
    failures += [
        f"the soak itself: {error!r}" for worker in workers if (error := worker.exception())
    ]
    print("\n" + "\n".join(format_mix(soak.finished, programs)))
    _remove_folders(soak, keeps_others=bool(failures))
    if failures:
        print(f"\n{len(failures)} FAILED:", *failures, sep="\n  ")
        return 1
    print("no alert, no kill; every program ended as it does without hangwatch")
    return EXIT_INTERRUPTED if is_interrupted else 0


def _format_run(run: FinishedRun) -> str:
    outcome = run.outcome
    verdict = "NO: " + "; ".join(outcome.problems) if outcome.problems else "yes"
    warnings = "".join(f"  warning: {warning}" for warning, _ in list_warnings(outcome))
    return (
        f"{run.plan.number:>4} {outcome.name:<34} {run.seconds:>6.1f} s  well: {verdict}{warnings}"
    )


def _list_incidents(server: Server) -> list[dict[str, Any]]:
    try:
        return server.get_items("incidents")
    except httpx.HTTPError as error:
        print(f"the server does not list its incidents: {error}", flush=True)
        return []


def _kill_jobs(soak: Soak, workers: Sequence[Future[None]]) -> None:
    """Kills the jobs under way, also one that is just being launched."""
    while not all(worker.done() for worker in workers):
        for job in sorted(soak.running):
            clean_up_job(soak.folder / job / "run", agent_exit_timeout_s=0.0)
        wait(workers, WAIT_INTERVAL_S)


def _remove_folders(soak: Soak, *, keeps_others: bool) -> None:
    """Removes the folders of the runs that were well, and all others unless they show a failure; the
    outcome of a failed run is written beside its output.
    """
    if not keeps_others:
        shutil.rmtree(soak.folder, ignore_errors=True)
        return
    for run in soak.finished:
        folder = soak.folder / run.plan.job
        if run.outcome.is_ok:
            shutil.rmtree(folder, ignore_errors=True)
        elif folder.is_dir():
            (folder / "outcome.txt").write_text(str(run.outcome))
