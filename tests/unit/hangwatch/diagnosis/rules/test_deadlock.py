"""Cycles of waits, and messages with different tags."""

from __future__ import annotations

import pytest

from hangwatch.diagnosis.rules.deadlock import (
    REORDERED_TAGS_ADVICE,
    WRONG_TAG_ADVICE,
)
from hangwatch.model.calls import StreamKind
from hangwatch.model.kinds import VerdictKind
from hangwatch.model.verdicts import Verdict
from tests.simulation.scripted_job import ScriptedJob

from ..expect import make_frame


def test_two_groups_entered_in_opposite_order_are_a_deadlock() -> None:
    job = ScriptedJob(2)
    job.add_group("a", (0, 1))
    job.add_group("b", (0, 1))
    job.send_heartbeats()
    job.make_call(0, group="a")
    job.make_call(1, group="b")
    job.advance_time(1.8)
    for rank in (0, 1):
        job.report_stack(
            rank, make_frame("all_reduce", "/x/site-packages/torch/distributed/distributed_c10d.py")
        )
    assert job.list_due_verdicts() == []
    job.advance_time(0.3)
    (verdict,) = job.list_due_verdicts()
    assert (verdict.kind, verdict.culprits) == (VerdictKind.DEADLOCK, (0, 1))


def test_deadlock_is_reported_without_stacks() -> None:
    job = ScriptedJob(2)
    job.add_group("a", (0, 1))
    job.add_group("b", (0, 1))
    job.send_heartbeats()
    job.make_call(0, group="a")
    job.make_call(1, group="b")
    job.advance_time(3.5)
    assert job.list_due_verdicts() == []  # their stacks have been requested
    job.advance_time(1.0)
    (verdict,) = job.list_due_verdicts()
    assert (verdict.kind, verdict.culprits) == (VerdictKind.DEADLOCK, (0, 1))


def test_waiting_side_threads_are_no_deadlock() -> None:
    """Rank 0 trains, and rank 1's other thread is ahead: each will make the call that the other
    waits for.
    """
    job = ScriptedJob(2)
    for thread, name in enumerate("ab", 1):
        job.add_group(name, (0, 1))
        job.make_calls(group=name, thread=thread, done=False)
        job.advance_time(1)  # long enough to be reported
        job.send_heartbeats()
        for rank in (0, 1):
            job.complete_calls(rank, name)
    job.send_heartbeats()
    job.make_call(0, group="a", thread=1)
    job.make_call(1, group="b", thread=2)
    job.send_heartbeats()
    job.report_stack(
        0, make_frame("all_reduce", "/x/site-packages/torch/distributed/distributed_c10d.py")
    )
    stacks = (
        [make_frame("load", text="time.sleep(3)")],
        [
            make_frame("all_reduce", "/x/site-packages/torch/distributed/distributed_c10d.py"),
            make_frame("gather"),
        ],
    )
    job.report_stacks(1, *stacks)
    job.advance_time(3.5)
    assert job.list_due_verdicts() == []
    job.advance_time(8)
    job.send_heartbeats()
    job.report_stacks(1, *stacks)
    (verdict,) = job.list_due_verdicts()
    assert (verdict.kind, verdict.culprits, verdict.waiting) == (
        VerdictKind.MISSING_RANK,
        (1,),
        (0,),
    )


def test_sleeping_main_thread_is_blocked_with_working_thread() -> None:
    job = ScriptedJob(2)
    job.make_calls(thread=7)
    job.send_heartbeats()
    job.make_call(0, thread=7)
    job.advance_time(11)
    job.send_heartbeats()
    for rank in (0, 1):
        job.report_stack(rank, make_frame("main", text="time.sleep(1)"))
    (verdict,) = job.list_due_verdicts()
    assert (verdict.kind, verdict.culprits, verdict.waiting) == (
        VerdictKind.MISSING_RANK,
        (1,),
        (0,),
    )


def test_deadlock_is_uncertain_while_other_threads_run_user_code() -> None:
    job = ScriptedJob(2)
    job.add_group("a", (0, 1))
    job.add_group("b", (0, 1))
    job.send_heartbeats()
    job.make_call(0, group="a")
    job.make_call(1, group="b")
    job.send_heartbeats()
    for rank in (0, 1):
        job.report_stacks(
            rank,
            [make_frame("join", "/usr/lib/python3.11/threading.py")],
            [make_frame("load", text="time.sleep(3)")],
        )
    job.advance_time(4.5)
    assert job.list_due_verdicts() == []
    job.advance_time(job.limits.stall_after_s)
    (verdict,) = job.list_due_verdicts()
    assert (verdict.kind, verdict.culprits) == (VerdictKind.DEADLOCK, (0, 1))


