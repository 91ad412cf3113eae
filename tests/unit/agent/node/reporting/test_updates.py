"""The changes that a heartbeat reports, and the acknowledged ones that it does not repeat."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from hangwatch.agent.node.discovery.watched import parse_identity
from hangwatch.agent.node.reporting import uplink
from hangwatch.agent.node.reporting.acked import AckedState, UnackedHistory
from hangwatch.agent.node.reporting.updates import (
    compose_update,
    make_terse_update,
    parse_exception,
    select_checkpoints,
)
from hangwatch.model.calls import Call, Loss, LossReason, Signature, Site, StreamKind
from hangwatch.model.groups import Group
from hangwatch.model.ranks import ExitInfo
from hangwatch.protocol.heartbeat import (
    CallsReply,
    HardwareReply,
    Heartbeat,
    ProcessIdentity,
    ProcessUpdate,
    StackReply,
)
from hangwatch.ring.reader import RingDelta, StreamState
from tests.simulation.rings import ProcessView, make_snapshot

SECOND_NS = 1_000_000_000
NOW_NS = 1000 * SECOND_NS
IDENTITY = ProcessIdentity(job="j", rank=3, world_size=4, pid=7, start_ticks=70)


def make_stream_state(
    entered: int, completed: int | None, pending_s: float | None = None, entered_s: float = 0.0
) -> StreamState:
    return StreamState(
        uid=1, kind=StreamKind.COLLECTIVE, group=Group(name="0", desc="default_pg", ranks=(0, 1, 2, 3)), peer=None, tag=None,
        entered=entered, completed=completed, chain=entered, entered_s=entered_s, pending_s=pending_s,
    )  # fmt: skip


def make_view(*streams: StreamState, pulse_s: float = 0.01, **more: Any) -> ProcessView:
    process = ProcessUpdate(key="7-70", identity=IDENTITY, state="S", idle_s=5.0)
    snapshot = make_snapshot(*streams, pulse_s=pulse_s)
    return ProcessView(process=replace(process, **more), snapshot=snapshot)


def make_call(seq: int) -> Call:
    return Call(seq=seq, signature=Signature(op="all_reduce"), chain=seq)


def compose_next_update(
    view: ProcessView,
    acked: AckedState | None,
    now: int = NOW_NS,
    history: UnackedHistory | None = None,
) -> tuple[ProcessUpdate | None, AckedState]:
    unacked = history or UnackedHistory()
    return compose_update(
        *view,
        acked,
        unacked,
        now,
        lambda _, first, most: [make_call(s) for s in range(first, first + most)],
        {},
    )


def test_checkpoints_are_few_and_common_to_all_ranks() -> None:
    chains = {seq: seq * 10 for seq in range(1, 1001)}
    coarse = dict(select_checkpoints(chains, 0, 1000))
    fine = dict(select_checkpoints(chains, 990, 1000))
    assert len(coarse) <= 8
    assert sorted(coarse) == [128, 256, 384, 512, 640, 768, 896]
    assert sorted(fine) == [992, 994, 996, 998, 1000]
    assert select_checkpoints(chains, 1000, 1000) == ()
    assert select_checkpoints({4: 40}, 0, 5) == ((4, 40),), (
        "checkpoints that the ring has lost are omitted"
    )


def test_unchanged_rank_is_not_reported_until_refresh() -> None:
    first, acked = compose_next_update(make_view(make_stream_state(2, 2)), None)
    assert first is not None and first.identity == IDENTITY
    assert (
        compose_next_update(make_view(make_stream_state(2, 2)), acked, NOW_NS + SECOND_NS // 2)[0]
        is None
    )
    refresh, acked = compose_next_update(
        make_view(make_stream_state(2, 2)), acked, NOW_NS + SECOND_NS
    )
    assert refresh is not None and refresh.identity is None and refresh.streams == ()
    assert (
        compose_next_update(
            make_view(make_stream_state(2, 2), pulse_s=2.5), acked, NOW_NS + 3 * SECOND_NS
        )[0]
        is None
    ), "an unchanged rank whose recorder is silent is not refreshed"


def test_state_change_is_reported_immediately_except_running_or_sleeping() -> None:
    _, acked = compose_next_update(make_view(), None)
    assert compose_next_update(make_view(state="R"), acked)[0] is None
    stopped, _ = compose_next_update(make_view(state="T"), acked)
    assert stopped is not None and stopped.state == "T"


def test_unfinished_calls_are_reported_once_when_blocked() -> None:
    update, acked = compose_next_update(make_view(make_stream_state(5, 3, pending_s=0.1)), None)
    assert update is not None and update.streams[0].calls == ()
    update, acked = compose_next_update(make_view(make_stream_state(5, 3, pending_s=0.6)), acked)
    assert update is not None and [c.seq for c in update.streams[0].calls] == [4, 5]
    assert compose_next_update(make_view(make_stream_state(5, 3, pending_s=0.9)), acked)[0] is None
    update, acked = compose_next_update(make_view(make_stream_state(40, 3, pending_s=2.0)), acked)
    assert update is not None and [c.seq for c in update.streams[0].calls] == [6, 7, 8, 9, 10, 11]


def test_newest_call_is_reported_without_completion() -> None:
    update, _ = compose_next_update(make_view(make_stream_state(5, None, entered_s=0.6)), None)
    assert update is not None and [c.seq for c in update.streams[0].calls] == [5]
    assert update.streams[0].completed is None


def test_calls_lost_from_ring_are_searched_once() -> None:
    fetched_uids = []

    def fetch_nothing(uid: int, first: int, most: int) -> list[Call]:
        fetched_uids.append(uid)
        return []

    view = make_view(make_stream_state(5, None, entered_s=9.0))
    _, acked = compose_update(*view, None, UnackedHistory(), NOW_NS, fetch_nothing, {})
    compose_update(*view, acked, UnackedHistory(), NOW_NS + SECOND_NS, fetch_nothing, {})
    assert fetched_uids == [1]


def test_exit_is_reported_once_with_last_calls() -> None:
    _, acked = compose_next_update(make_view(make_stream_state(2, 2)), None)
    exited = make_view(make_stream_state(2, 2), ended=ExitInfo(signal=9), ended_s=0.5)
    update, acked = compose_update(
        *exited, acked, UnackedHistory(), NOW_NS, lambda *_: [], {1: [make_call(1), make_call(2)]}
    )
    assert update is not None and update.ended == ExitInfo(signal=9)
    assert [c.seq for c in update.streams[0].calls] == [1, 2]
    assert acked.includes_exit
    assert (
        compose_update(*exited, acked, UnackedHistory(), NOW_NS + 5 * SECOND_NS, lambda *_: [], {})[
            0
        ]
        is None
    )


def test_running_hashes_wait_for_the_acknowledgement() -> None:
    history = UnackedHistory()
    history.add_delta(
        RingDelta(next_index=3, chains={1: {1: 11, 2: 22, 3: 33}}, newest_ops={1: "barrier"})
    )
    update, acked = compose_next_update(make_view(make_stream_state(4, 3)), None, history=history)
    assert update is not None and update.streams[0].checkpoints == ((1, 11), (2, 22), (3, 33))
    assert update.streams[0].op == "barrier"
    again, _ = compose_next_update(make_view(make_stream_state(4, 3)), None, history=history)
    assert again is not None and again.streams[0].checkpoints == update.streams[0].checkpoints
    history.mark_acked(acked)
    history.add_delta(RingDelta(next_index=4, chains={1: {4: 44}}, newest_ops={}))
    later, _ = compose_next_update(make_view(make_stream_state(4, 3)), acked, history=history)
    assert later is not None and later.streams[0].checkpoints == ((4, 44),), (
        "the record was read after its stream's state"
    )


def test_running_hashes_are_thinned_while_server_is_unreachable() -> None:
    history = UnackedHistory()
    for start in range(1, 5001, 100):
        history.add_delta(
            RingDelta(
                next_index=start,
                chains={1: {seq: seq for seq in range(start, start + 100)}},
                newest_ops={},
            )
        )
    chains = history.chains[1]
    assert len(chains) <= 256
    assert len(select_checkpoints(chains, 0, 5000)) == 4, "multiples of 1024 survive"


def test_closed_streams_are_forgotten_once_they_are_many() -> None:
    history = UnackedHistory()
    ring = make_snapshot(make_stream_state(5, 5), opened=1000)
    for uid in range(1, 1003):
        delta = RingDelta(next_index=uid, chains={uid: {1: 11}}, newest_ops={uid: "barrier"})
        history.add_delta(delta)
        history.forget_closed_streams(ring)
    assert 2 < len(history.newest_ops) < 300
    assert {1, 1001, 1002} <= set(history.newest_ops), "it is open, or was opened later"
    assert history.chains.keys() == history.newest_ops.keys()
    torn = replace(ring, streams=(), torn_parts=1)
    history.forget_closed_streams(torn)
    assert 1 in history.newest_ops


def test_identity_without_rank_waits_and_invalid_one_is_refused() -> None:
    assert parse_identity({"job": "j"}, pid=1, start_ticks=2) is None
    identity = parse_identity(
        {"job": "j", "rank": 1, "world_size": 2, "torch": "2.6", "stacks_fd": 9},
        pid=1,
        start_ticks=2,
    )
    assert identity == ProcessIdentity(
        job="j", rank=1, world_size=2, pid=1, start_ticks=2, torch="2.6"
    )
    with pytest.raises(ValueError, match="job"):
        parse_identity({"rank": 1}, pid=1, start_ticks=2)


def test_exception_record_is_parsed() -> None:
    assert parse_exception(None) is None
    assert parse_exception({"message": "no type"}) is None
    complete = parse_exception(
        {"type": "KeyError", "message": "'x'", "file": "a.py", "line": 3, "function": "f"}
    )
    assert complete is not None and complete.site == Site(file="a.py", line=3, function="f")
    without_site = parse_exception({"type": "KeyError", "message": "", "file": "a.py", "line": "?"})
    assert without_site is not None and without_site.site is None


def test_outbox_is_bounded_and_keeps_undelivered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uplink, "MAX_REPLIES", 2)
    box = uplink.Outbox()
    for number in range(3):
        box.add_reply(StackReply(key="k", request=str(number), source="py-spy"), NOW_NS)
    assert box.dropped_count == 1
    sent = box.list_pending(NOW_NS + SECOND_NS)["samples"]
    assert [(s.request, s.taken_s) for s in sent] == [("1", 1.0), ("2", 1.0)]
    box.add_reply(CallsReply(key="k", request="9", uid=1), NOW_NS)
    box.mark_delivered(Heartbeat(host="n", agent="a", number=1, samples=sent))
    assert box.list_pending(NOW_NS)["samples"] == ()
    assert [c.request for c in box.list_pending(NOW_NS)["calls"]] == ["9"]
    calls = box.list_pending(NOW_NS)["calls"]
    box.mark_delivered(Heartbeat(host="n", agent="a", number=2, calls=calls))
    assert not box


def test_hardware_replies_are_kept_until_delivered() -> None:
    box = uplink.Outbox()
    for number in range(10):
        box.add_reply(HardwareReply(key="k", request=str(number)), NOW_NS)
    assert box.dropped_count == 2
    sent = box.list_pending(NOW_NS + SECOND_NS)["hardware"]
    assert [(reply.request, reply.taken_s) for reply in sent] == [
        (str(number), 1.0) for number in range(2, 10)
    ]
    box.mark_delivered(Heartbeat(host="n", agent="a", number=1, hardware=sent[:-1]))
    assert [reply.request for reply in box.list_pending(NOW_NS)["hardware"]] == ["9"]
    assert box


def test_loss_is_reported_once_and_again_after_a_resync() -> None:
    complete = make_stream_state(5, 5)
    _, acked = compose_next_update(make_view(complete), None)
    lossy = make_view(replace(complete, loss=Loss(6, LossReason.FAULT)))
    update, after = compose_next_update(lossy, acked)
    assert update is not None
    assert (update.losses, update.streams) == (((1, 6, 1),), ())
    assert make_terse_update(lossy.snapshot, acked, update, after) is None
    update, _ = compose_next_update(lossy, after)
    assert update is None
    update, _ = compose_next_update(lossy, None)
    assert update is not None
    assert update.losses == ((1, 6, 1),)


def test_dormant_streams_are_reported_once_and_with_their_present_age() -> None:
    state = replace(make_stream_state(5, 5, entered_s=1.0), read_ns=NOW_NS)
    view = make_view(state)
    assert view.snapshot is not None
    snapshot = replace(view.snapshot, active_streams=(), dormant_chunks={0: (state,)})
    view = view._replace(snapshot=snapshot)
    later_ns = NOW_NS + 100 * SECOND_NS
    update, acked = compose_next_update(view, None, later_ns)
    assert update is not None
    assert [part.entered_s for part in update.streams] == [101.0]
    moved = replace(state, entered=6, completed=6)
    changed = view._replace(snapshot=replace(snapshot, streams=(moved,)))
    update, _ = compose_next_update(changed, acked, later_ns + 1)
    assert update is None  # the part is the same object, so it was not read again


def test_stream_that_the_ring_has_no_more_is_reported_as_closed() -> None:
    states = [replace(make_stream_state(5, 5), uid=uid) for uid in (1, 2, 3)]
    _, acked = compose_next_update(make_view(*states), None)
    update, after = compose_next_update(make_view(states[1]), acked)
    assert update is not None
    assert update.closed == (1, 3)
    assert set(after.streams) == {2}
    torn = make_view(states[1])
    assert torn.snapshot is not None
    torn = torn._replace(snapshot=replace(torn.snapshot, torn_parts=1))
    update, _ = compose_next_update(torn, acked)
    assert update is None or not update.closed
