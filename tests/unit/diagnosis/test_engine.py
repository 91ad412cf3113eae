"""The verdict of each kind, from a pretended job; who is blamed, who is not, and when."""

from __future__ import annotations

import signal
from dataclasses import replace

import pytest

from hangwatch.diagnosis import diagnose, messages
from hangwatch.diagnosis.rules.mismatch import partings
from hangwatch.model.calls import Call, Signature, Site, StreamKind
from hangwatch.model.groups import DECLARED_BACKEND, Group
from hangwatch.model.kinds import Severity, VerdictKind
from hangwatch.model.limits import MIN_WAIT_S, Limits
from hangwatch.model.ranks import ExceptionInfo, ExitInfo, Lifecycle
from hangwatch.model.threads import Frame
from hangwatch.model.verdicts import Verdict
from hangwatch.protocol import heartbeat
from hangwatch.tracking.call_stream import MAX_URGENT_SUSPECTS, CallStream
from hangwatch.tracking.fleet import Fleet
from tests.unit.jobs import Job


def frame(
    function: str, file: str = "/home/me/train.py", line: int = 7, text: str | None = None
) -> Frame:
    return Frame(function=function, file=file, line=line, text=text)


def only(job: Job) -> object:
    verdicts = job.verdicts()
    assert len(verdicts) == 1, [v.summary for v in verdicts]
    return verdicts[0]


def test_a_healthy_job_has_no_verdict_however_long_a_rank_computes_before_others_wait() -> None:
    job = Job(4)
    for _ in range(20):
        job.everybody()
    job.wait(1000)
    assert job.verdicts() == []
    assert job.diagnose().requests == ()


def test_the_rank_that_does_not_come_is_missing_once_the_limit_is_reached() -> None:
    job = Job(4)
    job.everybody()
    job.heartbeat()
    job.everybody(but=(2,), done=False)
    job.wait(9)
    assert job.verdicts() == []
    job.wait(1.5)
    (verdict,) = job.verdicts()
    assert verdict.kind is VerdictKind.MISSING_RANK
    assert verdict.severity is Severity.ALERT
    assert verdict.culprits == (2,)
    assert verdict.waiting == (0, 1, 3)
    assert verdict.seq == 2
    assert verdict.calls[0].ranks == (0, 1, 3)
    assert verdict.calls[0].call.site == Site(file="train.py", line=10, function="step")


def test_evidence_is_asked_for_before_the_verdict_is_due() -> None:
    job = Job(4)
    job.everybody(but=(2,), done=False)
    job.wait(6)
    assert job.verdicts() == []
    assert any(r.rank == 2 and r.stacks for r in job.diagnose().requests)


def test_where_dozens_of_hangs_seem_to_be_there_their_stacks_are_asked_for_in_turns() -> None:
    job = Job(200)
    for pair in range(100):
        job.group(f"tp{pair}", (2 * pair, 2 * pair + 1))
        job.call(2 * pair, group=f"tp{pair}")
    job.wait(6)
    job.heartbeat()
    seen: set[int] = set()
    for _ in range(20):
        asked = {r.rank for r in job.diagnose().requests if r.stacks}
        assert len(asked) <= 66
        seen |= asked
        for rank in asked:
            job.stack(rank, frame("step"))
        job.wait(1.5)
    assert seen == set(range(200))


def test_the_culprit_s_own_line_is_in_the_verdict() -> None:
    job = Job(2)
    job.heartbeat()
    job.call(0)
    job.wait(11)
    job.heartbeat()
    job.stack(
        1,
        frame("acquire", "/usr/lib/python3.11/threading.py"),
        frame("load_batch", line=33),
        frame("main"),
    )
    (verdict,) = job.verdicts()
    assert verdict.site == Site(file="/home/me/train.py", line=33, function="load_batch")
    assert "train.py:33" in verdict.summary


def test_victims_along_a_chain_across_groups_are_not_blamed() -> None:
    """2-way tensor parallel x 4-way data parallel: one rank holds up its pair, and each of the pair
    a data-parallel group.
    """
    job = Job(8)
    for t in range(4):
        job.group(f"tp{t}", (2 * t, 2 * t + 1))
    for d in range(2):
        job.group(f"dp{d}", tuple(range(d, 8, 2)))
    job.heartbeat()
    job.call(2, group="tp1")  # rank 3 does not come
    for rank in (0, 4, 6):
        job.call(rank, group="dp0")
    for rank in (1, 5, 7):
        job.call(rank, group="dp1")
    job.wait(11)
    (verdict,) = job.verdicts()
    assert verdict.culprits == (3,)
    assert verdict.waiting == (0, 1, 2, 4, 5, 6, 7)


def test_another_operation_is_a_mismatch_at_once() -> None:
    job = Job(4)
    job.everybody()
    for rank in (0, 2, 3):
        job.call(rank, line=41)
    job.call(1, "broadcast", reduce_op=None, root=0, line=55)
    job.wait(1.1)
    (verdict,) = job.verdicts()
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
    job = Job(4)
    for rank in (1, 2, 3):
        job.call(rank, root=0)
    job.call(0, **{"root": 0, **theirs})  # type: ignore[arg-type]
    job.wait(1.1)
    (verdict,) = job.verdicts()
    assert (verdict.kind, verdict.culprits, verdict.differing_fields) == (
        VerdictKind.MISMATCH,
        (0,),
        (field,),
    )


def test_a_mismatch_that_hangs_nobody_is_found_among_many_calls() -> None:
    job = Job(4)
    for n in range(50):
        for rank in range(4):
            job.call(rank, reduce_op="max" if (n, rank) == (20, 3) else "sum", done=True)
        if n % 5 == 0:
            job.wait(0.5)
            job.heartbeat()
    (verdict,) = job.verdicts()
    assert (verdict.kind, verdict.culprits, verdict.waiting, verdict.seq) == (
        VerdictKind.MISMATCH,
        (3,),
        (),
        21,
    )
    assert verdict.differing_fields == ("reduce_op",)


def test_views_of_the_same_number_of_elements_agree() -> None:
    job = Job(2)
    job.call(0, shape=(8, 8), done=True)
    job.call(1, shape=(64,), done=True)
    assert job.verdicts() == []


