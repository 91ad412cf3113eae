"""Hosts that are not heard: lost ones are named, those that run on unheard are not, and old words
are not taken for the present.
"""

from __future__ import annotations

import pytest

from hangwatch.diagnosis import diagnose
from hangwatch.model.calls import StreamKind
from hangwatch.model.kinds import VerdictKind
from hangwatch.model.limits import Limits
from hangwatch.model.ranks import ExceptionInfo
from hangwatch.model.threads import Frame
from hangwatch.model.verdicts import Verdict
from hangwatch.protocol import heartbeat
from tests.unit.jobs import Job

FAR = (4, 5, 6, 7)
RESET = ExceptionInfo(type="RuntimeError", message="Connection reset by peer")


@pytest.fixture
def job() -> Job:
    return two_hosts("node1", "agent-node1")


def two_hosts(host: str, agent: str) -> Job:
    """Hosts of four ranks, all of whom have made calls and told of them; the second's name and node
    agent are as given.
    """
    made = Job(8)
    for rank in FAR:
        made.ranks[rank].host, made.ranks[rank].agent = host, agent
    for _ in range(3):
        step(made)
    return made


def step(job: Job, seconds: float = 0.5) -> None:
    job.everybody()
    job.heartbeat()
    job.wait(seconds)


def cut(job: Job, *ranks: int) -> None:
    for rank in ranks:
        job.ranks[rank].heard = False


def mend(job: Job) -> None:
    for rank in job.ranks.values():
        rank.heard = True


def told(verdicts: list[Verdict]) -> list[tuple[VerdictKind, tuple[int, ...]]]:
    return [(v.kind, v.culprits) for v in verdicts]


def over(job: Job, seconds: float) -> list[Verdict]:
    """All that is due at some moment of that time."""
    found = []
    for _ in range(int(seconds * 2)):
        job.wait(0.5)
        found += job.verdicts()
    return found


def test_a_host_that_is_cut_off_is_lost(job: Job) -> None:
    cut(job, *FAR)
    job.everybody(but=FAR, done=False)
    assert over(job, 9) == []
    (verdict, *_) = over(job, 2)
    assert (verdict.kind, verdict.culprits, verdict.waiting) == (
        VerdictKind.LOST_NODE,
        FAR,
        (0, 1, 2, 3),
    )
    assert "node1" in verdict.summary


def test_all_its_ranks_are_lost_though_others_wait_for_one_of_them(job: Job) -> None:
    job.group("pair", (0, 4))
    cut(job, *FAR)
    job.call(0, group="pair")
    job.everybody(but=(0, *FAR), done=False)
    assert set(told(over(job, 12))) == {(VerdictKind.LOST_NODE, FAR)}


def test_a_lost_host_is_one_verdict_though_each_rank_waits_for_another_of_it(job: Job) -> None:
    for near, far in zip(range(4), FAR, strict=True):
        job.group(f"pair{near}", (near, far))
        job.call(near, group=f"pair{near}")
    cut(job, *FAR)
    job.wait(12)
    (verdict,) = job.verdicts()
    assert (verdict.kind, verdict.culprits, verdict.waiting) == (
        VerdictKind.LOST_NODE,
        FAR,
        (0, 1, 2, 3),
    )


def test_a_host_that_was_last_seen_inside_the_call_is_lost_and_the_network_not_blamed(
    job: Job,
) -> None:
    job.everybody(done=False)
    job.wait(1)
    job.heartbeat()
    cut(job, *FAR)
    assert set(told(over(job, 14))) == {(VerdictKind.LOST_NODE, FAR)}


def test_no_host_is_lost_with_whom_others_get_further(job: Job) -> None:
    cut(job, *FAR)
    for _ in range(100):
        step(job)
        assert job.verdicts() == []


def test_who_hangs_is_named_although_another_host_runs_unheard(job: Job) -> None:
    cut(job, *FAR)
    for _ in range(30):
        step(job)
    job.everybody(but=(2,), done=False)
    assert set(told(over(job, 14))) == {(VerdictKind.MISSING_RANK, (2,))}


def test_who_was_seen_waiting_before_its_host_fell_silent_is_not_the_cause(job: Job) -> None:
    job.everybody(but=(2,), done=False)
    job.wait(1)
    job.heartbeat()
    cut(job, *FAR)
    assert set(told(over(job, 14))) == {(VerdictKind.MISSING_RANK, (2,))}


