"""Whether a process that a rank started is a rank, and the name of its job."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hangwatch.agent.environment import run_dir
from hangwatch.agent.environment.identity import LaunchInfo
from hangwatch.agent.recorder import ring_file
from hangwatch.agent.recorder.ring_file import AncestorRank
from hangwatch.agent.recorder.writer import RingWriter
from hangwatch.model.groups import Group
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


@pytest.mark.parametrize(
    ("environ", "has_ranked_ancestor", "job"),
    [
        ({}, False, "group engines:0123456789abcdef"),
        ({"HANGWATCH_JOB": "serving"}, False, "serving"),
        ({"HANGWATCH_JOB": "serving"}, True, None),
        ({"HANGWATCH_JOB": "serving", "RANK": "0", "WORLD_SIZE": "2"}, False, None),
    ],
)
def test_job_of_a_member_without_a_rank(
    environ: dict[str, str],
    has_ranked_ancestor: bool,
    job: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ancestor = object() if has_ranked_ancestor else None
    monkeypatch.setattr(ring_file, "find_ancestor_rank", lambda: ancestor)
    monkeypatch.setattr(os, "environ", environ)
    group = Group(name="engines", desc="", ranks=(0, 1), foreign="0123456789abcdef", number=1)
    launch = ring_file.choose_member_launch(group)
    assert (launch.job if launch is not None else None) == job


def test_member_without_a_rank_is_no_ancestor_rank(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The processes that an engine starts are recorded as if it was not."""
    monkeypatch.setenv("HANGWATCH_URL", "http://127.0.0.1:1")
    monkeypatch.setattr(run_dir, "ensure_run_dir", lambda _: tmp_path)
    pid = os.getppid()
    start_ticks = run_dir.read_start_ticks(pid)
    name = run_dir.format_process_key(pid, start_ticks) + run_dir.RING_SUFFIX
    ring = RingWriter(tmp_path / name, pid=pid, start_ticks=start_ticks, has_checks=False)
    rank = {"job": "serving", "rank": 0, "world_size": 2}
    ring.write_identity({**rank, "master": "group engines:0123456789abcdef"})
    assert ring_file.find_ancestor_rank() is None
    ring.write_identity({**rank, "master": _ADDRESS})
    found = ring_file.find_ancestor_rank()
    assert found is not None and found.master_address == _ADDRESS