def test_whose_hash_at_the_parting_is_not_known_is_placed_by_what_follows_it() -> None:
    """Before it, all are alike: that says nothing."""
    group = Group(name="0", desc="default_pg", ranks=(0, 1, 2, 3))

    def sequence(checkpoints: dict[int, int]) -> CallStream:
        return CallStream(
            uid=1,
            kind=StreamKind.COLLECTIVE,
            group=group,
            entered=max(checkpoints),
            reported_hashes=list(checkpoints.items()),
        )

    members = {
        0: sequence({8: 88, 9: 99}),
        1: sequence({8: 88, 10: 110}),
        2: sequence({8: 88, 9: 90}),
        3: sequence({8: 88, 10: 110}),
    }
    (parting,) = partings({group.key: members}, {group.key})
    assert {rank for rank, _, _ in parting.missing} >= {1, 3}, (
        "nobody is placed by what all have in common"
    )
    members[1].reported_hashes.append((9, 99))
    (parting,) = partings({group.key: members}, {group.key})
    assert (parting.seq, parting.classes, parting.odd) == (9, ((0, 1, 3), (2,)), (2,))


def test_a_tie_blames_all_who_differ_unless_the_group_s_twins_decide() -> None:
    job = Job(4)
    job.group("tp0", (0, 1))
    job.group("tp1", (2, 3))
    job.call(0, group="tp0", done=True)
    job.call(1, "barrier", group="tp0", done=True)
    (verdict,) = job.verdicts()
    assert verdict.culprits == (0, 1)
    job.everybody(group="tp1")
    (verdict,) = job.verdicts()
    assert verdict.culprits == (1,)


def test_a_killed_rank_is_named_and_those_its_launcher_ends_are_not() -> None:
    job = Job(4)
    job.everybody()
    job.heartbeat()
    job.die(2, signal=signal.SIGKILL)
    job.wait(0.4)
    for rank in (0, 1, 3):
        job.die(rank, signal=signal.SIGTERM)
    job.wait(2)
    (verdict,) = job.verdicts()
    assert (verdict.kind, verdict.culprits) == (VerdictKind.DEAD_RANK, (2,))
    assert "SIGKILL" in verdict.summary


def test_a_peer_that_complains_of_the_lost_connection_before_the_end_is_seen_is_not_the_cause() -> (
    None
):
    job = Job(2)
    job.everybody()
    job.heartbeat()
    job.ranks[0].raised, job.ranks[0].raised_at = (
        ExceptionInfo(type="RuntimeError", message="Read error: Connection reset by peer"),
        job.now,
    )
    job.wait(0.2)
    job.die(1, signal=signal.SIGKILL)
    job.wait(0.4)
    job.die(0, signal=signal.SIGTERM)
    job.wait(2)
    (verdict,) = job.verdicts()
    assert (verdict.kind, verdict.culprits) == (VerdictKind.DEAD_RANK, (1,))


def test_the_first_exception_counts_though_its_process_ends_last() -> None:
    job = Job(2)
    job.everybody()
    job.heartbeat()
    job.ranks[1].raised, job.ranks[1].raised_at = (
        ExceptionInfo(type="ValueError", message="bad batch"),
        job.now,
    )
    job.wait(0.2)
    job.die(
        0, status=1, raised=ExceptionInfo(type="RuntimeError", message="Connection closed by peer")
    )
    job.wait(0.2)
    job.die(1, status=1)
    job.wait(2)
    (verdict,) = job.verdicts()
    assert verdict.culprits == (1,)
    assert "ValueError: bad batch" in verdict.summary


def test_who_vanished_unseen_is_not_blamed_for_an_exception_right_after_its_last_sign_of_life() -> (
    None
):
    job = Job(4)
    job.everybody()
    job.heartbeat()
    job.die(0)
    job.wait(0.3)
    job.die(2, raised=ExceptionInfo(type="ValueError", message="bad batch"))
    job.wait(0.1)
    job.die(3, raised=ExceptionInfo(type="RuntimeError", message="Connection closed by peer"))
    job.wait(2)
    (verdict,) = job.verdicts()
    assert (verdict.kind, verdict.culprits) == (VerdictKind.DEAD_RANK, (2,))


def test_who_vanished_unseen_comes_before_those_that_complain_and_those_that_are_told_to_stop() -> (
    None
):
    job = Job(4)
    job.everybody()
    job.heartbeat()
    job.die(1, raised=ExceptionInfo(type="RuntimeError", message="Connection closed by peer"))
    job.die(0)
    job.wait(0.3)
    job.die(3, signal=signal.SIGTERM)
    job.wait(2)
    (verdict,) = job.verdicts()
    assert (verdict.kind, verdict.culprits) == (VerdictKind.DEAD_RANK, (0,))


def test_who_raised_and_takes_long_to_end_is_dead_and_has_not_simply_left() -> None:
    job = Job(3)
    job.everybody()
    job.ranks[1].raised, job.ranks[1].raised_at = (
        ExceptionInfo(type="ValueError", message="bad batch"),
        job.now,
    )
    job.ranks[1].lifecycle = Lifecycle.EXITING
    job.everybody(but=(1,), done=False)
    job.wait(2)
    (verdict,) = job.verdicts()
    assert (verdict.kind, verdict.culprits) == (VerdictKind.DEAD_RANK, (1,))


def test_who_left_is_named_though_its_exit_takes_longer_than_its_peers_need_to_fail() -> None:
    job = Job(3)
    job.everybody()
    job.ranks[1].lifecycle, job.ranks[1].pulse_at = Lifecycle.EXITING, job.now
    job.everybody(but=(1,), done=False)
    job.wait(0.1)
    for rank in (0, 2):
        job.die(
            rank,
            status=1,
            raised=ExceptionInfo(type="RuntimeError", message="Connection closed by peer"),
        )
    job.wait(3)
    job.die(1, status=0)
    job.wait(1)
    (verdict,) = job.verdicts()
    assert (verdict.kind, verdict.culprits) == (VerdictKind.EXITED_RANK, (1,))


