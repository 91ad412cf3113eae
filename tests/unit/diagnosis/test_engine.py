"""The verdict of each kind, from a pretended job; who is blamed, who is not, and when."""

from __future__ import annotations

import signal
from dataclasses import replace

import pytest

from hangwatch.diagnosis import diagnose
from hangwatch.diagnosis.graph.graph import shows_all_members
from hangwatch.diagnosis.messages import describe_ranks
from hangwatch.diagnosis.rules import missing
from hangwatch.diagnosis.rules.deadlock import (
    REORDERED_TAGS_ADVICE,
    WRONG_TAG_ADVICE,
    format_new_tag_advice,
)
from hangwatch.diagnosis.rules.mismatch import find_call_mismatches
from hangwatch.model.calls import Call, Signature, Site, StreamKind
from hangwatch.model.groups import DECLARED_BACKEND, Group
from hangwatch.model.kinds import Severity, VerdictKind
from hangwatch.model.limits import MIN_WAIT_S, Limits
from hangwatch.model.ranks import ExceptionInfo, ExitInfo, Frame, Lifecycle
from hangwatch.model.verdicts import Verdict
from hangwatch.protocol import heartbeat
from hangwatch.tracking.attempt import Attempt
from hangwatch.tracking.call_stream import MAX_URGENT_SUSPECTS, CallStream, GroupState
from hangwatch.tracking.fleet import Fleet
from tests.simulation.scripted_job import ScriptedJob


def make_frame(
    function: str, file: str = "/home/me/train.py", line: int = 7, text: str | None = None
) -> Frame:
    return Frame(function=function, file=file, line=line, text=text)


def diagnose_only(job: ScriptedJob) -> Verdict:
    verdicts = job.list_due_verdicts()
    assert len(verdicts) == 1, [v.summary for v in verdicts]
    return verdicts[0]


def test_healthy_job_has_no_verdict_during_long_computation() -> None:
    job = ScriptedJob(4)
    for _ in range(20):
        job.make_calls()
    job.advance_time(1000)
    assert job.list_due_verdicts() == []
    assert job.run_diagnosis().requests == ()


def test_absent_rank_is_missing_after_limit() -> None:
    job = ScriptedJob(4)
    job.make_calls()
    job.send_heartbeats()
    job.make_calls(except_ranks=(2,), done=False)
    job.advance_time(9)
    assert job.list_due_verdicts() == []
    job.advance_time(1.5)
    (verdict,) = job.list_due_verdicts()
    assert verdict.kind is VerdictKind.MISSING_RANK
    assert verdict.severity is Severity.ALERT
    assert verdict.culprits == (2,)
    assert verdict.waiting == (0, 1, 3)
    assert verdict.seq == 2
    assert verdict.calls[0].ranks == (0, 1, 3)
    assert verdict.calls[0].call.site == Site(file="train.py", line=10, function="step")


def test_evidence_is_requested_before_verdict_is_due() -> None:
    job = ScriptedJob(4)
    job.make_calls(except_ranks=(2,), done=False)
    job.advance_time(6)
    assert job.list_due_verdicts() == []
    assert any(r.rank == 2 and r.stacks for r in job.run_diagnosis().requests)


def test_stacks_of_many_suspected_hangs_are_requested_in_turns() -> None:
    job = ScriptedJob(200)
    for pair in range(100):
        job.add_group(f"tp{pair}", (2 * pair, 2 * pair + 1))
        job.make_call(2 * pair, group=f"tp{pair}")
    job.advance_time(6)
    job.send_heartbeats()
    seen: set[int] = set()
    for _ in range(20):
        requested_ranks = {r.rank for r in job.run_diagnosis().requests if r.stacks}
        assert len(requested_ranks) <= 66
        seen |= requested_ranks
        for rank in requested_ranks:
            job.report_stack(rank, make_frame("step"))
        job.advance_time(1.5)
    assert seen == set(range(200))


def test_the_culprit_s_own_line_is_in_the_verdict() -> None:
    job = ScriptedJob(2)
    job.send_heartbeats()
    job.make_call(0)
    job.advance_time(11)
    job.send_heartbeats()
    job.report_stack(
        1,
        make_frame("acquire", "/usr/lib/python3.11/threading.py"),
        make_frame("load_batch", line=33),
        make_frame("main"),
    )
    (verdict,) = job.list_due_verdicts()
    assert verdict.site == Site(file="/home/me/train.py", line=33, function="load_batch")
    assert "train.py:33" in verdict.summary