def test_a_host_that_was_proven_to_run_can_be_lost_all_the_same(job: Job) -> None:
    cut(job, *FAR)
    for _ in range(30):
        step(job)
    job.everybody(but=FAR, done=False)
    assert over(job, 9) == []
    assert set(told(over(job, 3))) == {(VerdictKind.LOST_NODE, FAR)}


def test_no_wait_grows_while_nobody_is_heard(job: Job) -> None:
    job.everybody(but=(5,), done=False)
    job.wait(2)
    job.heartbeat()
    cut(job, *range(8))
    assert over(job, 60) == []


def test_a_host_that_comes_back_later_than_another_is_not_lost(job: Job) -> None:
    """They wait, legally, for a rank of it that is in a declared phase; the server was away for a
    minute.
    """
    job.ranks[5].phase = "evaluate"
    job.everybody(but=(5,), done=False)
    cut(job, *range(8))
    job.wait(60)
    mend(job)
    cut(job, *FAR)
    assert [v for v in over(job, 8) if v.kind is VerdictKind.LOST_NODE] == []


def test_two_hosts_of_one_name() -> None:
    job = two_hosts("node0", "another")
    cut(job, *FAR)
    job.everybody(but=FAR, done=False)
    assert set(told(over(job, 12))) == {(VerdictKind.LOST_NODE, FAR)}


def test_whom_a_lost_connection_ends_is_not_blamed_when_a_whole_host_is_gone(job: Job) -> None:
    cut(job, *FAR)
    job.everybody(but=FAR, done=False)
    job.wait(0.2)
    for rank in range(4):
        job.die(rank, status=1, raised=RESET)
    assert over(job, 9) == []
    assert set(told(over(job, 3))) == {(VerdictKind.LOST_NODE, FAR)}


@pytest.mark.parametrize("raised", [ExceptionInfo(type="ValueError", message="shape"), None])
def test_who_fails_by_itself_is_blamed_at_once_whatever_is_not_heard(
    job: Job, raised: ExceptionInfo | None
) -> None:
    cut(job, *FAR)
    job.die(1, signal=None if raised else 9, status=1 if raised else None, raised=raised)
    job.everybody(but=(1, *FAR), done=False)
    assert told(over(job, 3))[0] == (VerdictKind.DEAD_RANK, (1,))


def test_a_connection_that_fails_while_all_are_heard_is_the_rank_s_own(job: Job) -> None:
    job.everybody(done=False)
    job.wait(0.2)
    job.die(1, status=1, raised=RESET)
    assert told(over(job, 3))[0] == (VerdictKind.DEAD_RANK, (1,))


def test_a_dead_network_is_one_verdict_however_many_groups_it_parts(job: Job) -> None:
    for near, far in zip(range(4), FAR, strict=True):
        job.group(f"pair{near}", (near, far))
        job.everybody(group=f"pair{near}", done=False)
    job.group("near", (0, 1))
    job.complete(0, "pair0")  # it has finished its own, and waits for one who has not
    job.call(0, group="near")
    job.wait(11)
    (verdict,) = job.verdicts()
    assert (verdict.kind, verdict.culprits, verdict.waiting) == (
        VerdictKind.NO_PROGRESS,
        (),
        tuple(range(8)),
    )
    assert "3 more such calls" in verdict.summary


def test_what_was_sent_does_not_arrive(job: Job) -> None:
    """Whoever waits for it by its stack is not blamed, nor are those who wait for that rank."""
    job.p2p(4, StreamKind.SEND, 0, done=True)
    job.p2p(0, StreamKind.RECV, 4)
    job.group("near", (0, 1))
    job.call(1, group="near")
    job.wait(6)
    job.heartbeat()
    job.stack(
        0,
        Frame(
            function="recv",
            file="/opt/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py",
            line=2500,
        ),
    )
    job.wait(6)
    (verdict,) = job.verdicts()
    assert (verdict.kind, verdict.waiting) == (VerdictKind.NO_PROGRESS, (0, 1))
    assert "rank 0 does not finish recv, although rank 4 has sent" in verdict.summary


