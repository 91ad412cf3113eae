"""When a heartbeat is due."""

from __future__ import annotations

from hangwatch.agent.node.reporting.uplink import EARLY_INTERVAL_NS, HeartbeatSchedule
from hangwatch.protocol.heartbeat import HeartbeatReply

SECOND_NS = 1_000_000_000
REPLY = HeartbeatReply(interval_s=0.5, steady_s=2.0)


def make_schedule(reply: HeartbeatReply = REPLY, *, is_steady: bool = True) -> HeartbeatSchedule:
    schedule = HeartbeatSchedule(0)
    schedule.apply_reply(reply, SECOND_NS, is_steady=is_steady)
    return schedule


def test_steady_host_waits_longer() -> None:
    assert make_schedule().next_ns == 3 * SECOND_NS
    assert make_schedule(is_steady=False).next_ns == 3 * SECOND_NS // 2
    assert make_schedule(HeartbeatReply(interval_s=0.5)).next_ns == 3 * SECOND_NS // 2


def test_end_of_steadiness() -> None:
    schedule = make_schedule()
    schedule.end_steadiness()
    assert schedule.next_ns == 3 * SECOND_NS // 2
    retrying = make_schedule()
    retrying.set_next(5 * SECOND_NS)
    retrying.end_steadiness()
    assert retrying.next_ns == 5 * SECOND_NS, "a retry is not brought forward"


def test_early_heartbeats_are_limited() -> None:
    schedule = make_schedule()
    schedule.bring_forward_once(SECOND_NS + 1)
    assert schedule.next_ns == SECOND_NS + 1
    schedule.apply_reply(REPLY, SECOND_NS + 2, is_steady=False)
    schedule.bring_forward_once(SECOND_NS + 3)
    assert schedule.next_ns == SECOND_NS + 2 + SECOND_NS // 2
    schedule.bring_forward_once(SECOND_NS + 1 + EARLY_INTERVAL_NS)
    schedule.apply_reply(REPLY, 3 * SECOND_NS, is_steady=False)
    schedule.bring_forward_once(3 * SECOND_NS + 1)
    assert schedule.next_ns == 3 * SECOND_NS + 1
