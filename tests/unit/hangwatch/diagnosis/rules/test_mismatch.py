"""Calls that differ between ranks: which ranks are named, and what follows from the mismatch."""

from __future__ import annotations

import signal

import pytest

from hangwatch.diagnosis.rules.mismatch import find_call_mismatches
from hangwatch.model.calls import StreamKind
from hangwatch.model.groups import Group
from hangwatch.model.kinds import VerdictKind
from hangwatch.model.ranks import ExceptionInfo, Lifecycle
from hangwatch.tracking.call_stream import CallStream
from tests.simulation.scripted_job import ScriptedJob

from ..expect import diagnose_only


def test_different_operation_is_an_immediate_mismatch() -> None:
    job = ScriptedJob(4)
    job.make_calls()
    for rank in (0, 2, 3):
        job.make_call(rank, line=41)
    job.make_call(1, "broadcast", reduce_op=None, root=0, line=55)
    job.advance_time(1.1)
    (verdict,) = job.list_due_verdicts()
    assert verdict.kind is VerdictKind.MISMATCH
    assert (verdict.culprits, verdict.waiting, verdict.differing_fields, verdict.seq) == (
        (1,),
        (0, 2, 3),
        ("op",),
        2,
    )
    assert (
        verdict.summary
        == "rank 1 called broadcast where ranks 0, 2-3 called all_reduce (call 2 of group world)"
    )
    assert verdict.site is not None
    assert verdict.site.line == 55


@pytest.mark.parametrize(("blocked_s", "waiting"), [(0.3, ()), (0.6, (0, 2, 3))])
def test_member_waits_in_a_mismatched_call_after_half_a_second(
    blocked_s: float, waiting: tuple[int, ...]
) -> None:
    job = ScriptedJob(4)
    job.make_calls()
    for rank in range(4):
        job.make_call(rank, reduce_op="max" if rank == 1 else "sum", done=rank == 1)
    job.advance_time(blocked_s)
    (verdict,) = job.list_due_verdicts()
    assert (verdict.kind, verdict.culprits, verdict.waiting) == (
        VerdictKind.MISMATCH,
        (1,),
        waiting,
    )


@pytest.mark.parametrize(
    ("field", "theirs"),
    [
        ("shape", {"shape": (32,)}),
        ("dtype", {"dtype": "float64"}),
        ("reduce_op", {"reduce_op": "max"}),
        ("root", {"root": 1}),
    ],
)
def test_each_field_that_differs_is_named(field: str, theirs: dict[str, object]) -> None:
    job = ScriptedJob(4)
    for rank in (1, 2, 3):
        job.make_call(rank, root=0)
    job.make_call(0, **{"root": 0, **theirs})  # type: ignore[arg-type]
    job.advance_time(1.1)
    (verdict,) = job.list_due_verdicts()
    assert (verdict.kind, verdict.culprits, verdict.differing_fields) == (
        VerdictKind.MISMATCH,
        (0,),
        (field,),
    )


def test_mismatch_without_hang_is_found_among_many_calls() -> None:
    job = ScriptedJob(4)
    for n in range(50):
        for rank in range(4):
            job.make_call(rank, reduce_op="max" if (n, rank) == (20, 3) else "sum", done=True)
        if n % 5 == 0:
            job.advance_time(0.5)
            job.send_heartbeats()
    (verdict,) = job.list_due_verdicts()
    assert (verdict.kind, verdict.culprits, verdict.waiting, verdict.seq) == (
        VerdictKind.MISMATCH,
        (3,),
        (),
        21,
    )
    assert verdict.differing_fields == ("reduce_op",)


def test_views_of_the_same_number_of_elements_agree() -> None:
    job = ScriptedJob(2)
    job.make_call(0, shape=(8, 8), done=True)
    job.make_call(1, shape=(64,), done=True)
    assert job.list_due_verdicts() == []


