"""Nothing is concluded by counting from a stream in which calls were lost; what is certain without
counting still is.
"""

from __future__ import annotations

import pytest

from hangwatch.model.calls import StreamKind
from hangwatch.model.kinds import VerdictKind
from hangwatch.model.ranks import Frame, Lifecycle
from hangwatch.tracking.attempt import find_divergence
from tests.simulation.scripted_job import ScriptedJob

IN_A_CALL = (
    Frame(
        function="all_reduce", file="/site-packages/torch/distributed/distributed_c10d.py", line=9
    ),
    Frame(function="step", file="/home/me/train.py", line=10),
)
OWN_CODE = (
    Frame(function="tokenize", file="/home/me/train.py", line=77, text="for word in text:"),
    Frame(function="step", file="/home/me/train.py", line=12),
)


def make_job_with_loss(rank: int = 2, *, reports_completion: bool = True) -> ScriptedJob:
    """Four ranks whose calls are equal; one call of the rank is not recorded."""
    job = ScriptedJob(4, reports_completion=reports_completion)
    for _ in range(3):
        job.make_calls()
    job.send_heartbeats()
    job.lose_call(rank)
    job.make_calls("broadcast", except_ranks=(rank,))
    job.send_heartbeats()
    return job


def report_stacks(job: ScriptedJob, **frames: tuple[Frame, ...]) -> None:
    for name, stack in frames.items():
        job.report_stack(int(name.removeprefix("rank")), *stack)


def test_lost_call_is_no_mismatch() -> None:
    job = make_job_with_loss()
    for _ in range(30):
        job.make_calls()
        job.send_heartbeats()
    job.advance_time(100)
    assert job.list_due_verdicts() == []
    assert not job.latest_attempt.diverged_groups


def test_mismatch_of_others_is_still_found() -> None:
    job = make_job_with_loss()
    job.make_calls(except_ranks=(1,), done=False)
    job.make_call(1, "broadcast")
    job.advance_time(3)
    (verdict,) = job.list_due_verdicts()
    assert (verdict.kind, verdict.culprits) == (VerdictKind.MISMATCH, (1,))
    assert "Rank 2's calls of group world are not completely recorded since call 4" in (
        verdict.advice
    )


def test_mismatch_before_the_loss_is_still_found() -> None:
    job = ScriptedJob(4)
    job.make_calls()
    job.make_calls("broadcast", except_ranks=(2,))
    job.make_call(2)
    job.lose_call(2)
    job.make_calls(except_ranks=(2,), done=False)
    job.advance_time(3)
    (verdict,) = job.list_due_verdicts()
    assert (verdict.kind, verdict.culprits, verdict.seq) == (VerdictKind.MISMATCH, (2,), 2)


def test_hashes_that_arrived_before_the_loss_was_known_are_revoked() -> None:
    job = ScriptedJob(4)
    for _ in range(3):
        job.make_calls()
    job.make_calls("broadcast", except_ranks=(2,))
    stream = job.ranks[2].streams["world"]
    job.make_calls()
    job.send_heartbeats()
    attempt = job.latest_attempt
    assert attempt.diverged_groups
    stream.lost_from_seq = 4
    job.send_heartbeats()
    assert not attempt.diverged_groups
    job.make_calls()
    job.send_heartbeats()
    assert not any(map(find_divergence, attempt.streams_by_group.values()))


@pytest.mark.parametrize("reports_completion", [True, False])
def test_rank_with_lost_calls_is_not_missing(reports_completion: bool) -> None:
    job = make_job_with_loss(reports_completion=reports_completion)
    job.make_calls(done=False)  # by count, rank 2 has not entered it
    job.advance_time(11)
    job.send_heartbeats()
    report_stacks(job, rank0=IN_A_CALL, rank1=IN_A_CALL, rank2=IN_A_CALL, rank3=IN_A_CALL)
    job.advance_time(50)
    assert job.list_due_verdicts() == []
    wait = job.run_diagnosis().unexplained_wait
    assert wait is not None
    assert wait.reason == (
        "rank 2's calls of group world are not completely recorded since call 4, because its"
        " recorder failed to record a call"
    )


def test_stack_in_own_code_names_a_rank_with_lost_calls() -> None:
    job = make_job_with_loss()
    job.make_calls(except_ranks=(2,), done=False)
    job.advance_time(6)
    job.send_heartbeats()
    requested = {r.rank for r in job.run_diagnosis().requests if r.stacks}
    assert 2 in requested
    report_stacks(job, rank2=OWN_CODE)
    job.advance_time(2)
    report_stacks(job, rank2=OWN_CODE)
    job.advance_time(3)
    (verdict,) = job.list_due_verdicts()
    assert (verdict.kind, verdict.culprits) == (VerdictKind.MISSING_RANK, (2,))
    assert verdict.waiting == (0, 1, 3)
    assert "not completely recorded since call 4" in verdict.advice


def test_complete_member_behind_is_missing_and_the_other_is_not() -> None:
    job = make_job_with_loss()
    job.make_calls(except_ranks=(1, 2), done=False)
    job.advance_time(11)
    (verdict,) = job.list_due_verdicts()
    assert (verdict.kind, verdict.culprits) == (VerdictKind.MISSING_RANK, (1,))


