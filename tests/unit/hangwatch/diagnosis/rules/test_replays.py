"""Jobs that replay CUDA graphs with collectives on NCCL, which counts no replay and reports the
completion of none.
"""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from hangwatch.diagnosis import is_quiet
from hangwatch.model.kinds import Severity, VerdictKind
from hangwatch.model.limits import UNTIMED_GRACE_S
from hangwatch.model.ranks import Frame
from tests.simulation.scripted_job import ScriptedJob
from tests.unit.hangwatch.diagnosis.expect import diagnose_only, make_frame

RANKS = range(4)
CONTENTS = "12 collectives (all_reduce), hash 5"
TITLE = "the replay of a CUDA graph with 12 collectives (all_reduce)"
IN_SYNCHRONIZE = (make_frame("synchronize", "/x/torch/cuda/__init__.py"), make_frame("train"))
IN_REPLAY = (make_frame("replay", "/x/torch/cuda/graphs.py"), make_frame("train"))
IN_OWN_CODE = (make_frame("tokenize", line=9),)
AT_QUEUE = (make_frame("get", "/usr/lib/python3.11/queue.py"), make_frame("serve"))
STALL_AFTER_S = 10.0


def make_job(*, has_counters: bool = True, replay_count: int = 5) -> ScriptedJob:
    """All ranks have replayed a graph some times, each time after an eager call."""
    job = ScriptedJob(len(RANKS), reports_completion=False)
    for _ in range(replay_count):
        job.make_calls(blocking=None, backend="nccl")
        for rank in RANKS:
            job.replay_graph(rank)
            if has_counters:
                stream = job.ranks[rank].streams["world"]
                job.report_device(rank, stream.counted_calls)
        job.send_heartbeats()
        job.advance_time(0.1)
    return job


def wait(job: ScriptedJob, seconds: float, stacks: Mapping[int, tuple[Frame, ...]]) -> None:
    """Time passes in which requested stacks are these, and counters are read again."""
    for _ in range(int(seconds)):
        job.advance_time(1.0)
        job.send_heartbeats()
        for request in job.run_diagnosis().requests:
            if request.stacks and request.rank in stacks:
                job.report_stack(request.rank, *stacks[request.rank])


@pytest.mark.parametrize("has_counters", [True, False])
@pytest.mark.parametrize("is_spinning", [True, False])
@pytest.mark.parametrize("stack", [IN_SYNCHRONIZE, IN_REPLAY])
def test_rank_that_has_not_replayed_is_missing(
    has_counters: bool, is_spinning: bool, stack: tuple[Frame, ...]
) -> None:
    job = make_job(has_counters=has_counters)
    for rank in (0, 1, 2):
        job.replay_graph(rank)
        job.ranks[rank].idle = not is_spinning
    wait(job, STALL_AFTER_S + 6, {0: stack, 1: stack, 2: stack, 3: IN_OWN_CODE})
    verdict = diagnose_only(job)
    assert (verdict.kind, verdict.culprits, verdict.waiting) == (
        VerdictKind.MISSING_RANK,
        (3,),
        (0, 1, 2),
    )
    assert verdict.severity is Severity.ALERT
    assert verdict.summary == (
        f"rank 3 has not entered {TITLE} (call 11 of group world), for which 3 ranks wait: it is at"
        " train.py:9 in tokenize"
    )
    (call_class,) = verdict.calls
    assert call_class.ranks == (0, 1, 2)
    assert (call_class.call.signature.op, call_class.call.signature.detail) == (
        "graph_replay",
        CONTENTS,
    )


def test_hosts_may_run_ahead_of_the_replay_that_is_missing() -> None:
    """Their devices are in the replay, although the first call that these have not completed, as far as
    they count, is the one after it.
    """
    job = make_job()
    for rank in (0, 1, 2):
        job.replay_graph(rank)
        job.make_call(rank, blocking=None, backend="nccl", done=False)
        job.report_device(rank, completed=5)
    wait(job, STALL_AFTER_S + 6, {**dict.fromkeys((0, 1, 2), IN_SYNCHRONIZE), 3: IN_OWN_CODE})
    verdict = diagnose_only(job)
    assert (verdict.kind, verdict.culprits, verdict.seq) == (VerdictKind.MISSING_RANK, (3,), 11)
    assert verdict.summary.startswith(f"rank 3 has not entered {TITLE} (call 11 of group world)")


