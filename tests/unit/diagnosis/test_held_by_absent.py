"""Absent ranks that wait for another absent one: who is blamed while that works, once it has come,
and when it does not.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from hangwatch.model.kinds import Severity, VerdictKind
from hangwatch.model.threads import Frame, ThreadStack
from hangwatch.protocol import heartbeat
from tests.unit.jobs import LIMITS, Job

PYTHON = "/usr/lib/python3.11"
HELD = (
    "fcntl.flock(f, fcntl.LOCK_EX)",
    "store.wait(['ready'])",
    "time.sleep(0.1)",
    "answer = sock.recv(10)",
    "x = ref.to_here()",
)
OWN = ("input()", "lock.acquire()", "x = f(x)", "open(path)")


def line(text: str) -> Frame:
    return Frame(function="main", file="/home/me/train.py", line=7, text=text)


def absent(*texts: str, world: int = 0) -> Job:
    """Its last rank waits for all others since 10 s. Rank 0 works, the next ones were seen, idle,
    in these lines.
    """
    job = Job(max(world, len(texts) + 2), limits=replace(LIMITS))
    job.heartbeat()
    job.wait(20)
    job.call(job.world_size - 1)
    job.ranks[0].idle = False
    job.wait(9)
    job.heartbeat()
    for rank, text in enumerate(texts, 1):
        job.stack(rank, line(text))
    job.wait(2)
    return job


def blamed(job: Job) -> list[tuple[VerdictKind, tuple[int, ...]]]:
    return [(v.kind, v.culprits) for v in job.verdicts()]


@pytest.mark.parametrize("text", HELD)
def test_who_may_wait_for_a_slow_one_is_its_victim(text: str) -> None:
    job = absent(text, text)
    (verdict,) = job.verdicts()
    assert (verdict.kind, verdict.severity, verdict.culprits) == (
        VerdictKind.SLOW_RANK,
        Severity.WARNING,
        (0,),
    )
    job.wait(LIMITS.slow_limit_s)
    assert blamed(job) == [(VerdictKind.MISSING_RANK, (0,))]


@pytest.mark.parametrize("text", OWN)
def test_who_waits_for_nothing_of_another_rank_s_is_missing_first(text: str) -> None:
    assert blamed(absent("time.sleep(0.1)", text)) == [(VerdictKind.MISSING_RANK, (2,))]


def test_where_nobody_works_all_are_missing() -> None:
    job = absent("time.sleep(0.1)", "sock.recv(1)")
    job.ranks[0].idle = True
    job.wait(3)
    assert blamed(job) == [(VerdictKind.MISSING_RANK, (0, 1, 2))]


def test_who_was_not_looked_at_is_taken_for_one_of_those_that_were() -> None:
    job = absent("time.sleep(0.1)", world=40)
    assert blamed(job) == [(VerdictKind.SLOW_RANK, (0,))]
    asked = {request.rank for request in job.diagnose().requests if request.stacks}
    assert {1, 2, 3} <= asked


def test_who_was_not_looked_at_at_all_is_missing_a_little_later() -> None:
    job = absent(world=3)
    assert blamed(job) == []
    job.wait(1)
    assert blamed(job) == [(VerdictKind.MISSING_RANK, (1,))]


def test_who_stays_away_once_the_late_one_has_come_has_a_stall_s_time_from_then_on() -> None:
    job = absent("time.sleep(0.1)", "sock.recv(1)")
    job.call(0)
    job.wait(1.5)
    assert blamed(job) == []
    (suspected,) = (
        job.diagnose().verdicts
    )  # which keeps the incident of the slow one open: it is the same hang
    assert (suspected.kind, suspected.is_confirmed) == (VerdictKind.MISSING_RANK, False)
    job.wait(7)
    assert blamed(job) == []
    job.wait(2)
    assert blamed(job) == [(VerdictKind.MISSING_RANK, (1, 2))]


def test_whoever_stands_in_a_wait_of_its_own_gets_no_more_time() -> None:
    job = absent("input()")
    job.call(0)
    job.wait(1.5)
    assert blamed(job) == [(VerdictKind.MISSING_RANK, (1,))]


def test_turns_are_passed_on() -> None:
    """Rank 1 was seen where it waited for its turn. It works now, and rank 2 waits for it."""
    job = absent("store.wait(['turn1'])", "store.wait(['turn2'])")
    job.call(0)
    job.ranks[1].idle = False
    job.wait(5)
    assert blamed(job) == [(VerdictKind.SLOW_RANK, (1,))]
    job.call(1)
    job.wait(9)
    assert blamed(job) == []


def test_a_rank_s_own_worker_is_no_other_rank() -> None:
    queue = Frame(function="Queue.get", file=f"{PYTHON}/multiprocessing/queues.py", line=1)
    job = absent(world=3)
    job.stack(1, queue, line("queue.get()"))
    assert blamed(job) == [(VerdictKind.SLOW_RANK, (0,))]
    worker = Frame(function="_bootstrap", file=f"{PYTHON}/multiprocessing/process.py", line=1)
    threads = (
        ThreadStack(thread="MainThread", frames=(queue, line("queue.get()")), main=True),
        ThreadStack(thread="child", frames=(worker,), pid=99),
    )
    job._beat(
        samples=(heartbeat.StackReply(key="1-1", request="r", source="py-spy", threads=threads),)
    )
    assert blamed(job) == [(VerdictKind.MISSING_RANK, (1,))]


def test_a_poller_whose_stack_moves_does_not_work() -> None:
    """Rank 2 asks again and again for what rank 1 does not bring."""
    job = absent("sock.recv(1)", "time.sleep(0.1)")
    job.ranks[0].idle = True
    job.call(0)
    job.stack(
        2,
        Frame(function="exists", file=f"{PYTHON}/genericpath.py", line=1),
        line("os.path.exists(path)"),
    )
    job.wait(1)
    job.stack(2, line("time.sleep(0.1)"))
    job.wait(LIMITS.stall_after_s)
    assert blamed(job) == [(VerdictKind.MISSING_RANK, (1,))]