def test_who_left_is_named_though_its_launcher_stops_it_after_its_peers_fail() -> None:
    job = Job(3)
    job.everybody()
    job.ranks[1].lifecycle = Lifecycle.DESTROYED
    job.everybody(but=(1,), done=False)
    job.wait(0.1)
    for rank in (0, 2):
        job.die(
            rank,
            status=1,
            raised=ExceptionInfo(type="RuntimeError", message="Connection closed by peer"),
        )
    job.wait(0.4)
    job.die(1, signal=signal.SIGTERM)
    job.wait(3)
    (verdict,) = job.verdicts()
    assert (verdict.kind, verdict.culprits) == (VerdictKind.EXITED_RANK, (1,))


def test_a_job_that_is_told_to_stop_is_no_alert() -> None:
    job = Job(2)
    job.everybody()
    job.heartbeat()
    for rank in (0, 1):
        job.die(rank, signal=signal.SIGTERM)
    job.wait(20)
    assert job.verdicts() == []


def test_a_job_that_is_interrupted_is_no_alert() -> None:
    job = Job(2)
    job.everybody()
    job.heartbeat()
    for rank in (0, 1):
        job.die(
            rank, signal=signal.SIGINT, raised=ExceptionInfo(type="KeyboardInterrupt", message="")
        )
    job.wait(20)
    assert job.verdicts() == []


def test_ranks_that_end_well_seconds_apart_are_no_alert() -> None:
    job = Job(3)
    job.everybody()
    job.heartbeat()
    for rank in range(3):
        job.die(rank, status=0)
        job.wait(5)
        assert job.verdicts() == []


def test_a_death_in_a_mismatched_call_is_a_mismatch() -> None:
    job = Job(4)
    for rank in range(4):
        job.call(rank, shape=(32,) if rank == 1 else (64,))
    job.die(1, signal=signal.SIGABRT)
    job.wait(0.3)
    for rank in (0, 2, 3):
        job.die(rank, signal=signal.SIGTERM)
    job.wait(2)
    (verdict,) = job.verdicts()
    assert (verdict.kind, verdict.culprits, verdict.differing_fields) == (
        VerdictKind.MISMATCH,
        (1,),
        ("shape",),
    )


def _passes_a_mismatch(calls_after: int) -> Job:
    job = Job(4)
    for rank in range(4):
        job.call(rank, "broadcast", shape=(3,) if rank == 2 else (2,), done=True)
    for _ in range(calls_after):
        job.wait(0.1)
        job.everybody("broadcast")
    job.heartbeat()
    assert only(job).kind is VerdictKind.MISMATCH
    return job


@pytest.mark.parametrize("ended", [True, False])
@pytest.mark.parametrize("calls_after", [0, 1, 2])
@pytest.mark.parametrize("rank", [2, 1])
def test_a_failure_right_after_a_mismatch_that_got_through_follows_from_it(
    rank: int, calls_after: int, ended: bool
) -> None:
    """What was broadcast is used: by the odd rank, or by another one of what that one sent."""
    job = _passes_a_mismatch(calls_after)
    job.wait(0.4)
    raised = ExceptionInfo(type="UnpicklingError", message="invalid load key")
    if ended:
        job.die(rank, status=1, raised=raised)
    else:
        job.ranks[rank].lifecycle, job.ranks[rank].raised, job.ranks[rank].raised_at = (
            Lifecycle.EXITING,
            raised,
            job.now,
        )
    job.everybody(but=(rank,), done=False)
    for _ in range(3):
        job.wait(2)
        (verdict,) = job.verdicts()
        waiting = tuple(r for r in range(4) if r not in (rank, 2))
        assert (verdict.kind, verdict.culprits, verdict.waiting) == (
            VerdictKind.MISMATCH,
            (2,),
            waiting,
        )


@pytest.mark.parametrize(("calls_after", "seconds"), [(3, 0.4), (2, 6.0), (100, 300.0)])
def test_a_failure_long_after_a_mismatch_that_got_through_is_its_own(
    calls_after: int, seconds: float
) -> None:
    job = _passes_a_mismatch(calls_after)
    job.wait(seconds)
    job.die(2, status=1, raised=ExceptionInfo(type="ValueError", message="boom"))
    job.wait(2)
    assert {v.kind: v.culprits for v in job.verdicts()} == {
        VerdictKind.MISMATCH: (2,),
        VerdictKind.DEAD_RANK: (2,),
    }


def test_who_is_told_to_stop_after_a_mismatch_did_not_fail_for_it() -> None:
    job = _passes_a_mismatch(1)
    job.die(0, signal=signal.SIGTERM)
    job.everybody(but=(0,), done=False)
    job.wait(2)
    assert {v.kind: v.culprits for v in job.verdicts()} == {
        VerdictKind.MISMATCH: (2,),
        VerdictKind.DEAD_RANK: (0,),
    }


def test_a_rank_that_never_initialises() -> None:
    job = Job(4)
    for rank in (0, 1, 2):
        job.ranks[rank].lifecycle = Lifecycle.INITIALISING
        job.setup(rank, done=False)
    job.ranks[3].lifecycle = Lifecycle.STARTING
    job.wait(5)
    assert job.verdicts() == []
    job.wait(6)
    (verdict,) = job.verdicts()
    assert (verdict.kind, verdict.culprits, verdict.waiting) == (
        VerdictKind.STARTUP_STALL,
        (3,),
        (0, 1, 2),
    )


def reinitialised(later: tuple[int, ...], *, world: int = 3, nth: int = 2) -> Job:
    """Three ranks were in a world and destroyed it; some wait in init_process_group again."""
    job = Job(3)
    for rank in range(3):
        job.setup(rank, world=3)
        job.ranks[rank].lifecycle = Lifecycle.DESTROYED
    job.wait(1)
    for rank in later:
        job.ranks[rank].lifecycle = Lifecycle.INITIALISING
        job.setup(rank, world=world, nth=nth, done=False)
    return job


def test_a_rank_that_does_not_initialise_again() -> None:
    job = reinitialised((0, 1))
    job.wait(9)
    assert job.verdicts() == [], "it may take longer than the others"
    job.wait(2)
    (verdict,) = job.verdicts()
    assert (verdict.kind, verdict.culprits, verdict.waiting) == (
        VerdictKind.STARTUP_STALL,
        (2,),
        (0, 1),
    )
    assert verdict.summary == "rank 2 never reached init_process_group again, in which 2 ranks wait"
    assert verdict.advice.startswith(
        "It has destroyed its process groups and not called init_process_group again"
    )


