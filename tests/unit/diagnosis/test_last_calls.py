"""A rank that stopped at another call than its peers, whose hosts have run ahead of it."""

from __future__ import annotations

from hangwatch.model.kinds import VerdictKind
from tests.simulation.scripted_job import ScriptedJob


def make_job() -> ScriptedJob:
    """On a backend like NCCL: every rank has made 14 calls."""
    job = ScriptedJob(4, reports_completion=False)
    for _ in range(7):
        job.make_calls("all_gather_into_tensor", done=False, blocking=None, backend="nccl")
        job.make_calls("reduce_scatter_tensor", done=False, blocking=None, backend="nccl")
    return job


def run_ahead(job: ScriptedJob, *ranks: int) -> None:
    for rank in ranks:
        for op in ("all_gather_into_tensor", "reduce_scatter_tensor", "barrier"):
            job.make_call(rank, op, blocking=None, backend="nccl")


def test_other_call_at_an_unreported_position_is_a_mismatch() -> None:
    job = make_job()
    job.make_call(1, "barrier", blocking=None, backend="nccl")
    run_ahead(job, 0, 2, 3)
    job.advance_time(2.0)
    (verdict,) = job.list_due_verdicts()
    assert (verdict.kind, verdict.culprits, verdict.seq) == (VerdictKind.MISMATCH, (1,), 15)


def test_same_last_call_is_no_mismatch() -> None:
    job = make_job()
    job.make_call(1, "all_gather_into_tensor", blocking=None, backend="nccl")
    run_ahead(job, 0, 2, 3)
    job.advance_time(22.0)  # without a stack, it is a guess that they wait
    (verdict,) = job.list_due_verdicts()
    assert (verdict.kind, verdict.culprits) == (VerdictKind.MISSING_RANK, (1,))