@pytest.mark.parametrize("has_counters", [True, False])
def test_replay_that_no_rank_finishes_is_no_progress(has_counters: bool) -> None:
    job = make_job(has_counters=has_counters)
    for rank in RANKS:
        job.replay_graph(rank)
    stacks = dict.fromkeys(RANKS, IN_SYNCHRONIZE)
    wait(job, STALL_AFTER_S, stacks)
    assert not is_quiet(job.latest_attempt, job.now, job.limits)
    assert job.list_due_verdicts() == []
    wait(job, UNTIMED_GRACE_S + 2, stacks)
    verdict = diagnose_only(job)
    assert (verdict.kind, verdict.culprits, verdict.waiting) == (
        VerdictKind.NO_PROGRESS,
        (),
        (0, 1, 2, 3),
    )
    assert verdict.summary == (
        "ranks 0-3 wait for their devices, and no device finishes what is queued: rank 0's last call"
        f" is {TITLE} (call 11 of group world)"
    )


def test_counters_show_a_call_after_replays_that_no_rank_finishes() -> None:
    job = make_job()
    for rank in RANKS:
        job.replay_graph(rank)
        job.make_call(rank, blocking=None, backend="nccl", done=False)
        job.report_device(rank, completed=5)
    wait(job, STALL_AFTER_S + UNTIMED_GRACE_S + 2, dict.fromkeys(RANKS, IN_SYNCHRONIZE))
    verdict = diagnose_only(job)
    assert (verdict.kind, verdict.culprits) == (VerdictKind.NO_PROGRESS, ())
    assert verdict.summary == (
        "all 4 ranks made the same call and none finishes: all_reduce (call 12 of group world)"
    )


def test_device_that_lags_behind_replays_is_stuck_in_the_right_call() -> None:
    """Rank 1's device does not come to an eager call after replays, which others have begun."""
    job = make_job()
    for rank in RANKS:
        job.replay_graph(rank)
        job.make_call(rank, blocking=None, backend="nccl", done=False)
        job.report_device(rank, completed=5, started=5 if rank == 1 else 6)
    wait(job, STALL_AFTER_S + 4, dict.fromkeys(RANKS, IN_SYNCHRONIZE))
    verdict = diagnose_only(job)
    assert (verdict.kind, verdict.culprits, verdict.seq) == (VerdictKind.DEVICE_STUCK, (1,), 12)
    assert "has queued all_reduce (call 12 of group world)" in verdict.summary


def test_replay_of_another_graph_is_a_mismatch() -> None:
    job = make_job()
    for rank in RANKS:
        job.replay_graph(rank, "3 collectives (all_gather), hash 9" if rank == 1 else CONTENTS)
    verdict = diagnose_only(job)
    assert (verdict.kind, verdict.culprits) == (VerdictKind.MISMATCH, (1,))
    assert verdict.summary == (
        "rank 1 replayed a CUDA graph with 3 collectives (all_gather) where ranks 0, 2-3 replayed a"
        " CUDA graph with 12 collectives (all_reduce) (call 11 of group world)"
    )


def test_graphs_that_look_the_same_are_shown_with_their_hashes() -> None:
    job = make_job()
    for rank in RANKS:
        hashed = CONTENTS.replace("hash 5", "hash 9") if rank == 1 else CONTENTS
        job.replay_graph(rank, hashed)
    verdict = diagnose_only(job)
    assert verdict.summary == (
        "rank 1 replayed a CUDA graph with 12 collectives (all_reduce), hash 9 where ranks 0, 2-3"
        " replayed a CUDA graph with 12 collectives (all_reduce), hash 5 (call 11 of group world)"
    )


@pytest.mark.parametrize("has_counters", [True, False])
def test_rank_may_execute_what_others_replay(has_counters: bool) -> None:
    """torch.compile decides on each rank when it captures a graph."""
    job = make_job(has_counters=has_counters)
    for rank in RANKS:
        if rank == 1:
            job.make_call(rank, blocking=None, backend="nccl")
            job.make_call(rank, blocking=None, backend="nccl")
        else:
            job.replay_graph(rank)
    for _ in range(5):
        job.advance_time(1.0)
        assert job.list_due_verdicts() == []
        for rank in RANKS:
            job.replay_graph(rank)


@pytest.mark.parametrize("has_counters", [True, False])
def test_idle_engine_after_a_replay_is_left_alone(has_counters: bool) -> None:
    job = make_job(has_counters=has_counters)
    wait(job, 200, dict.fromkeys(RANKS, AT_QUEUE))
    assert job.list_due_verdicts() == []
