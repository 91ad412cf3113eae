"""How a node agent ends ranks by order of the server, which processes it must not end, and which
calls it sends.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hangwatch.agent.node.discovery.rings import RingFile
from hangwatch.agent.node.discovery.watched import (
    UNREADABLE_GRACE_NS,
    WatchedProcess,
    watch_process,
)
from hangwatch.agent.node.hardware.monitor import HardwareMonitor
from hangwatch.agent.node.reporting.uplink import Outbox
from hangwatch.agent.node.requests import commands
from hangwatch.agent.node.requests.commands import AbortTracker, CommandExecutor
from hangwatch.agent.node.requests.recordings import RecordingWorker
from hangwatch.agent.node.requests.traces import TraceRequests
from hangwatch.agent.node.stacks.cuda_gdb import CudaGdb, KernelReader
from hangwatch.agent.node.stacks.pyspy import PySpy
from hangwatch.agent.node.stacks.sampler import StackSampler
from hangwatch.agent.node.system.processes import read_environ, read_stat
from hangwatch.agent.node.system.runtime import AgentLog
from hangwatch.model.ranks import ExitInfo
from hangwatch.protocol.commands import Command, CommandKind
from hangwatch.protocol.heartbeat import AbortReply, Heartbeat, KernelsReply
from tests.simulation.waiting import wait_for_value, wait_until

from ..discovery.test_rings import make_ring, watch_ring
from ..stacks.gpu_cores import FakeKernel, make_core
from ..stacks.test_cuda_gdb import write_debugger


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


def make_executor(
    rank: WatchedProcess,
    outbox: Outbox,
    *,
    recordings: RecordingWorker | None = None,
    cuda_gdb: str | None = None,
) -> CommandExecutor:
    """``cuda_gdb`` is its path."""
    pyspy = PySpy(path=None)
    recordings = recordings or RecordingWorker(pyspy, lambda: None)
    preempt_recording = recordings.preempt_recording
    sampler = StackSampler(pyspy, lambda: None, preempt_recording)
    kernels = KernelReader(CudaGdb(path=cuda_gdb), lambda: None, sampler.locks, preempt_recording)
    return CommandExecutor(
        watched={rank.key: rank},
        sampler=sampler,
        recordings=recordings,
        kernels=kernels,
        hardware=HardwareMonitor(lambda: None),
        traces=TraceRequests(),
        outbox=outbox,
        log=AgentLog(),
    )


def test_rank_that_allows_it_is_killed() -> None:
    tracker, now_ns = AbortTracker(), time.monotonic_ns()
    with running_rank(HANGWATCH_ON_HANG="abort") as rank:
        assert tracker.abort_process(make_command(rank), rank, now_ns) is None
        assert tracker, "its exit is not reported yet"
        assert wait_until(rank.has_ended, 5.0)
        rank.record_exit(now_ns)
        (reply,) = tracker.check_exits({rank.key: rank}, now_ns)
    assert isinstance(reply, AbortReply)
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
    rank, outbox = watch_ring(make_ring(tmp_path)), Outbox()
    executor = make_executor(rank, outbox)
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


def run_kernels_command(rank: WatchedProcess, cuda_gdb: str | None = None) -> list[KernelsReply]:
    outbox = Outbox()
    executor = make_executor(rank, outbox, cuda_gdb=cuda_gdb)
    command = Command(id="k", kind=CommandKind.KERNELS, key=rank.key)
    executor.execute_command(command, time.monotonic_ns())

    def list_replies() -> list[KernelsReply]:
        executor.collect_results()
        return list(outbox.list_pending(time.monotonic_ns())["kernels"])

    return wait_for_value(list_replies, "the reply with the kernels")


def test_debugger_attaches_only_where_the_job_allows_it(tmp_path: Path) -> None:
    row = "* 0 - 1 1 Active 0x3 (2,1,1) (128,1,1) spin(int)"
    path = write_debugger(tmp_path, f"echo 'Kernel GridDim BlockDim'; echo '{row}'")
    with running_rank() as rank:
        (refused,) = run_kernels_command(rank, path)
    assert "HANGWATCH_GPU_STACKS=1" in str(refused.error)
    with running_rank(HANGWATCH_GPU_STACKS="1") as rank:
        (reply,) = run_kernels_command(rank, path)
        assert [(kernel.name, kernel.device) for kernel in reply.kernels] == [("spin", 1)]
        assert (reply.key, reply.request, reply.error) == (rank.key, "k", None)
        rank.exit = ExitInfo(exit_status=0)
        (late,) = run_kernels_command(rank, path)
    assert late.error == "the process has ended"


# It does what a driver does with core dumps of GPUs, at once or never.
DRIVER = """
import os, sys, time
pid = os.getpid()
os.mkfifo(f"{pid}.gpupipe")
fd = os.open(f"{pid}.gpupipe", os.O_RDWR)
os.rename("ready", "listens")
os.read(fd, 1)
if "stuck" in sys.argv:
    time.sleep(60)