def test_a_rank_that_ends_while_others_initialise_again() -> None:
    job = reinitialised((0, 1))
    job.ranks[2].lifecycle = Lifecycle.EXITING
    job.wait(3)
    (verdict,) = job.verdicts()
    assert (verdict.kind, verdict.culprits, verdict.waiting) == (
        VerdictKind.EXITED_RANK,
        (2,),
        (0, 1),
    )


def test_a_rank_that_destroyed_the_world_in_which_others_wait() -> None:
    job = reinitialised(())
    for rank in (0, 1):
        job.ranks[rank].lifecycle = Lifecycle.INITIALISED
        job.setup(rank, "new_group", world=3, done=False)
    job.wait(3)
    (verdict,) = job.verdicts()
    assert (verdict.kind, verdict.culprits, verdict.waiting) == (
        VerdictKind.EXITED_RANK,
        (2,),
        (0, 1),
    )
    assert verdict.advice.startswith(
        "It called destroy_process_group while others still communicated."
    )


def test_who_gives_up_initialising_again_is_not_excused_by_who_destroyed_the_world_before() -> None:
    job = reinitialised((0, 1))
    job.wait(5)
    job.die(0, status=1, raised=ExceptionInfo(type="DistStoreError", message="timed out"))
    job.wait(3)
    (verdict,) = job.verdicts()
    assert (verdict.kind, verdict.culprits) == (VerdictKind.DEAD_RANK, (0,))


def test_ranks_in_another_world_are_slow_while_they_get_on_there() -> None:
    job = reinitialised((2,))
    job.groups["pair"] = (0, 1)
    for second in range(20):
        for rank in (0, 1):
            job.ranks[rank].lifecycle, job.ranks[rank].idle = Lifecycle.INITIALISED, False
            if not second:
                job.setup(rank, world=2)
        job.everybody(group="pair")
        job.wait(1)
        job.heartbeat()
    (verdict,) = job.verdicts()
    assert (verdict.kind, verdict.culprits, verdict.waiting) == (
        VerdictKind.SLOW_RANK,
        (0, 1),
        (2,),
    )
    job.wait(job.limits.slow_limit_s)
    (verdict,) = job.verdicts()
    assert (verdict.kind, verdict.severity) == (VerdictKind.MISSING_RANK, Severity.ALERT)


def test_set_up_calls_of_another_world_are_not_compared() -> None:
    job = Job(3)
    for rank in range(3):
        job.setup(rank, world=3)
    for rank in (0, 1):
        job.setup(rank, world=2)
        job.setup(rank, "new_group", world=2, ranks=(0, 1))
    for rank in range(3):
        job.setup(rank, world=3, nth=2)
        job.setup(rank, "new_group", world=3, nth=2, ranks=(0, 1, 2))
    assert job.verdicts() == []
    for rank in range(3):
        job.setup(rank, "new_group", world=3, nth=2, ranks=(0, min(rank, 1)))
    (verdict,) = job.verdicts()
    assert (verdict.kind, verdict.culprits, verdict.seq) == (VerdictKind.GROUP_MISMATCH, (0,), 3)


def test_communication_that_takes_no_init_process_group() -> None:
    job = Job(4)
    for rank in (0, 1, 2):
        job.call(rank, "Barrier", backend=DECLARED_BACKEND)
    job.ranks[3].lifecycle = Lifecycle.STARTING
    job.wait(11)
    (verdict,) = job.verdicts()
    assert (verdict.kind, verdict.culprits, verdict.waiting) == (
        VerdictKind.MISSING_RANK,
        (3,),
        (0, 1, 2),
    )
    other = Job(4, name="other")
    del other.ranks[3]
    for rank in (0, 1, 2):
        other.call(rank, "Barrier", backend=DECLARED_BACKEND)
    other.heartbeat()
    other.wait(11)
    (verdict,) = other.verdicts()
    assert (verdict.kind, verdict.summary) == (
        VerdictKind.STARTUP_STALL,
        "rank 3 never started, for which 3 ranks wait in Barrier",
    )


def test_a_rank_that_was_never_heard_of() -> None:
    job = Job(4)
    for rank in (0, 1, 2):
        job.setup(rank, done=False)
    del job.ranks[3]
    job.heartbeat()
    job.wait(11)
    (verdict,) = job.verdicts()
    assert (verdict.kind, verdict.culprits) == (VerdictKind.STARTUP_STALL, (3,))


def test_a_rank_that_works_is_slow_first_and_missing_at_the_limit() -> None:
    job = Job(2)
    job.call(0)
    job.ranks[1].idle = False
    job.wait(11)
    (verdict,) = job.verdicts()
    assert (verdict.kind, verdict.severity) == (VerdictKind.SLOW_RANK, Severity.WARNING)
    job.wait(60)
    (verdict,) = job.verdicts()
    assert (verdict.kind, verdict.severity, verdict.culprits) == (
        VerdictKind.MISSING_RANK,
        Severity.ALERT,
        (1,),
    )


def test_a_pipeline_stage_that_stalls_is_found_through_point_to_point() -> None:
    job = Job(3)
    job.heartbeat()
    job.p2p(0, StreamKind.SEND, 1, done=True)
    job.p2p(1, StreamKind.RECV, 0, done=True)
    job.heartbeat()
    job.p2p(2, StreamKind.RECV, 1)
    job.p2p(0, StreamKind.RECV, 1, tag=1)
    job.wait(11)
    job.heartbeat()
    for rank in (0, 2):
        job.stack(rank, frame("recv", "/x/site-packages/torch/distributed/distributed_c10d.py"))
    job.stack(1, frame("forward", text="time.sleep(100)"))
    (verdict,) = job.verdicts()
    assert (verdict.kind, verdict.culprits, verdict.waiting) == (
        VerdictKind.MISSING_RANK,
        (1,),
        (0, 2),
    )