def test_two_pairs_with_crossed_receives_are_two_deadlocks() -> None:
    job = ScriptedJob(6)
    job.make_calls()
    job.send_heartbeats()
    for rank in range(4):
        job.make_p2p_call(rank, StreamKind.RECV, rank ^ 1, blocking=True)
    for rank in (4, 5):
        job.make_call(rank, "barrier")
    job.advance_time(4.5)
    verdicts = [(v.kind, v.culprits, v.waiting) for v in job.list_due_verdicts()]
    assert verdicts == [
        (VerdictKind.DEADLOCK, (0, 1), (4, 5)),
        (VerdictKind.DEADLOCK, (2, 3), (4, 5)),
    ]


def make_crossed_waits(job: ScriptedJob, *others: int) -> None:
    """Ranks 0-2 share group "a", in which 0 and 2 wait for 1; that waits for them in the group of
    all, as ``others`` do.
    """
    job.make_calls()
    job.add_group("a", (0, 1, 2))
    job.add_group("b", (3, 4, 5))
    job.send_heartbeats()
    for rank in (0, 2):
        job.make_call(rank, group="a")
    for rank in (1, *others):
        job.make_call(rank, "barrier")


def diagnose_tag_mismatch(
    sent: int, awaited: int, before: tuple[int, ...] = (), *, blocked: bool = True
) -> Verdict:
    """Rank 0 sends with one tag what rank 1 waits for with another; rank 2 waits for both in a
    barrier.
    """
    job = ScriptedJob(3)
    job.make_calls()
    job.send_heartbeats()
    for tag in before:
        job.make_p2p_call(0, StreamKind.SEND, 1, tag=tag, done=True, blocking=True)
        job.make_p2p_call(1, StreamKind.RECV, 0, tag=tag, done=True, blocking=True)
    job.make_p2p_call(0, StreamKind.SEND, 1, tag=sent, blocking=blocked)
    job.make_p2p_call(1, StreamKind.RECV, 0, tag=awaited, blocking=True)
    for rank in (2,) if blocked else (0, 2):
        job.make_call(rank, "barrier")
    job.advance_time(4.5)
    (verdict,) = job.list_due_verdicts()
    assert verdict.differing_fields == ("tag",)
    return verdict


@pytest.mark.parametrize("blocked", [True, False])
def test_a_receive_with_another_tag_than_the_send_is_a_mismatch(blocked: bool) -> None:
    verdict = diagnose_tag_mismatch(4, 5, (1, 2, 3), blocked=blocked)
    assert (verdict.kind, verdict.culprits, verdict.waiting) == (VerdictKind.MISMATCH, (0, 1), (2,))
    expected_summary = (
        f"rank 1 waits to receive tag 5 from rank 0, which {'sends' if blocked else 'sent'} tag 4"
        " (group world)"
    )
    assert (verdict.summary, verdict.advice) == (expected_summary, WRONG_TAG_ADVICE)
    assert [(c.ranks, c.call.signature.op, c.call.peer) for c in verdict.calls] == [
        ((0,), "send", 1),
        ((1,), "recv", 0),
    ]


@pytest.mark.parametrize(("before", "new_tag"), [((1, 2), None), ((1,), 2), ((2,), 1)])
@pytest.mark.parametrize("blocked", [True, False])
def test_previously_used_tags_are_matched_in_any_order(
    before: tuple[int, ...], new_tag: int | None, blocked: bool
) -> None:
    verdict = diagnose_tag_mismatch(1, 2, before, blocked=blocked)
    advice = REORDERED_TAGS_ADVICE
    if new_tag is not None:
        advice = (
            f"The two ranks have not used tag {new_tag} before, unlike the other one: either it is"
            " wrong, or one of them uses its tags in a different order."
        )
    assert (verdict.kind, verdict.culprits, verdict.waiting, verdict.advice) == (
        VerdictKind.DEADLOCK,
        (0, 1),
        (2,),
        advice,
    )
    assert (
        f"rank 1 waits to receive tag 2 from rank 0, which {'sends' if blocked else 'sent'} tag 1"
        in verdict.summary
    )


def test_pending_message_does_not_blame_blocking_send() -> None:
    job = ScriptedJob(2)
    job.make_calls()
    job.send_heartbeats()
    job.make_p2p_call(0, StreamKind.SEND, 1, tag=7, done=True)
    job.make_p2p_call(1, StreamKind.RECV, 0, tag=7, done=True)
    job.make_p2p_call(0, StreamKind.SEND, 1, tag=7)
    job.make_p2p_call(0, StreamKind.SEND, 1, tag=1, blocking=True)
    job.make_p2p_call(1, StreamKind.RECV, 0, tag=2, blocking=True)
    job.advance_time(4.5)
    (verdict,) = job.list_due_verdicts()
    assert (verdict.kind, verdict.differing_fields) == (VerdictKind.MISMATCH, ("tag",))
    assert "which sends tag 1" in verdict.summary


