"""Receives from any source, which take messages that later receives by name then wait for."""

from __future__ import annotations

from hangwatch.model.calls import ANY_SOURCE, StreamKind
from hangwatch.model.kinds import VerdictKind
from hangwatch.model.verdicts import Verdict
from tests.simulation.scripted_job import ScriptedJob

from ..expect import make_frame

SEND, RECV = StreamKind.SEND, StreamKind.RECV
IN_TORCH = make_frame("recv", "/x/site-packages/torch/distributed/distributed_c10d.py")
AT_WORK = make_frame("load", text="queue.get()")


def send(job: ScriptedJob, source: int, *, done: bool = True, numel: int = 64) -> None:
    job.make_p2p_call(source, SEND, 0, done=done, shape=(numel,))


def receive(job: ScriptedJob, source: int, *, done: bool = True, numel: int = 64) -> None:
    job.make_p2p_call(0, RECV, source, done=done, shape=(numel,))


def wait_until_due(job: ScriptedJob, *waiting: int) -> list[Verdict]:
    """The verdicts after a stall, in which the ranks that do not wait are blocked in code of their own."""
    job.send_heartbeats()
    verdicts: list[Verdict] = []
    for _ in range(2):
        job.advance_time(6)
        job.send_heartbeats()
        for rank in range(job.world_size):
            job.report_stack(rank, IN_TORCH if rank in waiting else AT_WORK)
        verdicts = job.list_due_verdicts()
    return verdicts


def list_accused(verdicts: list[Verdict]) -> list[tuple[VerdictKind, tuple[int, ...]]]:
    return [(verdict.kind, verdict.culprits) for verdict in verdicts]


def test_message_that_was_taken_is_not_there_for_a_receive_by_name() -> None:
    job = ScriptedJob(2)
    send(job, 1)
    receive(job, ANY_SOURCE)
    receive(job, 1, done=False)
    (verdict,) = wait_until_due(job, 0)
    assert (verdict.kind, verdict.culprits, verdict.waiting) == (
        VerdictKind.MISSING_RANK,
        (1,),
        (0,),
    )
    assert "rank 1 has not sent what rank 0 waits to receive" in verdict.summary


def test_taken_message_whose_send_nothing_has_waited_for() -> None:
    job = ScriptedJob(2)
    send(job, 1, done=False)
    receive(job, ANY_SOURCE)
    receive(job, 1, done=False)
    assert list_accused(wait_until_due(job, 0)) == [(VerdictKind.MISSING_RANK, (1,))]


def test_sender_whose_message_was_taken_is_awaited_and_no_other_one() -> None:
    job = ScriptedJob(3)
    send(job, 2)
    receive(job, ANY_SOURCE)
    send(job, 2)
    receive(job, 2)
    send(job, 1)
    receive(job, ANY_SOURCE)
    receive(job, 1, done=False)
    assert list_accused(wait_until_due(job, 0)) == [(VerdictKind.MISSING_RANK, (1,))]


def test_message_of_another_sender_was_taken() -> None:
    """The receive from any source took the message of rank 2: that of rank 1 is in transit."""
    job = ScriptedJob(3)
    send(job, 2)
    receive(job, ANY_SOURCE)
    send(job, 1, done=False)
    receive(job, 1, done=False)
    assert list_accused(wait_until_due(job, 0, 1)) == [(VerdictKind.NO_PROGRESS, ())]


def test_receive_by_name_leaves_one_from_any_source_for_another_sender() -> None:
    job = ScriptedJob(3)
    send(job, 1)
    receive(job, 1)
    receive(job, ANY_SOURCE, done=False)
    send(job, 2, done=False)
    assert all(not verdict.culprits for verdict in wait_until_due(job, 0, 2))


def test_calls_with_equal_numbers_are_not_compared_if_some_message_was_taken() -> None:
    job = ScriptedJob(2)
    send(job, 1, numel=64)
    receive(job, ANY_SOURCE, numel=64)
    send(job, 1, numel=16, done=False)
    receive(job, 1, numel=64, done=False)
    verdicts = wait_until_due(job, 0, 1)
    assert all(verdict.kind is not VerdictKind.MISMATCH for verdict in verdicts)
