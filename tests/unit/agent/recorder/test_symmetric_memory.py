"""Calls of operators on symmetric memory are recorded in a stream of their own, by both recorders, and
come out as without a recorder.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hangwatch.agent.recorder.calls import CallReader, iter_communicating_operators
from hangwatch.agent.recorder.groups import GroupRegistry
from hangwatch.agent.recorder.streams import CompletionMode, StreamRecorder
from hangwatch.agent.recorder.writer import RingWriter
from hangwatch.model.groups import SYMMETRIC_BACKEND
from hangwatch.ring.layout import UNKNOWN_COMPLETED
from tests.harness import native
from tests.harness.processes import clean_environment

from .test_first_calls import Group, make_ring

PROGRAM = Path(__file__).with_name("symmetric_program.py")
EAGER_CALLS = [
    ["symm_mem.one_shot_all_reduce", [[2, 3]], "sum", None, "call_eagerly"],
    ["symm_mem.one_shot_all_reduce", [[2, 3]], "avg", None, "call_eagerly"],
    ["symm_mem.two_shot_all_reduce_", [[2, 3]], "sum", None, "call_eagerly"],
    ["symm_mem.nvshmem_broadcast", [[2, 3]], None, 0, "call_eagerly"],
    *[["symm_mem.fused_all_gather_matmul", [[2, 3]], None, None, "call_eagerly"]] * 2,
]
COMPILED_CALLS = [
    ["symm_mem.one_shot_all_reduce", [[4]], "sum", None, "trace.<locals>.reduce"],
    ["symm_mem.tile_reduce", [[4]], "sum", 0, "trace.<locals>.reduce"],
]
# Calls with fake and meta tensors are none, nor is one that has no kernel.
TRACED_CALLS = [
    ["symm_mem.one_shot_all_reduce", [[4]], "sum", None, "trace.<locals>.<lambda>"],
    ["symm_mem.one_shot_all_reduce", [[4]], "sum", None, "trace"],
    *COMPILED_CALLS * 2,
]


def run_program(kind: str, folder: Path, **env: str) -> Any:
    finished = subprocess.run(
        [sys.executable, str(PROGRAM), kind, str(folder)],
        env=clean_environment(**env), capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert finished.returncode == 0, finished.stderr
    assert "hangwatch" not in finished.stderr
    return json.loads(finished.stdout)


@pytest.fixture(scope="module")
def plain_results(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return run_program("none", tmp_path_factory.mktemp("plain"))["results"]


@pytest.mark.parametrize("kind", ["python", pytest.param("native", marks=pytest.mark.slow)])
def test_calls_are_recorded_and_come_out_the_same(
    kind: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, plain_results: Any
) -> None:
    env = native.recorder_env(kind, tmp_path_factory)
    output = run_program(kind, tmp_path, **env)
    assert output["results"] == plain_results
    ring = output["ring"]
    assert (ring["faults"], ring["dropped"]) == ({}, 0)
    streams = ring["streams"]
    assert set(streams) == {
        "group tp", "group tp (symmetric memory)", "group ep", "group ep (symmetric memory)"
    }  # fmt: skip
    assert [call[0] for call in streams["group tp"]["calls"]] == ["all_reduce"]
    of_tp, of_ep = (streams[f"group {name} (symmetric memory)"] for name in ("tp", "ep"))
    assert of_tp["calls"] == EAGER_CALLS + TRACED_CALLS
    assert of_ep["calls"] == EAGER_CALLS
    assert of_tp["backend"] == SYMMETRIC_BACKEND
    assert (of_tp["completed"], of_ep["completed"]) == (12, 6), "on the CPU they block"
    assert of_tp["agree"][: len(EAGER_CALLS)] == of_ep["agree"]
    assert len(set(of_ep["agree"])) == 5, "the operators and the reduce ops are compared"


def make_registry(ring: RingWriter) -> GroupRegistry:
    def make_stream(uid: int, slot: int) -> StreamRecorder:
        return StreamRecorder(ring, uid, slot, lambda work: work)

    return GroupRegistry(ring, make_stream, lambda: None)


def test_completion_on_a_device_is_not_observable(tmp_path: Path) -> None:
    """Whatever the backend of the group is, and without a change for its own calls."""
    groups = make_registry(make_ring(tmp_path))
    pg = Group("tp")
    track = groups.find_symmetric_group(pg)
    stream = track.collective_stream
    assert stream is not None
    reader = next(
        CallReader(operator.spec, operator.schema)
        for operator in iter_communicating_operators()
        if operator.qualified_name == "symm_mem::one_shot_all_reduce"
    )
    on_device = SimpleNamespace(is_cpu=False)
    flags, blocks, mode = reader._find_completion(track, stream, on_device, (), sys._getframe())
    assert (flags, blocks, mode) == (0, False, CompletionMode.UNOBSERVABLE)
    assert stream.completed == UNKNOWN_COMPLETED
    own_stream = groups.find_group(pg).collective_stream
    assert own_stream is not None
    assert own_stream.completed == 0


def test_track_of_a_group_is_found_again(tmp_path: Path) -> None:
    groups = make_registry(make_ring(tmp_path))
    pg = Group("tp")
    track = groups.find_symmetric_group(pg)
    assert groups.find_symmetric_group(pg) is track
    assert track is not groups.find_group(pg)
    assert (track.has_device_backend, track.has_flight_recorder) == (True, False)
    assert len(groups.streams) == 2


def test_group_that_torch_does_not_know_is_not_recorded() -> None:
    for operator in iter_communicating_operators():
        if operator.spec.is_symmetric:
            reader = CallReader(operator.spec, operator.schema)
            args: list[Any] = [torch.ones(1)] * len(operator.schema.arguments)
            args[reader._group_index] = "no group of torch"
            recorder: Any = SimpleNamespace(groups=None)
            assert reader.open_track(recorder, tuple(args)) is None
