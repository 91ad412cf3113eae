"""Ranks whose hosts use the CPU while they wait for their devices."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from hangwatch.model.kinds import Severity, VerdictKind
from hangwatch.model.ranks import Frame
from hangwatch.model.verdicts import Verdict
from tests.simulation.scripted_job import ScriptedJob

READS_LOSS = Frame(function="read_loss", file="/job/train.py", line=12, text="return x.item()")
MAIN = Frame(function="main", file="/job/train.py", line=30)
STALL_AFTER_S = 10


def make_waiting_job() -> ScriptedJob:
    """Rank 1 has not made the call in which the others are, and uses the CPU."""
    job = ScriptedJob(4)
    job.make_calls(backend="nccl")
    for rank in range(4):
        job.report_device(rank, 1)
    job.send_heartbeats()
    job.make_calls(except_ranks=(1,), backend="nccl")
    for rank in (0, 2, 3):
        job.report_device(rank, 1)
        job.report_stack(rank, READS_LOSS, MAIN)
    job.ranks[1].idle = False
    return job


def run_job(
    job: ScriptedJob, holds: Sequence[int | None], seconds: int
) -> tuple[list[Verdict], list[float]]:
    """The verdicts after some seconds in which stacks are reported as they are requested, and the times at
    which it was requested whether the device holds the rank. The reports on that are those of ``holds``.
    """
    verdicts: list[Verdict] = []
    examined_at: list[float] = []
    for second in range(seconds):
        job.advance_time(1.0)
        verdicts = job.list_due_verdicts()
        for request in job.run_diagnosis().requests:
            if request.device:
                hold = holds[min(len(examined_at), len(holds) - 1)]
                examined_at.append(second + 1.0)
                job.report_stacks(request.rank, (READS_LOSS, MAIN), device_hold=hold)
            elif request.stacks:
                job.report_stack(request.rank, READS_LOSS, MAIN)
    return verdicts, examined_at


def test_rank_that_spins_in_a_wait_for_its_device_is_missing() -> None:
    job = make_waiting_job()
    (verdict,), examined_at = run_job(job, [7], STALL_AFTER_S + 2)
    assert (verdict.kind, verdict.severity) == (VerdictKind.SLOW_RANK, Severity.WARNING)
    assert len(examined_at) == 2
    assert examined_at[0] >= STALL_AFTER_S - 2
    (verdict,), examined_at = run_job(job, [7], 3)
    assert (verdict.kind, verdict.severity) == (VerdictKind.MISSING_RANK, Severity.ALERT)
    assert (verdict.culprits, verdict.waiting) == ((1,), (0, 2, 3))
    assert verdict.site is not None
    assert verdict.site.line == READS_LOSS.line
    assert verdict.advice.startswith("It waits for its device. Look at what it launched")
    assert examined_at == []


def test_stacks_that_users_request_change_no_verdict() -> None:
    job = make_waiting_job()
    run_job(job, [7], STALL_AFTER_S + 5)
    for _ in range(6):
        job.report_stack(1, READS_LOSS, MAIN)
        job.advance_time(1.0)
        assert [v.kind for v in job.list_due_verdicts()] == [VerdictKind.MISSING_RANK]
    assert not any(request.device for request in job.run_diagnosis().requests)


@pytest.mark.parametrize(
    ("holds", "count"),
    [
        ([0], 1),  # it computes, or variables change
        ([7, 0], 2),
        ([7, 8], 2),  # a loop whose steps take seconds reads one result after the other
    ],
)
def test_rank_that_may_work_is_slow(holds: list[int | None], count: int) -> None:
    job = make_waiting_job()
    (verdict,), examined_at = run_job(job, holds, STALL_AFTER_S + 20)
    assert (verdict.kind, verdict.culprits) == (VerdictKind.SLOW_RANK, (1,))
    assert len(examined_at) == count


def test_rank_of_older_node_agent_is_slow() -> None:
    job = make_waiting_job()
    (verdict,), _ = run_job(job, [None], STALL_AFTER_S + 20)
    assert verdict.kind is VerdictKind.SLOW_RANK


def test_rank_that_continues_after_its_wait_is_slow() -> None:
    job = make_waiting_job()
    run_job(job, [7], STALL_AFTER_S + 2)
    elsewhere = Frame(function="tokenize", file="/job/train.py", line=20, text="encode(x)")
    job.report_stack(1, elsewhere, MAIN)
    job.advance_time(STALL_AFTER_S)
    (verdict,) = job.list_due_verdicts()
    assert (verdict.kind, verdict.culprits) == (VerdictKind.SLOW_RANK, (1,))


def test_rank_that_waits_without_the_cpu_is_not_examined() -> None:
    job = make_waiting_job()
    job.ranks[1].idle = True
    verdicts, examined_at = run_job(job, [7], STALL_AFTER_S + 5)
    assert [verdict.kind for verdict in verdicts] == [VerdictKind.MISSING_RANK]
    assert examined_at == []


def test_rank_in_phase_is_not_examined() -> None:
    job = make_waiting_job()
    job.ranks[1].phase = "evaluate"
    (verdict,), examined_at = run_job(job, [7], STALL_AFTER_S + 5)
    assert (verdict.kind, examined_at) == (VerdictKind.SLOW_RANK, [])