def test_an_asynchronous_call_leaves_a_rank_free_to_be_the_culprit() -> None:
    """Rank 1 has a call in flight that rank 2 has not entered, yet it sits in its own code, and
    rank 2 waits for it.
    """
    job = Job(3)
    job.group("a", (1, 2))
    job.group("b", (0, 1, 2))
    job.heartbeat()
    job.call(1, group="a", blocking=False)
    job.call(0, group="b")
    job.call(2, group="b")
    job.wait(11)
    job.heartbeat()
    job.stack(1, frame("evaluate", text="lock.acquire()"))
    (verdict,) = job.verdicts()
    assert (verdict.kind, verdict.culprits) == (VerdictKind.MISSING_RANK, (1,))


def test_two_groups_entered_in_opposite_order_are_a_deadlock() -> None:
    job = Job(2)
    job.group("a", (0, 1))
    job.group("b", (0, 1))
    job.heartbeat()
    job.call(0, group="a")
    job.call(1, group="b")
    job.wait(3.5)
    assert job.verdicts() == []  # a look at their stacks is on its way
    for rank in (0, 1):
        job.stack(
            rank, frame("all_reduce", "/x/site-packages/torch/distributed/distributed_c10d.py")
        )
    (verdict,) = job.verdicts()
    assert (verdict.kind, verdict.culprits) == (VerdictKind.DEADLOCK, (0, 1))


def test_a_deadlock_is_told_of_although_no_stack_comes() -> None:
    job = Job(2)
    job.group("a", (0, 1))
    job.group("b", (0, 1))
    job.heartbeat()
    job.call(0, group="a")
    job.call(1, group="b")
    job.wait(4.5)
    (verdict,) = job.verdicts()
    assert (verdict.kind, verdict.culprits) == (VerdictKind.DEADLOCK, (0, 1))


def test_threads_that_wait_for_ranks_whose_main_threads_are_elsewhere_are_no_deadlock() -> None:
    """Rank 0 trains, and rank 1's other thread is ahead: each will make the call that the other
    waits for.
    """
    job = Job(2)
    for thread, name in enumerate("ab", 1):
        job.group(name, (0, 1))
        job.everybody(group=name, thread=thread, done=False)
        job.wait(1)  # long enough to be told
        job.heartbeat()
        for rank in (0, 1):
            job.complete(rank, name)
    job.heartbeat()
    job.call(0, group="a", thread=1)
    job.call(1, group="b", thread=2)
    job.heartbeat()
    job.stack(0, frame("all_reduce", "/x/site-packages/torch/distributed/distributed_c10d.py"))
    job.stack(1, frame("load", text="time.sleep(3)"))
    job.wait(3.5)
    assert job.verdicts() == []
    job.wait(8)
    job.heartbeat()
    job.stack(1, frame("load", text="time.sleep(3)"))
    (verdict,) = job.verdicts()
    assert (verdict.kind, verdict.culprits, verdict.waiting) == (
        VerdictKind.MISSING_RANK,
        (1,),
        (0,),
    )


def test_a_main_thread_that_sleeps_while_another_does_all_is_held_up_with_it() -> None:
    job = Job(2)
    job.everybody(thread=7)
    job.heartbeat()
    job.call(0, thread=7)
    job.wait(11)
    job.heartbeat()
    for rank in (0, 1):
        job.stack(rank, frame("main", text="time.sleep(1)"))
    (verdict,) = job.verdicts()
    assert (verdict.kind, verdict.culprits, verdict.waiting) == (
        VerdictKind.MISSING_RANK,
        (1,),
        (0,),
    )


def test_a_deadlock_is_doubted_while_other_threads_are_in_the_users_code() -> None:
    job = Job(2)
    job.group("a", (0, 1))
    job.group("b", (0, 1))
    job.heartbeat()
    job.call(0, group="a")
    job.call(1, group="b")
    job.heartbeat()
    for rank in (0, 1):
        job.stacks(
            rank,
            [frame("join", "/usr/lib/python3.11/threading.py")],
            [frame("load", text="time.sleep(3)")],
        )
    job.wait(4.5)
    assert job.verdicts() == []
    job.wait(job.limits.stall_after_s)
    (verdict,) = job.verdicts()
    assert (verdict.kind, verdict.culprits) == (VerdictKind.DEADLOCK, (0, 1))


def test_an_asynchronous_call_holds_up_nobody_who_goes_on_elsewhere() -> None:
    job = Job(2)
    job.group("a", (0, 1))
    job.heartbeat()
    job.call(0, group="a", blocking=False)
    for _ in range(20):
        job.wait(1)
        job.everybody()
        assert job.verdicts() == []
    assert job.diagnose().verdicts == ()


def test_a_thread_that_listens_holds_up_nobody() -> None:
    """Its receive blocks, and the rank trains on beside it."""
    job = Job(2)
    job.heartbeat()
    job.p2p(1, StreamKind.RECV, 0, blocking=True)
    for _ in range(20):
        job.wait(1)
        job.everybody()
        job.heartbeat()
        assert job.verdicts() == []
    assert job.diagnose().verdicts == ()


@pytest.mark.parametrize("text", ['store.wait(["ready"])', 'kv.wait(["ready"])'])
def test_who_waits_for_a_store_does_not_wait_in_a_pending_receive(text: str) -> None:
    job = Job(2)
    job.heartbeat()
    job.p2p(1, StreamKind.RECV, 0, blocking=False)
    job.wait(1)
    job.call(0)
    job.wait(11)
    job.heartbeat()
    job.stack(1, frame("main", text=text))
    (verdict,) = job.verdicts()
    assert (verdict.kind, verdict.culprits, verdict.waiting) == (
        VerdictKind.MISSING_RANK,
        (1,),
        (0,),
    )


def test_whoever_asks_in_a_loop_whether_a_work_is_complete_waits_for_it() -> None:
    job = Job(2)
    job.heartbeat()
    job.call(0, blocking=False)
    job.wait(11)
    job.heartbeat()
    job.stack(0, frame("wait", text="time.sleep(0.01)"))
    assert job.verdicts() == []
    job.stack(
        0, replace(frame("wait", text="time.sleep(0.01)"), polls="while not work.is_completed()")
    )
    (verdict,) = job.verdicts()
    assert (verdict.kind, verdict.culprits, verdict.waiting) == (
        VerdictKind.MISSING_RANK,
        (1,),
        (0,),
    )


