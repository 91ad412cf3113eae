"""What a host tells before its next heartbeat is due."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest

from hangwatch.agent.node.discovery.watched import Watched
from hangwatch.agent.node.reporting.changes import News, found
from hangwatch.agent.node.system.processes import Activity
from hangwatch.model.calls import StreamKind
from hangwatch.model.groups import Group
from hangwatch.model.ranks import ExitInfo
from hangwatch.protocol.heartbeat import ProcessIdentity
from hangwatch.ring.snapshot import RingSnapshot, StreamState

WORLD = Group(name="0", desc="default_pg", ranks=(0, 1))
SETUP, CALLS, CHANNEL = 1, 2, 3


def place(
    uid: int, kind: StreamKind, entered: int = 5, pending_s: float | None = None
) -> StreamState:
    return StreamState(
        uid=uid, kind=kind, group=WORLD, peer=None, tag=None, entered=entered, completed=entered if pending_s is None else entered - 1,
        chain=0, entered_s=pending_s or 0.0, pending_s=pending_s,
    )  # fmt: skip


def rank(
    number: int,
    *sequences: StreamState,
    pulse_s: float = 0.1,
    state: str = "S",
    op: str = "all_reduce",
) -> Watched:
    snapshot = RingSnapshot(
        pid=number, start_ticks=1, identity={}, lifecycle=3, step=None, pulse_s=pulse_s, phase=None, phase_s=0.0, phase_limit_s=None,
        record_count=0, dropped=0, errors=0, is_disabled=False, streams=sequences or (waiting(None),),
    )  # fmt: skip
    made = Watched(
        pid=number,
        start_ticks=1,
        proc="/proc",
        activity=Activity(busy_ns=0),
        found_ns=0,
        snapshot=snapshot,
    )
    made.activity.state = state
    made.history.ops[CALLS], made.history.ops[CHANNEL] = op, "recv"
    return made


def waiting(pending_s: float | None = 2.0, uid: int = CALLS) -> StreamState:
    return place(
        uid, StreamKind.COLLECTIVE if uid == CALLS else StreamKind.RECV, pending_s=pending_s
    )


def shares(number: int) -> Watched:
    made = rank(number)
    made.history.shared[CALLS] = 4
    return made


@pytest.mark.parametrize(
    ("now", "why"),
    [
        ([rank(1, waiting()), rank(2)], "one waits and the other does not"),
        (
            [rank(1, waiting()), rank(2, waiting(), op="broadcast")],
            "they wait in different operations",
        ),
        (
            [rank(1, waiting()), rank(2, waiting(0.1), waiting(3.0, CHANNEL))],
            "the one has waited for a message, and for longer",
        ),
        ([rank(1), rank(2, state="T")], "one is stopped"),
        ([rank(1), rank(2, pulse_s=4.0)], "one runs no Python"),
        ([rank(1), shares(2)], "two threads share a group"),
        ([rank(1, place(SETUP, StreamKind.SETUP, entered=6)), rank(2)], "a group was made"),
    ],
)
def test_what_is_rare_or_known_here_alone_is_news(now: list[Watched], why: str) -> None:
    assert found(now) - found([rank(1, place(SETUP, StreamKind.SETUP)), rank(2)]), why


@pytest.mark.parametrize(
    ("now", "why"),
    [
        ([rank(1), rank(2)], "nothing happens"),
        ([rank(1, waiting()), rank(2, waiting())], "all wait alike: other hosts say so, too"),
        ([rank(1, waiting(0.4)), rank(2)], "a short wait is everyday life"),
        ([rank(1, waiting())], "of one rank alone it cannot be told"),
        (
            [rank(1, replace(waiting(), entered=9)), rank(2, waiting())],
            "they need not be in the same call",
        ),
    ],
)
def test_all_else_waits_for_the_next_heartbeat(now: list[Watched], why: str) -> None:
    assert not found(now), why


def member(number: int, *members: int, pending_s: float = 2.0, entered: int = 5) -> Watched:
    made = rank(
        number,
        replace(
            waiting(pending_s), group=Group(name="tp", desc="tp", ranks=members), entered=entered
        ),
    )
    made.identity = ProcessIdentity(job="j", rank=number, world_size=8, pid=number, start_ticks=1)
    return made


def test_a_call_of_which_all_members_are_here_and_that_does_not_finish_is_news() -> None:
    assert found([member(4, 4, 5), member(5, 4, 5)])
    assert not found([member(4, 4, 6), member(5, 5, 7)]), "half of the members are elsewhere"
    assert not found([member(4, 4, 5), member(5, 4, 5, entered=6)]), "they are not in the same call"
    assert not found([member(4, 4, 5, pending_s=0.4), member(5, 4, 5, pending_s=0.4)])


def test_who_has_ended_or_is_sampled_makes_no_news() -> None:
    ended, sampled = rank(1), rank(3, state="t")
    ended.ended, sampled.paused = ExitInfo(exit_status=0), True
    assert not found([ended, rank(2, waiting()), sampled]) - found([rank(2, waiting()), rank(3)])


class Host:
    """News as the node agent's loop uses it."""

    def __init__(self, *ranks: Watched) -> None:
        self.news, self.ranks = News(), ranks

    def looks(self, *ranks: Watched) -> tuple[float, bool] | None:
        self.ranks = ranks or self.ranks
        return self.news.look(self.ranks)

    def beats(self, within_s: float | None) -> None:
        told: Iterable[Watched] = self.ranks
        self.news.told(told)
        self.news.answered(told, within_s)


def test_a_server_that_hears_a_host_often_enough_gets_no_early_heartbeat() -> None:
    host = Host(rank(1), rank(2))
    host.beats(None)
    assert host.looks(rank(1, waiting()), rank(2)) is None


def test_news_is_told_within_the_time_that_the_server_gives_and_once_between_two_heartbeats() -> (
    None
):
    host = Host(rank(1), rank(2))
    host.beats(3.0)
    assert host.looks() is None
    first = host.looks(rank(1, waiting()), rank(2))
    assert first is not None and 0.0 <= first[0] <= 3.0 and first[1]
    assert host.looks(rank(1, waiting()), rank(2, state="T")) is None, (
        "the heartbeat that is due by now tells that, too"
    )
    host.beats(3.0)
    assert host.looks() is None, "it is told"
    assert host.looks(rank(1, waiting()), rank(2, state="D")) is not None


def test_hosts_that_have_the_same_news_do_not_tell_it_all_at_once() -> None:
    hosts = [Host(rank(1), rank(2)) for _ in range(200)]
    for host in hosts:
        host.beats(4.0)
    times = [(host.looks(rank(1, waiting()), rank(2)) or (0.0, False))[0] for host in hosts]
    assert min(times) < 0.5 and max(times) > 3.5


def test_that_a_group_was_made_is_told_early_but_is_not_urgent() -> None:
    host = Host(rank(1, place(SETUP, StreamKind.SETUP)), rank(2))
    host.beats(3.0)
    made = host.looks(rank(1, place(SETUP, StreamKind.SETUP, entered=6)), rank(2))
    assert made is not None and not made[1]
