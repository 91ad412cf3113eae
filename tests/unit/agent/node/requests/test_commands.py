"""How a node agent ends ranks by order of the server, which processes it must not end, and which
calls it sends.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hangwatch.agent.node.discovery.watched import WatchedProcess, watch_process
from hangwatch.agent.node.hardware.monitor import HardwareMonitor
from hangwatch.agent.node.reporting.uplink import Outbox
from hangwatch.agent.node.requests.commands import AbortTracker, CommandExecutor
from hangwatch.agent.node.requests.recordings import RecordingWorker
from hangwatch.agent.node.requests.traces import TraceRequests
from hangwatch.agent.node.stacks.pyspy import PySpy
from hangwatch.agent.node.stacks.sampler import StackSampler
from hangwatch.agent.node.system.processes import read_environ, read_stat
from hangwatch.agent.node.system.runtime import AgentLog
from hangwatch.model.ranks import ExitInfo
from hangwatch.protocol.commands import Command, CommandKind
from hangwatch.protocol.heartbeat import Heartbeat
from tests.simulation.waiting import wait_until

from ..discovery.test_rings import make_ring, watch_ring


@contextlib.contextmanager
def running_rank(**env: str) -> Iterator[WatchedProcess]:
    launch = {"RANK": "0", "WORLD_SIZE": "1"}
    with subprocess.Popen(["sleep", "60"], env={**os.environ, **launch, **env}) as process:
        ticks = read_stat(process.pid).start_ticks
        assert wait_until(lambda: "RANK" in read_environ(process.pid), 5.0)
        watched = watch_process(process.pid, ticks, time.monotonic_ns())
        yield watched
        watched.close()
        process.kill()


def make_command(process: WatchedProcess | None) -> Command:
    key = "1-1" if process is None else process.key
    return Command(id="order", kind=CommandKind.ABORT, key=key)


def test_rank_that_allows_it_is_killed() -> None:
    tracker, now_ns = AbortTracker(), time.monotonic_ns()
    with running_rank(HANGWATCH_ON_HANG="abort") as rank:
        assert tracker.abort_process(make_command(rank), rank, now_ns) is None
        assert tracker, "its exit is not reported yet"
        assert wait_until(rank.has_ended, 5.0)
        rank.record_exit(now_ns)
        (reply,) = tracker.check_exits({rank.key: rank}, now_ns)
    assert (reply.key, reply.request, reply.error) == (rank.key, "order", None)
    assert (reply.signal, reply.ended) == (signal.SIGKILL, ExitInfo(signal=signal.SIGKILL))
    assert not tracker


def test_rank_that_does_not_allow_it_is_left_alone() -> None:
    tracker = AbortTracker()
    with running_rank() as rank:
        reply = tracker.abort_process(make_command(rank), rank, 0)
        assert reply is not None and "HANGWATCH_ON_HANG=abort" in (reply.error or "")
        assert not tracker and not rank.has_ended()
        unknown = tracker.abort_process(make_command(None), None, 0)
    assert unknown is not None and "no such process" in (unknown.error or "")


@pytest.mark.parametrize(("last", "seqs"), [(9, [7, 8, 9]), (99, [38, 39]), (5, []), (0, [])])
def test_reply_with_calls_covers_the_requested_window(
    tmp_path: Path, last: int, seqs: list[int]
) -> None:
    rank, outbox, pyspy = watch_ring(make_ring(tmp_path)), Outbox(), PySpy(path=None)
    recordings = RecordingWorker(pyspy, lambda: None)
    sampler = StackSampler(pyspy, lambda: None, recordings.preempt_recording)
    hardware, traces = HardwareMonitor(lambda: None), TraceRequests()
    executor = CommandExecutor(
        {rank.key: rank}, sampler, recordings, hardware, traces, outbox, AgentLog()
    )
    first = 38 if last == 99 else 7
    for key in (rank.key, "1-1"):
        command = Command(
            id=key, kind=CommandKind.CALLS, key=key, uid=1, from_seq=first, to_seq=last
        )
        executor.execute_command(command, time.monotonic_ns())
    replies = outbox.list_pending(0)["calls"]
    assert [[call.seq for call in reply.calls] for reply in replies] == [seqs, []]
    assert {(reply.from_seq, reply.to_seq) for reply in replies} == {(first, last)}
    rank.close()


def test_outcome_is_reported_until_it_is_acknowledged() -> None:
    outbox = Outbox()
    reply = AbortTracker().abort_process(make_command(None), None, 0)
    assert reply is not None
    outbox.add_reply(reply, 0)
    for number in (1, 2):
        pending = outbox.list_pending(number)
        assert pending["aborts"] == (reply,)
    outbox.mark_delivered(Heartbeat(host="h", agent="a", number=2, aborts=(reply,)))
    assert not outbox