def test_rank_with_unknown_hash_at_divergence_is_placed_by_later_hash() -> None:
    """Before the mismatch all ranks make the same calls, which proves nothing."""
    group = Group(name="0", desc="default_pg", ranks=(0, 1, 2, 3))

    def make_stream(checkpoints: dict[int, int]) -> CallStream:
        return CallStream(
            uid=1,
            kind=StreamKind.COLLECTIVE,
            group=group,
            entered=max(checkpoints),
            reported_hashes=tuple(checkpoints.items()),
        )

    members = {
        0: make_stream({8: 88, 9: 99}),
        1: make_stream({8: 88, 10: 110}),
        2: make_stream({8: 88, 9: 90}),
        3: make_stream({8: 88, 10: 110}),
    }
    (parting,) = find_call_mismatches({group.key: members}, {group.key})
    assert {rank for rank, _ in parting.calls_to_fetch} >= {
        1,
        3,
    }, "hashes that all ranks share place no rank"
    members[1].reported_hashes += ((9, 99),)
    (parting,) = find_call_mismatches({group.key: members}, {group.key})
    assert (parting.seq, parting.classes, parting.outliers) == (9, ((0, 1, 3), (2,)), (2,))


def test_tie_blames_all_unless_sibling_groups_decide() -> None:
    job = ScriptedJob(4)
    job.add_group("tp0", (0, 1))
    job.add_group("tp1", (2, 3))
    job.make_call(0, group="tp0", done=True)
    job.make_call(1, "barrier", group="tp0", done=True)
    (verdict,) = job.list_due_verdicts()
    assert verdict.culprits == (0, 1)
    job.make_calls(group="tp1")
    (verdict,) = job.list_due_verdicts()
    assert verdict.culprits == (1,)


def test_stacks_are_requested_where_all_are_culprits() -> None:
    """No other rank waits; what led to the call, such as a property, is only in the stacks."""
    job = ScriptedJob(2)
    job.make_calls()
    job.make_call(0, "broadcast", root=0)
    job.make_call(1)
    job.advance_time(1.1)
    job.send_heartbeats()
    context = job.run_diagnosis()
    assert [verdict.culprits for verdict in context.verdicts] == [(0, 1)]
    assert {request.rank for request in context.requests if request.stacks} == {0, 1}


def test_a_death_in_a_mismatched_call_is_a_mismatch() -> None:
    job = ScriptedJob(4)
    for rank in range(4):
        job.make_call(rank, shape=(32,) if rank == 1 else (64,))
    job.end_process(1, signal=signal.SIGABRT)
    job.advance_time(0.3)
    for rank in (0, 2, 3):
        job.end_process(rank, signal=signal.SIGTERM)
    job.advance_time(2)
    (verdict,) = job.list_due_verdicts()
    assert (verdict.kind, verdict.culprits, verdict.differing_fields) == (
        VerdictKind.MISMATCH,
        (1,),
        ("shape",),
    )


def _job_past_mismatch(calls_after: int) -> ScriptedJob:
    job = ScriptedJob(4)
    for rank in range(4):
        job.make_call(rank, "broadcast", shape=(3,) if rank == 2 else (2,), done=True)
    for _ in range(calls_after):
        job.advance_time(0.1)
        job.make_calls("broadcast")
    job.send_heartbeats()
    assert diagnose_only(job).kind is VerdictKind.MISMATCH
    return job


