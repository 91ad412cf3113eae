"""Calls that time out before the wait in them becomes a verdict: who had not come is to blame,
where that is known.
"""

from __future__ import annotations

import signal

import pytest

from hangwatch.model.calls import StreamKind
from hangwatch.model.kinds import VerdictKind
from hangwatch.model.ranks import ExceptionInfo, Lifecycle
from tests.simulation.scripted_job import ScriptedJob

GLOO_MESSAGE = (
    "[gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 3000ms for recv operation to"
    " complete"
)
MONITORED_BARRIER_MESSAGE = "[Rank 0]: Ranks 1 failed to pass monitoredBarrier in 3000 ms"
NCCL_MESSAGE = (
    "[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7) ran for 3000"
    " milliseconds before timing out."
)


def raise_timeout(
    job: ScriptedJob, *ranks: int, type: str = "RuntimeError", message: str = GLOO_MESSAGE
) -> None:
    for rank in ranks:
        job.ranks[rank].lifecycle = Lifecycle.EXITING
        job.end_process(rank, status=1, exception=ExceptionInfo(type=type, message=message))
        job.complete_calls(rank) if "world" in job.ranks[rank].streams else None


def job_without_rank_0(size: int = 3) -> ScriptedJob:
    job = ScriptedJob(size)
    job.make_calls()
    job.advance_time(0.1)
    job.make_calls(except_ranks=(0,), done=False)
    job.advance_time(3.0)
    return job


@pytest.mark.parametrize(
    ("type", "message"),
    [
        ("RuntimeError", GLOO_MESSAGE),
        ("RuntimeError", MONITORED_BARRIER_MESSAGE),
        ("DistBackendError", NCCL_MESSAGE),
    ],
)
def test_rank_absent_from_timed_out_call_is_missing_even_if_killed(type: str, message: str) -> None:
    job = job_without_rank_0()
    raise_timeout(job, 1, type=type, message=message)
    job.advance_time(0.4)
    for rank in (0, 2):
        job.end_process(rank, signal=signal.SIGTERM)
    job.advance_time(2.0)
    (verdict,) = job.list_due_verdicts()
    assert (verdict.kind, verdict.culprits, verdict.waiting, verdict.seq) == (
        VerdictKind.MISSING_RANK,
        (0,),
        (1, 2),
        2,
    )
    assert verdict.began_at == pytest.approx(100.1)
    assert "timed out on rank 1" in verdict.summary and "its last call was at" in verdict.summary


def test_connection_errors_before_timeout_report_change_nothing() -> None:
    job = job_without_rank_0()
    job.end_process(
        2,
        status=1,
        exception=ExceptionInfo(type="RuntimeError", message="Connection closed by peer"),
    )
    job.advance_time(0.2)
    raise_timeout(job, 1)
    job.advance_time(2.0)
    (verdict,) = job.list_due_verdicts()
    assert (verdict.kind, verdict.culprits) == (VerdictKind.MISSING_RANK, (0,))


def test_rank_entering_after_timeout_counts_as_absent() -> None:
    job = job_without_rank_0()
    raise_timeout(job, 1, 2)
    job.advance_time(1.0)
    job.make_call(0, done=True, line=30)
    job.end_process(
        0,
        status=1,
        exception=ExceptionInfo(type="RuntimeError", message="Connection closed by peer"),
    )
    job.advance_time(2.0)
    (verdict,) = job.list_due_verdicts()
    assert (verdict.kind, verdict.culprits, verdict.waiting) == (
        VerdictKind.MISSING_RANK,
        (0,),
        (1, 2),
    )
    assert verdict.site is not None and verdict.site.line == 10


def test_waiter_in_other_group_is_victim_and_awaited_rank_is_missing() -> None:
    job = ScriptedJob(4)
    job.add_group("pair", (0, 1))
    job.make_calls(group="pair")
    job.make_calls()
    job.make_call(1, group="pair")
    job.make_calls(except_ranks=(0, 1), done=False)
    job.advance_time(3.0)
    raise_timeout(job, 2, 3)
    job.advance_time(0.4)
    for rank in (0, 1):
        job.end_process(rank, signal=signal.SIGTERM)
    job.advance_time(2.0)
    (verdict,) = job.list_due_verdicts()
    assert (verdict.kind, verdict.culprits, verdict.waiting) == (
        VerdictKind.MISSING_RANK,
        (0,),
        (1, 2, 3),
    )


def test_non_sending_pipeline_rank_is_missing() -> None:
    job = ScriptedJob(3)
    job.make_calls()
    for rank in (1, 2):
        job.make_p2p_call(rank, StreamKind.RECV, rank - 1, blocking=True)
    job.advance_time(3.0)
    raise_timeout(job, 1, 2)
    job.advance_time(2.0)
    (verdict,) = job.list_due_verdicts()
    assert (verdict.kind, verdict.culprits, verdict.waiting) == (
        VerdictKind.MISSING_RANK,
        (0,),
        (1, 2),
    )


def test_stopped_rank_is_frozen_not_missing() -> None:
    job = job_without_rank_0()
    job.ranks[0].state = "T"
    job.send_heartbeats()
    raise_timeout(job, 1, 2)
    job.advance_time(2.0)
    (verdict,) = job.list_due_verdicts()
    assert (verdict.kind, verdict.culprits) == (VerdictKind.FROZEN_RANK, (0,))


def test_gil_holder_at_termination_is_frozen() -> None:
    job = job_without_rank_0()
    job.ranks[0].pulse_at = job.now - 3.0
    raise_timeout(job, 1, 2)
    job.advance_time(0.4)
    job.end_process(0, signal=signal.SIGTERM)
    job.advance_time(2.0)
    (verdict,) = job.list_due_verdicts()
    assert (verdict.kind, verdict.culprits) == (VerdictKind.FROZEN_RANK, (0,))


def test_timeout_with_all_ranks_present_blames_no_rank() -> None:
    job = ScriptedJob(3)
    job.make_calls(done=False)
    job.advance_time(3.0)
    raise_timeout(job, 1)
    job.advance_time(0.4)
    for rank in (0, 2):
        job.end_process(rank, signal=signal.SIGTERM)
    job.advance_time(2.0)
    (verdict,) = job.list_due_verdicts()
    assert (verdict.kind, verdict.culprits, verdict.waiting) == (
        VerdictKind.NO_PROGRESS,
        (),
        (0, 1, 2),
    )


@pytest.mark.parametrize(
    "raised",
    [
        ExceptionInfo(type="TimeoutError", message=GLOO_MESSAGE),
        ExceptionInfo(type="Empty", message=""),
        ExceptionInfo(type="RuntimeError", message="DataLoader timed out after 5 seconds"),
        ExceptionInfo(
            type="DistStoreError", message="wait timeout after 3000ms, keys: /dataset/ready"
        ),
    ],
)
def test_timeout_raised_by_script_is_a_cause(raised: ExceptionInfo) -> None:
    job = job_without_rank_0()
    job.end_process(1, status=1, exception=raised)
    job.advance_time(2.0)
    (verdict,) = job.list_due_verdicts()
    assert (verdict.kind, verdict.culprits) == (VerdictKind.DEAD_RANK, (1,))


def test_simultaneous_own_failure_is_the_cause() -> None:
    job = job_without_rank_0()
    raise_timeout(job, 1, 2)
    job.advance_time(0.5)
    job.end_process(0, status=1, exception=ExceptionInfo(type="Empty", message=""))
    job.advance_time(2.0)
    (verdict,) = job.list_due_verdicts()
    assert (verdict.kind, verdict.culprits) == (VerdictKind.DEAD_RANK, (0,))
