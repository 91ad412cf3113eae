"""A rank with unfinished calls in the table of ranks."""

from __future__ import annotations

from hangwatch.model.calls import StreamKind
from hangwatch.model.limits import Limits
from hangwatch.model.ranks import Frame, RankState
from hangwatch.server.monitor import views
from hangwatch.server.monitor.views import compute_states
from tests.simulation.scripted_job import ScriptedJob


def make_frame(text: str) -> Frame:
    return Frame(function="main", file="/job/train.py", line=7, text=text)


def describe_rank(job: ScriptedJob, rank: int) -> tuple[RankState, float | None]:
    state = compute_states(job.latest_attempt, (), job.now, Limits().lost_after_s)[rank]
    view = views.describe_rank(job.latest_attempt, rank, state, job.now)
    return view.state, view.waiting_s


def start_send(job: ScriptedJob) -> None:
    job.send_heartbeats()
    job.make_p2p_call(0, StreamKind.SEND, 1, blocking=False)
    job.advance_time(11)
    job.send_heartbeats()


def test_rank_does_not_wait_for_send_while_it_sleeps() -> None:
    job = ScriptedJob(2)
    start_send(job)
    job.report_stack(0, make_frame("time.sleep(60)"))
    assert describe_rank(job, 0) == (RankState.RUNNING, None)


def test_rank_waits_for_send_in_wait() -> None:
    job = ScriptedJob(2)
    start_send(job)
    job.report_stack(0, make_frame("work.wait()"))
    assert describe_rank(job, 0) == (RankState.WAITING, 11.0)


def test_rank_has_not_waited_for_send_since_before_its_newest_call() -> None:
    job = ScriptedJob(2)
    start_send(job)
    job.make_calls()
    job.advance_time(2)
    job.send_heartbeats()
    assert describe_rank(job, 0) == (RankState.WAITING, 2.0)


def test_rank_waits_in_blocking_call_whatever_its_stack_shows() -> None:
    job = ScriptedJob(2)
    job.send_heartbeats()
    job.make_call(0)
    job.advance_time(11)
    job.send_heartbeats()
    job.report_stack(0, make_frame("time.sleep(60)"))
    assert describe_rank(job, 0) == (RankState.WAITING, 11.0)