def test_victims_along_a_chain_across_groups_are_not_blamed() -> None:
    """2-way tensor parallel x 4-way data parallel: one rank holds up its pair, and each of the pair
    a data-parallel group.
    """
    job = ScriptedJob(8)
    for t in range(4):
        job.add_group(f"tp{t}", (2 * t, 2 * t + 1))
    for d in range(2):
        job.add_group(f"dp{d}", tuple(range(d, 8, 2)))
    job.send_heartbeats()
    job.make_call(2, group="tp1")  # rank 3 does not come
    for rank in (0, 4, 6):
        job.make_call(rank, group="dp0")
    for rank in (1, 5, 7):
        job.make_call(rank, group="dp1")
    job.advance_time(11)
    (verdict,) = job.list_due_verdicts()
    assert verdict.culprits == (3,)
    assert verdict.waiting == (0, 1, 2, 4, 5, 6, 7)


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
    """Before it, all are alike: that says nothing."""
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


def test_ranks_exiting_successfully_seconds_apart_are_no_alert() -> None:
    job = ScriptedJob(3)
    job.make_calls()
    job.send_heartbeats()
    for rank in range(3):
        job.end_process(rank, status=0)
        job.advance_time(5)
        assert job.list_due_verdicts() == []


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
    """What was broadcast is used: by the odd rank, or by another one of what that one sent."""
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


def test_rank_that_never_initialises() -> None:
    job = ScriptedJob(4)
    for rank in (0, 1, 2):
        job.ranks[rank].lifecycle = Lifecycle.INITIALISING
        job.make_setup_call(rank, done=False)
    job.ranks[3].lifecycle = Lifecycle.STARTING
    job.advance_time(5)
    assert job.list_due_verdicts() == []
    job.advance_time(6)
    (verdict,) = job.list_due_verdicts()
    assert (verdict.kind, verdict.culprits, verdict.waiting) == (
        VerdictKind.STARTUP_STALL,
        (3,),
        (0, 1, 2),
    )


def test_starting_rank_is_shown_where_it_is_now() -> None:
    job = ScriptedJob(2, limits=Limits(stall_after_s=10.0, startup_after_s=100.0))
    job.ranks[0].lifecycle = Lifecycle.INITIALISING
    job.make_setup_call(0, done=False)
    job.ranks[1].lifecycle = Lifecycle.STARTING
    job.advance_time(11)
    job.send_heartbeats()
    for _ in range(2):
        job.report_stack(1, make_frame("<module>", line=3, text="import lightning"))
        job.advance_time(1)
    job.send_heartbeats()
    diagnosis = job.run_diagnosis()
    assert "train.py:3" in diagnosis.verdicts[0].summary
    assert 1 not in {request.rank for request in diagnosis.requests}, (
        "two samples are enough so far"
    )
    job.advance_time(12)
    job.send_heartbeats()
    assert 1 in {request.rank for request in job.run_diagnosis().requests if request.stacks}
    job.report_stack(1, make_frame("read_shards", line=40))
    assert "train.py:40 in read_shards" in job.run_diagnosis().verdicts[0].summary


def test_slow_start_is_a_warning_until_the_startup_limit() -> None:
    job = ScriptedJob(2, limits=Limits(stall_after_s=10.0, startup_after_s=100.0))
    job.ranks[0].lifecycle = Lifecycle.INITIALISING
    job.make_setup_call(0, done=False)
    job.ranks[1].lifecycle = Lifecycle.STARTING
    job.advance_time(99)
    (verdict,) = job.list_due_verdicts()
    assert (verdict.kind, verdict.severity) == (VerdictKind.STARTUP_STALL, Severity.WARNING)
    job.advance_time(2)
    (verdict,) = job.list_due_verdicts()
    assert (verdict.kind, verdict.severity) == (VerdictKind.STARTUP_STALL, Severity.ALERT)


def job_reinitialising(later: tuple[int, ...], *, world: int = 3, nth: int = 2) -> ScriptedJob:
    """Three ranks were in a world and destroyed it; some wait in init_process_group again."""
    job = ScriptedJob(3)
    for rank in range(3):
        job.make_setup_call(rank, world=3)
        job.ranks[rank].lifecycle = Lifecycle.DESTROYED
    job.advance_time(1)
    for rank in later:
        job.ranks[rank].lifecycle = Lifecycle.INITIALISING
        job.make_setup_call(rank, world=world, nth=nth, done=False)
    return job