os.rename("core", f"{pid}.gpucore")
os.abort()
"""


@contextlib.contextmanager
def running_driver(folder: Path, *arguments: str) -> Iterator[WatchedProcess]:
    """A rank with a ring in ``folder``, and with a pipe for core dumps."""
    (folder / "ready").touch()
    (folder / "core").write_bytes(make_core([FakeKernel("_Z4spini", 0x7F0000)]))
    env = {**os.environ, "RANK": "0", "WORLD_SIZE": "1", "HANGWATCH_ON_HANG": "abort"}
    command = [sys.executable, "-c", DRIVER, *arguments]
    with subprocess.Popen(command, env=env, cwd=folder) as process:
        assert wait_until((folder / "listens").exists, 10.0)
        ticks = read_stat(process.pid).start_ticks
        path = folder / f"{process.pid}-{ticks}.ring"
        ring = RingFile(path=path, pid=process.pid, start_ticks=ticks)
        watched = watch_process(process.pid, ticks, time.monotonic_ns(), ring=ring)
        watched.read_state(time.monotonic_ns() + UNREADABLE_GRACE_NS)  # it has no ring in fact
        yield watched
        watched.close()
        process.kill()


def test_rank_that_wants_a_core_dump_ends_with_one(tmp_path: Path) -> None:
    tracker, now_ns = AbortTracker(), time.monotonic_ns()
    with running_driver(tmp_path) as rank:
        assert tracker.abort_process(make_command(rank), rank, now_ns) is None
        assert wait_until(rank.has_ended, 10.0)
        rank.record_exit(now_ns)
        kernels, reply = tracker.check_exits({rank.key: rank}, now_ns)
        assert rank.ring is not None
        rank.ring.remove_files()
    assert isinstance(kernels, KernelsReply) and isinstance(reply, AbortReply)
    assert [kernel.name for kernel in kernels.kernels] == ["spin"]
    assert (kernels.source, kernels.request) == ("core dump", "order")
    assert (reply.signal, reply.ended) == (signal.SIGABRT, ExitInfo(signal=signal.SIGABRT))
    assert not list(tmp_path.glob("*.gpu*"))


def test_rank_whose_core_dump_takes_too_long_is_killed(tmp_path: Path) -> None:
    messages: list[str] = []
    tracker, now_ns = AbortTracker(messages.append), time.monotonic_ns()
    with running_driver(tmp_path, "stuck") as rank:
        assert tracker.abort_process(make_command(rank), rank, now_ns) is None
        assert tracker.check_exits({rank.key: rank}, now_ns + 10**9) == []
        assert not rank.has_ended()
        assert tracker.check_exits({rank.key: rank}, now_ns + 5 * 10**9) == []
        assert wait_until(rank.has_ended, 5.0)
        rank.record_exit(now_ns)
        (reply,) = tracker.check_exits({rank.key: rank}, now_ns)
    assert isinstance(reply, AbortReply)
    assert (reply.signal, reply.ended) == (signal.SIGKILL, ExitInfo(signal=signal.SIGKILL))
    assert messages == ["the driver wrote no core dump"]


def test_rank_is_killed_if_there_is_no_space_for_its_core_dump(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    messages: list[str] = []
    monkeypatch.setattr(commands, "REQUIRED_BYTES", 1 << 60)
    tracker, now_ns = AbortTracker(messages.append), time.monotonic_ns()
    with running_driver(tmp_path) as rank:
        assert tracker.abort_process(make_command(rank), rank, now_ns) is None
        assert wait_until(rank.has_ended, 5.0)
        rank.record_exit(now_ns)
        (reply,) = tracker.check_exits({rank.key: rank}, now_ns)
    assert isinstance(reply, AbortReply) and reply.signal == signal.SIGKILL
    assert "HANGWATCH_RUN_DIR" in messages[0]