def test_two_pairs_that_cross_their_receives_are_two_deadlocks() -> None:
    job = Job(6)
    job.everybody()
    job.heartbeat()
    for rank in range(4):
        job.p2p(rank, StreamKind.RECV, rank ^ 1, blocking=True)
    for rank in (4, 5):
        job.call(rank, "barrier")
    job.wait(4.5)
    found = [(v.kind, v.culprits, v.waiting) for v in job.verdicts()]
    assert found == [(VerdictKind.DEADLOCK, (0, 1), (4, 5)), (VerdictKind.DEADLOCK, (2, 3), (4, 5))]


def crossed(job: Job, *others: int) -> None:
    """Ranks 0-2 share group "a", in which 0 and 2 wait for 1; that waits for them in the group of
    all, as ``others`` do.
    """
    job.everybody()
    job.group("a", (0, 1, 2))
    job.group("b", (3, 4, 5))
    job.heartbeat()
    for rank in (0, 2):
        job.call(rank, group="a")
    for rank in (1, *others):
        job.call(rank, "barrier")


def sent_and_awaited(
    sent: int, awaited: int, before: tuple[int, ...] = (), *, blocked: bool = True
) -> Verdict:
    """Rank 0 sends with one tag what rank 1 waits for with another; rank 2 waits for both in a
    barrier.
    """
    job = Job(3)
    job.everybody()
    job.heartbeat()
    for tag in before:
        job.p2p(0, StreamKind.SEND, 1, tag=tag, done=True, blocking=True)
        job.p2p(1, StreamKind.RECV, 0, tag=tag, done=True, blocking=True)
    job.p2p(0, StreamKind.SEND, 1, tag=sent, blocking=blocked)
    job.p2p(1, StreamKind.RECV, 0, tag=awaited, blocking=True)
    for rank in (2,) if blocked else (0, 2):
        job.call(rank, "barrier")
    job.wait(4.5)
    (verdict,) = job.verdicts()
    assert verdict.differing_fields == ("tag",)
    return verdict


@pytest.mark.parametrize("blocked", [True, False])
def test_a_receive_with_another_tag_than_the_send_is_a_mismatch(blocked: bool) -> None:
    verdict = sent_and_awaited(4, 5, (1, 2, 3), blocked=blocked)
    assert (verdict.kind, verdict.culprits, verdict.waiting) == (VerdictKind.MISMATCH, (0, 1), (2,))
    told = f"rank 1 waits to receive tag 5 from rank 0, which {'sends' if blocked else 'sent'} tag 4 (group world)"
    assert (verdict.summary, verdict.advice) == (told, messages.WRONG_TAG)
    assert [(c.ranks, c.call.signature.op, c.call.peer) for c in verdict.calls] == [
        ((0,), "send", 1),
        ((1,), "recv", 0),
    ]


@pytest.mark.parametrize("before", [(1, 2), (1,), (2,)])
@pytest.mark.parametrize("blocked", [True, False])
def test_tags_that_were_in_use_before_are_right_and_in_another_order(
    before: tuple[int, ...], blocked: bool
) -> None:
    verdict = sent_and_awaited(1, 2, before, blocked=blocked)
    assert (verdict.kind, verdict.culprits, verdict.waiting, verdict.advice) == (
        VerdictKind.DEADLOCK,
        (0, 1),
        (2,),
        messages.TAGS_MIXED_UP,
    )
    assert (
        f"rank 1 waits to receive tag 2 from rank 0, which {'sends' if blocked else 'sent'} tag 1"
        in verdict.summary
    )


def test_a_message_that_is_yet_to_be_received_is_not_held_against_the_send_that_blocks() -> None:
    job = Job(2)
    job.everybody()
    job.heartbeat()
    job.p2p(0, StreamKind.SEND, 1, tag=7, done=True)
    job.p2p(1, StreamKind.RECV, 0, tag=7, done=True)
    job.p2p(0, StreamKind.SEND, 1, tag=7)
    job.p2p(0, StreamKind.SEND, 1, tag=1, blocking=True)
    job.p2p(1, StreamKind.RECV, 0, tag=2, blocking=True)
    job.wait(4.5)
    (verdict,) = job.verdicts()
    assert (verdict.kind, verdict.differing_fields) == (VerdictKind.MISMATCH, ("tag",))
    assert "which sends tag 1" in verdict.summary


def test_a_cycle_is_a_deadlock_even_where_one_on_it_waits_for_somebody_at_work_as_well() -> None:
    job = Job(6)
    crossed(job, 3, 5)
    for _ in range(2):
        job.wait(4.5)
        job.heartbeat()
        (verdict,) = job.verdicts()
        assert (verdict.kind, verdict.culprits, verdict.waiting) == (
            VerdictKind.DEADLOCK,
            (0, 1, 2),
            (3, 5),
        )
        assert (
            "rank 0 waits for rank 1 in all_reduce; rank 1 waits for rank 0 in barrier"
            in verdict.summary
        )
        assert verdict.advice.startswith("Every cycle of waits leads through rank 1: begin there")
        job.wait(8)


def test_who_holds_up_others_than_those_of_a_deadlock_is_told_beside_it() -> None:
    job = Job(6)
    crossed(job)
    for rank in (3, 5):
        job.call(rank, group="b")
    job.wait(11)
    job.heartbeat()
    job.stack(4, frame("load", text="data = sock.recv(1)"))
    found = [(v.kind, v.culprits, v.waiting) for v in job.verdicts()]
    assert found == [
        (VerdictKind.DEADLOCK, (0, 1, 2), ()),
        (VerdictKind.MISSING_RANK, (4,), (3, 5)),
    ]


def test_a_cycle_that_waits_for_a_rank_that_finished_is_put_down_to_that() -> None:
    job = Job(6)
    crossed(job, 3, 5)
    job.die(4, status=0)
    job.wait(4.5)
    job.heartbeat()
    (verdict,) = job.verdicts()
    assert (verdict.kind, verdict.culprits) == (VerdictKind.EXITED_RANK, (4,))


