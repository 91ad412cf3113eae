"""What a host leaves out while its ranks make progress, and what it always reports."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from hangwatch.agent.node.reporting.acked import AckedState, UnackedHistory
from hangwatch.agent.node.reporting.updates import compose_update, make_terse_update
from hangwatch.model.calls import Call, Signature, StreamKind
from hangwatch.model.groups import Group
from hangwatch.model.ranks import ExitInfo
from hangwatch.protocol.heartbeat import ProcessIdentity, ProcessUpdate
from hangwatch.ring.reader import StreamState
from tests.simulation.rings import ProcessView, make_snapshot

SECOND_NS = 1_000_000_000
WORLD = Group(name="0", desc="default_pg", ranks=(0, 1, 2, 3))
IDENTITY = ProcessIdentity(job="j", rank=3, world_size=4, pid=7, start_ticks=70)


def make_collective_state(
    entered: int, pending_s: float | None = None, entered_s: float = 0.1, **more: Any
) -> StreamState:
    made = StreamState(
        uid=1, kind=StreamKind.COLLECTIVE, group=WORLD, peer=None, tag=None, entered=entered,
        completed=entered if pending_s is None else entered - 1, chain=entered, entered_s=pending_s or entered_s, pending_s=pending_s,
    )  # fmt: skip
    return replace(made, **more)


def make_setup_state(entered: int) -> StreamState:
    return make_collective_state(entered, uid=2, kind=StreamKind.SETUP, entered_s=500.0)


def make_view(
    *streams: StreamState,
    step: int = 1,
    phase: str | None = None,
    pulse_s: float = 0.1,
    **more: Any,
) -> ProcessView:
    snapshot = make_snapshot(*streams, step=step, pulse_s=pulse_s, phase=phase)
    process = replace(ProcessUpdate(key="7-70", identity=IDENTITY, state="S"), **more)
    return ProcessView(process=process, snapshot=snapshot)


def fetch_calls(uid: int, first: int, most: int) -> list[Call]:
    return [
        Call(seq=seq, signature=Signature(op="all_reduce"), thread=seq % 2)
        for seq in range(first, first + most)
    ]


ComposedUpdate = tuple[AckedState | None, ProcessUpdate | None, AckedState | None]


def may_omit_position(*views: ProcessView) -> bool:
    """Whether the update for the last view may omit the rank's position, after updates for the
    earlier views were acknowledged.
    """
    return make_terse_update(views[-1].snapshot, *compose_updates(*views)) is not None


def compose_updates(*views: ProcessView) -> ComposedUpdate:
    """The acknowledged state before the last view's update, the update, and the state after it."""
    before: AckedState | None = None
    update: ProcessUpdate | None = None
    acked: AckedState | None = None
    for n, view in enumerate(views):
        before = acked
        update, acked = compose_update(
            *view, before, UnackedHistory(first_concurrent={1: 70}, cursor=70) if view.process.cpu_s else UnackedHistory(), (1000 + 10 * n) * SECOND_NS,
            fetch_calls, {},
        )  # fmt: skip
    return before, update, acked


PROGRESSING_VIEW = make_view(make_collective_state(10), make_setup_state(3))


@pytest.mark.parametrize(
    ("now", "why"),
    [
        (make_view(make_collective_state(70), make_setup_state(3)), "it made calls"),
        (
            make_view(make_collective_state(70, pending_s=0.3), make_setup_state(3)),
            "it is in one, as everybody is now and then",
        ),
        (
            make_view(make_collective_state(70), make_setup_state(3), step=9),
            "its training step is another",
        ),
        (
            make_view(make_collective_state(70, entered_s=2.0), make_setup_state(3)),
            "it works on its own for a moment",
        ),
        (
            make_view(
                make_collective_state(70, completed=None, entered_s=0.6), make_setup_state(3)
            ),
            "it made a call, whose completion nothing reports",
        ),
    ],
)
def test_progressing_rank_may_omit_position(now: ProcessView, why: str) -> None:
    assert may_omit_position(PROGRESSING_VIEW, now), why


