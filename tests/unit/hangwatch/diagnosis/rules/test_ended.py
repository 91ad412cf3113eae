"""Ranks that ended: which one failed first, and which ones only followed."""

from __future__ import annotations

import signal

import pytest

from hangwatch.model.calls import Site
from hangwatch.model.kinds import VerdictKind
from hangwatch.model.ranks import ExceptionInfo, ExitInfo, Frame, Lifecycle
from tests.simulation.scripted_job import LIMITS, ScriptedJob


def test_killed_rank_is_named_but_not_ranks_ended_by_launcher() -> None:
    job = ScriptedJob(4)
    job.make_calls()
    job.send_heartbeats()
    job.end_process(2, signal=signal.SIGKILL)
    job.advance_time(0.4)
    for rank in (0, 1, 3):
        job.end_process(rank, signal=signal.SIGTERM)
    job.advance_time(2)
    (verdict,) = job.list_due_verdicts()
    assert (verdict.kind, verdict.culprits) == (VerdictKind.DEAD_RANK, (2,))
    assert "SIGKILL" in verdict.summary


def test_peer_reporting_lost_connection_first_is_not_the_cause() -> None:
    job = ScriptedJob(2)
    job.make_calls()
    job.send_heartbeats()
    job.ranks[0].exception, job.ranks[0].exception_at = (
        ExceptionInfo(type="RuntimeError", message="Read error: Connection reset by peer"),
        job.now,
    )
    job.advance_time(0.2)
    job.end_process(1, signal=signal.SIGKILL)
    job.advance_time(0.4)
    job.end_process(0, signal=signal.SIGTERM)
    job.advance_time(2)
    (verdict,) = job.list_due_verdicts()
    assert (verdict.kind, verdict.culprits) == (VerdictKind.DEAD_RANK, (1,))


def test_first_exception_is_the_cause_even_if_process_ends_last() -> None:
    job = ScriptedJob(2)
    job.make_calls()
    job.send_heartbeats()
    job.ranks[1].exception, job.ranks[1].exception_at = (
        ExceptionInfo(type="ValueError", message="bad batch"),
        job.now,
    )
    job.advance_time(0.2)
    job.end_process(
        0,
        status=1,
        exception=ExceptionInfo(type="RuntimeError", message="Connection closed by peer"),
    )
    job.advance_time(0.2)
    job.end_process(1, status=1)
    job.advance_time(2)
    (verdict,) = job.list_due_verdicts()
    assert verdict.culprits == (1,)
    assert "ValueError: bad batch" in verdict.summary


@pytest.mark.parametrize(
    "message", ["Connection closed by peer", "NCCL communicator was aborted on rank 3."]
)
def test_vanished_rank_is_not_blamed_for_exception_right_after_last_sign_of_life(
    message: str,
) -> None:
    job = ScriptedJob(4)
    job.make_calls()
    job.send_heartbeats()
    job.end_process(0)
    job.advance_time(0.3)
    job.end_process(2, exception=ExceptionInfo(type="ValueError", message="bad batch"))
    job.advance_time(0.1)
    job.end_process(3, exception=ExceptionInfo(type="RuntimeError", message=message))
    job.advance_time(2)
    (verdict,) = job.list_due_verdicts()
    assert (verdict.kind, verdict.culprits) == (VerdictKind.DEAD_RANK, (2,))


def test_vanished_rank_comes_before_failing_and_terminated_peers() -> None:
    job = ScriptedJob(4)
    job.make_calls()
    job.send_heartbeats()
    job.end_process(
        1, exception=ExceptionInfo(type="RuntimeError", message="Connection closed by peer")
    )
    job.end_process(0)
    job.advance_time(0.3)
    job.end_process(3, signal=signal.SIGTERM)
    job.advance_time(2)
    (verdict,) = job.list_due_verdicts()
    assert (verdict.kind, verdict.culprits) == (VerdictKind.DEAD_RANK, (0,))


def test_rank_that_raised_and_exits_slowly_is_dead() -> None:
    job = ScriptedJob(3)
    job.make_calls()
    job.ranks[1].exception, job.ranks[1].exception_at = (
        ExceptionInfo(type="ValueError", message="bad batch"),
        job.now,
    )
    job.ranks[1].lifecycle = Lifecycle.EXITING
    job.make_calls(except_ranks=(1,), done=False)
    job.advance_time(2)
    (verdict,) = job.list_due_verdicts()
    assert (verdict.kind, verdict.culprits) == (VerdictKind.DEAD_RANK, (1,))
    assert verdict.summary == "rank 1 raised ValueError: bad batch"


