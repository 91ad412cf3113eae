"""What a host leaves out while its ranks get on, and what it never does."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hangwatch.agent.node.reporting.terse import gets_on, shortened
from hangwatch.agent.node.reporting.updates import History, Told, View, compose
from hangwatch.model.calls import Call, Signature, StreamKind
from hangwatch.model.groups import Group
from hangwatch.model.ranks import ExitInfo
from hangwatch.protocol.heartbeat import ProcessIdentity, ProcessUpdate
from hangwatch.ring.snapshot import RingSnapshot, StreamState

SECOND = 1_000_000_000
WORLD = Group(name="0", desc="default_pg", ranks=(0, 1, 2, 3))
WHO = ProcessIdentity(job="j", rank=3, world_size=4, pid=7, start_ticks=70)


def calls(
    entered: int, pending_s: float | None = None, entered_s: float = 0.1, **more: object
) -> StreamState:
    made = StreamState(
        uid=1, kind=StreamKind.COLLECTIVE, group=WORLD, peer=None, tag=None, entered=entered,
        completed=entered if pending_s is None else entered - 1, chain=entered, entered_s=pending_s or entered_s, pending_s=pending_s,
    )  # fmt: skip
    return replace(made, **more)


def setup(entered: int) -> StreamState:
    return calls(entered, uid=2, kind=StreamKind.SETUP, entered_s=500.0)


def seen(
    *sequences: StreamState,
    step: int = 1,
    phase: str | None = None,
    pulse_s: float = 0.1,
    **more: object,
) -> View:
    snapshot = RingSnapshot(
        pid=7, start_ticks=70, identity={}, lifecycle=3, step=step, pulse_s=pulse_s, phase=phase, phase_s=0.0, phase_limit_s=None,
        record_count=0, dropped=0, errors=0, is_disabled=False, streams=sequences,
    )  # fmt: skip
    return replace(View(key="7-70", identity=WHO, snapshot=snapshot, state="S"), **more)


def recorded(uid: int, first: int, most: int) -> list[Call]:
    return [
        Call(seq=seq, signature=Signature(op="all_reduce"), thread=seq % 2)
        for seq in range(first, first + most)
    ]


Known = tuple[Told | None, ProcessUpdate | None, Told | None]


def brief(*views: View) -> bool:
    """Whether of the last of these it need not be told where the rank is, where of the ones before
    it was.
    """
    return gets_on(views[-1].snapshot, *composed(*views))


def composed(*views: View) -> Known:
    """What is known before the last of these, what is to be told of it, and what is known then."""
    before: Told | None = None
    update: ProcessUpdate | None = None
    told: Told | None = None
    for n, view in enumerate(views):
        before = told
        update, told = compose(
            view, before, History(shared={1: 70}, cursor=70) if view.cpu_s else History(), (1000 + 10 * n) * SECOND,
            recorded, {},
        )  # fmt: skip
    return before, update, told


WELL = seen(calls(10), setup(3))


@pytest.mark.parametrize(
    ("now", "why"),
    [
        (seen(calls(70), setup(3)), "it made calls"),
        (seen(calls(70, pending_s=0.3), setup(3)), "it is in one, as everybody is now and then"),
        (seen(calls(70), setup(3), step=9), "its training step is another"),
        (seen(calls(70, entered_s=2.0), setup(3)), "it works on its own for a moment"),
    ],
)
def test_of_a_rank_that_gets_on_it_need_not_be_told_where_it_is(now: View, why: str) -> None:
    assert brief(WELL, now), why


@pytest.mark.parametrize(
    ("now", "why"),
    [
        (seen(calls(70, pending_s=0.6), setup(3)), "it stands in a call"),
        (seen(calls(70, completed=None, entered_s=0.6), setup(3)), "it may"),
        (seen(calls(70, entered_s=4.0), setup(3)), "it has made no call for a while"),
        (seen(calls(70), setup(3), calls(1, uid=3)), "it makes calls on another group"),
        (seen(calls(70), setup(3), phase="checkpoint"), "it says that it is busy"),
        (seen(calls(70), setup(3), pulse_s=4.0), "no Python runs in it"),
        (seen(calls(70), setup(3), state="T"), "it is stopped"),
        (seen(calls(70), setup(3), ended=ExitInfo(signal=9)), "it has ended"),
        (seen(calls(70), setup(3), faults=("x",)), "it has a fault of its own"),
        (seen(calls(70), setup(3), cpu_s=1.0), "two threads make calls at the same time"),
        (replace(seen(), snapshot=None), "it has no ring"),
    ],
)
def test_all_else_is_told_at_once(now: View, why: str) -> None:
    assert not brief(WELL, now), why


def test_a_rank_that_the_server_takes_for_one_that_stands_is_told_to_get_on() -> None:
    stands = seen(calls(10, pending_s=0.7), setup(3))
    assert not brief(WELL, stands, seen(calls(70), setup(3)))
    assert brief(WELL, stands, seen(calls(40), setup(3)), seen(calls(70), setup(3)))


def test_a_server_that_knows_nothing_of_a_rank_is_told_of_it() -> None:
    assert not brief(WELL)


def test_that_groups_were_made_is_told_all_the_same_and_nothing_else() -> None:
    now = seen(calls(70), setup(4))
    assert brief(WELL, now)
    before, update, after = composed(WELL, now)
    short, known = shortened(now.snapshot, before, update, after)
    assert short is not None and [(part.uid, part.entered) for part in short.sequences] == [(2, 4)]
    assert before is not None and known is not None
    assert {uid: place.entered for uid, place in known.sequences.items()} == {1: 10, 2: 4}, (
        "where it is in other calls is still to be told"
    )
    assert (known.word, known.at_ns) == (before.word, before.at_ns)
    assert shortened(now.snapshot, *composed(WELL, seen(calls(70), setup(3)))) == (
        None,
        composed(WELL, WELL)[0],
    )
