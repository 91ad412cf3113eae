"""Native code that is blocked in a system call stays blocked while its stacks are taken: with and
without the GIL, by py-spy and where that is refused.
"""

from __future__ import annotations

import os
import select
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.harness.job import PTRACE_REFUSED

from .blocking_calls import CALLS, remove_queues
from .node_support import AgentTestbed, open_testbed

# The others are made without the GIL only. Each of these takes a process.
CALLS_WITH_GIL = (
    "sleep",
    "poll",
    "select",
    "epoll_wait",
    "recv with SO_RCVTIMEO",
    "read from a pipe",
    "futex with a limit",
    "semtimedop",
    "sigtimedwait",
)
SETTLE_S = 0.5


@pytest.fixture(params=["py-spy", "faulthandler"])
def source(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def agent_testbed(source: str, tmp_path: Path) -> Iterator[AgentTestbed]:
    with open_testbed(tmp_path) as made:
        if source == "faulthandler":
            made.command_prefix = list(PTRACE_REFUSED)
        yield made
        for process in made.processes:
            remove_queues(process.pid)


def start_and_sample(testbed: AgentTestbed, tmp_path: Path, *orders: list[str]) -> list[Any]:
    """Two samples of a rank for each of the orders; no call may return because of them."""
    env = testbed.make_environ(TMPDIR=str(tmp_path))
    ranks = [testbed.start_rank(n, *order, env=env) for n, order in enumerate(orders)]
    testbed.start_agent()
    keys = [testbed.wait_until_reported(n)["key"] for n in range(len(ranks))]
    samples = [testbed.receiver.request_stacks(key) for key in keys for _ in range(2)]
    outputs = [process.stdout for process in ranks if process.stdout is not None]
    returned, _, _ = select.select(outputs, [], [], SETTLE_S)
    assert [os.read(output.fileno(), 4096).decode() for output in returned] == []
    assert [process.poll() for process in ranks] == [None] * len(ranks)
    return samples


def test_calls_without_the_gil(agent_testbed: AgentTestbed, source: str, tmp_path: Path) -> None:
    samples = start_and_sample(
        agent_testbed, tmp_path, ["block_all", "sleep"], ["block", "epoll_wait"]
    )
    assert [sample["source"] for sample in samples] == [source] * 4
    functions = [frame["function"] for t in samples[0]["threads"] for frame in t["frames"]]
    assert functions.count("enter_blocking_call") == len(CALLS)
    assert "where_it_sleeps" in functions


def test_calls_with_the_gil(agent_testbed: AgentTestbed, source: str, tmp_path: Path) -> None:
    orders = [["hold", name] for name in CALLS_WITH_GIL]
    for sample in start_and_sample(agent_testbed, tmp_path, *orders):
        assert sample["source"] == source
        main = next(thread for thread in sample["threads"] if thread.get("main"))
        assert main["holds_gil"]
        assert "enter_blocking_call" in [frame["function"] for frame in main["frames"]]
        if source == "faulthandler":
            assert (
                "native code keeps the GIL: the main thread is asleep in the kernel"
                in sample["error"]
            )