def test_exited_rank_is_named_despite_slow_exit() -> None:
    job = ScriptedJob(3)
    job.make_calls()
    job.ranks[1].lifecycle, job.ranks[1].pulse_at = Lifecycle.EXITING, job.now
    job.make_calls(except_ranks=(1,), done=False)
    job.advance_time(0.1)
    for rank in (0, 2):
        job.end_process(
            rank,
            status=1,
            exception=ExceptionInfo(type="RuntimeError", message="Connection closed by peer"),
        )
    job.advance_time(3)
    job.end_process(1, status=0)
    job.advance_time(1)
    (verdict,) = job.list_due_verdicts()
    assert (verdict.kind, verdict.culprits) == (VerdictKind.EXITED_RANK, (1,))


def test_exited_rank_is_named_although_launcher_stops_it() -> None:
    job = ScriptedJob(3)
    job.make_calls()
    job.ranks[1].lifecycle = Lifecycle.DESTROYED
    job.make_calls(except_ranks=(1,), done=False)
    job.advance_time(0.1)
    for rank in (0, 2):
        job.end_process(
            rank,
            status=1,
            exception=ExceptionInfo(type="RuntimeError", message="Connection closed by peer"),
        )
    job.advance_time(0.4)
    job.end_process(1, signal=signal.SIGTERM)
    job.advance_time(3)
    (verdict,) = job.list_due_verdicts()
    assert (verdict.kind, verdict.culprits) == (VerdictKind.EXITED_RANK, (1,))


def test_terminated_job_is_no_alert() -> None:
    job = ScriptedJob(2)
    job.make_calls()
    job.send_heartbeats()
    for rank in (0, 1):
        job.end_process(rank, signal=signal.SIGTERM)
    job.advance_time(20)
    assert job.list_due_verdicts() == []


def test_interrupted_job_is_no_alert() -> None:
    job = ScriptedJob(2)
    job.make_calls()
    job.send_heartbeats()
    for rank in (0, 1):
        job.end_process(
            rank,
            signal=signal.SIGINT,
            exception=ExceptionInfo(type="KeyboardInterrupt", message=""),
        )
    job.advance_time(20)
    assert job.list_due_verdicts() == []


def test_rank_that_raised_and_does_not_exit_is_not_slow() -> None:
    """A thread of its own that works keeps the process alive: where it raised is what matters."""
    job = ScriptedJob(3)
    job.make_calls()
    site = Site(file="train.py", line=12, function="read_batch")
    job.ranks[1].exception = ExceptionInfo(type="ValueError", message="bad batch", site=site)
    job.ranks[1].exception_at = job.now
    job.ranks[1].idle = False
    job.make_calls(except_ranks=(1,), done=False)
    job.send_heartbeats()
    job.advance_time(LIMITS.stall_after_s + 5)
    (verdict,) = job.list_due_verdicts()
    assert (verdict.kind, verdict.culprits) == (VerdictKind.MISSING_RANK, (1,))
    assert verdict.summary.endswith("it raised ValueError: bad batch at train.py:12 in read_batch")
    assert verdict.site == site


def test_rank_that_went_on_after_an_exception_was_shown_is_not_ended_by_it() -> None:
    """An interactive session shows an exception as if it ended the program, and goes on."""
    job = ScriptedJob(3)
    job.make_calls()
    job.ranks[1].exception = ExceptionInfo(type="ValueError", message="bad batch")
    job.ranks[1].exception_at = job.now
    job.advance_time(5)
    job.make_calls()
    job.make_calls(except_ranks=(1,), done=False)
    job.send_heartbeats()
    job.advance_time(LIMITS.stall_after_s + 5)
    (verdict,) = job.list_due_verdicts()
    assert verdict.kind is VerdictKind.MISSING_RANK and "bad batch" not in verdict.summary


@pytest.mark.parametrize("how", ["exiting", "ended", "in a finally clause"])
def test_interrupted_rank_is_named_only_if_the_others_keep_waiting(how: str) -> None:
    """Ctrl-C interrupts all ranks: one that waits in native code acts on it once the first one is gone."""
    job = ScriptedJob(2)
    job.make_calls()
    job.make_call(1)
    job.send_heartbeats()
    interrupt = ExceptionInfo(type="KeyboardInterrupt", message="")
    if how == "ended":
        job.end_process(0, signal=signal.SIGINT, exception=interrupt)
    elif how == "exiting":
        job.ranks[0].exception, job.ranks[0].exception_at = interrupt, job.now
        job.ranks[0].lifecycle = Lifecycle.EXITING
    else:
        job.ranks[0].handling, job.ranks[0].lifecycle = interrupt, Lifecycle.DESTROYED
    job.advance_time(LIMITS.stall_after_s - 1)
    assert job.list_due_verdicts() == []
    job.advance_time(3)
    (verdict,) = job.list_due_verdicts()
    kind = VerdictKind.DEAD_RANK if how == "ended" else VerdictKind.EXITED_RANK
    assert (verdict.kind, verdict.culprits, verdict.waiting) == (kind, (0,), (1,))