def test_a_rank_that_may_wait_in_either_of_two_calls_is_on_no_cycle_while_one_of_them_may_finish() -> (
    None
):
    job = Job(3)
    job.group("a", (0, 1))
    job.group("b", (0, 2))
    job.group("c", (0, 1))
    job.heartbeat()
    job.call(0, group="a", blocking=False)
    job.call(0, group="b", blocking=False)
    job.call(1, group="c")
    job.wait(4.5)
    job.heartbeat()
    job.stack(0, frame("wait", "/x/site-packages/torch/distributed/distributed_c10d.py"))
    assert [v.kind for v in job.verdicts()] == []


def test_of_a_cycle_that_all_joined_by_and_by_those_are_named_with_whom_it_began() -> None:
    """Tensor and data parallel groups: rank 5 leaves out a step, so that 4 waits for it, and in
    time everybody for one of them.
    """
    job = Job(6)
    job.everybody()
    for name, members in (("tp", (4, 5)), ("even", (0, 2, 4)), ("odd", (1, 3, 5))):
        job.group(name, members)
    job.heartbeat()
    job.call(4, group="tp")
    job.call(5, "barrier")
    job.wait(0.5)
    for rank in range(4):
        job.call(rank, group="odd" if rank % 2 else "even")
    job.wait(4.5)
    (verdict,) = job.verdicts()
    assert (verdict.kind, verdict.culprits, verdict.waiting) == (
        VerdictKind.DEADLOCK,
        (4, 5),
        (0, 1, 2, 3),
    )
    assert verdict.summary.endswith(
        ": rank 4 waits for rank 5 in all_reduce; rank 5 waits for rank 4 in barrier"
    )
    assert verdict.advice.startswith("Every cycle of waits leads through rank 5: begin there")


@pytest.mark.parametrize(("ranks", "told"), [(4, 4), (8, 4)])
def test_of_a_long_cycle_the_first_waits_are_told(ranks: int, told: int) -> None:
    job = Job(ranks)
    job.everybody()
    job.heartbeat()
    for rank in range(ranks):
        job.p2p(rank, StreamKind.RECV, (rank - 1) % ranks, blocking=True)
    job.wait(4.5)
    (verdict,) = job.verdicts()
    assert verdict.culprits == tuple(range(ranks))
    assert verdict.summary.count(" waits for ") == told
    assert verdict.summary.endswith("; and so on") is (ranks > told)
    assert verdict.advice.startswith("No rank on the cycle can go on")


def test_a_rank_that_finished_while_others_wait() -> None:
    job = Job(3)
    job.everybody()
    job.heartbeat()
    job.die(2, status=0)
    for rank in (0, 1):
        job.call(rank)
    job.wait(2)
    (verdict,) = job.verdicts()
    assert (verdict.kind, verdict.culprits, verdict.waiting) == (
        VerdictKind.EXITED_RANK,
        (2,),
        (0, 1),
    )


def test_a_stopped_rank_is_frozen_even_inside_the_call() -> None:
    job = Job(3)
    job.everybody(done=False)
    job.ranks[1].state = "T"
    job.heartbeat()
    assert job.verdicts() == []
    job.wait(2)
    (verdict,) = job.verdicts()
    assert (verdict.kind, verdict.culprits, verdict.waiting) == (
        VerdictKind.FROZEN_RANK,
        (1,),
        (0, 2),
    )


def test_all_in_the_same_call_is_no_progress() -> None:
    job = Job(3)
    job.everybody(done=False)
    job.wait(11)
    (verdict,) = job.verdicts()
    assert (verdict.kind, verdict.culprits, verdict.waiting) == (
        VerdictKind.NO_PROGRESS,
        (),
        (0, 1, 2),
    )


@pytest.mark.parametrize("signal", [None, 9])
def test_a_rank_that_ends_long_after_groups_were_created_differently_is_named_beside_that(
    signal: int | None,
) -> None:
    job = Job(4)
    for rank in range(4):
        job.setup(rank)
        job.setup(rank, "new_group", ranks=(0, 1, 2) if rank == 3 else (0, 1, 2, 3))
    for _ in range(3):
        job.wait(5.0)
        job.everybody()
    job.heartbeat()
    assert [v.kind for v in job.verdicts()] == [VerdictKind.GROUP_MISMATCH]
    job.wait(2.0)
    job.die(1, signal=signal, status=None if signal else 0)
    job.everybody(but=(1,), done=False)
    job.wait(3.0)
    job.heartbeat()
    found = {v.kind: v.culprits for v in job.verdicts()}
    assert found == {
        VerdictKind.GROUP_MISMATCH: (3,),
        (VerdictKind.DEAD_RANK if signal else VerdictKind.EXITED_RANK): (1,),
    }


def test_groups_created_in_another_order() -> None:
    job = Job(4)
    for rank in range(4):
        job.setup(rank)
        first, second = ((2, 3), (0, 1)) if rank == 3 else ((0, 1), (2, 3))
        job.setup(rank, "new_group", ranks=first)
        job.setup(rank, "new_group", ranks=second)
    (verdict,) = job.verdicts()
    assert (verdict.kind, verdict.culprits, verdict.seq) == (VerdictKind.GROUP_MISMATCH, (3,), 2)


def test_what_hangs_because_one_rank_left_out_a_group_is_no_deadlock_of_its_own() -> None:
    job = Job(4)
    job.groups["decoder"] = (1, 2, 3)
    for rank in range(4):
        job.setup(rank)
        if rank != 3:
            job.setup(rank, "new_group", ranks=(0, 1, 2))
        job.setup(
            rank, "new_group", ranks=(1, 2, 3), done=rank in (0, 3)
        )  # 3 finds the others in it, and they wait for its next one
    job.heartbeat()
    job.call(3, group="decoder")
    job.wait(20)
    (verdict,) = job.verdicts()
    assert (verdict.kind, verdict.culprits, verdict.waiting) == (
        VerdictKind.GROUP_MISMATCH,
        (3,),
        (1, 2),
    )


