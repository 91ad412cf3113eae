"""Calls that time out before the wait in them becomes a verdict: who had not come is to blame,
where that is known.
"""

from __future__ import annotations

import signal

import pytest

from hangwatch.model.calls import StreamKind
from hangwatch.model.kinds import VerdictKind
from hangwatch.model.ranks import ExceptionInfo, Lifecycle
from tests.unit.jobs import Job

GLOO = "[gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 3000ms for recv operation to complete"
MONITORED = "[Rank 0]: Ranks 1 failed to pass monitoredBarrier in 3000 ms"
NCCL = "[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7) ran for 3000 milliseconds before timing out."


def times_out(job: Job, *ranks: int, type: str = "RuntimeError", message: str = GLOO) -> None:
    for rank in ranks:
        job.ranks[rank].lifecycle = Lifecycle.EXITING
        job.die(rank, status=1, raised=ExceptionInfo(type=type, message=message))
        job.complete(rank) if "world" in job.ranks[rank].places else None


def rank_0_stays_away(size: int = 3) -> Job:
    job = Job(size)
    job.everybody()
    job.wait(0.1)
    job.everybody(but=(0,), done=False)
    job.wait(3.0)
    return job


@pytest.mark.parametrize(
    ("type", "message"),
    [("RuntimeError", GLOO), ("RuntimeError", MONITORED), ("DistBackendError", NCCL)],
)
def test_who_had_not_entered_the_call_that_timed_out_is_missing_though_its_launcher_kills_it(
    type: str, message: str
) -> None:
    job = rank_0_stays_away()
    times_out(job, 1, type=type, message=message)
    job.wait(0.4)
    for rank in (0, 2):
        job.die(rank, signal=signal.SIGTERM)
    job.wait(2.0)
    (verdict,) = job.verdicts()
    assert (verdict.kind, verdict.culprits, verdict.waiting, verdict.seq) == (
        VerdictKind.MISSING_RANK,
        (0,),
        (1, 2),
        2,
    )
    assert verdict.began_at == pytest.approx(100.1)
    assert "timed out on rank 1" in verdict.summary and "its last call was at" in verdict.summary


def test_peers_that_lose_the_connection_before_the_time_out_itself_is_told_change_nothing() -> None:
    job = rank_0_stays_away()
    job.die(
        2, status=1, raised=ExceptionInfo(type="RuntimeError", message="Connection closed by peer")
    )
    job.wait(0.2)
    times_out(job, 1)
    job.wait(2.0)
    (verdict,) = job.verdicts()
    assert (verdict.kind, verdict.culprits) == (VerdictKind.MISSING_RANK, (0,))


def test_who_comes_after_the_time_out_had_not_come() -> None:
    job = rank_0_stays_away()
    times_out(job, 1, 2)
    job.wait(1.0)
    job.call(0, done=True, line=30)
    job.die(
        0, status=1, raised=ExceptionInfo(type="RuntimeError", message="Connection closed by peer")
    )
    job.wait(2.0)
    (verdict,) = job.verdicts()
    assert (verdict.kind, verdict.culprits, verdict.waiting) == (
        VerdictKind.MISSING_RANK,
        (0,),
        (1, 2),
    )
    assert verdict.site is not None and verdict.site.line == 10


def test_who_waited_in_another_group_is_a_victim_and_whom_it_waited_for_is_missing() -> None:
    job = Job(4)
    job.group("pair", (0, 1))
    job.everybody(group="pair")
    job.everybody()
    job.call(1, group="pair")
    job.everybody(but=(0, 1), done=False)
    job.wait(3.0)
    times_out(job, 2, 3)
    job.wait(0.4)
    for rank in (0, 1):
        job.die(rank, signal=signal.SIGTERM)
    job.wait(2.0)
    (verdict,) = job.verdicts()
    assert (verdict.kind, verdict.culprits, verdict.waiting) == (
        VerdictKind.MISSING_RANK,
        (0,),
        (1, 2, 3),
    )


def test_who_did_not_send_along_a_pipeline_is_missing() -> None:
    job = Job(3)
    job.everybody()
    for rank in (1, 2):
        job.p2p(rank, StreamKind.RECV, rank - 1, blocking=True)
    job.wait(3.0)
    times_out(job, 1, 2)
    job.wait(2.0)
    (verdict,) = job.verdicts()
    assert (verdict.kind, verdict.culprits, verdict.waiting) == (
        VerdictKind.MISSING_RANK,
        (0,),
        (1, 2),
    )


def test_a_stopped_rank_is_frozen_and_not_missing() -> None:
    job = rank_0_stays_away()
    job.ranks[0].state = "T"
    job.heartbeat()
    times_out(job, 1, 2)
    job.wait(2.0)
    (verdict,) = job.verdicts()
    assert (verdict.kind, verdict.culprits) == (VerdictKind.FROZEN_RANK, (0,))


def test_who_held_the_gil_when_it_was_told_to_end_was_frozen() -> None:
    job = rank_0_stays_away()
    job.ranks[0].pulse_at = job.now - 3.0
    times_out(job, 1, 2)
    job.wait(0.4)
    job.die(0, signal=signal.SIGTERM)
    job.wait(2.0)
    (verdict,) = job.verdicts()
    assert (verdict.kind, verdict.culprits) == (VerdictKind.FROZEN_RANK, (0,))


def test_where_all_had_come_in_time_nobody_is_to_blame() -> None:
    job = Job(3)
    job.everybody(done=False)
    job.wait(3.0)
    times_out(job, 1)
    job.wait(0.4)
    for rank in (0, 2):
        job.die(rank, signal=signal.SIGTERM)
    job.wait(2.0)
    (verdict,) = job.verdicts()
    assert (verdict.kind, verdict.culprits, verdict.waiting) == (
        VerdictKind.NO_PROGRESS,
        (),
        (0, 1, 2),
    )


@pytest.mark.parametrize(
    "raised",
    [
        ExceptionInfo(type="TimeoutError", message=GLOO),
        ExceptionInfo(type="Empty", message=""),
        ExceptionInfo(type="RuntimeError", message="DataLoader timed out after 5 seconds"),
        ExceptionInfo(
            type="DistStoreError", message="wait timeout after 3000ms, keys: /dataset/ready"
        ),
    ],
)
def test_a_time_out_of_the_script_s_own_is_a_cause(raised: ExceptionInfo) -> None:
    job = rank_0_stays_away()
    job.die(1, status=1, raised=raised)
    job.wait(2.0)
    (verdict,) = job.verdicts()
    assert (verdict.kind, verdict.culprits) == (VerdictKind.DEAD_RANK, (1,))


def test_who_failed_by_itself_at_about_the_same_moment_is_the_cause() -> None:
    job = rank_0_stays_away()
    times_out(job, 1, 2)
    job.wait(0.5)
    job.die(0, status=1, raised=ExceptionInfo(type="Empty", message=""))
    job.wait(2.0)
    (verdict,) = job.verdicts()
    assert (verdict.kind, verdict.culprits) == (VerdictKind.DEAD_RANK, (0,))
