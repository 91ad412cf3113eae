"""Ranks that others wait for and that do not make the call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from hangwatch.diagnosis import diagnose
from hangwatch.diagnosis.graph.edges import shows_all_members
from hangwatch.diagnosis.messages import describe_ranks
from hangwatch.diagnosis.rules import missing
from hangwatch.model.calls import Call, Signature, Site, StreamKind
from hangwatch.model.kinds import Severity, VerdictKind
from hangwatch.model.limits import MIN_WAIT_S, Limits
from hangwatch.model.ranks import Frame
from hangwatch.protocol import heartbeat
from hangwatch.tracking.attempt import Attempt
from hangwatch.tracking.call_stream import MAX_URGENT_SUSPECTS, GroupState
from hangwatch.tracking.fleet import Fleet
from tests.simulation.scripted_job import ScriptedJob

from ..expect import make_frame


def test_healthy_job_has_no_verdict_during_long_computation() -> None:
    job = ScriptedJob(4)
    for _ in range(20):
        job.make_calls()
    for rank in job.ranks.values():
        rank.idle = False
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


SLEEPING = make_frame("wait_for_data", text="time.sleep(0.2)")
CHECKING = (make_frame("exists", "/usr/lib/python3.11/pathlib.py"), make_frame("wait_for_data"))
READING = (make_frame("read", "/usr/lib/python3.11/gzip.py"), make_frame("load_batch"))


@pytest.mark.parametrize(
    ("stacks", "kind"),
    [
        (((SLEEPING,), CHECKING), VerdictKind.MISSING_RANK),
        ((CHECKING, (SLEEPING,)), VerdictKind.MISSING_RANK),
        ((CHECKING, READING), VerdictKind.SLOW_RANK),
        (((SLEEPING,), READING), VerdictKind.SLOW_RANK),
    ],
)
def test_loop_that_polls_makes_no_progress(
    stacks: Sequence[tuple[Frame, ...]], kind: VerdictKind
) -> None:
    job = ScriptedJob(2)
    job.send_heartbeats()
    job.make_call(0)
    for stack in stacks:
        job.advance_time(6)
        job.send_heartbeats()
        job.report_stack(1, *stack, make_frame("main"))
    (verdict,) = job.list_due_verdicts()
    assert (verdict.kind, verdict.culprits) == (kind, (1,))


def make_moved_job() -> ScriptedJob:
    """A job of two ranks: rank 0 waits, and rank 1 was seen in two places since then."""
    job = ScriptedJob(2)
    job.send_heartbeats()
    job.make_call(0)
    for stack in (CHECKING, READING):
        job.advance_time(6)
        job.send_heartbeats()
        job.report_stack(1, *stack, make_frame("main"), cpu_s=0.0)
    (verdict,) = job.list_due_verdicts()
    assert verdict.kind is VerdictKind.SLOW_RANK
    return job


def test_rank_that_moved_and_is_stuck_since_is_missing() -> None:
    job = make_moved_job()
    job.advance_time(4)
    assert 1 not in [request.rank for request in job.run_diagnosis().requests]
    job.advance_time(7)
    (verdict,) = job.list_due_verdicts()
    assert verdict.kind is VerdictKind.SLOW_RANK, "nothing is known of it since its last sample"
    assert 1 in [request.rank for request in job.run_diagnosis().requests if request.stacks]
    job.report_stack(1, *READING, make_frame("main"), cpu_s=0.0)
    (verdict,) = job.list_due_verdicts()
    assert (verdict.kind, verdict.severity, verdict.culprits) == (
        VerdictKind.MISSING_RANK,
        Severity.ALERT,
        (1,),
    )


@pytest.mark.parametrize(
    ("seconds", "stack", "cpu_s"),
    [
        (9, READING, 0.0),  # one place, but for less than the limit
        (11, CHECKING, 0.0),  # another place
        (11, READING, 1.0),  # one place, with CPU time
    ],
)
def test_rank_that_moves_is_slow(seconds: float, stack: tuple[Frame, ...], cpu_s: float) -> None:
    job = make_moved_job()
    job.advance_time(seconds)
    job.report_stack(1, *stack, make_frame("main"), cpu_s=cpu_s)
    (verdict,) = job.list_due_verdicts()
    assert verdict.kind is VerdictKind.SLOW_RANK


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
    """The receive of a thread blocks, and its rank continues to train."""
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


@pytest.mark.parametrize(
    ("is_idle", "cpu_s", "kind"),
    [
        (True, 0.0, VerdictKind.FROZEN_RANK),  # blocked in native code with the GIL
        (False, 6.0, VerdictKind.FROZEN_RANK),  # computes in native code with the GIL
        (False, 0.3, VerdictKind.SLOW_RANK),  # gets hardly any CPU on an overloaded host
    ],
)
def test_rank_that_waits_for_a_cpu_is_not_frozen(
    is_idle: bool, cpu_s: float, kind: VerdictKind
) -> None:
    job = ScriptedJob(3)
    late = job.ranks[1]
    late.pulse_at, late.cpu_s = job.now - 0.1, 40.0
    job.make_calls()
    job.send_heartbeats()
    late.idle = is_idle
    job.make_calls(except_ranks=(1,), done=False)
    for _ in range(11):
        job.advance_time(1)
        late.cpu_s += cpu_s / 11
        job.send_heartbeats()
    (verdict,) = job.list_due_verdicts()
    assert (verdict.kind, verdict.culprits) == (kind, (1,))


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


def test_reports_of_replaced_process_do_not_stop_diagnosis() -> None:
    group = heartbeat.StreamIdentity(kind=StreamKind.COLLECTIVE, name="0", desc="", ranks="0-1")
    calls = tuple(Call(seq=seq, signature=Signature(op="all_reduce"), thread=seq) for seq in (1, 2))
    twice = tuple(
        heartbeat.StreamUpdate(uid=uid, identity=group, entered=1, completed=1) for uid in (1, 2)
    )
    fleet = Fleet()
    for number, (key, streams) in enumerate(
        [("1-1", twice), ("2-1", ()), ("1-1", (twice[0]._replace(shared=calls),))], 1
    ):
        identity = heartbeat.ProcessIdentity(job="j", rank=0, world_size=2, pid=1, start_ticks=1)
        process = heartbeat.ProcessUpdate(key=key, identity=identity, lifecycle=3, streams=streams)
        fleet.apply_heartbeat(
            heartbeat.Heartbeat(host="n", agent="a", number=number, processes=(process,)), 100.0
        )
    (attempt,) = fleet.attempts.values()
    assert diagnose(attempt, 101.0, Limits()).verdicts == ()


def test_previously_blocked_rank_is_not_slow_for_its_waiters() -> None:
    """The awaited rank makes its call, and the next rank reports progress before the ranks that
    wait for that one report again.
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
