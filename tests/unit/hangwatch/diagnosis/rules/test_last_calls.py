"""A rank that stopped at another call than its peers, whose hosts have run ahead of it."""

from __future__ import annotations

from hangwatch.model.calls import StreamKind
from hangwatch.model.kinds import VerdictKind
from tests.simulation.scripted_job import ScriptedJob


def make_job() -> ScriptedJob:
    """A job on a backend like NCCL, in which every rank has made 14 calls."""
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


def test_completed_send_is_compared_with_the_receive_that_waits_for_it() -> None:
    """The sender has gone on: nothing but a request shows what it sent."""
    job = ScriptedJob(2)
    for _ in range(20):
        job.make_p2p_call(0, StreamKind.SEND, 1, done=True)
        job.make_p2p_call(1, StreamKind.RECV, 0, done=True)
    job.make_p2p_call(0, StreamKind.SEND, 1, done=True, shape=(32,))
    job.make_p2p_call(0, StreamKind.SEND, 1, done=True)
    job.make_p2p_call(1, StreamKind.RECV, 0, blocking=True)
    job.advance_time(2.0)
    (verdict,) = job.list_due_verdicts()
    assert (verdict.kind, verdict.culprits, verdict.seq) == (VerdictKind.MISMATCH, (0, 1), 21)
    assert verdict.differing_fields == ("shape",)


def test_split_sizes_of_members_that_went_on_are_compared() -> None:
    job = ScriptedJob(3)
    for _ in range(20):
        job.make_calls("all_to_all_single", splits=((4, 4, 4), (4, 4, 4)))
    for rank, expected in ((0, (4, 4, 4)), (1, (4, 4, 4)), (2, (4, 5, 4))):
        job.make_call(
            rank, "all_to_all_single", splits=((4, 4, 4), expected), done=rank == 0, blocking=True
        )
    job.make_call(0, done=False)
    job.advance_time(2.0)
    (verdict,) = job.list_due_verdicts()
    assert (verdict.kind, verdict.culprits) == (VerdictKind.MISMATCH, (1, 2))
    assert verdict.differing_fields == ("splits",)
