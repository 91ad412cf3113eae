"""The changes that a host reports before its next heartbeat is due."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hangwatch.agent.node.discovery.watched import WatchedProcess
from hangwatch.agent.node.schedule import ReportSchedule, find_changes
from hangwatch.agent.node.system.processes import CpuActivity
from hangwatch.model.calls import StreamKind
from hangwatch.model.groups import Group
from hangwatch.model.ranks import ExitInfo
from hangwatch.protocol.heartbeat import HeartbeatReply, ProcessIdentity
from hangwatch.ring.reader import StreamState
from tests.simulation.rings import make_snapshot

WORLD = Group(name="0", desc="default_pg", ranks=(0, 1))
SETUP, CALLS, CHANNEL = 1, 2, 3


def make_stream_state(
    uid: int, kind: StreamKind, entered: int = 5, pending_s: float | None = None
) -> StreamState:
    return StreamState(
        uid=uid, kind=kind, group=WORLD, peer=None, tag=None, entered=entered, completed=entered if pending_s is None else entered - 1,
        chain=0, entered_s=pending_s or 0.0, pending_s=pending_s,
    )  # fmt: skip


def make_watched_rank(
    number: int,
    *streams: StreamState,
    pulse_s: float = 0.1,
    state: str = "S",
    op: str = "all_reduce",
) -> WatchedProcess:
    states = streams or (make_waiting_state(None),)
    snapshot = make_snapshot(*states, pulse_s=pulse_s)
    made = WatchedProcess(
        pid=number,
        start_ticks=1,
        activity=CpuActivity(last_busy_ns=0),
        found_ns=0,
        snapshot=snapshot,
    )
    made.activity.state = state
    made.history.newest_ops[CALLS], made.history.newest_ops[CHANNEL] = op, "recv"
    return made


def make_waiting_state(pending_s: float | None = 2.0, uid: int = CALLS) -> StreamState:
    return make_stream_state(
        uid, StreamKind.COLLECTIVE if uid == CALLS else StreamKind.RECV, pending_s=pending_s
    )


def make_sharing_rank(number: int) -> WatchedProcess:
    made = make_watched_rank(number)
    made.history.first_concurrent[CALLS] = 4
    return made


@pytest.mark.parametrize(
    ("now", "why"),
    [
        (
            [make_watched_rank(1, make_waiting_state()), make_watched_rank(2)],
            "one waits and the other does not",
        ),
        (
            [
                make_watched_rank(1, make_waiting_state()),
                make_watched_rank(2, make_waiting_state(), op="broadcast"),
            ],
            "they wait in different operations",
        ),
        (
            [
                make_watched_rank(1, make_waiting_state()),
                make_watched_rank(2, make_waiting_state(0.1), make_waiting_state(3.0, CHANNEL)),
            ],
            "the one has waited for a message, and for longer",
        ),
        ([make_watched_rank(1), make_watched_rank(2, state="T")], "one is stopped"),
        ([make_watched_rank(1), make_watched_rank(2, pulse_s=4.0)], "one runs no Python"),
        ([make_watched_rank(1), make_sharing_rank(2)], "two threads share a group"),
        (
            [
                make_watched_rank(1, make_stream_state(SETUP, StreamKind.SETUP, entered=6)),
                make_watched_rank(2),
            ],
            "a group was made",
        ),
    ],
)
def test_rare_or_local_changes_are_detected(now: list[WatchedProcess], why: str) -> None:
    assert find_changes(now) - find_changes(
        [make_watched_rank(1, make_stream_state(SETUP, StreamKind.SETUP)), make_watched_rank(2)]
    ), why


@pytest.mark.parametrize(
    ("now", "why"),
    [
        ([make_watched_rank(1), make_watched_rank(2)], "nothing happens"),
        (
            [
                make_watched_rank(1, make_waiting_state()),
                make_watched_rank(2, make_waiting_state()),
            ],
            "all wait alike: other hosts say so, too",
        ),
        (
            [make_watched_rank(1, make_waiting_state(0.4)), make_watched_rank(2)],
            "a short wait is everyday life",
        ),
        ([make_watched_rank(1, make_waiting_state())], "a single rank gives no evidence"),
        (
            [
                make_watched_rank(1, replace(make_waiting_state(), entered=9)),
                make_watched_rank(2, make_waiting_state()),
            ],
            "they need not be in the same call",
        ),
    ],
)
def test_other_changes_wait_for_next_heartbeat(now: list[WatchedProcess], why: str) -> None:
    assert not find_changes(now), why


def make_waiting_member(
    number: int, *members: int, pending_s: float = 2.0, entered: int = 5
) -> WatchedProcess:
    made = make_watched_rank(
        number,
        replace(
            make_waiting_state(pending_s),
            group=Group(name="tp", desc="tp", ranks=members),
            entered=entered,
        ),
    )
    made.identity = ProcessIdentity(job="j", rank=number, world_size=8, pid=number, start_ticks=1)
    return made


def test_unfinished_local_call_is_a_change() -> None:
    assert find_changes([make_waiting_member(4, 4, 5), make_waiting_member(5, 4, 5)])
    assert not find_changes([make_waiting_member(4, 4, 6), make_waiting_member(5, 5, 7)]), (
        "half of the members are elsewhere"
    )
    assert not find_changes(
        [make_waiting_member(4, 4, 5), make_waiting_member(5, 4, 5, entered=6)]
    ), "they are not in the same call"
    assert not find_changes(
        [make_waiting_member(4, 4, 5, pending_s=0.4), make_waiting_member(5, 4, 5, pending_s=0.4)]
    )


def test_exited_rank_causes_no_change() -> None:
    ended = make_watched_rank(1)
    ended.exit = ExitInfo(exit_status=0)
    waiting = make_watched_rank(2, make_waiting_state())
    assert find_changes([ended, waiting]) == find_changes([waiting])


class DetectingHost:
    """A node agent's loop, which reports the changes that it detects."""

    def __init__(self, *ranks: WatchedProcess) -> None:
        self.schedule, self.ranks = ReportSchedule(0), ranks

    def detect_changes(self, *ranks: WatchedProcess) -> float | None:
        """The seconds until the next heartbeat, if it was brought forward."""
        self.ranks = ranks or self.ranks
        due_ns = self.schedule.next_ns
        self.schedule.apply_scan(self.ranks, 0, has_urgent_changes=False)
        return self.schedule.next_ns / 1e9 if self.schedule.next_ns < due_ns else None

    def send_heartbeat(self, within_s: float | None) -> bool:
        """Whether it is urgent."""
        is_urgent = self.schedule.start_report(self.ranks, 0)
        reply = HeartbeatReply(interval_s=20.0, changes_s=within_s)
        self.schedule.apply_reply(reply, self.ranks, 0, is_steady=False)
        return is_urgent


