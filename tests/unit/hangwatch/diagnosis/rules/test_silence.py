"""Hosts that do not report: lost ones are named, hosts that continue without reporting are not, and
old reports are not taken for the current state.
"""

from __future__ import annotations

import pytest

from hangwatch.diagnosis import diagnose
from hangwatch.model.calls import StreamKind
from hangwatch.model.kinds import VerdictKind
from hangwatch.model.limits import Limits
from hangwatch.model.ranks import ExceptionInfo, Frame
from hangwatch.model.verdicts import Verdict
from hangwatch.protocol import heartbeat
from tests.simulation.scripted_job import ScriptedJob

FAR_RANKS = (4, 5, 6, 7)
CONNECTION_RESET = ExceptionInfo(type="RuntimeError", message="Connection reset by peer")


@pytest.fixture
def job() -> ScriptedJob:
    return make_two_host_job("node1", "agent-node1")


def make_two_host_job(host: str, agent: str) -> ScriptedJob:
    """Two hosts of four ranks, all of which have made and reported calls. The name and the node agent
    are those of the second host.
    """
    made = ScriptedJob(8)
    for rank in FAR_RANKS:
        made.ranks[rank].host, made.ranks[rank].agent = host, agent
    for _ in range(3):
        run_step(made)
    return made


def run_step(job: ScriptedJob, seconds: float = 0.5) -> None:
    job.make_calls()
    job.send_heartbeats()
    job.advance_time(seconds)


def cut_off(job: ScriptedJob, *ranks: int) -> None:
    for rank in ranks:
        job.ranks[rank].is_reporting = False


def reconnect_all(job: ScriptedJob) -> None:
    for rank in job.ranks.values():
        rank.is_reporting = True


def list_blamed(verdicts: list[Verdict]) -> list[tuple[VerdictKind, tuple[int, ...]]]:
    return [(v.kind, v.culprits) for v in verdicts]


def collect_verdicts(job: ScriptedJob, seconds: float) -> list[Verdict]:
    """All that is due at some moment of that time."""
    verdicts = []
    for _ in range(int(seconds * 2)):
        job.advance_time(0.5)
        verdicts += job.list_due_verdicts()
    return verdicts


def test_disconnected_host_is_lost(job: ScriptedJob) -> None:
    cut_off(job, *FAR_RANKS)
    job.make_calls(except_ranks=FAR_RANKS, done=False)
    assert collect_verdicts(job, 9) == []
    (verdict, *_) = collect_verdicts(job, 2)
    assert (verdict.kind, verdict.culprits, verdict.waiting) == (
        VerdictKind.LOST_NODE,
        FAR_RANKS,
        (0, 1, 2, 3),
    )
    assert "node1" in verdict.summary


def test_all_ranks_of_lost_host_are_lost(job: ScriptedJob) -> None:
    job.add_group("pair", (0, 4))
    cut_off(job, *FAR_RANKS)
    job.make_call(0, group="pair")
    job.make_calls(except_ranks=(0, *FAR_RANKS), done=False)
    assert set(list_blamed(collect_verdicts(job, 12))) == {(VerdictKind.LOST_NODE, FAR_RANKS)}


def test_lost_host_is_one_verdict_despite_many_waits(job: ScriptedJob) -> None:
    for near, far in zip(range(4), FAR_RANKS, strict=True):
        job.add_group(f"pair{near}", (near, far))
        job.make_call(near, group=f"pair{near}")
    cut_off(job, *FAR_RANKS)
    job.advance_time(12)
    (verdict,) = job.list_due_verdicts()
    assert (verdict.kind, verdict.culprits, verdict.waiting) == (
        VerdictKind.LOST_NODE,
        FAR_RANKS,
        (0, 1, 2, 3),
    )


def test_host_last_seen_inside_call_is_lost(
    job: ScriptedJob,
) -> None:
    job.make_calls(done=False)
    job.advance_time(1)
    job.send_heartbeats()
    cut_off(job, *FAR_RANKS)
    assert set(list_blamed(collect_verdicts(job, 14))) == {(VerdictKind.LOST_NODE, FAR_RANKS)}