def test_rank_that_does_not_reinitialise() -> None:
    job = job_reinitialising((0, 1))
    job.advance_time(9)
    assert job.list_due_verdicts() == [], "it may take longer than the others"
    job.advance_time(2)
    (verdict,) = job.list_due_verdicts()
    assert (verdict.kind, verdict.culprits, verdict.waiting) == (
        VerdictKind.STARTUP_STALL,
        (2,),
        (0, 1),
    )
    assert verdict.summary == "rank 2 never reached init_process_group again, in which 2 ranks wait"
    assert verdict.advice.startswith(
        "It has destroyed its process groups and not called init_process_group again"
    )


def test_rank_that_exits_while_others_reinitialise() -> None:
    job = job_reinitialising((0, 1))
    job.ranks[2].lifecycle = Lifecycle.EXITING
    job.advance_time(3)
    (verdict,) = job.list_due_verdicts()
    assert (verdict.kind, verdict.culprits, verdict.waiting) == (
        VerdictKind.EXITED_RANK,
        (2,),
        (0, 1),
    )


def test_rank_that_destroyed_world_while_others_wait() -> None:
    job = job_reinitialising(())
    for rank in (0, 1):
        job.ranks[rank].lifecycle = Lifecycle.INITIALISED
        job.make_setup_call(rank, "new_group", world=3, done=False)
    job.advance_time(3)
    (verdict,) = job.list_due_verdicts()
    assert (verdict.kind, verdict.culprits, verdict.waiting) == (
        VerdictKind.EXITED_RANK,
        (2,),
        (0, 1),
    )
    assert verdict.advice.startswith(
        "It called destroy_process_group while others still communicated."
    )


def test_failed_reinitialisation_is_not_excused_by_earlier_destroy() -> None:
    job = job_reinitialising((0, 1))
    job.advance_time(5)
    job.end_process(
        0, status=1, exception=ExceptionInfo(type="DistStoreError", message="timed out")
    )
    job.advance_time(3)
    (verdict,) = job.list_due_verdicts()
    assert (verdict.kind, verdict.culprits) == (VerdictKind.DEAD_RANK, (0,))


def test_ranks_progressing_in_another_world_are_slow() -> None:
    job = job_reinitialising((2,))
    job.groups["pair"] = (0, 1)
    for second in range(20):
        for rank in (0, 1):
            job.ranks[rank].lifecycle, job.ranks[rank].idle = Lifecycle.INITIALISED, False
            if not second:
                job.make_setup_call(rank, world=2)
        job.make_calls(group="pair")
        job.advance_time(1)
        job.send_heartbeats()
    (verdict,) = job.list_due_verdicts()
    assert (verdict.kind, verdict.culprits, verdict.waiting) == (
        VerdictKind.SLOW_RANK,
        (0, 1),
        (2,),
    )
    job.advance_time(job.limits.slow_limit_s)
    (verdict,) = job.list_due_verdicts()
    assert (verdict.kind, verdict.severity) == (VerdictKind.MISSING_RANK, Severity.ALERT)


def test_set_up_calls_of_another_world_are_not_compared() -> None:
    job = ScriptedJob(3)
    for rank in range(3):
        job.make_setup_call(rank, world=3)
    for rank in (0, 1):
        job.make_setup_call(rank, world=2)
        job.make_setup_call(rank, "new_group", world=2, ranks=(0, 1))
    for rank in range(3):
        job.make_setup_call(rank, world=3, nth=2)
        job.make_setup_call(rank, "new_group", world=3, nth=2, ranks=(0, 1, 2))
    assert job.list_due_verdicts() == []
    for rank in range(3):
        job.make_setup_call(rank, "new_group", world=3, nth=2, ranks=(0, min(rank, 1)))
    (verdict,) = job.list_due_verdicts()
    assert (verdict.kind, verdict.culprits, verdict.seq) == (VerdictKind.GROUP_MISMATCH, (0,), 3)


