"""Jobs in which no rank makes calls any more, and none is known to wait in one."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from hangwatch.diagnosis import is_quiet
from hangwatch.model.kinds import Severity, VerdictKind
from hangwatch.model.ranks import Frame, Lifecycle, ThreadStack
from hangwatch.model.verdicts import Verdict
from hangwatch.protocol.heartbeat import StackReply
from tests.simulation.scripted_job import LIMITS, ScriptedJob

from ..expect import make_frame

PYTHON = "/usr/lib/python3.11"
TORCH = "/usr/lib/python3/site-packages/torch"

Stack = tuple[Frame, ...]


def make_line(text: str, function: str = "main", line: int = 7) -> Stack:
    return (Frame(function=function, file="/home/me/train.py", line=line, text=text),)


POLLS = make_line("time.sleep(0.1)", "await_file")
READS_PIPE = make_line("return pipe.read()", "read_samples", 21)
STORE_BARRIER = (
    make_frame("get", f"{TORCH}/distributed/elastic/utils/store.py"),
    *make_line("barrier(store, 3, 'x')"),
)
TAKES_REQUEST = (make_frame("get", f"{PYTHON}/queue.py"), *make_line("queue.get()", "serve"))
EVENT_LOOP = (make_frame("run_forever", f"{PYTHON}/asyncio/base_events.py"), *make_line("run()"))
PROCESS_BARRIER = (
    make_frame("wait", f"{PYTHON}/multiprocessing/synchronize.py"),
    make_frame("_wait", f"{PYTHON}/threading.py"),
    make_frame("wait", f"{PYTHON}/threading.py"),
    *make_line("meeting.wait()"),
)


def make_job(*stacks: Stack | None, pause_s: float = 0.5) -> ScriptedJob:
    """A job whose ranks made calls, the last ones now, and have these stacks from then on."""
    job = ScriptedJob(len(stacks))
    for _ in range(5):
        job.make_calls()
        job.send_heartbeats()
        job.advance_time(pause_s)
        job.send_heartbeats()
    job.make_calls()
    job.send_heartbeats()
    return job


def wait(job: ScriptedJob, seconds: float, stacks: Sequence[Stack | None]) -> list[Verdict]:
    """The verdicts after this time, with stacks whenever they are requested."""
    verdicts: list[Verdict] = []
    for _ in range(int(seconds)):
        job.advance_time(1.0)
        verdicts = job.list_due_verdicts()
        for request in job.run_diagnosis().requests:
            stack = stacks[request.rank] if request.stacks else None
            if stack:
                job.report_stack(request.rank, *stack)
    return verdicts


@pytest.mark.parametrize(
    ("stacks", "culprits"),
    [
        ((READS_PIPE, POLLS, POLLS), (0,)),
        ((READS_PIPE, POLLS), (0,)),
        ((STORE_BARRIER, POLLS, STORE_BARRIER), (1,)),
        ((STORE_BARRIER, READS_PIPE, make_line("sock.recv(1)")), (1,)),
        ((PROCESS_BARRIER, make_line("f(x)", "load"), PROCESS_BARRIER), (1,)),
        ((TAKES_REQUEST, make_line("sock.recv(1)"), TAKES_REQUEST), (1,)),
        ((READS_PIPE, READS_PIPE, READS_PIPE), ()),
        ((make_line("sock.recv(1)"), POLLS), ()),
        ((READS_PIPE, make_line("f(x)", "a"), make_line("f(x)", "b")), ()),
    ],
)
def test_rank_that_is_blocked_where_others_are_not_is_named(
    stacks: Sequence[Stack], culprits: tuple[int, ...]
) -> None:
    job = make_job(*stacks)
    assert wait(job, 9, stacks) == []
    (verdict,) = wait(job, 2, stacks)
    assert (verdict.kind, verdict.severity) == (VerdictKind.QUIET_JOB, Severity.WARNING)
    assert verdict.culprits == culprits
    assert "no rank makes calls any more" in verdict.summary
    assert "train.py:" in verdict.summary
    (verdict,) = wait(job, LIMITS.slow_limit_s, stacks)
    assert verdict.is_alert == bool(culprits)


@pytest.mark.parametrize(
    "stacks",
    [
        (TAKES_REQUEST, TAKES_REQUEST, TAKES_REQUEST),
        (EVENT_LOOP, TAKES_REQUEST, TAKES_REQUEST),
        (make_line("server.accept()"), TAKES_REQUEST, TAKES_REQUEST),
    ],
)
def test_engine_without_requests_is_not_suspected(stacks: Sequence[Stack]) -> None:
    job = make_job(*stacks)
    assert wait(job, 60, stacks) == []
    assert "requests" in job.run_diagnosis().pause_note


def test_rank_that_works_keeps_job_from_being_suspected() -> None:
    stacks = (READS_PIPE, POLLS, POLLS)
    job = make_job(*stacks)
    job.ranks[0].idle = False
    assert wait(job, 60, stacks) == []
    assert job.run_diagnosis().pause_note == "rank 0 works"


def test_declared_phase_keeps_job_from_being_suspected() -> None:
    stacks = (READS_PIPE, POLLS, POLLS)
    job = make_job(*stacks)
    job.ranks[1].phase = "evaluate"
    assert wait(job, 20, stacks) == []
    assert job.run_diagnosis().pause_note == "rank 1 is in its phase 'evaluate'"


def test_usual_pause_is_not_suspected() -> None:
    stacks = (READS_PIPE, POLLS, POLLS)
    job = make_job(*stacks, pause_s=6.0)
    assert is_quiet(job.latest_attempt, job.now, job.limits)
    assert wait(job, 29, stacks) == []
    (verdict,) = wait(job, 3, stacks)
    assert verdict.culprits == (0,)


def test_job_that_ends_is_not_suspected() -> None:
    stacks = (READS_PIPE, POLLS, POLLS)
    job = make_job(*stacks)
    job.ranks[2].lifecycle = Lifecycle.DESTROYED
    assert wait(job, 30, stacks) == []


def test_nothing_is_said_without_stacks() -> None:
    job = make_job(None, None)
    assert wait(job, 30, (None, None)) == []
    assert job.run_diagnosis().pause_note == "no stack shows what they do"


def test_rank_that_executes_remote_call_works() -> None:
    awaits_reply = (make_frame("rpc_sync", f"{TORCH}/distributed/rpc/api.py"), *make_line("ask()"))
    remote = (
        make_frame("answer", line=14),
        make_frame("_run_function", f"{TORCH}/distributed/rpc/internal.py"),
    )
    job = make_job(awaits_reply, awaits_reply)
    used_s = 0.0
    for _ in range(40):
        job.advance_time(1.0)
        used_s += 0.5
        verdicts = job.list_due_verdicts()
        for request in job.run_diagnosis().requests:
            threads = [ThreadStack(thread="MainThread", frames=awaits_reply, main=True)]
            if request.rank == 1:
                threads.append(ThreadStack(thread="Dummy-1", tid=9, frames=remote, cpu_s=used_s))
            reply = StackReply(
                key=f"{request.rank}-1", request="r", source="py-spy", threads=tuple(threads)
            )
            job.apply_heartbeat(samples=(reply,))
    assert verdicts == []
    assert job.run_diagnosis().pause_note == "rank 1 works"