def test_communicating_host_is_not_lost(job: ScriptedJob) -> None:
    cut_off(job, *FAR_RANKS)
    for _ in range(100):
        run_step(job)
        assert job.list_due_verdicts() == []


def test_hang_is_named_while_another_host_is_not_reporting(job: ScriptedJob) -> None:
    cut_off(job, *FAR_RANKS)
    for _ in range(30):
        run_step(job)
    job.make_calls(except_ranks=(2,), done=False)
    assert set(list_blamed(collect_verdicts(job, 14))) == {(VerdictKind.MISSING_RANK, (2,))}


def test_rank_waiting_before_host_fell_silent_is_not_the_cause(job: ScriptedJob) -> None:
    job.make_calls(except_ranks=(2,), done=False)
    job.advance_time(1)
    job.send_heartbeats()
    cut_off(job, *FAR_RANKS)
    assert set(list_blamed(collect_verdicts(job, 14))) == {(VerdictKind.MISSING_RANK, (2,))}


def test_host_proven_alive_earlier_can_be_lost(job: ScriptedJob) -> None:
    cut_off(job, *FAR_RANKS)
    for _ in range(30):
        run_step(job)
    job.make_calls(except_ranks=FAR_RANKS, done=False)
    assert collect_verdicts(job, 9) == []
    assert set(list_blamed(collect_verdicts(job, 3))) == {(VerdictKind.LOST_NODE, FAR_RANKS)}


def test_waits_do_not_grow_while_no_host_reports(job: ScriptedJob) -> None:
    job.make_calls(except_ranks=(5,), done=False)
    job.advance_time(2)
    job.send_heartbeats()
    cut_off(job, *range(8))
    assert collect_verdicts(job, 60) == []


def test_host_reconnecting_later_is_not_lost(job: ScriptedJob) -> None:
    """The others wait, legally, for one of its ranks that is in a declared phase; the server was
    away for a minute.
    """
    job.ranks[5].phase = "evaluate"
    job.make_calls(except_ranks=(5,), done=False)
    cut_off(job, *range(8))
    job.advance_time(60)
    reconnect_all(job)
    cut_off(job, *FAR_RANKS)
    assert [v for v in collect_verdicts(job, 8) if v.kind is VerdictKind.LOST_NODE] == []


def test_two_hosts_of_one_name() -> None:
    job = make_two_host_job("node0", "another")
    cut_off(job, *FAR_RANKS)
    job.make_calls(except_ranks=FAR_RANKS, done=False)
    assert set(list_blamed(collect_verdicts(job, 12))) == {(VerdictKind.LOST_NODE, FAR_RANKS)}


def test_connection_error_is_not_blamed_when_host_is_lost(job: ScriptedJob) -> None:
    cut_off(job, *FAR_RANKS)
    job.make_calls(except_ranks=FAR_RANKS, done=False)
    job.advance_time(0.2)
    for rank in range(4):
        job.end_process(rank, status=1, exception=CONNECTION_RESET)
    assert collect_verdicts(job, 9) == []
    assert set(list_blamed(collect_verdicts(job, 3))) == {(VerdictKind.LOST_NODE, FAR_RANKS)}


@pytest.mark.parametrize("raised", [ExceptionInfo(type="ValueError", message="shape"), None])
def test_own_failure_is_blamed_immediately_despite_silent_host(
    job: ScriptedJob, raised: ExceptionInfo | None
) -> None:
    cut_off(job, *FAR_RANKS)
    job.end_process(1, signal=None if raised else 9, status=1 if raised else None, exception=raised)
    job.make_calls(except_ranks=(1, *FAR_RANKS), done=False)
    assert list_blamed(collect_verdicts(job, 3))[0] == (VerdictKind.DEAD_RANK, (1,))


def test_connection_error_while_all_report_blames_its_rank(job: ScriptedJob) -> None:
    job.make_calls(done=False)
    job.advance_time(0.2)
    job.end_process(1, status=1, exception=CONNECTION_RESET)
    assert list_blamed(collect_verdicts(job, 3))[0] == (VerdictKind.DEAD_RANK, (1,))