def test_communication_without_init_process_group() -> None:
    job = ScriptedJob(4)
    for rank in (0, 1, 2):
        job.make_call(rank, "Barrier", backend=DECLARED_BACKEND)
    job.ranks[3].lifecycle = Lifecycle.STARTING
    job.advance_time(11)
    (verdict,) = job.list_due_verdicts()
    assert (verdict.kind, verdict.culprits, verdict.waiting) == (
        VerdictKind.MISSING_RANK,
        (3,),
        (0, 1, 2),
    )
    other = ScriptedJob(4, name="other")
    del other.ranks[3]
    for rank in (0, 1, 2):
        other.make_call(rank, "Barrier", backend=DECLARED_BACKEND)
    other.send_heartbeats()
    other.advance_time(11)
    (verdict,) = other.list_due_verdicts()
    assert (verdict.kind, verdict.summary) == (
        VerdictKind.STARTUP_STALL,
        "rank 3 never started, for which 3 ranks wait in Barrier",
    )


def test_group_of_many_absent_ranks_is_examined_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not once for each of them: at the start of a large job, nearly all are absent."""
    job, examined = ScriptedJob(3 * MAX_URGENT_SUSPECTS), []

    def record_examined(attempt: Attempt, group_state: GroupState) -> bool:
        examined.append(group_state)
        return shows_all_members(attempt, group_state)

    monkeypatch.setattr(missing, "shows_all_members", record_examined)
    for number in range(10, job.world_size):
        del job.ranks[number]
    for number in range(10):
        job.make_setup_call(number, done=False)
    for _ in range(12):
        job.advance_time(1.0)
        job.send_heartbeats()
    examined.clear()
    (verdict,) = job.run_diagnosis().verdicts
    assert (verdict.kind, len(examined)) == (VerdictKind.STARTUP_STALL, 1)
    assert verdict.culprits == tuple(range(10, job.world_size))


def test_rank_that_never_reported() -> None:
    job = ScriptedJob(4)
    for rank in (0, 1, 2):
        job.make_setup_call(rank, done=False)
    del job.ranks[3]
    job.send_heartbeats()
    job.advance_time(11)
    (verdict,) = job.list_due_verdicts()
    assert (verdict.kind, verdict.culprits) == (VerdictKind.STARTUP_STALL, (3,))


def test_working_rank_is_slow_then_missing_at_limit() -> None:
    job = ScriptedJob(2)
    job.make_call(0)
    job.ranks[1].idle = False
    job.advance_time(11)
    (verdict,) = job.list_due_verdicts()
    assert (verdict.kind, verdict.severity) == (VerdictKind.SLOW_RANK, Severity.WARNING)
    job.advance_time(60)
    (verdict,) = job.list_due_verdicts()
    assert (verdict.kind, verdict.severity, verdict.culprits) == (
        VerdictKind.MISSING_RANK,
        Severity.ALERT,
        (1,),
    )


def test_a_pipeline_stage_that_stalls_is_found_through_point_to_point() -> None:
    job = ScriptedJob(3)
    job.send_heartbeats()
    job.make_p2p_call(0, StreamKind.SEND, 1, done=True)
    job.make_p2p_call(1, StreamKind.RECV, 0, done=True)
    job.send_heartbeats()
    job.make_p2p_call(2, StreamKind.RECV, 1)
    job.make_p2p_call(0, StreamKind.RECV, 1, tag=1)
    job.advance_time(11)
    job.send_heartbeats()
    for rank in (0, 2):
        job.report_stack(
            rank, make_frame("recv", "/x/site-packages/torch/distributed/distributed_c10d.py")
        )
    job.report_stack(1, make_frame("forward", text="time.sleep(100)"))
    (verdict,) = job.list_due_verdicts()
    assert (verdict.kind, verdict.culprits, verdict.waiting) == (
        VerdictKind.MISSING_RANK,
        (1,),
        (0, 2),
    )


def test_asynchronous_call_does_not_clear_culprit() -> None:
    """Rank 1 has a call in flight that rank 2 has not entered, yet it sits in its own code, and
    rank 2 waits for it.
    """
    job = ScriptedJob(3)
    job.add_group("a", (1, 2))
    job.add_group("b", (0, 1, 2))
    job.send_heartbeats()
    job.make_call(1, group="a", blocking=False)
    job.make_call(0, group="b")
    job.make_call(2, group="b")
    job.advance_time(11)
    job.send_heartbeats()
    job.report_stack(1, make_frame("evaluate", text="lock.acquire()"))
    (verdict,) = job.list_due_verdicts()
    assert (verdict.kind, verdict.culprits) == (VerdictKind.MISSING_RANK, (1,))


def test_two_groups_entered_in_opposite_order_are_a_deadlock() -> None:
    job = ScriptedJob(2)
    job.add_group("a", (0, 1))
    job.add_group("b", (0, 1))
    job.send_heartbeats()
    job.make_call(0, group="a")
    job.make_call(1, group="b")
    job.advance_time(3.5)
    assert job.list_due_verdicts() == []  # their stacks have been requested
    for rank in (0, 1):
        job.report_stack(
            rank, make_frame("all_reduce", "/x/site-packages/torch/distributed/distributed_c10d.py")
        )
    (verdict,) = job.list_due_verdicts()
    assert (verdict.kind, verdict.culprits) == (VerdictKind.DEADLOCK, (0, 1))


def test_deadlock_is_reported_without_stacks() -> None:
    job = ScriptedJob(2)
    job.add_group("a", (0, 1))
    job.add_group("b", (0, 1))
    job.send_heartbeats()
    job.make_call(0, group="a")
    job.make_call(1, group="b")
    job.advance_time(4.5)
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


def test_asynchronous_call_does_not_block_progressing_rank() -> None:
    job = ScriptedJob(2)
    job.add_group("a", (0, 1))
    job.send_heartbeats()
    job.make_call(0, group="a", blocking=False)
    for _ in range(20):
        job.advance_time(1)
        job.make_calls()
        assert job.list_due_verdicts() == []
    assert job.run_diagnosis().verdicts == ()


def test_listening_thread_blocks_no_rank() -> None:
    """Its receive blocks, and the rank trains on beside it."""
    job = ScriptedJob(2)
    job.send_heartbeats()
    job.make_p2p_call(1, StreamKind.RECV, 0, blocking=True)
    for _ in range(20):
        job.advance_time(1)
        job.make_calls()
        job.send_heartbeats()
        assert job.list_due_verdicts() == []
    assert job.run_diagnosis().verdicts == ()


@pytest.mark.parametrize("text", ['store.wait(["ready"])', 'kv.wait(["ready"])'])
def test_store_wait_is_not_a_pending_receive(text: str) -> None:
    job = ScriptedJob(2)
    job.send_heartbeats()
    job.make_p2p_call(1, StreamKind.RECV, 0, blocking=False)
    job.advance_time(1)
    job.make_call(0)
    job.advance_time(11)
    job.send_heartbeats()
    job.report_stack(1, make_frame("main", text=text))
    (verdict,) = job.list_due_verdicts()
    assert (verdict.kind, verdict.culprits, verdict.waiting) == (
        VerdictKind.MISSING_RANK,
        (1,),
        (0,),
    )


def test_polling_for_completion_counts_as_waiting() -> None:
    job = ScriptedJob(2)
    job.send_heartbeats()
    job.make_call(0, blocking=False)
    job.advance_time(11)
    job.send_heartbeats()
    job.report_stack(0, make_frame("wait", text="time.sleep(0.01)"))
    assert job.list_due_verdicts() == []
    job.report_stack(
        0,
        replace(make_frame("wait", text="time.sleep(0.01)"), polls="while not work.is_completed()"),
    )
    (verdict,) = job.list_due_verdicts()
    assert (verdict.kind, verdict.culprits, verdict.waiting) == (
        VerdictKind.MISSING_RANK,
        (1,),
        (0,),
    )


def test_the_oldest_of_simultaneous_waits_is_shown() -> None:
    """Rank 2 misses a message of rank 1 in one step and of rank 3 in the next, which was reported by
    a heartbeat that was delayed less.
    """
    job = ScriptedJob(4)
    job.send_heartbeats()
    job.make_p2p_call(3, StreamKind.SEND, 2, done=True)
    job.make_p2p_call(2, StreamKind.RECV, 3, done=True)
    job.make_p2p_call(3, StreamKind.SEND, 2, blocking=True)
    job.advance_time(0.1)
    job.make_p2p_call(1, StreamKind.SEND, 2, blocking=True)
    job.advance_time(job.limits.stall_after_s + 1)
    job.send_heartbeats()
    (verdict,) = job.list_due_verdicts()
    assert (verdict.kind, verdict.culprits, verdict.waiting) == (
        VerdictKind.MISSING_RANK,
        (2,),
        (1, 3),
    )
    assert "rank 2 has not received what rank 1 sends" in verdict.summary


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
    advice = REORDERED_TAGS_ADVICE if new_tag is None else format_new_tag_advice(new_tag)
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


def test_a_stopped_rank_is_frozen_even_inside_the_call() -> None:
    job = ScriptedJob(3)
    job.make_calls(done=False)
    job.ranks[1].state = "T"
    job.send_heartbeats()
    assert job.list_due_verdicts() == []
    job.advance_time(2)
    (verdict,) = job.list_due_verdicts()
    assert (verdict.kind, verdict.culprits, verdict.waiting) == (
        VerdictKind.FROZEN_RANK,
        (1,),
        (0, 2),
    )


def test_all_in_the_same_call_is_no_progress() -> None:
    job = ScriptedJob(3)
    job.make_calls(done=False)
    job.advance_time(11)
    (verdict,) = job.list_due_verdicts()
    assert (verdict.kind, verdict.culprits, verdict.waiting) == (
        VerdictKind.NO_PROGRESS,
        (),
        (0, 1, 2),
    )


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


def test_groups_of_one_member_each_are_no_mismatch() -> None:
    """The halves of a world each divide themselves, as by ``new_subgroups(1, group=half)``."""
    job = ScriptedJob(4)
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
    """They meet under the same keys, as of ``new_subgroups(2, group=half)``."""
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


def test_reports_of_replaced_process_do_not_stop_diagnosis() -> None:
    group = heartbeat.StreamIdentity(kind=StreamKind.COLLECTIVE, name="0", desc="", ranks="0-1")
    calls = tuple(Call(seq=seq, signature=Signature(op="all_reduce"), thread=seq) for seq in (1, 2))
    twice = tuple(
        heartbeat.StreamUpdate(uid=uid, identity=group, entered=1, completed=1) for uid in (1, 2)
    )
    fleet = Fleet()
    for number, (key, sequences) in enumerate(
        [("1-1", twice), ("2-1", ()), ("1-1", (twice[0]._replace(shared=calls),))], 1
    ):
        identity = heartbeat.ProcessIdentity(job="j", rank=0, world_size=2, pid=1, start_ticks=1)
        process = heartbeat.ProcessUpdate(
            key=key, identity=identity, lifecycle=3, sequences=sequences
        )
        fleet.apply_heartbeat(
            heartbeat.Heartbeat(host="n", agent="a", number=number, processes=(process,)), 100.0
        )
    (attempt,) = fleet.attempts.values()
    assert diagnose(attempt, 101.0, Limits()).verdicts == ()


def test_death_is_reported_while_others_progress() -> None:
    job = ScriptedJob(2)
    job.make_calls()
    job.send_heartbeats()
    job.end_process(1, status=3)
    job.advance_time(2)
    (verdict,) = job.list_due_verdicts()
    assert (verdict.kind, verdict.culprits) == (VerdictKind.DEAD_RANK, (1,))
    assert job.ranks[1].exit == ExitInfo(exit_status=3)


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


def test_previously_blocked_rank_is_not_slow_for_its_waiters() -> None:
    """The one whom all waited for comes, and the next one is heard to go on before those who wait
    for it are heard again.
    """
    job = ScriptedJob(4)
    job.add_group("first", (0, 1))
    job.add_group("second", (1, 2, 3))
    for group in ("first", "second"):
        job.make_calls(group=group)
    job.make_call(1, group="first")
    for rank in (2, 3):
        job.make_call(rank, group="second")
    for _ in range(15):
        job.advance_time(1.0)
        late = job.list_due_verdicts()
    assert [v.culprits for v in late] == [(0,)]
    job.make_call(0, group="first", done=True)
    job.complete_calls(1, "first")
    for rank in (2, 3):
        job.ranks[rank].is_reporting = False
    job.advance_time(0.5)
    assert job.list_due_verdicts() == [], "rank 1 has only just been let go"
    for rank in (2, 3):
        job.ranks[rank].is_reporting = True
    job.advance_time(job.limits.stall_after_s + 0.5)
    assert [v.culprits for v in job.list_due_verdicts()] == [(1,)], "now it has had its time"


def test_of_just_released_ranks_only_unable_ones_count() -> None:
    """A hang of many dissolves: somebody has waited for all of them for long, but none of them had
    its turn yet.
    """
    count = MAX_URGENT_SUSPECTS + 2
    job, many = ScriptedJob(count + 2), tuple(range(1, count + 1))
    job.add_group("first", (0, *many))
    job.add_group("second", (*many, count + 1))
    for group in ("first", "second"):
        job.make_calls(group=group)
    for rank in many:
        job.make_call(rank, group="first")
    job.make_call(count + 1, group="second")
    for _ in range(15):
        job.advance_time(1.0)
        job.send_heartbeats()
    assert [(v.culprits, v.is_confirmed) for v in job.run_diagnosis().verdicts] == [((0,), True)]
    job.make_call(0, group="first", done=True)
    for rank in many:
        job.complete_calls(rank, "first")
    job.ranks[count + 1].is_reporting = False
    job.advance_time(0.5)
    assert job.list_due_verdicts() == []
    assert job.run_diagnosis().verdicts == (), "nor is any of them suspected"
    job.ranks[count + 1].is_reporting = True
    job.end_process(7, status=0)
    job.send_heartbeats()
    job.advance_time(2.0)
    assert [(v.kind, v.culprits) for v in job.list_due_verdicts()] == [
        (VerdictKind.EXITED_RANK, (7,))
    ]


def test_of_many_awaited_ranks_only_those_that_reported_since_are_suspected() -> None:
    """Hosts of a large job report rarely: most of the awaited ranks have not had their turn yet."""
    count = 2 * MAX_URGENT_SUSPECTS
    job, culprit = ScriptedJob(count), 5
    job.limits = replace(job.limits, report_interval_s=20.0)
    for scripted in job.ranks.values():
        scripted.host = f"node{scripted.number}"
    job.make_calls()
    job.send_heartbeats()
    job.advance_time(0.5)
    unreported = range(count // 3, count)
    for rank in unreported:
        job.ranks[rank].is_reporting = False
    job.make_calls(except_ranks=(culprit,), done=False)
    for _ in range(12):
        job.advance_time(1.0)
        job.send_heartbeats()
    (verdict,) = job.run_diagnosis().verdicts
    assert (verdict.kind, verdict.culprits) == (VerdictKind.MISSING_RANK, (culprit,))
    assert len(verdict.waiting) == count // 3 - 1
    for rank in unreported:
        job.ranks[rank].is_reporting = True
    job.advance_time(1.0)
    (verdict,) = job.list_due_verdicts()
    assert verdict.culprits == (culprit,) and len(verdict.waiting) == count - 1


def test_progress_reported_late_does_not_extend_blocked_time() -> None:
    job = ScriptedJob(3)
    job.make_calls()
    job.make_call(1, group=job.add_group("pair", (0, 1)))
    job.advance_time(2.0)
    job.send_heartbeats()
    job.make_call(0, group="pair", done=True)
    job.complete_calls(1, "pair")
    job.ranks[1].is_reporting = False
    job.make_calls(
        except_ranks=(1,), done=False
    )  # rank 1 went on, made one more call elsewhere, and then no more
    job.advance_time(0.1)
    job.make_call(1, group=job.add_group("alone", (1,)), done=True)
    for _ in range(8):
        job.advance_time(1.0)
        job.send_heartbeats()
    job.ranks[1].is_reporting = True
    job.advance_time(job.limits.stall_after_s - 7.0)
    assert job.list_due_verdicts() == [], "it has just reported"
    job.advance_time(MIN_WAIT_S)
    assert [v.culprits for v in job.list_due_verdicts()] == [(1,)]


def test_summary_of_many_ranks_names_first_and_counts_all() -> None:
    assert describe_ranks((3,)) == "rank 3"
    assert describe_ranks((0, 2, 3)) == "ranks 0, 2-3"
    assert describe_ranks(tuple(range(100_000))) == "ranks 0-99999"
    many = describe_ranks(tuple(range(0, 100_000, 2)))
    assert many.startswith("50000 ranks (0, 2, 4, ") and many.endswith(", …)") and len(many) < 200


def _report_saver_stacks(job: ScriptedJob) -> None:
    collective = make_frame("barrier", "/x/site-packages/torch/distributed/distributed_c10d.py")
    for rank in (0, 2):
        job.report_stacks(rank, [make_frame("train")], [collective, make_frame("save")])
    job.report_stacks(1, [make_frame("train")], [make_frame("write_shard", text="open(path)")])


def test_thread_waits_while_its_rank_goes_on() -> None:
    job = ScriptedJob(3)
    job.add_group("saver", (0, 1, 2))
    job.make_calls(thread=1)
    job.send_heartbeats()
    for rank in (0, 2):
        job.make_call(rank, "barrier", group="saver", thread=2)
    for _ in range(7):
        job.advance_time(2)
        job.make_calls(thread=1)
        job.send_heartbeats()
        assert job.list_due_verdicts() == [], "no stack shows that a thread waits"
    _report_saver_stacks(job)
    (verdict,) = job.list_due_verdicts()
    assert (verdict.kind, verdict.culprits, verdict.waiting) == (
        VerdictKind.SLOW_RANK,
        (1,),
        (0, 2),
    )
    assert verdict.site is not None and verdict.site.function == "write_shard"
    for _ in range(30):
        job.advance_time(2)
        job.make_calls(thread=1)
        job.send_heartbeats()
    (verdict,) = job.list_due_verdicts()
    assert (verdict.kind, verdict.culprits) == (VerdictKind.MISSING_RANK, (1,)), "the slow limit"


def test_rank_that_waits_with_a_thread_only_is_awaited_itself() -> None:
    """Rank 2's saver waits for rank 1's, while its main thread is in its own code, and rank 0 waits
    for that one.
    """
    job = ScriptedJob(3)
    job.add_group("saver", (1, 2))
    job.make_calls(thread=1)
    job.send_heartbeats()
    job.make_call(2, "barrier", group="saver", thread=2)
    job.advance_time(4)
    job.make_calls(thread=1)
    job.send_heartbeats()
    job.make_call(0, thread=1)
    job.make_call(1, thread=1)
    job.advance_time(14)
    job.send_heartbeats()
    job.report_stacks(
        2,
        [make_frame("evaluate", text="lock.acquire()")],
        [
            make_frame("barrier", "/x/site-packages/torch/distributed/distributed_c10d.py"),
            make_frame("save"),
        ],
    )
    verdicts = {(v.kind, v.culprits) for v in job.list_due_verdicts()}
    assert verdicts == {(VerdictKind.MISSING_RANK, (2,))}


def test_rank_that_is_not_recorded_is_no_culprit() -> None:
    """Ranks 0 and 1 completed calls together with rank 2, which never reported."""
    job = ScriptedJob(3)
    job.ranks[2].is_reporting = False
    job.make_calls()
    job.send_heartbeats()
    job.make_calls(except_ranks=(2,), done=False)
    verdicts = []
    for _ in range(12):
        job.advance_time(1)
        job.send_heartbeats()
        verdicts = job.list_due_verdicts()
    (verdict,) = verdicts
    assert (verdict.kind, verdict.culprits, verdict.waiting) == (
        VerdictKind.STARTUP_STALL,
        (),
        (0, 1),
    )
    assert "rank 2, which is not watched" in verdict.summary
    assert verdict.severity is Severity.WARNING


def test_rank_in_its_own_code_is_named_beside_one_that_is_not_recorded() -> None:
    job = ScriptedJob(3)
    job.ranks[2].is_reporting = False
    job.make_calls()
    job.send_heartbeats()
    job.make_call(0)
    for _ in range(12):
        job.advance_time(1)
        job.send_heartbeats()
        job.report_stack(1, make_frame("load", text="lock.acquire()"))
    (verdict,) = job.list_due_verdicts()
    assert (verdict.kind, verdict.culprits, verdict.waiting) == (
        VerdictKind.MISSING_RANK,
        (1,),
        (0,),
    )


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


def test_rank_whose_training_waits_for_its_saver() -> None:
    """The main threads train on for a while, then wait for the checkpoint."""
    job = ScriptedJob(3)
    job.add_group("saver", (0, 1, 2))
    job.make_calls(thread=1)
    job.send_heartbeats()
    for rank in (0, 2):
        job.make_call(rank, "barrier", group="saver", thread=2)
    for _ in range(3):
        job.advance_time(2)
        job.make_calls(thread=1)
        job.send_heartbeats()
    collective = make_frame("barrier", "/x/site-packages/torch/distributed/distributed_c10d.py")
    joined = [make_frame("join", "/usr/lib/python3.11/threading.py"), make_frame("main")]
    verdicts = []
    for second in range(13):
        job.advance_time(1)
        job.send_heartbeats()
        if second == 5:
            for rank in (0, 2):
                job.report_stacks(rank, joined, [collective])
            job.report_stacks(1, joined, [make_frame("write_shard", text="open(path)")])
        verdicts = job.list_due_verdicts()
    (verdict,) = verdicts
    assert (verdict.kind, verdict.culprits, verdict.waiting) == (
        VerdictKind.MISSING_RANK,
        (1,),
        (0, 2),
    )
    assert verdict.site is not None and verdict.site.function == "write_shard"