@pytest.mark.parametrize("ended", [True, False])
@pytest.mark.parametrize("calls_after", [0, 1, 2])
@pytest.mark.parametrize("rank", [2, 1])
def test_failure_right_after_completed_mismatch_is_its_consequence(
    rank: int, calls_after: int, ended: bool
) -> None:
    """The outlier, or a rank that received its data, fails when it uses the wrong result."""
    job = _job_past_mismatch(calls_after)
    job.advance_time(0.4)
    raised = ExceptionInfo(type="UnpicklingError", message="invalid load key")
    if ended:
        job.end_process(rank, status=1, exception=raised)
    else:
        job.ranks[rank].lifecycle, job.ranks[rank].exception, job.ranks[rank].exception_at = (
            Lifecycle.EXITING,
            raised,
            job.now,
        )
    job.make_calls(except_ranks=(rank,), done=False)
    for _ in range(3):
        job.advance_time(2)
        (verdict,) = job.list_due_verdicts()
        waiting = tuple(r for r in range(4) if r not in (rank, 2))
        assert (verdict.kind, verdict.culprits, verdict.waiting) == (
            VerdictKind.MISMATCH,
            (2,),
            waiting,
        )


@pytest.mark.parametrize(("calls_after", "seconds"), [(3, 0.4), (2, 6.0), (100, 300.0)])
def test_failure_long_after_completed_mismatch_is_separate(
    calls_after: int, seconds: float
) -> None:
    job = _job_past_mismatch(calls_after)
    job.advance_time(seconds)
    job.end_process(2, status=1, exception=ExceptionInfo(type="ValueError", message="boom"))
    job.advance_time(2)
    assert {v.kind: v.culprits for v in job.list_due_verdicts()} == {
        VerdictKind.MISMATCH: (2,),
        VerdictKind.DEAD_RANK: (2,),
    }


def test_terminated_rank_after_mismatch_is_not_its_failure() -> None:
    job = _job_past_mismatch(1)
    job.end_process(0, signal=signal.SIGTERM)
    job.make_calls(except_ranks=(0,), done=False)
    job.advance_time(2)
    assert {v.kind: v.culprits for v in job.list_due_verdicts()} == {
        VerdictKind.MISMATCH: (2,),
        VerdictKind.DEAD_RANK: (0,),
    }


@pytest.mark.parametrize("signal", [None, 9])
def test_late_exit_after_group_mismatch_is_named_separately(
    signal: int | None,
) -> None:
    job = ScriptedJob(4)
    for rank in range(4):
        job.make_setup_call(rank)
        job.make_setup_call(rank, "new_group", ranks=(0, 1, 2) if rank == 3 else (0, 1, 2, 3))
    for _ in range(3):
        job.advance_time(5.0)
        job.make_calls()
    job.send_heartbeats()
    assert [v.kind for v in job.list_due_verdicts()] == [VerdictKind.GROUP_MISMATCH]
    job.advance_time(2.0)
    job.end_process(1, signal=signal, status=None if signal else 0)
    job.make_calls(except_ranks=(1,), done=False)
    job.advance_time(3.0)
    job.send_heartbeats()
    culprits_by_kind = {v.kind: v.culprits for v in job.list_due_verdicts()}
    assert culprits_by_kind == {
        VerdictKind.GROUP_MISMATCH: (3,),
        (VerdictKind.DEAD_RANK if signal else VerdictKind.EXITED_RANK): (1,),
    }


def test_groups_created_in_different_order() -> None:
    job = ScriptedJob(4)
    for rank in range(4):
        job.make_setup_call(rank)
        first, second = ((2, 3), (0, 1)) if rank == 3 else ((0, 1), (2, 3))
        job.make_setup_call(rank, "new_group", ranks=first)
        job.make_setup_call(rank, "new_group", ranks=second)
    (verdict,) = job.list_due_verdicts()
    assert (verdict.kind, verdict.culprits, verdict.seq) == (VerdictKind.GROUP_MISMATCH, (3,), 2)