def test_network_failure_is_one_verdict_for_all_groups(job: ScriptedJob) -> None:
    for near, far in zip(range(4), FAR_RANKS, strict=True):
        job.add_group(f"pair{near}", (near, far))
        job.make_calls(group=f"pair{near}", done=False)
    job.add_group("near", (0, 1))
    job.complete_calls(0, "pair0")  # it has finished its own, and waits for one who has not
    job.make_call(0, group="near")
    job.advance_time(11)
    (verdict,) = job.list_due_verdicts()
    assert (verdict.kind, verdict.culprits, verdict.waiting) == (
        VerdictKind.NO_PROGRESS,
        (),
        tuple(range(8)),
    )
    assert "3 more such calls" in verdict.summary


def test_sent_message_does_not_arrive(job: ScriptedJob) -> None:
    """A rank whose stack shows that it waits for the message is not blamed, nor are its waiters."""
    job.make_p2p_call(4, StreamKind.SEND, 0, done=True)
    job.make_p2p_call(0, StreamKind.RECV, 4)
    job.add_group("near", (0, 1))
    job.make_call(1, group="near")
    job.advance_time(6)
    job.send_heartbeats()
    job.report_stack(
        0,
        Frame(
            function="recv",
            file="/opt/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py",
            line=2500,
        ),
    )
    job.advance_time(6)
    (verdict,) = job.list_due_verdicts()
    assert (verdict.kind, verdict.waiting) == (VerdictKind.NO_PROGRESS, (0, 1))
    assert "rank 0 does not finish recv, although rank 4 has sent" in verdict.summary


def test_partial_completion_on_failed_network(job: ScriptedJob) -> None:
    job.make_calls(done=False)
    for rank in (0, 1):
        job.complete_calls(rank)
        job.make_call(rank)
    job.advance_time(11)
    (verdict,) = job.list_due_verdicts()
    assert (verdict.kind, verdict.culprits, verdict.waiting) == (
        VerdictKind.NO_PROGRESS,
        (),
        tuple(range(8)),
    )
    assert "ranks 2-7 cannot finish it" in verdict.summary


def test_rarely_reporting_host_is_not_lost_between_heartbeats() -> None:
    assert (Limits().lost_after_s, Limits(stall_after_s=10.0).lost_after_s) == (10.0, 5.0)
    assert Limits(stall_after_s=10.0, report_interval_s=2.0).lost_after_s == 5.0
    assert Limits(stall_after_s=10.0, report_interval_s=20.0).lost_after_s == 25.0


def send_terse_update(job: ScriptedJob) -> None:
    """The second host reports only that its ranks make progress."""
    job.apply_heartbeat(host="node1", agent="agent-node1", brief=True)


def test_host_sending_terse_updates_is_not_lost(job: ScriptedJob) -> None:
    cut_off(job, *FAR_RANKS)
    job.make_calls(except_ranks=FAR_RANKS, done=False)
    for _ in range(40):
        job.advance_time(1.0)
        send_terse_update(job)
        assert list_blamed(job.list_due_verdicts()) == [], "their positions are unknown"
    reconnect_all(job)
    job.advance_time(1.0)
    assert list_blamed(job.list_due_verdicts()) == [(VerdictKind.SLOW_RANK, FAR_RANKS)], (
        "they were getting on elsewhere until just now"
    )
    job.advance_time(job.limits.stall_after_s)
    assert list_blamed(job.list_due_verdicts()) == [(VerdictKind.MISSING_RANK, FAR_RANKS)]


def test_progressing_ranks_are_not_waiting(job: ScriptedJob) -> None:
    job.make_calls(except_ranks=(0,), done=False)
    job.advance_time(1.5)
    job.send_heartbeats()
    assert job.run_diagnosis().verdicts[0].waiting == (1, 2, 3, *FAR_RANKS)
    cut_off(job, *FAR_RANKS)
    for _ in range(3):
        job.advance_time(0.5)
        send_terse_update(job)
    job.send_heartbeats()
    assert job.run_diagnosis().verdicts[0].waiting == (1, 2, 3)