def test_what_hangs_in_groups_that_were_created_in_another_order_is_no_deadlock_of_its_own() -> (
    None
):
    job = Job(4)
    job.everybody()
    for rank in range(4):
        job.setup(rank)
        for members in ((1, 2, 3), (0, 2, 3)) if rank == 3 else ((0, 2, 3), (1, 2, 3)):
            job.setup(rank, "new_group", ranks=members)
    for name, members in (
        ("1", (0, 2, 3)),
        ("2", (1, 2, 3)),
        ("1 of 3", (1, 2, 3)),
        ("2 of 3", (0, 2, 3)),
    ):
        job.group(name, members)
    job.heartbeat()
    for rank, name in enumerate(("1", "2", "1", "2 of 3")):
        job.call(rank, group=name)
    job.wait(20)
    (verdict,) = job.verdicts()
    assert (verdict.kind, verdict.culprits, verdict.waiting) == (
        VerdictKind.GROUP_MISMATCH,
        (3,),
        (0, 1, 2),
    )


def test_what_a_process_says_after_another_took_its_rank_does_not_stop_the_diagnosis() -> None:
    group = heartbeat.StreamIdentity(kind=StreamKind.COLLECTIVE, name="0", desc="", ranks="0-1")
    calls = tuple(Call(seq=seq, signature=Signature(op="all_reduce"), thread=seq) for seq in (1, 2))
    twice = tuple(
        heartbeat.StreamUpdate(uid=uid, identity=group, entered=1, completed=1) for uid in (1, 2)
    )
    fleet = Fleet()
    for number, (key, sequences) in enumerate(
        [("1-1", twice), ("2-1", ()), ("1-1", (replace(twice[0], shared=calls),))], 1
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


def test_a_death_while_others_go_on_without_it_is_told_all_the_same() -> None:
    job = Job(2)
    job.everybody()
    job.heartbeat()
    job.die(1, status=3)
    job.wait(2)
    (verdict,) = job.verdicts()
    assert (verdict.kind, verdict.culprits) == (VerdictKind.DEAD_RANK, (1,))
    assert job.ranks[1].ended == ExitInfo(exit_status=3)


def test_a_mismatch_that_all_got_past_does_not_hide_a_later_hang() -> None:
    job = Job(4)
    for rank in range(4):
        job.call(rank, reduce_op="max" if rank == 3 else "sum", done=True)
    job.heartbeat()
    job.everybody(but=(1,), done=False)
    job.wait(11)
    by_kind = {v.kind: v for v in job.verdicts()}
    assert by_kind[VerdictKind.MISMATCH].culprits == (3,)
    assert by_kind[VerdictKind.MISMATCH].waiting == ()
    assert by_kind[VerdictKind.MISSING_RANK].culprits == (1,)
    assert by_kind[VerdictKind.MISSING_RANK].waiting == (0, 2, 3)


def test_who_was_held_up_itself_is_not_slow_for_those_who_waited_meanwhile() -> None:
    """The one whom all waited for comes, and the next one is heard to go on before those who wait
    for it are heard again.
    """
    job = Job(4)
    job.group("first", (0, 1))
    job.group("second", (1, 2, 3))
    for group in ("first", "second"):
        job.everybody(group=group)
    job.call(1, group="first")
    for rank in (2, 3):
        job.call(rank, group="second")
    for _ in range(15):
        job.wait(1.0)
        late = job.verdicts()
    assert [v.culprits for v in late] == [(0,)]
    job.call(0, group="first", done=True)
    job.complete(1, "first")
    for rank in (2, 3):
        job.ranks[rank].heard = False
    job.wait(0.5)
    assert job.verdicts() == [], "rank 1 has only just been let go"
    for rank in (2, 3):
        job.ranks[rank].heard = True
    job.wait(job.limits.stall_after_s + 0.5)
    assert [v.culprits for v in job.verdicts()] == [(1,)], "now it has had its time"


def test_of_many_who_were_just_let_go_only_those_count_who_cannot_come() -> None:
    """A hang of many dissolves: somebody has waited for all of them for long, but none of them had
    its turn yet.
    """
    count = MAX_URGENT_SUSPECTS + 2
    job, many = Job(count + 2), tuple(range(1, count + 1))
    job.group("first", (0, *many))
    job.group("second", (*many, count + 1))
    for group in ("first", "second"):
        job.everybody(group=group)
    for rank in many:
        job.call(rank, group="first")
    job.call(count + 1, group="second")
    for _ in range(15):
        job.wait(1.0)
        job.heartbeat()
    assert [(v.culprits, v.is_confirmed) for v in job.diagnose().verdicts] == [((0,), True)]
    job.call(0, group="first", done=True)
    for rank in many:
        job.complete(rank, "first")
    job.ranks[count + 1].heard = False
    job.wait(0.5)
    assert job.verdicts() == []
    assert job.diagnose().verdicts == (), "nor is any of them suspected"
    job.ranks[count + 1].heard = True
    job.die(7, status=0)
    job.heartbeat()
    job.wait(2.0)
    assert [(v.kind, v.culprits) for v in job.verdicts()] == [(VerdictKind.EXITED_RANK, (7,))]


def test_who_went_on_long_before_that_was_heard_was_not_held_up_until_then() -> None:
    job = Job(3)
    job.everybody()
    job.call(1, group=job.group("pair", (0, 1)))
    job.wait(2.0)
    job.heartbeat()
    job.call(0, group="pair", done=True)
    job.complete(1, "pair")
    job.ranks[1].heard = False
    job.everybody(
        but=(1,), done=False
    )  # rank 1 went on, made one more call elsewhere, and then no more
    job.wait(0.1)
    job.call(1, group=job.group("alone", (1,)), done=True)
    for _ in range(8):
        job.wait(1.0)
        job.heartbeat()
    job.ranks[1].heard = True
    job.wait(job.limits.stall_after_s - 7.0)
    assert job.verdicts() == [], "it was heard just now"
    job.wait(MIN_WAIT_S)
    assert [v.culprits for v in job.verdicts()] == [(1,)]


def test_of_thousands_of_ranks_a_sentence_names_the_first_and_counts_all() -> None:
    assert messages.those((3,)) == "rank 3"
    assert messages.those((0, 2, 3)) == "ranks 0, 2-3"
    assert messages.those(tuple(range(100_000))) == "ranks 0-99999"
    many = messages.those(tuple(range(0, 100_000, 2)))
    assert many.startswith("50000 ranks (0, 2, 4, ") and many.endswith(", …)") and len(many) < 200