def test_some_finish_a_call_on_a_dead_network_and_wait_in_the_next(job: Job) -> None:
    job.everybody(done=False)
    for rank in (0, 1):
        job.complete(rank)
        job.call(rank)
    job.wait(11)
    (verdict,) = job.verdicts()
    assert (verdict.kind, verdict.culprits, verdict.waiting) == (
        VerdictKind.NO_PROGRESS,
        (),
        tuple(range(8)),
    )
    assert "ranks 2-7 cannot finish it" in verdict.summary


def test_a_host_is_not_silent_between_two_of_its_heartbeats_however_seldom_it_has_its_turn() -> (
    None
):
    assert (Limits().lost_after_s, Limits(stall_after_s=10.0).lost_after_s) == (10.0, 5.0)
    assert Limits(stall_after_s=10.0, report_interval_s=10.0).lost_after_s == 20.0


def brief(job: Job) -> None:
    """The second host says no more than that its ranks get on."""
    job._beat(host="node1", agent="agent-node1", brief=True)


def test_a_host_that_says_no_more_than_that_its_ranks_get_on_is_not_lost(job: Job) -> None:
    cut(job, *FAR)
    job.everybody(but=FAR, done=False)
    for _ in range(40):
        job.wait(1.0)
        brief(job)
        assert told(job.verdicts()) == [], "where they are is not known"
    mend(job)
    job.wait(1.0)
    assert told(job.verdicts()) == [(VerdictKind.SLOW_RANK, FAR)], (
        "they were getting on elsewhere until just now"
    )
    job.wait(job.limits.stall_after_s)
    assert told(job.verdicts()) == [(VerdictKind.MISSING_RANK, FAR)]


def test_ranks_that_get_on_wait_for_nobody_whatever_they_were_last_seen_in(job: Job) -> None:
    job.everybody(but=(0,), done=False)
    job.wait(1.5)
    job.heartbeat()
    assert job.diagnose().verdicts[0].waiting == (1, 2, 3, *FAR)
    cut(job, *FAR)
    for _ in range(3):
        job.wait(0.5)
        brief(job)
    job.heartbeat()
    assert job.diagnose().verdicts[0].waiting == (1, 2, 3)


def test_of_ranks_that_get_on_the_groups_that_they_made_are_known_and_no_more_than_that(
    job: Job,
) -> None:
    for rank in job.ranks:
        job.setup(rank)
    job.heartbeat()
    process = job.attempt.processes[4]
    known, uid = process.last_seen_at, job.ranks[4].places["setup"].uid
    job.wait(5.0)
    made = heartbeat.ProcessUpdate(
        key="4-1", sequences=(heartbeat.StreamUpdate(uid=uid, entered=2, completed=2, chain=77),)
    )
    job._beat(host="node1", agent="agent-node1", brief=True, processes=(made,))
    assert (process.last_seen_at, process.last_progress_at) == (known, job.now)
    assert process.streams[uid].entered == 2
    assert (process.state, process.lifecycle) == ("S", 3), "nothing else was told"
    unknown = heartbeat.Heartbeat(
        host="node1",
        agent="agent-node1",
        number=99,
        brief=True,
        processes=(heartbeat.ProcessUpdate(key="9-9"),),
    )
    assert not job.fleet.apply_heartbeat(unknown, job.now), "it is asked for everything"


def relay() -> Job:
    """Rank 0 is at work, rank 1 waits to receive from it, and ranks 2 and 3 for rank 1; each has a
    host of its own.
    """
    made = Job(4)
    for rank in made.ranks.values():
        rank.host = f"node{rank.number}"
    rest = made.group("rest", (1, 2, 3))
    made.everybody()
    made.p2p(0, StreamKind.SEND, 1, done=True)
    made.p2p(1, StreamKind.RECV, 0, done=True, blocking=True)
    made.everybody(group=rest)
    made.heartbeat()
    made.wait(1.0)
    made.p2p(1, StreamKind.RECV, 0, blocking=True)
    made.everybody(group=rest, done=False, but=(1,))
    for _ in range(5):
        made.wait(3.0)
        made.heartbeat()
    return made


def test_who_was_held_up_in_all_that_is_known_of_it_is_not_blamed_as_soon_as_that_is_over() -> None:
    job = relay()
    assert [v.culprits for v in job.verdicts()] == [(0,)]
    job.wait(1.0)
    job.p2p(0, StreamKind.SEND, 1, done=True)
    for _ in range(3):  # it goes on, and is heard before the others are
        job.p2p(0, StreamKind.SEND, 1, done=True)
    cut(job, 1, 2, 3)
    job.heartbeat()
    job.wait(1.0)
    assert [v.culprits for v in job.diagnose().verdicts if v.is_confirmed] == []