def test_terse_updates_carry_created_groups_only(
    job: ScriptedJob,
) -> None:
    for rank in job.ranks:
        job.make_setup_call(rank)
    job.send_heartbeats()
    process = job.latest_attempt.processes[4]
    last_seen_at, uid = process.reports.last_seen_at, job.ranks[4].streams["setup"].uid
    job.advance_time(5.0)
    made = heartbeat.ProcessUpdate(
        key="4-1", streams=(heartbeat.StreamUpdate(uid=uid, entered=2, completed=2, chain=77),)
    )
    job.apply_heartbeat(host="node1", agent="agent-node1", brief=True, processes=(made,))
    assert (process.reports.last_seen_at, process.reports.last_progress_at) == (
        last_seen_at,
        job.now,
    )
    assert process.streams[uid].entered == 2
    assert (process.activity.state, process.lifecycle) == ("S", 3), "nothing else was reported"
    unknown = heartbeat.Heartbeat(
        host="node1",
        agent="agent-node1",
        number=99,
        brief=True,
        processes=(heartbeat.ProcessUpdate(key="9-9"),),
    )
    assert not job.fleet.apply_heartbeat(unknown, job.now), "a full resync is requested"


def test_terse_update_ends_a_wait(job: ScriptedJob) -> None:
    job.make_calls(except_ranks=(0,), done=False)
    job.advance_time(1.5)
    job.send_heartbeats()
    attempt, uid = job.latest_attempt, job.ranks[4].streams["world"].uid
    stream = attempt.processes[4].streams[uid]
    assert 4 in attempt.suspects and stream.is_pending
    job.advance_time(0.5)
    ended = heartbeat.StreamUpdate(
        uid=uid, entered=stream.entered, completed=stream.entered, entered_s=2.0
    )
    update = heartbeat.ProcessUpdate(key="4-1", streams=(ended,))
    job.apply_heartbeat(host="node1", agent="agent-node1", brief=True, processes=(update,))
    assert 4 not in attempt.suspects
    assert not stream.is_pending


def make_relay_job() -> ScriptedJob:
    """Rank 0 is at work, rank 1 waits to receive from it, and ranks 2 and 3 for rank 1; each has a
    host of its own.
    """
    made = ScriptedJob(4)
    for rank in made.ranks.values():
        rank.host = f"node{rank.number}"
    rest = made.add_group("rest", (1, 2, 3))
    made.make_calls()
    made.make_p2p_call(0, StreamKind.SEND, 1, done=True)
    made.make_p2p_call(1, StreamKind.RECV, 0, done=True, blocking=True)
    made.make_calls(group=rest)
    made.send_heartbeats()
    made.advance_time(1.0)
    made.make_p2p_call(1, StreamKind.RECV, 0, blocking=True)
    made.make_calls(group=rest, done=False, except_ranks=(1,))
    for _ in range(5):
        made.advance_time(3.0)
        made.send_heartbeats()
    return made


def test_blocked_rank_is_not_blamed_right_after_release() -> None:
    job = make_relay_job()
    assert [v.culprits for v in job.list_due_verdicts()] == [(0,)]
    job.advance_time(1.0)
    job.make_p2p_call(0, StreamKind.SEND, 1, done=True)
    for _ in range(3):  # it makes progress, and reports before the others do
        job.make_p2p_call(0, StreamKind.SEND, 1, done=True)
    cut_off(job, 1, 2, 3)
    job.send_heartbeats()
    job.advance_time(1.0)
    assert [v.culprits for v in job.run_diagnosis().verdicts if v.is_confirmed] == []


def test_released_rank_is_blamed_if_it_does_not_progress() -> None:
    job = make_relay_job()
    job.make_p2p_call(0, StreamKind.SEND, 1, done=True)
    job.send_heartbeats()
    for _ in range(4):
        job.advance_time(3.0)
        job.send_heartbeats()
    assert [v.culprits for v in job.run_diagnosis().verdicts if v.is_confirmed] == [(1,)]


