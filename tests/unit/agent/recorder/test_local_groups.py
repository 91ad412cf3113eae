"""Which calls of new_group are recorded where only the members of the group make them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from hangwatch.agent.recorder import installation

Recorded = list[tuple[Any, ...]]


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Recorded:
    """The set-up calls of rank 1 of 4, in whose place these tests call."""
    calls: Recorded = []
    setup = SimpleNamespace(
        enter_call=lambda op, ranks: calls.append((op, ranks)),
        enter_local_call=lambda op, ranks, name: calls.append((op, ranks, name)),
    )
    current = SimpleNamespace(rank=1, world_size=4, setup_recorder=setup)
    monkeypatch.setattr(installation, "current_rank", current)
    return calls


def enter_new_group(*args: Any, **kwargs: Any) -> Any:
    return installation._enter_new_group(args, kwargs)


def test_call_of_members_alone_has_the_name_of_its_group(recorded: Recorded) -> None:
    enter_new_group([2, 1], use_local_synchronization=True)
    enter_new_group(None, use_local_synchronization=True)
    (_, first_ranks, first_name), (_, second_ranks, second_name) = recorded
    assert (first_ranks, second_ranks) == ((1, 2), (0, 1, 2, 3))
    assert first_name != second_name


def test_ranks_that_are_no_members_make_no_call(recorded: Recorded) -> None:
    assert enter_new_group([2, 3], use_local_synchronization=True) is None
    assert recorded == []


def test_call_of_all_ranks_is_recorded_with_members(recorded: Recorded) -> None:
    enter_new_group([2, 1])
    assert recorded == [("new_group", (1, 2))]
