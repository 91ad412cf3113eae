"""A soak's order is that of its seed, and every alert of its server is a failure."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import httpx

from tests.harness.expected import ExpectedVerdict
from tests.harness.verdicts import ProgramOutcome
from tests.zoo.soak import (
    FinishedRun,
    PlannedRun,
    Soak,
    format_mix,
    list_failures,
    list_warnings,
    plan_runs,
)

PROGRAMS = {
    "calm": ExpectedVerdict(ranks=2, healthy=True),
    "mpi": ExpectedVerdict(ranks=4, healthy=True, launcher="mpirun"),
    "nccl/calm": ExpectedVerdict(ranks=3, healthy=True),
}
FOLDER = Path("/tmp/soak")


def make_incident(severity: str = "alert", **members: Any) -> dict[str, Any]:
    return {
        "id": "i1",
        "job": "calm-1",
        "kind": "missing_rank",
        "severity": severity,
        "culprits": [1],
        "summary": "rank 1 is late",
        "recovery": None,
        **members,
    }


def make_run(
    program: str = "calm", *, number: int = 1, seconds: float = 8.0, **outcome: Any
) -> FinishedRun:
    return FinishedRun(
        plan=PlannedRun(number=number, program=program, seed=7),
        outcome=ProgramOutcome(name=program, **outcome),
        seconds=seconds,
    )


def test_order_is_that_of_the_seed() -> None:
    runs = list(islice(plan_runs(list(PROGRAMS), 7), 30))
    assert runs == list(islice(plan_runs(list(reversed(PROGRAMS)), 7), 30))
    assert runs != list(islice(plan_runs(list(PROGRAMS), 8), 30))


def test_each_program_runs_once_in_a_round_with_calls_of_its_own() -> None:
    runs = list(islice(plan_runs(list(PROGRAMS), 7), 9))
    for number in range(3):
        assert {run.program for run in runs[3 * number :][:3]} == set(PROGRAMS)
    assert [run.seed for run in runs] == [7] * 3 + [8] * 3 + [9] * 3
    assert len({run.job for run in runs}) == 9 and not any("/" in run.job for run in runs)


def test_mix_counts_runs_ranks_and_warnings_of_each_program() -> None:
    warning = make_incident("warning", kind="slow_rank")
    runs = [
        make_run(seconds=6.0, incidents=[warning]),
        make_run(number=2, seconds=10.0, incidents=[warning]),
        make_run("mpi", number=3, seconds=20.0),
    ]
    lines = [" ".join(line.split()) for line in format_mix(runs, PROGRAMS)]
    assert lines[1:] == [
        "calm 2 torchrun 2 8.0 10.0",
        "mpi 4 mpirun 1 20.0 20.0",
        "3 runs of 2 programs, 8 ranks",
        "2 warnings:",
        "calm 2 x slow_rank [1]: rank 1 is late",
    ]


def test_warning_is_no_failure() -> None:
    warning = make_incident("warning")
    assert list_failures([make_run(incidents=[warning])], [warning], FOLDER) == []
    assert list_warnings(make_run(incidents=[warning]).outcome) == [
        ("missing_rank [1]", "rank 1 is late")
    ]


def test_failure_shows_seed_problem_kill_and_folder() -> None:
    killed = make_incident(recovery={"aborts": [{"rank": 1, "result": "ended"}]})
    run = make_run(problems=["the job's exit status is 1"], incidents=[killed])
    assert list_failures([run], [killed], FOLDER) == [
        "calm (--seed 7): the job's exit status is 1; ended ranks 1 (ended)\n    /tmp/soak/calm-1"
    ]


def test_alert_that_no_outcome_has_is_a_failure() -> None:
    late = make_incident(id="i2", job="calm-1/127.0.0.1:29500")
    [failure] = list_failures([make_run()], [late], FOLDER)
    assert failure.startswith("calm-1/127.0.0.1:29500: missing_rank [1]: rank 1 is late")
    assert failure.endswith("/tmp/soak/calm-1")


def make_soak(run_program: Callable[[str, Path, int], ProgramOutcome], **members: Any) -> Soak:
    return Soak(
        folder=FOLDER,
        run_program=run_program,
        plans=plan_runs(["calm"], 7),
        **{"deadline": time.monotonic() + 60.0, **members},
    )


def test_run_that_is_stopped_does_not_count() -> None:
    def run_program(name: str, folder: Path, seed: int) -> ProgramOutcome:
        if folder.name == "calm-2":
            soak.stop()
        return ProgramOutcome(name=name)

    soak = make_soak(run_program)
    soak.run_in_turn()
    assert [run.plan.number for run in soak.finished] == [1]


def test_no_run_begins_after_the_deadline() -> None:
    soak = make_soak(lambda name, *_: ProgramOutcome(name=name), deadline=time.monotonic())
    soak.run_in_turn()
    assert not soak.finished and not soak.running


def test_server_that_does_not_answer_is_a_failure() -> None:
    def run_program(name: str, folder: Path, seed: int) -> ProgramOutcome:
        soak.deadline = 0.0
        raise httpx.ReadTimeout("timed out")

    soak = make_soak(run_program)
    soak.run_in_turn()
    [failure] = list_failures(soak.finished, [], FOLDER)
    assert "the server did not answer: ReadTimeout: timed out" in failure