def test_ranks_exiting_successfully_seconds_apart_are_no_alert() -> None:
    job = ScriptedJob(3)
    job.make_calls()
    job.send_heartbeats()
    for rank in range(3):
        job.end_process(rank, status=0)
        job.advance_time(5)
        assert job.list_due_verdicts() == []


def test_rank_that_exited_while_others_wait() -> None:
    job = ScriptedJob(3)
    job.make_calls()
    job.send_heartbeats()
    job.end_process(2, status=0)
    for rank in (0, 1):
        job.make_call(rank)
    job.advance_time(2)
    (verdict,) = job.list_due_verdicts()
    assert (verdict.kind, verdict.culprits, verdict.waiting) == (
        VerdictKind.EXITED_RANK,
        (2,),
        (0, 1),
    )


def test_death_is_reported_while_others_progress() -> None:
    job = ScriptedJob(2)
    job.make_calls()
    job.send_heartbeats()
    job.end_process(1, status=3)
    job.advance_time(2)
    (verdict,) = job.list_due_verdicts()
    assert (verdict.kind, verdict.culprits) == (VerdictKind.DEAD_RANK, (1,))
    assert job.ranks[1].exit == ExitInfo(exit_status=3)


def test_workers_ended_after_their_threads_have_finished() -> None:
    job = ScriptedJob(2)
    job.make_calls(thread=7)
    job.send_heartbeats()
    job.end_process(0, status=1)
    job.advance_time(1.5)
    assert job.list_due_verdicts() == [], "the other may end as well"
    job.end_process(1, status=1)
    job.advance_time(10)
    assert job.list_due_verdicts() == []


@pytest.mark.parametrize("case", ["alone", "other end", "in a call", "main thread"])
def test_worker_that_fails_is_named(case: str) -> None:
    job = ScriptedJob(2)
    job.make_calls(thread=7 if case != "main thread" else 0)
    job.send_heartbeats()
    if case == "in a call":
        job.make_call(1, thread=7)
    job.end_process(0, status=1)
    job.advance_time(0.5)
    if case == "other end":
        job.end_process(1, signal=signal.SIGTERM)
    if case == "main thread":
        job.end_process(1, status=1)
    job.advance_time(4)
    verdicts = job.list_due_verdicts()
    assert [(v.kind, v.culprits) for v in verdicts] == [(VerdictKind.DEAD_RANK, (0,))]


def test_end_after_groups_were_destroyed_is_no_failure() -> None:
    job = ScriptedJob(2)
    job.make_calls()
    job.send_heartbeats()
    for rank in (0, 1):
        job.ranks[rank].lifecycle = Lifecycle.DESTROYED
    job.end_process(0, signal=signal.SIGKILL)
    job.advance_time(5)
    assert job.list_due_verdicts() == []


def make_job_with_unfinished_call() -> ScriptedJob:
    """Both ranks have made a reduce_scatter, which gloo never reports as complete."""
    job = ScriptedJob(2)
    job.make_calls(done=True)
    job.make_calls("reduce_scatter", done=False, blocking=False)
    job.send_heartbeats()
    job.advance_time(5.0)
    return job


@pytest.mark.parametrize("lifecycle", [Lifecycle.INITIALISED, Lifecycle.DESTROYED])
def test_unfinished_call_of_a_destroyed_group_is_no_wait(lifecycle: Lifecycle) -> None:
    """A rank that destroyed the group takes long to end, or is in its next world."""
    job = make_job_with_unfinished_call()
    for rank in (0, 1):
        job.ranks[rank].lifecycle = lifecycle
    if lifecycle is Lifecycle.INITIALISED:
        job.add_group("next", (0, 1))
        job.make_calls(group="next", generation=2)
    job.send_heartbeats()
    job.advance_time(1.0)
    job.end_process(0, status=0)
    for _ in range(20):
        job.advance_time(1.0)
        assert job.list_due_verdicts() == []


@pytest.mark.parametrize("is_waiting", [False, True])
def test_unfinished_call_that_all_entered_is_a_wait_only_if_a_stack_shows_it(
    is_waiting: bool,
) -> None:
    job = make_job_with_unfinished_call()
    job.end_process(0, status=0)
    for _ in range(20):
        job.advance_time(1.0)
        assert job.list_due_verdicts() == []
    assert 1 in {request.rank for request in job.run_diagnosis().requests if request.stacks}
    if is_waiting:
        job.report_stack(1, Frame(function="wait", file="/site/torch/distributed/x.py", line=3))
        (verdict,) = job.list_due_verdicts()
        assert (verdict.kind, verdict.culprits) == (VerdictKind.EXITED_RANK, (0,))
        assert verdict.advice.startswith("It had entered this call, too,")