@pytest.mark.parametrize(
    ("now", "why"),
    [
        (
            make_view(make_collective_state(70, pending_s=0.6), make_setup_state(3)),
            "it is blocked in a call",
        ),
        (
            make_view(
                make_collective_state(70, completed=None, entered_s=4.0), make_setup_state(3)
            ),
            "it may",
        ),
        (
            make_view(make_collective_state(70, entered_s=4.0), make_setup_state(3)),
            "it has made no call for a while",
        ),
        (
            make_view(
                make_collective_state(70), make_setup_state(3), make_collective_state(1, uid=3)
            ),
            "it makes calls on another group",
        ),
        (
            make_view(make_collective_state(70), make_setup_state(3), phase="checkpoint"),
            "it says that it is busy",
        ),
        (
            make_view(make_collective_state(70), make_setup_state(3), pulse_s=4.0),
            "no Python runs in it",
        ),
        (make_view(make_collective_state(70), make_setup_state(3), state="T"), "it is stopped"),
        (
            make_view(make_collective_state(70), make_setup_state(3), ended=ExitInfo(signal=9)),
            "it has ended",
        ),
        (
            make_view(make_collective_state(70), make_setup_state(3), faults=("x",)),
            "it has a fault of its own",
        ),
        (
            make_view(make_collective_state(70), make_setup_state(3), cpu_s=1.0),
            "two threads make calls at the same time",
        ),
        (make_view()._replace(snapshot=None), "it has no ring"),
    ],
)
def test_everything_else_is_reported_immediately(now: ProcessView, why: str) -> None:
    assert not may_omit_position(PROGRESSING_VIEW, now), why


def test_idle_group_on_nccl_is_no_reason_to_report_positions() -> None:
    """The last barrier of all ranks may have been long ago, and nothing reports that it completed."""
    idle = make_collective_state(2, uid=3, completed=None, entered_s=500.0)
    before = make_view(make_collective_state(10, completed=None), make_setup_state(3), idle)
    now = make_view(make_collective_state(70, completed=None), make_setup_state(3), idle)
    assert may_omit_position(before, now)


def test_terse_update_ends_the_wait_that_the_server_knows_of() -> None:
    other = make_collective_state(5, uid=3)
    first = make_view(make_collective_state(10), make_setup_state(3), other)
    blocked = make_view(make_collective_state(11, pending_s=0.7), make_setup_state(3), other)
    now = make_view(make_collective_state(70), make_setup_state(3), make_collective_state(9, uid=3))
    assert may_omit_position(first, blocked, now)
    made = make_terse_update(now.snapshot, *compose_updates(first, blocked, now))
    assert made is not None
    terse, acked = made
    assert terse is not None
    assert [(part.uid, part.entered, part.completed) for part in terse.streams] == [(1, 70, 70)]
    assert {uid: stream.entered for uid, stream in acked.streams.items()} == {1: 70, 2: 3, 3: 5}


def test_unknown_rank_is_reported_to_server() -> None:
    assert not may_omit_position(PROGRESSING_VIEW)


def test_terse_update_still_reports_created_groups() -> None:
    now = make_view(make_collective_state(70), make_setup_state(4))
    assert may_omit_position(PROGRESSING_VIEW, now)
    before, update, after = compose_updates(PROGRESSING_VIEW, now)
    made = make_terse_update(now.snapshot, before, update, after)
    assert before is not None and made is not None
    terse, acked = made
    assert terse is not None and [(part.uid, part.entered) for part in terse.streams] == [(2, 4)]
    assert {uid: stream.entered for uid, stream in acked.streams.items()} == {
        1: 10,
        2: 4,
    }, "its position in other streams is not reported yet"
    assert (acked.status_key, acked.reported_at_ns) == (before.status_key, before.reported_at_ns)
    assert make_terse_update(
        now.snapshot,
        *compose_updates(
            PROGRESSING_VIEW, make_view(make_collective_state(70), make_setup_state(3))
        ),
    ) == (
        None,
        compose_updates(PROGRESSING_VIEW, PROGRESSING_VIEW)[0],
    )
