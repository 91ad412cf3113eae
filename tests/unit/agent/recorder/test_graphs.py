"""What is recorded of the replays of CUDA graphs: `replays_program.py` has the cases."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hangwatch.agent.recorder.graphs import _describe_collectives
from tests.harness import native
from tests.harness.processes import clean_environment

REDUCE, GATHER, REPLAY = "all_reduce", "all_gather_into_tensor", "graph_replay"
Results = dict[str, Any]


@pytest.fixture(scope="module", params=["python", "native"])
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Results:
    env = clean_environment(**native.recorder_env(request.param, tmp_path_factory))
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("replays_program.py")), str(tmp_path_factory.mktemp("rings"))],
        env=env, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    results: Results = json.loads(done.stdout)
    return results


pytestmark = pytest.mark.slow


def list_ops(results: Results, case: str, stream: str = "default_pg") -> list[str]:
    return [op for op, _ in results[case]["streams"][stream]["calls"]]


def list_contents(results: Results, case: str, stream: str = "default_pg") -> list[str]:
    """The collectives that each replay stands for."""
    calls = results[case]["streams"][stream]["calls"]
    return [detail.partition(", hash ")[0] for op, detail in calls if op == REPLAY]


def test_replay_is_a_call_at_its_position(results: Results) -> None:
    assert list_ops(results, "replays") == [REDUCE, REDUCE, GATHER, REPLAY, REDUCE, REPLAY]
    contents = "3 collectives (all_reduce, all_gather_into_tensor)"
    assert list_contents(results, "replays") == [contents] * 2
    stream = results["replays"]["streams"]["default_pg"]
    assert stream["completed"] is None, "completion is not observable"
    assert stream["lines"][3::2] == ["replays", "replays"]


def test_members_agree_on_what_the_graph_captured(results: Results) -> None:
    agree = results["replay_of_equal_and_other_graphs"]["streams"]["default_pg"]["agree"]
    first, second, third = agree[1::2]
    assert first == second
    assert third != first, "a tensor has another size"


def test_replay_is_a_call_of_each_group(results: Results) -> None:
    assert list_ops(results, "groups") == [REDUCE, REDUCE, REPLAY]
    assert list_contents(results, "groups") == ["2 collectives (all_reduce)"]
    assert list_contents(results, "groups", "other") == ["1 collective (all_reduce)"]


def test_graph_without_collectives_is_not_recorded(results: Results) -> None:
    result = results["no_collective"]
    assert (result["known"], result["replays"], result["streams"]) == (0, 1, {})
    assert list_ops(results, "message") == []
    assert list_ops(results, "message", "default_pg send") == ["send"]


def test_only_calls_of_the_capture_are_captured(results: Results) -> None:
    contents = "2 collectives (all_reduce, all_gather_into_tensor)"
    assert list_contents(results, "other_threads") == [contents]
    assert list_contents(results, "calls_of_the_cpu") == ["1 collective (all_reduce)"]
    assert list_ops(results, "calls_of_the_cpu", "cpu") == [GATHER]


def test_graph_may_be_reset_and_captured_again(results: Results) -> None:
    assert list_ops(results, "captured_again") == [REDUCE, REPLAY, GATHER, REPLAY]
    assert list_contents(results, "captured_again")[1] == "1 collective (all_gather_into_tensor)"
    assert list_ops(results, "capture_that_fails") == [REDUCE]


def test_replay_that_raises_is_uncertain(results: Results) -> None:
    result = results["replay_that_fails"]
    assert "unsupported operand" in result["raised"]
    assert list_ops(results, "replay_that_fails") == [REDUCE, REPLAY, REPLAY]
    assert result["streams"]["default_pg"]["loss"] == 3


def test_error_of_ours_is_recorded_once_and_marks_the_stream(results: Results) -> None:
    result = results["own_error"]
    assert result["replays"] == 2
    (message,) = result["faults"]
    assert message.startswith("recording the replay of a CUDA graph: TypeError")
    assert list_ops(results, "own_error") == [REDUCE, REPLAY]
    assert result["streams"]["default_pg"]["loss"] == 2


def test_error_of_ours_in_a_capture_makes_calls_uncertain(results: Results) -> None:
    result = results["own_error_in_capture"]
    assert result["replays"] == 1
    (message,) = result["faults"]
    assert message.startswith("examining the capture of a CUDA graph: TypeError")
    assert list_ops(results, "own_error_in_capture") == [REDUCE]
    assert result["streams"]["default_pg"]["loss"] == 2


def test_signal_handler_may_interrupt_the_recorder(results: Results) -> None:
    result = results["interrupted"]
    assert (result["raised"], result["replays"]) == ("KeyboardInterrupt", 1)
    assert list_ops(results, "interrupted") == [REDUCE, REPLAY]


def test_plan_is_renewed(results: Results) -> None:
    assert list_ops(results, "outdated_plan") == [REDUCE, REPLAY, REPLAY]


def test_neither_group_nor_graph_is_kept_alive(results: Results) -> None:
    """No garbage collection runs in the program."""
    result = results["deleted_group"]
    assert not result["alive"]
    assert list_ops(results, "deleted_group") == [REDUCE, REPLAY, REPLAY]
    assert list_ops(results, "deleted_group", "other") == [REDUCE, REPLAY]
    assert result["streams"]["other"]["loss"] == 3
    result = results["deleted_graph"]
    assert (result["before"], result["after"], result["alive"]) == ([1, 1], [0, 0], False)


def test_capture_that_the_ring_does_not_hold_makes_calls_uncertain(results: Results) -> None:
    result = results["more_calls_than_the_ring_holds"]
    assert result["faults"] == [
        "examining the capture of a CUDA graph: OverflowError: more than 2000 calls, so that the"
        " replays are not watched"
    ]
    assert result["streams"]["default_pg"]["loss"] == 2002


def test_few_operations_are_named() -> None:
    assert _describe_collectives(["a", "b", "a", "c"]) == "4 collectives (a, b, c)"
    assert _describe_collectives(["a", "b", "c", "d"]) == "4 collectives (a, b, c, …)"