def test_rank_with_lost_calls_that_waits_names_nobody_by_count() -> None:
    """The newest call of the rank seems to be one in which all others have been."""
    job = make_job_with_loss()
    job.add_group("pair", (1, 2))
    job.make_calls(group="pair")
    job.make_call(2)
    job.make_call(1, group="pair")
    job.advance_time(30)
    assert job.list_due_verdicts() == []


@pytest.mark.parametrize("end", ["killed", "exited", "stopped"])
def test_end_of_a_rank_with_lost_calls_is_certain(end: str) -> None:
    job = make_job_with_loss()
    job.make_calls(except_ranks=(2,), done=False)
    if end == "killed":
        job.end_process(2, signal=9)
    elif end == "exited":
        job.ranks[2].lifecycle = Lifecycle.EXITING
        job.end_process(2, status=0)
    else:
        job.ranks[2].state = "T"
    job.send_heartbeats()
    job.advance_time(11)
    (verdict,) = job.list_due_verdicts()
    expected = {
        "killed": VerdictKind.DEAD_RANK,
        "exited": VerdictKind.EXITED_RANK,
        "stopped": VerdictKind.FROZEN_RANK,
    }
    assert (verdict.kind, verdict.culprits) == (expected[end], (2,))


def test_cycle_through_a_stream_with_losses_is_no_deadlock() -> None:
    """By the counts, rank 0 waits in one group for rank 1, which waits in the other for it."""
    job = ScriptedJob(2)
    job.add_group("other", (0, 1))
    job.make_calls()
    job.make_calls(group="other")
    job.lose_call(1)
    job.make_call(0)
    job.make_call(1, group="other")
    job.advance_time(30)
    assert job.list_due_verdicts() == []


def test_all_in_the_same_call_is_not_claimed() -> None:
    job = ScriptedJob(4)
    for _ in range(3):
        job.make_calls()
    job.lose_call(2)
    job.make_calls(done=False)
    job.advance_time(30)
    assert job.list_due_verdicts() == []


def test_receiver_does_not_wait_by_count_for_a_sender_with_losses() -> None:
    job = ScriptedJob(2)
    job.make_calls()
    job.make_p2p_call(0, StreamKind.SEND, 1, done=True)
    job.make_p2p_call(1, StreamKind.RECV, 0, done=True)
    job.lose_call(0, "send1/0")
    job.make_p2p_call(1, StreamKind.RECV, 0, blocking=True)
    job.advance_time(30)
    assert job.list_due_verdicts() == []


@pytest.mark.parametrize("loss", ["dropped", "unseen"])
def test_absent_stream_of_a_rank_that_misses_streams_proves_nothing(loss: str) -> None:
    job = ScriptedJob(3)
    job.add_group("late", (0, 1, 2))
    job.make_calls()
    if loss == "dropped":
        job.ranks[2].dropped = 1
    else:
        job.ranks[2].opened = 2
    job.make_calls(group="late", except_ranks=(2,), done=False)
    job.make_p2p_call(0, StreamKind.RECV, 2, blocking=True)
    job.advance_time(30)
    assert job.list_due_verdicts() == []
    report_stacks(job, rank2=OWN_CODE)
    job.advance_time(2)
    report_stacks(job, rank2=OWN_CODE)
    job.advance_time(30)
    (verdict,) = job.list_due_verdicts()
    assert (verdict.kind, verdict.culprits) == (VerdictKind.MISSING_RANK, (2,))


def test_lost_creation_of_a_group_is_no_group_mismatch() -> None:
    job = ScriptedJob(3)
    for rank in range(3):
        job.make_setup_call(rank)
    job.lose_call(1, "setup")
    for rank in (0, 2):
        job.make_setup_call(rank, "new_group", ranks=(0, 1))
    for rank in range(3):
        job.make_setup_call(rank, "new_group", ranks=(0, 1, 2))
    job.make_calls()
    job.advance_time(30)
    assert job.list_due_verdicts() == []


def test_restarted_process_begins_without_losses() -> None:
    job = make_job_with_loss()
    job.send_heartbeats()
    attempt = job.latest_attempt
    (state,) = [s.group_state for s in attempt.processes[2].streams.values()]
    assert state is not None
    assert state.has_losses
    attempt.assign_rank(None, 2)
    assert not state.has_losses


def test_wait_in_a_call_that_is_not_recorded_is_shown() -> None:
    job = ScriptedJob(2)
    job.make_calls()
    job.ranks[0].dropped = 1
    job.send_heartbeats()
    assert job.run_diagnosis().unexplained_wait is None
    job.advance_time(11)
    assert job.list_due_verdicts() == []
    assert job.latest_attempt.suspects == {0}
    assert {r.rank for r in job.run_diagnosis().requests if r.stacks} == {0}
    report_stacks(job, rank0=IN_A_CALL)
    assert job.list_due_verdicts() == []
    wait = job.run_diagnosis().unexplained_wait
    assert wait is not None
    assert wait.description == "rank 0 in a call that is not recorded at train.py:10 in step"
    assert wait.reason.startswith("not all groups and channels of rank 0 are recorded")


def test_rank_that_misses_streams_and_computes_does_not_wait() -> None:
    job = ScriptedJob(2)
    job.make_calls()
    job.ranks[0].dropped = 1
    job.send_heartbeats()
    job.advance_time(11)
    job.send_heartbeats()
    report_stacks(job, rank0=OWN_CODE)
    assert job.list_due_verdicts() == []
    assert job.run_diagnosis().unexplained_wait is None
