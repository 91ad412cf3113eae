"""Ranks that have not set up their process group, and those that set one up again."""

from __future__ import annotations

import pytest

from hangwatch.diagnosis import diagnose
from hangwatch.model.groups import DECLARED_BACKEND
from hangwatch.model.kinds import Severity, VerdictKind
from hangwatch.model.limits import Limits
from hangwatch.model.ranks import ExceptionInfo, Lifecycle
from tests.simulation.scripted_job import LIMITS, ScriptedJob, ScriptedRank

from ..expect import diagnose_only, make_frame


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


def test_rank_that_never_reported() -> None:
    job = ScriptedJob(4)
    for rank in (0, 1, 2):
        job.make_setup_call(rank, done=False)
    del job.ranks[3]
    job.send_heartbeats()
    job.advance_time(11)
    (verdict,) = job.list_due_verdicts()
    assert (verdict.kind, verdict.culprits) == (VerdictKind.STARTUP_STALL, (3,))


def make_starting_job(world: int = 4, *, limits: Limits | None = None) -> ScriptedJob:
    """All ranks are in init_process_group, with rank 0's host as their master."""
    job = ScriptedJob(world, limits=limits or LIMITS, master="node0:29500")
    for rank in job.ranks.values():
        rank.lifecycle = Lifecycle.INITIALISING
    return job


def test_stuck_set_up_is_a_warning_until_the_startup_limit() -> None:
    job = make_starting_job(limits=Limits(stall_after_s=10.0, startup_after_s=100.0))
    for rank in job.ranks:
        job.make_setup_call(rank, done=False)
    job.advance_time(99)
    verdict = diagnose_only(job)
    assert (verdict.kind, verdict.severity) == (VerdictKind.NO_PROGRESS, Severity.WARNING)
    assert (verdict.culprits, verdict.waiting) == ((), (0, 1, 2, 3))
    assert "All of them expect the master at node0:29500" in verdict.advice
    job.advance_time(2)
    verdict = diagnose_only(job)
    assert (verdict.kind, verdict.severity) == (VerdictKind.NO_PROGRESS, Severity.ALERT)


def test_stuck_new_group_and_first_call_of_a_group_are_warnings_at_first() -> None:
    limits = Limits(stall_after_s=10.0, startup_after_s=100.0)
    created, called = ScriptedJob(2, limits=limits), ScriptedJob(2, limits=limits)
    for rank in created.ranks:
        created.make_setup_call(rank)
        created.make_setup_call(rank, "new_group", done=False)
    called.make_calls(done=False)
    for job in (created, called):
        job.advance_time(99)
        verdict = diagnose_only(job)
        assert (verdict.kind, verdict.severity) == (VerdictKind.NO_PROGRESS, Severity.WARNING)
        job.advance_time(2)
        assert diagnose_only(job).severity is Severity.ALERT


def test_later_call_of_a_group_that_does_not_finish_is_an_alert() -> None:
    job = ScriptedJob(2, limits=Limits(stall_after_s=10.0, startup_after_s=100.0))
    job.make_calls()
    job.make_calls(done=False)
    job.advance_time(11)
    verdict = diagnose_only(job)
    assert (verdict.kind, verdict.severity) == (VerdictKind.NO_PROGRESS, Severity.ALERT)


def test_different_masters() -> None:
    job = make_starting_job(3)
    job.ranks[1].master = "node0:29501"
    for rank in job.ranks:
        job.make_setup_call(rank, done=False)
    job.advance_time(11)
    verdict = diagnose_only(job)
    assert (verdict.kind, verdict.severity) == (VerdictKind.STARTUP_STALL, Severity.WARNING)
    assert (verdict.culprits, verdict.waiting) == ((1,), (0, 2))
    assert verdict.summary == (
        "rank 1 expects the master at node0:29501; ranks 0, 2 expect the master at node0:29500"
    )


def test_master_is_localhost_on_two_hosts() -> None:
    job = make_starting_job()
    job.master = "localhost:29500"
    for rank in (2, 3):
        job.ranks[rank].host = "node1"
    for rank in job.ranks:
        job.make_setup_call(rank, done=False)
    job.advance_time(11)
    verdict = diagnose_only(job)
    assert (verdict.kind, verdict.severity) == (VerdictKind.STARTUP_STALL, Severity.WARNING)
    assert (verdict.culprits, verdict.waiting) == ((2, 3), (0, 1))
    assert verdict.summary == (
        "ranks 2-3 expect the master at localhost:29500, which is their own host; rank 0 runs on node0"
    )


def test_worlds_of_different_sizes() -> None:
    job = make_starting_job(3)
    job.ranks[2].world_size = 4
    for rank in (0, 1):
        job.make_setup_call(rank, world=3, done=False)
    job.make_setup_call(2, world=4, done=False)
    job.advance_time(9)
    assert job.list_due_verdicts() == [], "it is no deadlock"
    job.advance_time(2)
    verdict = diagnose_only(job)
    assert (verdict.kind, verdict.severity) == (VerdictKind.STARTUP_STALL, Severity.WARNING)
    assert (verdict.culprits, verdict.waiting) == ((2,), (0, 1))
    assert verdict.summary == "rank 2 expects 4 ranks; ranks 0-1 expect 3 ranks"
    assert "WORLD_SIZE" in verdict.advice


def test_world_of_another_size_whose_peers_left_init_process_group() -> None:
    """gloo connects the peers of the smaller world, which then wait in their first call."""
    job = make_starting_job(3)
    job.ranks[2].world_size = 4
    job.make_setup_call(2, world=4, done=False)
    for rank in (0, 1):
        job.ranks[rank].lifecycle = Lifecycle.INITIALISED
        job.make_setup_call(rank, world=3)
        job.make_call(rank, "barrier")
    job.advance_time(11)
    verdict = diagnose_only(job)
    assert (verdict.kind, verdict.severity) == (VerdictKind.STARTUP_STALL, Severity.WARNING)
    assert (verdict.culprits, verdict.waiting) == ((2,), (0, 1))


def add_twin(job: ScriptedJob, rank: int, host: str = "node0") -> None:
    """Reports another process with the rank, which is in init_process_group too."""
    twin = ScriptedRank(rank, host=host, lifecycle=Lifecycle.INITIALISING, pid=77)
    other = ScriptedJob(job.world_size, fleet=job.fleet, master=job.master, host=host)
    other.now, other.ranks = job.now, {rank: twin}
    other.make_setup_call(rank, done=False)
    other._heartbeat_numbers = job._heartbeat_numbers
    other.send_heartbeats()


@pytest.mark.parametrize("host", ["node0", "node1"])
def test_two_processes_with_one_rank(host: str) -> None:
    job = make_starting_job(3)
    del job.ranks[2]
    for rank in job.ranks:
        job.make_setup_call(rank, done=False)
    job.send_heartbeats()
    attempt = job.latest_attempt
    add_twin(job, 1, host)
    job.advance_time(11)
    job.send_heartbeats()
    (verdict,) = diagnose(attempt, job.now, job.limits).verdicts
    assert (verdict.kind, verdict.culprits) == (VerdictKind.STARTUP_STALL, (2,))
    assert "Two processes have rank 1 (pid" in verdict.advice
    assert "pid 77 on " + host in verdict.advice
    job.end_process(1, status=0)
    job.send_heartbeats()
    assert all(
        "Two processes" not in verdict.advice
        for verdict in diagnose(attempt, job.now, job.limits).verdicts
    ), "one of them has ended"
