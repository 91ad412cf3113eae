"""What the server is told, and what it is not told again."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hangwatch.agent.node.reporting.outbox import Outbox
from hangwatch.agent.node.reporting.updates import (
    History,
    Told,
    View,
    checkpoints,
    compose,
    read_identity,
    read_raised,
)
from hangwatch.model.calls import Call, Signature, Site, StreamKind
from hangwatch.model.groups import Group
from hangwatch.model.ranks import ExitInfo
from hangwatch.protocol.heartbeat import CallsReply, ProcessIdentity, ProcessUpdate, StackReply
from hangwatch.ring.snapshot import RingDelta, RingSnapshot, StreamState

SECOND = 1_000_000_000
NOW = 1000 * SECOND
WHO = ProcessIdentity(job="j", rank=3, world_size=4, pid=7, start_ticks=70)


def sequence(
    entered: int, completed: int | None, pending_s: float | None = None, entered_s: float = 0.0
) -> StreamState:
    return StreamState(
        uid=1, kind=StreamKind.COLLECTIVE, group=Group(name="0", desc="default_pg", ranks=(0, 1, 2, 3)), peer=None, tag=None,
        entered=entered, completed=completed, chain=entered, entered_s=entered_s, pending_s=pending_s,
    )  # fmt: skip


def snapshot(*sequences: StreamState, pulse_s: float = 0.01) -> RingSnapshot:
    return RingSnapshot(
        pid=7, start_ticks=70, identity={}, lifecycle=3, step=None, pulse_s=pulse_s, phase=None, phase_s=0.0, phase_limit_s=None,
        record_count=0, dropped=0, errors=0, is_disabled=False, streams=sequences,
    )  # fmt: skip


def view(*sequences: StreamState, pulse_s: float = 0.01) -> View:
    return View(
        key="7-70",
        identity=WHO,
        snapshot=snapshot(*sequences, pulse_s=pulse_s),
        state="S",
        idle_s=5.0,
    )


def call(seq: int) -> Call:
    return Call(seq=seq, signature=Signature(op="all_reduce"), chain=seq)


def tell(
    seen: View, told: Told | None, now: int = NOW, history: History | None = None
) -> tuple[ProcessUpdate | None, Told]:
    held = history or History()
    return compose(
        seen,
        told,
        held,
        now,
        lambda _, first, most: [call(s) for s in range(first, first + most)],
        {},
    )


def test_checkpoints_are_few_and_common_to_all_ranks() -> None:
    chains = {seq: seq * 10 for seq in range(1, 1001)}
    coarse = dict(checkpoints(chains, 0, 1000))
    fine = dict(checkpoints(chains, 990, 1000))
    assert len(coarse) <= 8
    assert sorted(coarse) == [128, 256, 384, 512, 640, 768, 896]
    assert sorted(fine) == [992, 994, 996, 998, 1000]
    assert checkpoints(chains, 1000, 1000) == ()
    assert checkpoints({4: 40}, 0, 5) == ((4, 40),), "those that the ring has lost are left out"


def test_nothing_new_is_nothing_told_until_a_refresh() -> None:
    first, told = tell(view(sequence(2, 2)), None)
    assert first is not None and first.identity == WHO
    assert tell(view(sequence(2, 2)), told, NOW + SECOND // 2)[0] is None
    refresh, told = tell(view(sequence(2, 2)), told, NOW + SECOND)
    assert refresh is not None and refresh.identity is None and refresh.sequences == ()
    assert tell(view(sequence(2, 2), pulse_s=2.5), told, NOW + 3 * SECOND)[0] is None, (
        "no sign of life is no news"
    )


def test_a_change_of_state_is_told_at_once_but_not_running_or_sleeping() -> None:
    _, told = tell(view(), None)
    assert tell(replace(view(), state="R"), told)[0] is None
    stopped, _ = tell(replace(view(), state="T"), told)
    assert stopped is not None and stopped.state == "T"


def test_unfinished_calls_are_told_once_they_stand_and_only_once() -> None:
    update, told = tell(view(sequence(5, 3, pending_s=0.1)), None)
    assert update is not None and update.sequences[0].calls == ()
    update, told = tell(view(sequence(5, 3, pending_s=0.6)), told)
    assert update is not None and [c.seq for c in update.sequences[0].calls] == [4, 5]
    assert tell(view(sequence(5, 3, pending_s=0.9)), told)[0] is None
    update, told = tell(view(sequence(40, 3, pending_s=2.0)), told)
    assert update is not None and [c.seq for c in update.sequences[0].calls] == [6, 7, 8, 9, 10, 11]


def test_where_completion_is_unknown_the_newest_call_is_told() -> None:
    update, _ = tell(view(sequence(5, None, entered_s=0.6)), None)
    assert update is not None and [c.seq for c in update.sequences[0].calls] == [5]
    assert update.sequences[0].completed is None


def test_calls_that_the_ring_has_lost_are_looked_for_once() -> None:
    asked = []

    def lost(uid: int, first: int, most: int) -> list[Call]:
        asked.append(uid)
        return []

    seen = view(sequence(5, None, entered_s=9.0))
    _, told = compose(seen, None, History(), NOW, lost, {})
    compose(seen, told, History(), NOW + SECOND, lost, {})
    assert asked == [1]


def test_the_end_is_told_once_with_the_last_calls() -> None:
    _, told = tell(view(sequence(2, 2)), None)
    ended = replace(view(sequence(2, 2)), ended=ExitInfo(signal=9), ended_s=0.5)
    update, told = compose(ended, told, History(), NOW, lambda *_: [], {1: [call(1), call(2)]})
    assert update is not None and update.ended == ExitInfo(signal=9)
    assert [c.seq for c in update.sequences[0].calls] == [1, 2]
    assert told.end
    assert compose(ended, told, History(), NOW + 5 * SECOND, lambda *_: [], {})[0] is None


def test_running_hashes_wait_for_the_acknowledgement() -> None:
    history = History()
    history.take(
        RingDelta(next_index=3, chains={1: {1: 11, 2: 22, 3: 33}}, newest_ops={1: "barrier"})
    )
    update, told = tell(view(sequence(4, 3)), None, history=history)
    assert update is not None and update.sequences[0].checkpoints == ((1, 11), (2, 22), (3, 33))
    assert update.sequences[0].op == "barrier"
    again, _ = tell(view(sequence(4, 3)), None, history=history)
    assert again is not None and again.sequences[0].checkpoints == update.sequences[0].checkpoints
    history.acknowledged(told)
    history.take(RingDelta(next_index=4, chains={1: {4: 44}}, newest_ops={}))
    later, _ = tell(view(sequence(4, 3)), told, history=history)
    assert later is not None and later.sequences[0].checkpoints == ((4, 44),), (
        "the record came after its sequence"
    )


def test_running_hashes_are_thinned_while_the_server_is_away() -> None:
    history = History()
    for start in range(1, 5001, 100):
        history.take(
            RingDelta(
                next_index=start,
                chains={1: {seq: seq for seq in range(start, start + 100)}},
                newest_ops={},
            )
        )
    held = history.chains[1]
    assert len(held) <= 256
    assert len(checkpoints(held, 0, 5000)) == 4, "multiples of 1024 survive"


def test_an_identity_without_a_rank_waits_and_nonsense_is_refused() -> None:
    assert read_identity({"job": "j"}, pid=1, start_ticks=2) is None
    found = read_identity(
        {"job": "j", "rank": 1, "world_size": 2, "torch": "2.6", "stacks_fd": 9},
        pid=1,
        start_ticks=2,
    )
    assert found == ProcessIdentity(
        job="j", rank=1, world_size=2, pid=1, start_ticks=2, torch="2.6"
    )
    with pytest.raises(ValueError, match="job"):
        read_identity({"rank": 1}, pid=1, start_ticks=2)


def test_last_words() -> None:
    assert read_raised(None) is None
    assert read_raised({"message": "no type"}) is None
    told = read_raised(
        {"type": "KeyError", "message": "'x'", "file": "a.py", "line": 3, "function": "f"}
    )
    assert told is not None and told.site == Site(file="a.py", line=3, function="f")
    bare = read_raised({"type": "KeyError", "message": "", "file": "a.py", "line": "?"})
    assert bare is not None and bare.site is None


def test_the_outbox_is_bounded_and_keeps_what_was_not_delivered() -> None:
    box = Outbox(most=2)
    for number in range(3):
        box.add_sample(StackReply(key="k", request=str(number), source="py-spy"), NOW)
    assert box.dropped == 1
    sent = box.samples(NOW + SECOND)
    assert [(s.request, s.taken_s) for s in sent] == [("1", 1.0), ("2", 1.0)]
    box.add_calls(CallsReply(key="k", request="9", uid=1))
    box.delivered(sent, ())
    assert box.samples(NOW) == ()
    assert [c.request for c in box.calls()] == ["9"]
    box.delivered((), box.calls())
    assert not box
