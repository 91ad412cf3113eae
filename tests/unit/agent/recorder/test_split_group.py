"""Which calls of split_group are recorded among the set-up calls of a world. gloo cannot make one; tests/zoo/nccl has jobs that do."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import distributed_c10d as c10d

from hangwatch.agent.recorder import installation


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The set-up calls of a rank in whose place these tests call."""
    calls: list[str] = []
    current = SimpleNamespace(setup_recorder=SimpleNamespace(enter_call=calls.append))
    monkeypatch.setattr(installation, "current_rank", current)
    return calls


def split_group(*args: Any, **kwargs: Any) -> None:
    installation._enter_split_group(args, kwargs)


def test_split_of_the_world_is_recorded(
    recorded: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    world = object()
    monkeypatch.setattr(c10d._world, "_default_pg", world)
    split_group(split_ranks=[[0, 1], [2, 3]])
    split_group(None, [[0, 1], [2, 3]])
    split_group(world, [[0, 1], [2, 3]])
    assert recorded == ["split_group"] * 3


def test_split_of_another_group_is_not_recorded(recorded: list[str]) -> None:
    split_group(object(), [[0, 1]])
    split_group(parent_pg=object(), split_ranks=[[0, 1]])
    assert recorded == []