def test_blocked_rank_is_not_blamed_when_sender_reports_first() -> None:
    job = make_relay_job()
    cut_off(job, 1, 2, 3)
    for _ in range(3):
        job.advance_time(0.5)
        job.make_p2p_call(0, StreamKind.SEND, 1, done=True)
        job.send_heartbeats()
        assert [v.culprits for v in job.run_diagnosis().verdicts if v.is_confirmed] == []


def test_rank_reporting_again_while_waiting_is_not_blamed() -> None:
    """Rank 1 waits to receive from rank 0, as it did while neither host reported."""
    made = ScriptedJob(4)
    for rank in made.ranks.values():
        rank.host = f"node{rank.number}"
    made.make_calls()
    made.make_p2p_call(0, StreamKind.SEND, 1, done=True)
    made.make_p2p_call(1, StreamKind.RECV, 0, done=True)
    made.send_heartbeats()
    made.make_p2p_call(0, StreamKind.SEND, 1, done=True)
    made.make_p2p_call(1, StreamKind.RECV, 0, done=True)
    made.make_calls()
    cut_off(made, 0, 1)
    made.make_p2p_call(1, StreamKind.RECV, 0)
    made.make_calls(except_ranks=(0, 1), done=False)
    limits = Limits(stall_after_s=made.limits.stall_after_s, report_interval_s=25.0)
    for _ in range(int(made.limits.stall_after_s)):
        made.advance_time(1.0)
        made.send_heartbeats()
    made.ranks[1].is_reporting = True
    verdicts = []
    for _ in range(4):
        made.advance_time(0.5)
        made.send_heartbeats()
        verdicts += [
            v
            for v in diagnose(made.latest_attempt, made.now, limits).verdicts
            if v.is_confirmed and 1 in v.culprits
        ]
    assert verdicts == []


@pytest.mark.parametrize("ran", [True, False])
def test_rank_is_not_blamed_for_time_without_reports(
    ran: bool,
) -> None:
    """Rank 2 waits for rank 1, which waits for rank 0. Rank 1 reports before both waits and after
    them, when rank 2 no longer reports.

    If it had done nothing in between, it would have been in its receive for all that time, or would
    have completed it immediately.
    """
    made = ScriptedJob(3)
    for rank in made.ranks.values():
        rank.host = f"node{rank.number}"
    for sender, receiver in ((0, 1), (1, 2)):
        made.make_p2p_call(sender, StreamKind.SEND, receiver, done=True)
        made.make_p2p_call(receiver, StreamKind.RECV, sender, done=True)
    made.send_heartbeats()
    cut_off(made, 1)
    made.make_p2p_call(1, StreamKind.RECV, 0)
    made.make_p2p_call(2, StreamKind.RECV, 1)
    limits = Limits(stall_after_s=made.limits.stall_after_s, report_interval_s=25.0)
    for _ in range(2 * int(made.limits.stall_after_s)):
        made.advance_time(1.0)
        made.send_heartbeats()
    made.make_p2p_call(0, StreamKind.SEND, 1, done=True)
    made.complete_calls(1, "recv0/0")
    reconnect_all(made)
    cut_off(made, 2)
    made.ranks[1].idle = not ran
    verdicts = []
    for _ in range(8):
        made.send_heartbeats()
        verdicts += [
            v
            for v in diagnose(made.latest_attempt, made.now, limits).verdicts
            if v.is_confirmed and 1 in v.culprits
        ]
        made.advance_time(1.0)
    assert (verdicts == []) is ran


def test_repeatedly_refused_host_is_lost_only_when_silent(
    job: ScriptedJob,
) -> None:
    cut_off(job, *FAR_RANKS)
    job.make_calls(except_ranks=FAR_RANKS, done=False)
    for _ in range(20):
        job.advance_time(1.0)
        job.fleet.mark_refused("agent-node1", job.now)
        assert job.list_due_verdicts() == []
    assert collect_verdicts(job, 9) == []
    assert set(list_blamed(collect_verdicts(job, 2))) == {(VerdictKind.LOST_NODE, FAR_RANKS)}