@pytest.mark.parametrize("without_old_calls", [(), (0, 1), (2,)])
def test_groups_of_one_member_each_are_no_mismatch(without_old_calls: tuple[int, ...]) -> None:
    """The halves of a world each divide themselves, as by ``new_subgroups(1, group=half)``."""
    job = ScriptedJob(4)
    for rank in without_old_calls:
        job.ranks[rank].has_old_calls = False
    for rank in range(4):
        job.make_setup_call(rank)
        for half in ((0, 2), (1, 3)):
            job.make_setup_call(rank, "new_group", ranks=half)
        for member in ((0, 2), (1, 3))[rank % 2]:
            job.make_setup_call(rank, "new_group", ranks=(member,))
    job.send_heartbeats()
    job.advance_time(10)  # long after the calls were requested, which may never arrive
    assert not job.run_diagnosis().verdicts
    assert job.list_due_verdicts() == []
    job.make_calls(except_ranks=(2,), done=False)
    job.advance_time(job.limits.slow_limit_s)
    (verdict,) = job.list_due_verdicts()
    assert (verdict.kind, verdict.culprits) == (VerdictKind.MISSING_RANK, (2,))


def test_groups_of_several_members_share_a_name() -> None:
    """The groups meet under the same keys, as those of ``new_subgroups(2, group=half)`` do."""
    job = ScriptedJob(8)
    for rank in range(8):
        job.make_setup_call(rank)
        first = rank // 4 * 4
        job.make_setup_call(rank, "new_group", ranks=(first, first + 1))
    (verdict,) = job.list_due_verdicts()
    assert (verdict.kind, verdict.seq) == (VerdictKind.GROUP_MISMATCH, 2)


def test_hang_from_skipped_group_is_no_separate_deadlock() -> None:
    job = ScriptedJob(4)
    job.groups["decoder"] = (1, 2, 3)
    for rank in range(4):
        job.make_setup_call(rank)
        if rank != 3:
            job.make_setup_call(rank, "new_group", ranks=(0, 1, 2))
        job.make_setup_call(
            rank, "new_group", ranks=(1, 2, 3), done=rank in (0, 3)
        )  # 3 finds the others in it, and they wait for its next one
    job.send_heartbeats()
    job.make_call(3, group="decoder")
    job.advance_time(20)
    (verdict,) = job.list_due_verdicts()
    assert (verdict.kind, verdict.culprits, verdict.waiting) == (
        VerdictKind.GROUP_MISMATCH,
        (3,),
        (1, 2),
    )


def test_hang_from_reordered_groups_is_no_separate_deadlock() -> None:
    job = ScriptedJob(4)
    job.make_calls()
    for rank in range(4):
        job.make_setup_call(rank)
        for members in ((1, 2, 3), (0, 2, 3)) if rank == 3 else ((0, 2, 3), (1, 2, 3)):
            job.make_setup_call(rank, "new_group", ranks=members)
    for name, members in (
        ("1", (0, 2, 3)),
        ("2", (1, 2, 3)),
        ("1 of 3", (1, 2, 3)),
        ("2 of 3", (0, 2, 3)),
    ):
        job.add_group(name, members)
    job.send_heartbeats()
    for rank, name in enumerate(("1", "2", "1", "2 of 3")):
        job.make_call(rank, group=name)
    job.advance_time(20)
    (verdict,) = job.list_due_verdicts()
    assert (verdict.kind, verdict.culprits, verdict.waiting) == (
        VerdictKind.GROUP_MISMATCH,
        (3,),
        (0, 1, 2),
    )


def test_completed_mismatch_does_not_hide_later_hang() -> None:
    job = ScriptedJob(4)
    for rank in range(4):
        job.make_call(rank, reduce_op="max" if rank == 3 else "sum", done=True)
    job.send_heartbeats()
    job.make_calls(except_ranks=(1,), done=False)
    job.advance_time(11)
    by_kind = {v.kind: v for v in job.list_due_verdicts()}
    assert by_kind[VerdictKind.MISMATCH].culprits == (3,)
    assert by_kind[VerdictKind.MISMATCH].waiting == ()
    assert by_kind[VerdictKind.MISSING_RANK].culprits == (1,)
    assert by_kind[VerdictKind.MISSING_RANK].waiting == (0, 2, 3)
