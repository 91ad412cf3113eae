"""When a heartbeat is due."""

from __future__ import annotations

from hangwatch.agent.node.reporting.uplink import Outbox
from hangwatch.agent.node.schedule import EARLY_INTERVAL_NS, ReportSchedule
from hangwatch.protocol.heartbeat import AbortReply, HeartbeatReply

SECOND_NS = 1_000_000_000
REPLY = HeartbeatReply(interval_s=0.5, steady_s=2.0)


def make_schedule(reply: HeartbeatReply = REPLY, *, is_steady: bool = True) -> ReportSchedule:
    schedule = ReportSchedule(0)
    schedule.apply_reply(reply, (), SECOND_NS, is_steady=is_steady)
    return schedule


def test_steady_host_waits_longer() -> None:
    assert make_schedule().next_ns == 3 * SECOND_NS
    assert make_schedule(is_steady=False).next_ns == 3 * SECOND_NS // 2
    assert make_schedule(HeartbeatReply(interval_s=0.5)).next_ns == 3 * SECOND_NS // 2


def test_end_of_steadiness() -> None:
    schedule = make_schedule()
    schedule.apply_scan((), SECOND_NS, has_urgent_changes=False)
    assert schedule.next_ns == 3 * SECOND_NS // 2
    retrying = make_schedule()
    retrying.delay(5 * SECOND_NS)
    retrying.apply_scan((), SECOND_NS, has_urgent_changes=False)
    assert retrying.next_ns == 5 * SECOND_NS, "a retry is not brought forward"


def test_early_heartbeats_are_limited() -> None:
    schedule = make_schedule()
    schedule.apply_scan((), SECOND_NS + 1, has_urgent_changes=True)
    assert schedule.next_ns == SECOND_NS + 1
    schedule.apply_reply(REPLY, (), SECOND_NS + 2, is_steady=False)
    schedule.apply_scan((), SECOND_NS + 3, has_urgent_changes=True)
    assert schedule.next_ns == SECOND_NS + 2 + SECOND_NS // 2
    schedule.apply_scan((), SECOND_NS + 1 + EARLY_INTERVAL_NS, has_urgent_changes=True)
    schedule.apply_reply(REPLY, (), 3 * SECOND_NS, is_steady=False)
    schedule.apply_scan((), 3 * SECOND_NS + 1, has_urgent_changes=True)
    assert schedule.next_ns == 3 * SECOND_NS + 1


def test_host_with_infrequent_heartbeats_sends_no_early_one_for_a_long_call() -> None:
    schedule = make_schedule(HeartbeatReply(interval_s=20.0, changes_s=1.0))
    assert schedule.is_infrequent
    schedule.apply_scan((), 2 * SECOND_NS, has_urgent_changes=True)
    assert schedule.next_ns == 21 * SECOND_NS, "all hosts may be in the same call"


def test_reply_hastens_the_heartbeat_that_carries_it() -> None:
    schedule = make_schedule()
    outbox = Outbox(on_reply=schedule.hasten)
    assert not schedule.is_due(2 * SECOND_NS, may_hasten=True)
    outbox.add_reply(AbortReply(key="1-1", request="order"), 2 * SECOND_NS)
    assert schedule.is_due(2 * SECOND_NS, may_hasten=True)


def test_urgent_heartbeats() -> None:
    schedule = make_schedule()
    schedule.hasten()
    assert schedule.is_due(SECOND_NS, may_hasten=True)
    assert not schedule.is_due(SECOND_NS, may_hasten=False), "the server does not answer"
    assert schedule.start_report((), 4 * SECOND_NS)
    assert not schedule.is_due(2 * SECOND_NS, may_hasten=True)
    assert not schedule.start_report((), 4 * SECOND_NS)
    schedule.apply_reply(HeartbeatReply(urgent=True), (), SECOND_NS, is_steady=False)
    assert schedule.start_report((), 4 * SECOND_NS), "the server waits for it"
