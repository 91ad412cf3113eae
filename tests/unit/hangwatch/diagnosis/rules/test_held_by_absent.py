"""Absent ranks that wait for another absent one: who is blamed while that works, once it has come,
and when it does not.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from hangwatch.model.kinds import Severity, VerdictKind
from hangwatch.model.ranks import Frame, ThreadStack
from hangwatch.protocol import heartbeat
from tests.simulation.scripted_job import LIMITS, ScriptedJob

PYTHON = "/usr/lib/python3.11"
WAITS_FOR_OTHERS = (
    "fcntl.flock(f, fcntl.LOCK_EX)",
    "store.wait(['ready'])",
    "time.sleep(0.1)",
    "answer = sock.recv(10)",
    "x = ref.to_here()",
)
OWN_WAITS = ("input()", "lock.acquire()", "x = f(x)", "open(path)")


def make_frame(text: str) -> Frame:
    return Frame(function="main", file="/home/me/train.py", line=7, text=text)


def job_with_absent_ranks(*texts: str, world: int = 0) -> ScriptedJob:
    """A job whose last rank has waited for all others for 10 s. Rank 0 works; the next ones were
    sampled, idle, in these lines.
    """
    job = ScriptedJob(max(world, len(texts) + 2), limits=replace(LIMITS))
    job.send_heartbeats()
    job.advance_time(20)
    job.make_call(job.world_size - 1)
    job.ranks[0].idle = False
    job.advance_time(9)
    job.send_heartbeats()
    for rank, text in enumerate(texts, 1):
        job.report_stack(rank, make_frame(text))
    job.advance_time(2)
    return job


def list_blamed(job: ScriptedJob) -> list[tuple[VerdictKind, tuple[int, ...]]]:
    return [(v.kind, v.culprits) for v in job.list_due_verdicts()]


@pytest.mark.parametrize("text", WAITS_FOR_OTHERS)
def test_possible_waiter_for_slow_rank_is_its_victim(text: str) -> None:
    job = job_with_absent_ranks(text, text)
    (verdict,) = job.list_due_verdicts()
    assert (verdict.kind, verdict.severity, verdict.culprits) == (
        VerdictKind.SLOW_RANK,
        Severity.WARNING,
        (0,),
    )
    job.advance_time(LIMITS.slow_limit_s)
    assert list_blamed(job) == [(VerdictKind.MISSING_RANK, (0,))]


@pytest.mark.parametrize("text", OWN_WAITS)
def test_rank_with_own_wait_is_missing_first(text: str) -> None:
    assert list_blamed(job_with_absent_ranks("time.sleep(0.1)", text)) == [
        (VerdictKind.MISSING_RANK, (2,))
    ]


def test_all_absent_ranks_are_missing_if_none_works() -> None:
    job = job_with_absent_ranks("time.sleep(0.1)", "sock.recv(1)")
    job.ranks[0].idle = True
    job.advance_time(3)
    assert list_blamed(job) == [(VerdictKind.MISSING_RANK, (0, 1, 2))]


def test_unsampled_rank_is_treated_like_sampled_ones() -> None:
    job = job_with_absent_ranks("time.sleep(0.1)", world=40)
    assert list_blamed(job) == [(VerdictKind.SLOW_RANK, (0,))]
    requested_ranks = {request.rank for request in job.run_diagnosis().requests if request.stacks}
    assert {1, 2, 3} <= requested_ranks


def test_never_sampled_ranks_are_missing_slightly_later() -> None:
    job = job_with_absent_ranks(world=3)
    assert list_blamed(job) == []
    job.advance_time(1)
    assert list_blamed(job) == [(VerdictKind.MISSING_RANK, (1,))]


def test_rank_absent_after_late_one_arrived_gets_stall_limit_again() -> None:
    job = job_with_absent_ranks("time.sleep(0.1)", "sock.recv(1)")
    job.make_call(0)
    job.advance_time(1.5)
    assert list_blamed(job) == []
    (suspected,) = (
        job.run_diagnosis().verdicts
    )  # which keeps the incident of the slow one open: it is the same hang
    assert (suspected.kind, suspected.is_confirmed) == (VerdictKind.MISSING_RANK, False)
    job.advance_time(7)
    assert list_blamed(job) == []
    job.advance_time(2)
    assert list_blamed(job) == [(VerdictKind.MISSING_RANK, (1, 2))]


def test_late_one_that_arrived_just_now_counts_as_well() -> None:
    """The late rank does not count as waiting yet, but the others were sampled while it worked."""
    job = job_with_absent_ranks("store.wait(['turn1'])")
    job.make_call(0)
    job.advance_time(0.5)
    assert list_blamed(job) == []


def test_rank_blocked_in_own_wait_gets_no_extra_time() -> None:
    job = job_with_absent_ranks("input()")
    job.make_call(0)
    job.advance_time(1.5)
    assert list_blamed(job) == [(VerdictKind.MISSING_RANK, (1,))]


def test_extra_time_passes_along_chain() -> None:
    """Rank 1 was seen where it waited for its turn. It works now, and rank 2 waits for it."""
    job = job_with_absent_ranks("store.wait(['turn1'])", "store.wait(['turn2'])")
    job.make_call(0)
    job.ranks[1].idle = False
    job.advance_time(5)
    assert list_blamed(job) == [(VerdictKind.SLOW_RANK, (1,))]
    job.make_call(1)
    job.advance_time(9)
    assert list_blamed(job) == []


def test_own_worker_is_not_another_rank() -> None:
    queue = Frame(function="Queue.get", file=f"{PYTHON}/multiprocessing/queues.py", line=1)
    job = job_with_absent_ranks(world=3)
    job.report_stack(1, queue, make_frame("queue.get()"))
    assert list_blamed(job) == [(VerdictKind.SLOW_RANK, (0,))]
    worker = Frame(function="_bootstrap", file=f"{PYTHON}/multiprocessing/process.py", line=1)
    threads = (
        ThreadStack(thread="MainThread", frames=(queue, make_frame("queue.get()")), main=True),
        ThreadStack(thread="child", frames=(worker,), pid=99),
    )
    job.apply_heartbeat(
        samples=(heartbeat.StackReply(key="1-1", request="r", source="py-spy", threads=threads),)
    )
    assert list_blamed(job) == [(VerdictKind.MISSING_RANK, (1,))]


def test_polling_rank_with_changing_stack_is_not_working() -> None:
    """Either of ranks 1 and 2 may wait for the other one."""
    job = job_with_absent_ranks("sock.recv(1)", "time.sleep(0.1)")
    job.ranks[0].idle = True
    job.make_call(0)
    job.report_stack(
        2,
        Frame(function="exists", file=f"{PYTHON}/genericpath.py", line=1),
        make_frame("os.path.exists(path)"),
    )
    job.advance_time(1)
    job.report_stack(2, make_frame("time.sleep(0.1)"))
    job.advance_time(LIMITS.stall_after_s)
    assert list_blamed(job) == [(VerdictKind.MISSING_RANK, (1, 2))]


@pytest.mark.parametrize("text", ["sock.recv(1)", "lock.acquire()", "x = f(x)", "time.sleep(9)"])
def test_rank_that_needs_another_one_is_its_victim_even_if_none_works(text: str) -> None:
    job = job_with_absent_ranks("store.get('turn1')", text)
    job.make_call(0)
    job.advance_time(12)
    assert list_blamed(job) == [(VerdictKind.MISSING_RANK, (2,))]


@pytest.mark.parametrize("text", WAITS_FOR_OTHERS)
def test_rank_that_may_wait_is_victim_of_one_that_waits_for_no_rank(text: str) -> None:
    job = job_with_absent_ranks(text, "lock.acquire()")
    job.make_call(0)
    job.advance_time(12)
    assert list_blamed(job) == [(VerdictKind.MISSING_RANK, (2,))]


@pytest.mark.parametrize(
    ("texts", "culprits"),
    [
        (("store.wait(['plan'])",), (2,)),
        (("work = dist.irecv(x)",), (1, 2)),
        (("store.wait(['plan'])", "x = f(x)"), (1, 2)),
    ],
)
def test_rank_that_joins_its_thread_waits_for_what_that_waits_for(
    texts: tuple[str, ...], culprits: tuple[int, ...]
) -> None:
    job = job_with_absent_ranks(world=4)
    job.make_call(0)
    join = Frame(function="join", file=f"{PYTHON}/threading.py", line=1)
    threads = [[make_frame(text)] for text in texts]
    job.report_stacks(1, [join, make_frame("thread.join()")], *threads)
    job.report_stack(2, make_frame("sock.recv(1)"))
    job.advance_time(12)
    assert list_blamed(job) == [(VerdictKind.MISSING_RANK, culprits)]
