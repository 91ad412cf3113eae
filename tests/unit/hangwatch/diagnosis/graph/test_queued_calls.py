"""Waits for devices whose queues are held up by a message that its peer has not met."""

from __future__ import annotations

from hangwatch.model.calls import StreamKind
from hangwatch.model.kinds import VerdictKind
from hangwatch.model.limits import Limits
from hangwatch.model.ranks import Frame
from hangwatch.model.verdicts import Verdict
from tests.simulation.scripted_job import ScriptedJob

STALL_AFTER_S = 10.0
LIMITS = Limits(stall_after_s=STALL_AFTER_S, slow_limit_s=60.0)
SEND, RECV = StreamKind.SEND, StreamKind.RECV
READ_FRAMES = (
    Frame(function="synchronize", file="/x/torch/cuda/__init__.py", line=1085),
    Frame(function="train", file="/home/me/train.py", line=20),
)
SLEEP_FRAMES = (Frame(function="export", file="/home/me/train.py", line=31, text="time.sleep(9)"),)


def make_job(world_size: int = 4) -> ScriptedJob:
    return ScriptedJob(world_size, limits=LIMITS, reports_completion=False)


def send(job: ScriptedJob, source: int, destination: int, blocking: bool | None = None) -> None:
    job.make_p2p_call(source, SEND, destination, blocking=blocking)
    job.advance_time(0.001)


def receive(job: ScriptedJob, destination: int, source: int) -> None:
    job.make_p2p_call(destination, RECV, source)
    job.advance_time(0.001)


def exchange(job: ScriptedJob, *pairs: tuple[int, int]) -> None:
    for source, destination in pairs:
        send(job, source, destination)
        receive(job, destination, source)


def advance_waiting(
    job: ScriptedJob, seconds: float, working: tuple[int, ...] = ()
) -> list[Verdict]:
    """The verdicts that are due after ``seconds``, in which all ranks but ``working`` wait for their
    devices.
    """
    verdicts: list[Verdict] = []
    for second in range(round(seconds)):
        job.advance_time(1.0)
        job.send_heartbeats()
        if second == 3:
            for rank in range(job.world_size):
                job.report_stack(rank, *(SLEEP_FRAMES if rank in working else READ_FRAMES))
        verdicts = job.list_due_verdicts()
    return verdicts


def test_receive_that_is_left_out_before_a_collective_is_a_deadlock() -> None:
    job = make_job()
    exchange(job, (0, 1))
    job.make_calls(done=False, blocking=None, backend="nccl")
    job.advance_time(0.1)
    send(job, 0, 1)
    job.make_calls(done=False, blocking=None, backend="nccl")
    assert advance_waiting(job, STALL_AFTER_S - 1) == []
    (verdict,) = advance_waiting(job, 4)
    assert (verdict.kind, verdict.culprits, verdict.waiting) == (
        VerdictKind.DEADLOCK,
        (0, 1),
        (2, 3),
    )
    assert "rank 0 waits for the recv of rank 1 in send" in verdict.summary
    assert "rank 1 waits for rank 0 in all_reduce" in verdict.summary


def test_collective_may_overtake_a_message_that_nothing_waits_for() -> None:
    job = make_job()
    exchange(job, (0, 1))
    send(job, 0, 1, blocking=False)
    job.make_calls(done=False, blocking=None, backend="nccl")
    verdicts = advance_waiting(job, 2 * STALL_AFTER_S)
    assert all(verdict.kind is not VerdictKind.DEADLOCK for verdict in verdicts)


def test_message_after_the_collective_does_not_hold_it_up() -> None:
    job = make_job()
    job.make_calls(done=False, blocking=None, backend="nccl")
    job.advance_time(0.001)
    send(job, 0, 1)
    (verdict,) = advance_waiting(job, 3 * STALL_AFTER_S, working=(1,))
    assert (verdict.culprits, verdict.waiting) == ((1,), (0,))


def test_stages_behind_a_held_stage_wait_for_the_one_in_its_own_code() -> None:
    job = make_job()
    forward, backward = [(0, 1), (1, 2), (2, 3)], [(3, 2), (2, 1), (1, 0)]
    exchange(job, *forward, *backward)
    job.advance_time(0.1)
    # Stage 2 does not come to the step; the hosts of the others queue all of their calls.
    exchange(job, (0, 1))
    receive(job, 3, 2)
    send(job, 1, 2)
    receive(job, 0, 1)
    receive(job, 1, 2)
    send(job, 1, 0)
    send(job, 3, 2)
    (verdict,) = advance_waiting(job, STALL_AFTER_S + 3, working=(2,))
    assert (verdict.kind, verdict.culprits, verdict.waiting) == (
        VerdictKind.MISSING_RANK,
        (2,),
        (0, 1, 3),
    )


def test_rank_does_not_wait_for_a_host_that_works() -> None:
    """The host of rank 0 may be about to make the call that rank 1 needs before it receives."""
    job = make_job(2)
    exchange(job, (0, 1))
    send(job, 0, 1)
    job.make_calls(done=False, blocking=None, backend="nccl")
    verdicts = advance_waiting(job, 3 * STALL_AFTER_S, working=(0,))
    assert all(verdict.culprits != (0,) for verdict in verdicts)


def test_completed_messages_hold_up_nothing() -> None:
    """On gloo, a rank may continue while a message is in transit."""
    job = ScriptedJob(4, limits=LIMITS)
    exchange(job, (0, 1))
    send(job, 0, 1)
    job.make_calls(done=False, blocking=None)
    graph_waits = {wait for v in advance_waiting(job, STALL_AFTER_S) for wait in v.waits}
    assert not any(wait.rank in (2, 3) and wait.on_rank == 0 for wait in graph_waits)


def make_batch(job: ScriptedJob, rank: int, *, receives: bool = True) -> None:
    """One step of a ring: a send to the next rank and a receive from the one before, as one batch."""
    size = job.world_size
    job.make_p2p_call(rank, SEND, (rank + 1) % size)
    if receives:
        job.make_p2p_call(rank, RECV, (rank - 1) % size)
    job.advance_time(0.001)


def test_parts_of_a_batch_hold_up_no_other_part() -> None:
    job = make_job(3)
    for step in range(3):
        for rank in range(3):
            make_batch(job, rank, receives=(rank, step) != (1, 2))
    (verdict,) = advance_waiting(job, 2 * STALL_AFTER_S, working=(1, 2))
    assert (verdict.kind, verdict.culprits, verdict.waiting) == (
        VerdictKind.MISSING_RANK,
        (1,),
        (0,),
    )


def test_batch_behind_an_unmet_one_is_held_up() -> None:
    """Rank 1 does not come to its batch; those of the others that do not include it wait as well."""
    job = make_job(4)
    for rank in range(4):
        make_batch(job, rank)
    for rank in (0, 2, 3):
        make_batch(job, rank)
    for rank in (0, 2, 3):
        make_batch(job, rank)
    (verdict,) = advance_waiting(job, 2 * STALL_AFTER_S, working=(1,))
    assert (verdict.kind, verdict.culprits, verdict.waiting) == (
        VerdictKind.MISSING_RANK,
        (1,),
        (0, 2, 3),
    )
