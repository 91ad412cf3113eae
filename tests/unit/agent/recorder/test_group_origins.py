"""Which groups make a process a rank that no launcher and no world made one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from hangwatch.agent.recorder.group_origins import OriginTracker
from hangwatch.model.groups import Group


class _ProcessGroup:
    """A process group. The tracker keeps only a weak reference to it."""


TCP_STORE = SimpleNamespace(host="node0", port=29400)


@pytest.fixture
def joined(tracker: OriginTracker) -> list[Group]:
    groups: list[Group] = []
    tracker.join_callback = groups.append
    return groups


@pytest.fixture
def tracker() -> OriginTracker:
    return OriginTracker()


def create_group(tracker: OriginTracker, store: Any, rank: int, size: int) -> _ProcessGroup:
    pg = _ProcessGroup()
    tracker.record_group(pg, (store, rank, size), {})
    return pg


def test_process_joins_a_group_once_it_has_a_backend(
    tracker: OriginTracker, joined: list[Group]
) -> None:
    pg = create_group(tracker, TCP_STORE, 1, 2)
    assert joined == [], "the other members may not have come yet"
    tracker.record_backend(pg, (), {})
    [group] = joined
    assert (group.number, group.ranks) == (1, (0, 1))
    assert group.name == "store at port 29400"


@pytest.mark.parametrize(
    ("store", "rank", "size"),
    [
        (TCP_STORE, 0, 1),  # a group of one member waits for nobody
        (TCP_STORE, -1, 2),
        (SimpleNamespace(), 0, 2),  # the store of threads of one process
    ],
)
def test_other_groups_make_no_process_a_rank(
    tracker: OriginTracker, joined: list[Group], store: Any, rank: int, size: int
) -> None:
    tracker.record_backend(create_group(tracker, store, rank, size), (), {})
    assert joined == []


def test_groups_of_a_world_and_recorded_processes_join_nothing(
    tracker: OriginTracker, joined: list[Group]
) -> None:
    tracker.ranked_creation.depth = 1
    tracker.record_backend(create_group(tracker, TCP_STORE, 0, 2), (), {})
    tracker.ranked_creation.depth = 0
    tracker.set_listeners(lambda op, group: None, lambda call, has_backend: None)
    tracker.record_backend(create_group(tracker, TCP_STORE, 0, 2), (), {})
    assert joined == []
