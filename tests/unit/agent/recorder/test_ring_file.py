"""Whether a process that a rank started is a rank, and the name of its job."""

from __future__ import annotations

import pytest

from hangwatch.agent.environment.identity import LaunchInfo
from hangwatch.agent.recorder import ring_file
from hangwatch.agent.recorder.ring_file import AncestorRank
from hangwatch.model.ranks import Lifecycle

_ADDRESS = "node0:29500"


def _make_launch(rank: int | None, job: str = "run7", world_size: int = 4) -> LaunchInfo:
    return LaunchInfo(job=job, restart=0, rank=rank, world_size=world_size, local_rank=rank)


@pytest.fixture
def ancestor(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process was started by rank 0 of 4."""
    rank = AncestorRank(
        lifecycle=Lifecycle.INITIALISED,
        job="run7",
        rank=0,
        world_size=4,
        master_address=_ADDRESS,
    )
    monkeypatch.setattr(ring_file, "find_ancestor_rank", lambda: rank)
    monkeypatch.setenv("MASTER_ADDR", "node0")
    monkeypatch.setenv("MASTER_PORT", "29500")


@pytest.mark.usefixtures("ancestor")
def test_children_of_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not ring_file.is_started_as_rank(_make_launch(0)), (
        "a worker with its parent's environment"
    )
    assert not ring_file.is_started_as_rank(_make_launch(None))
    assert ring_file.is_started_as_rank(_make_launch(2)), "rank 0 started it as rank 2"
    monkeypatch.setenv("MASTER_PORT", "29999")
    assert not ring_file.is_started_as_rank(_make_launch(2)), "of a world of its own"


@pytest.mark.usefixtures("ancestor")
def test_job_of_a_world_that_a_child_joins() -> None:
    launch = _make_launch(None)
    assert ring_file.choose_launch(launch, 2, 4, "") == launch, "the world of its parent"
    assert ring_file.choose_launch(launch, 0, 1, "node0:7") is None, (
        "a world of one waits for no rank"
    )
    nested = ring_file.choose_launch(launch, 1, 2, "node0:7")
    assert nested is not None and nested.job == "run7/node0:7"
    other = _make_launch(None, job="eval")
    assert ring_file.choose_launch(other, 1, 2, "node0:7") == other, "its launcher gave it a name"


def test_rank_without_an_ancestor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ring_file, "find_ancestor_rank", lambda: None)
    launch = _make_launch(3)
    assert ring_file.is_started_as_rank(launch)
    assert ring_file.choose_launch(launch, 3, 4, "") == launch


class _TcpStore:
    host, port = "localhost", 29400


class _FileStore:
    path = "/shared/rendezvous"


@pytest.mark.parametrize(
    ("arguments", "rendezvous"),
    [
        ({}, ""),
        ({"init_method": "env://"}, ""),
        ({"init_method": "tcp://10.0.0.1:23456"}, "10.0.0.1:23456"),
        ({"init_method": "tcp://10.0.0.1:23456?rank=0&world_size=2"}, "10.0.0.1:23456"),
        ({"init_method": "file:///shared/rendezvous"}, "/shared/rendezvous"),
        ({"store": _TcpStore()}, "tcp:29400"),
        ({"store": _FileStore()}, "/shared/rendezvous"),
        ({"store": object()}, ""),
    ],
)
def test_rendezvous_of_arguments(arguments: dict[str, object], rendezvous: str) -> None:
    assert ring_file.find_rendezvous(arguments) == rendezvous
