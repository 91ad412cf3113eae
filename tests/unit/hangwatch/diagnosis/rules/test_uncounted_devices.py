"""Calls that do not finish on devices whose counters are unknown, or cannot be compared."""

from __future__ import annotations

from hangwatch.diagnosis import is_quiet
from hangwatch.model.calls import StreamKind
from hangwatch.model.kinds import Severity, VerdictKind
from hangwatch.model.limits import Limits
from hangwatch.model.ranks import Frame
from tests.simulation.scripted_job import ScriptedJob

LIMITS = Limits(stall_after_s=10.0, slow_limit_s=60.0, startup_after_s=20.0)
IN_CALL = (
    Frame(function="all_reduce", file="/x/torch/distributed/distributed_c10d.py", line=9),
    Frame(function="train", file="/home/me/train.py", line=20),
)
IN_SYNCHRONIZE = (
    Frame(function="synchronize", file="/x/torch/cuda/__init__.py", line=1085),
    Frame(function="train", file="/home/me/train.py", line=20),
)


def make_job() -> ScriptedJob:
    job = ScriptedJob(4, limits=LIMITS, reports_completion=False)
    job.make_calls(done=False, blocking=None, backend="nccl")
    return job


def wait(job: ScriptedJob, seconds: int, frames: tuple[Frame, ...]) -> None:
    for second in range(seconds):
        job.advance_time(1.0)
        job.send_heartbeats()
        if second == 5:
            job.report_stack(0, *frames)


def test_hosts_inside_a_call_that_all_have_made_do_not_progress() -> None:
    job = make_job()
    wait(job, 12, IN_CALL)
    assert not is_quiet(job.latest_attempt, job.now, job.limits)
    (verdict,) = job.list_due_verdicts()
    assert (verdict.kind, verdict.culprits, verdict.waiting) == (
        VerdictKind.NO_PROGRESS,
        (),
        (0, 1, 2, 3),
    )


def test_first_call_may_take_as_long_as_a_start() -> None:
    job = make_job()
    wait(job, 12, IN_CALL)
    (verdict,) = job.list_due_verdicts()
    assert verdict.severity is Severity.WARNING
    assert verdict.summary == (
        "ranks 0-3 connect to each other and do not finish: call 1 of group world"
    )
    wait(job, 10, IN_CALL)
    (verdict,) = job.list_due_verdicts()
    assert verdict.severity is Severity.ALERT


def test_later_call_is_an_alert() -> None:
    job = make_job()
    job.make_calls(done=False, blocking=None, backend="nccl")
    wait(job, 12, IN_CALL)
    (verdict,) = job.list_due_verdicts()
    assert verdict.severity is Severity.ALERT


def test_hosts_that_wait_for_uncounted_devices_may_run_a_long_kernel() -> None:
    job = make_job()
    wait(job, 30, IN_SYNCHRONIZE)
    assert job.list_due_verdicts() == []


def test_devices_that_stop_between_messages_do_not_progress() -> None:
    job = make_job()
    for rank, kind, peer in ((0, StreamKind.SEND, 1), (1, StreamKind.RECV, 0)):
        job.make_p2p_call(rank, kind, peer)
    for rank in range(4):
        job.report_device(rank, completed=0)
    wait(job, 16, IN_SYNCHRONIZE)
    (verdict,) = job.list_due_verdicts()
    assert (verdict.kind, verdict.culprits) == (VerdictKind.NO_PROGRESS, ())