def test_frequently_reporting_host_sends_no_early_heartbeat() -> None:
    host = DetectingHost(make_watched_rank(1), make_watched_rank(2))
    host.send_heartbeat(None)
    assert (
        host.detect_changes(make_watched_rank(1, make_waiting_state()), make_watched_rank(2))
        is None
    )


def test_changes_are_reported_in_time_and_once_per_heartbeat() -> None:
    host = DetectingHost(make_watched_rank(1), make_watched_rank(2))
    host.send_heartbeat(3.0)
    assert host.detect_changes() is None
    first = host.detect_changes(make_watched_rank(1, make_waiting_state()), make_watched_rank(2))
    assert first is not None and 0.0 <= first <= 3.0
    assert (
        host.detect_changes(
            make_watched_rank(1, make_waiting_state()), make_watched_rank(2, state="T")
        )
        is None
    ), "the heartbeat that is due by now reports that, too"
    assert host.send_heartbeat(3.0)
    assert host.detect_changes() is None, "it has been reported"
    assert (
        host.detect_changes(
            make_watched_rank(1, make_waiting_state()), make_watched_rank(2, state="D")
        )
        is not None
    )


def test_hosts_with_same_change_spread_their_reports() -> None:
    hosts = [DetectingHost(make_watched_rank(1), make_watched_rank(2)) for _ in range(200)]
    for host in hosts:
        host.send_heartbeat(4.0)
    times = [
        host.detect_changes(make_watched_rank(1, make_waiting_state()), make_watched_rank(2)) or 0.0
        for host in hosts
    ]
    assert min(times) < 0.5 and max(times) > 3.5


def test_created_group_is_reported_early_but_not_urgently() -> None:
    host = DetectingHost(
        make_watched_rank(1, make_stream_state(SETUP, StreamKind.SETUP)), make_watched_rank(2)
    )
    host.send_heartbeat(3.0)
    made = host.detect_changes(
        make_watched_rank(1, make_stream_state(SETUP, StreamKind.SETUP, entered=6)),
        make_watched_rank(2),
    )
    assert made is not None and not host.send_heartbeat(3.0)