def test_it_is_blamed_if_it_still_does_not_go_on() -> None:
    job = relay()
    job.p2p(0, StreamKind.SEND, 1, done=True)
    job.heartbeat()
    for _ in range(4):
        job.wait(3.0)
        job.heartbeat()
    assert [v.culprits for v in job.diagnose().verdicts if v.is_confirmed] == [(1,)]


def test_who_was_held_up_is_not_blamed_however_often_its_sender_is_heard_before_it_is() -> None:
    job = relay()
    cut(job, 1, 2, 3)
    for _ in range(3):
        job.wait(0.5)
        job.p2p(0, StreamKind.SEND, 1, done=True)
        job.heartbeat()
        assert [v.culprits for v in job.diagnose().verdicts if v.is_confirmed] == []


def test_who_is_heard_again_in_a_wait_is_not_blamed_for_what_it_finished_before() -> None:
    """Rank 1 waits to receive from rank 0, as it did in all the time in which its host, and that of
    rank 0, were not heard.
    """
    made = Job(4)
    for rank in made.ranks.values():
        rank.host = f"node{rank.number}"
    made.everybody()
    made.p2p(0, StreamKind.SEND, 1, done=True)
    made.p2p(1, StreamKind.RECV, 0, done=True)
    made.heartbeat()
    made.p2p(0, StreamKind.SEND, 1, done=True)
    made.p2p(1, StreamKind.RECV, 0, done=True)
    made.everybody()
    cut(made, 0, 1)
    made.p2p(1, StreamKind.RECV, 0)
    made.everybody(but=(0, 1), done=False)
    limits = Limits(stall_after_s=made.limits.stall_after_s, report_interval_s=25.0)
    for _ in range(int(made.limits.stall_after_s)):
        made.wait(1.0)
        made.heartbeat()
    made.ranks[1].heard = True
    found = []
    for _ in range(4):
        made.wait(0.5)
        made.heartbeat()
        found += [
            v
            for v in diagnose(made.attempt, made.now, limits).verdicts
            if v.is_confirmed and 1 in v.culprits
        ]
    assert found == []


@pytest.mark.parametrize("ran", [True, False])
def test_who_may_have_been_held_up_while_it_was_not_heard_is_not_blamed_for_that_time(
    ran: bool,
) -> None:
    """Rank 2 waits for rank 1, which waits for rank 0. Rank 1 is heard before all that and after
    it, when rank 2 is not heard any more.

    But for what it did since then it would have been in its receive for all that time, or would
    have been done with it at once.
    """
    made = Job(3)
    for rank in made.ranks.values():
        rank.host = f"node{rank.number}"
    for sender, receiver in ((0, 1), (1, 2)):
        made.p2p(sender, StreamKind.SEND, receiver, done=True)
        made.p2p(receiver, StreamKind.RECV, sender, done=True)
    made.heartbeat()
    cut(made, 1)
    made.p2p(1, StreamKind.RECV, 0)
    made.p2p(2, StreamKind.RECV, 1)
    limits = Limits(stall_after_s=made.limits.stall_after_s, report_interval_s=25.0)
    for _ in range(2 * int(made.limits.stall_after_s)):
        made.wait(1.0)
        made.heartbeat()
    made.p2p(0, StreamKind.SEND, 1, done=True)
    made.complete(1, "recv0/0")
    mend(made)
    cut(made, 2)
    made.ranks[1].idle = not ran
    found = []
    for _ in range(8):
        made.heartbeat()
        found += [
            v
            for v in diagnose(made.attempt, made.now, limits).verdicts
            if v.is_confirmed and 1 in v.culprits
        ]
        made.wait(1.0)
    assert (found == []) is ran


def test_a_host_that_is_refused_again_and_again_is_not_lost_until_it_speaks_no_more(
    job: Job,
) -> None:
    cut(job, *FAR)
    job.everybody(but=FAR, done=False)
    for _ in range(20):
        job.wait(1.0)
        job.fleet.mark_refused("agent-node1", job.now)
        assert job.verdicts() == []
    assert over(job, 9) == []
    assert set(told(over(job, 2))) == {(VerdictKind.LOST_NODE, FAR)}
