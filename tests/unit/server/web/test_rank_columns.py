"""The columns of /ranks: each has a key of its own, and its title toggles the order."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import cast

from hangwatch.model.calls import StreamKind
from hangwatch.model.groups import Group
from hangwatch.model.verdicts import DeviceProgress
from hangwatch.server.web.ranks_page import (
    RANK_COLUMNS,
    SORT_PATTERN,
    SORTABLE_COLUMNS,
    AttemptOverview,
    RankRow,
)
from hangwatch.tracking.call_stream import CallStream


def test_keys_are_unique_and_the_first_column_is_the_rank() -> None:
    keys = [column.key for column in RANK_COLUMNS]
    assert len(set(keys)) == len(keys) and keys[0] == "rank"


def test_address_accepts_both_orders_of_sortable_columns_only() -> None:
    for column in RANK_COLUMNS:
        for sort in (column.key, f"-{column.key}"):
            assert bool(re.fullmatch(SORT_PATTERN, sort)) == (column.key in SORTABLE_COLUMNS)


def test_title_toggles_between_default_and_opposite_order() -> None:
    step = SORTABLE_COLUMNS["step"]
    assert step.toggle_sort("rank") == "-step", "the largest first"
    assert step.toggle_sort("-step") == "step" and step.toggle_sort("step") == "-step"
    assert step.describe_order("-step") == "descending" and step.describe_order("rank") == ""


def make_row(*streams: CallStream, now: float) -> RankRow:
    process = SimpleNamespace(streams={stream.uid: stream for stream in streams})
    overview = SimpleNamespace(attempt=SimpleNamespace(processes={0: process}))
    return RankRow(cast(AttemptOverview, overview), 0, now)


def make_stream(uid: int, *, entered_at: float, completed: int) -> CallStream:
    """A stream of 6 calls; the device has completed ``completed`` of them."""
    return CallStream(
        uid=uid,
        kind=StreamKind.COLLECTIVE,
        group=Group(name=str(uid), desc="", ranks=(0,)),
        entered=6,
        entered_at=entered_at,
        device=DeviceProgress(enqueued=6, started=None, completed=completed, read_at=0.0),
    )


def test_current_call_is_the_first_that_a_device_has_not_completed() -> None:
    done = make_stream(1, entered_at=10.0, completed=6)
    first = make_stream(2, entered_at=11.0, completed=5)
    newest = make_stream(3, entered_at=12.0, completed=5)
    assert make_row(done, first, newest, now=12.1).current_stream is newest
    row = make_row(done, first, newest, now=20.0)
    assert row.current_stream is first
    assert row.device_text == "device: completed 5 of 6 queued"


def test_device_text_is_empty_if_nothing_is_known_of_the_device() -> None:
    stream = make_stream(1, entered_at=10.0, completed=6)
    stream.device = None
    assert make_row(stream, now=20.0).device_text == make_row(now=20.0).device_text == ""