def test_cycle_is_a_deadlock_despite_wait_for_working_rank() -> None:
    job = ScriptedJob(6)
    make_crossed_waits(job, 3, 5)
    for _ in range(2):
        job.advance_time(4.5)
        job.send_heartbeats()
        (verdict,) = job.list_due_verdicts()
        assert (verdict.kind, verdict.culprits, verdict.waiting) == (
            VerdictKind.DEADLOCK,
            (0, 1, 2),
            (3, 5),
        )
        assert (
            "rank 0 waits for rank 1 in all_reduce; rank 1 waits for rank 0 in barrier"
            in verdict.summary
        )
        assert verdict.advice.startswith("Every cycle of waits includes rank 1: start there")
        job.advance_time(8)


def test_culprit_outside_deadlock_is_reported_separately() -> None:
    job = ScriptedJob(6)
    make_crossed_waits(job)
    for rank in (3, 5):
        job.make_call(rank, group="b")
    job.advance_time(11)
    job.send_heartbeats()
    job.report_stack(4, make_frame("load", text="data = sock.recv(1)"))
    verdicts = [(v.kind, v.culprits, v.waiting) for v in job.list_due_verdicts()]
    assert verdicts == [
        (VerdictKind.DEADLOCK, (0, 1, 2), ()),
        (VerdictKind.MISSING_RANK, (4,), (3, 5)),
    ]


def test_cycle_waiting_for_exited_rank_blames_the_exit() -> None:
    job = ScriptedJob(6)
    make_crossed_waits(job, 3, 5)
    job.end_process(4, status=0)
    job.advance_time(4.5)
    job.send_heartbeats()
    (verdict,) = job.list_due_verdicts()
    assert (verdict.kind, verdict.culprits) == (VerdictKind.EXITED_RANK, (4,))


def test_rank_with_completable_wait_is_on_no_cycle() -> None:
    job = ScriptedJob(3)
    job.add_group("a", (0, 1))
    job.add_group("b", (0, 2))
    job.add_group("c", (0, 1))
    job.send_heartbeats()
    job.make_call(0, group="a", blocking=False)
    job.make_call(0, group="b", blocking=False)
    job.make_call(1, group="c")
    job.advance_time(4.5)
    job.send_heartbeats()
    job.report_stack(
        0, make_frame("wait", "/x/site-packages/torch/distributed/distributed_c10d.py")
    )
    assert [v.kind for v in job.list_due_verdicts()] == []


def test_growing_cycle_names_its_first_members() -> None:
    """Tensor and data parallel groups: rank 5 leaves out a step, so that 4 waits for it, and in
    time everybody for one of them.
    """
    job = ScriptedJob(6)
    job.make_calls()
    for name, members in (("tp", (4, 5)), ("even", (0, 2, 4)), ("odd", (1, 3, 5))):
        job.add_group(name, members)
    job.send_heartbeats()
    job.make_call(4, group="tp")
    job.make_call(5, "barrier")
    job.advance_time(0.5)
    for rank in range(4):
        job.make_call(rank, group="odd" if rank % 2 else "even")
    job.advance_time(4.5)
    (verdict,) = job.list_due_verdicts()
    assert (verdict.kind, verdict.culprits, verdict.waiting) == (
        VerdictKind.DEADLOCK,
        (4, 5),
        (0, 1, 2, 3),
    )
    assert verdict.summary.endswith(
        ": rank 4 waits for rank 5 in all_reduce; rank 5 waits for rank 4 in barrier"
    )
    assert verdict.advice.startswith("Every cycle of waits includes rank 5: start there")


@pytest.mark.parametrize(("ranks", "shown"), [(4, 4), (8, 4)])
def test_long_cycle_shows_first_waits(ranks: int, shown: int) -> None:
    job = ScriptedJob(ranks)
    job.make_calls()
    job.send_heartbeats()
    for rank in range(ranks):
        job.make_p2p_call(rank, StreamKind.RECV, (rank - 1) % ranks, blocking=True)
    job.advance_time(4.5)
    (verdict,) = job.list_due_verdicts()
    assert verdict.culprits == tuple(range(ranks))
    assert verdict.summary.count(" waits for ") == shown
    assert verdict.summary.endswith("; and so on") is (ranks > shown)
    assert verdict.advice.startswith("No rank on the cycle can continue")
