"""The bytes that threads and children of this process move."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hangwatch.agent.node.system.awaited import read_awaited
from hangwatch.agent.node.system.processes import PROC_ROOT
from hangwatch.agent.node.system.transfers import TransferMeter
from hangwatch.model.ranks import Frame, ThreadStack

SIZE = 300_000
SLEEPS = Frame(function="main", file="/home/me/train.py", line=1, text="time.sleep(1)")
CLIENT = """
import socket, sys
with socket.create_connection(("127.0.0.1", int(sys.argv[1]))) as connection:
    while connection.recv(1 << 16):
        pass
"""


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener


class Receiver:
    """A thread that receives what a server in this process sends."""

    def __init__(self, listener: socket.socket, *, accepts: bool = False) -> None:
        address = listener.getsockname()
        self.far = socket.create_connection(address)
        self.near, _ = listener.accept()
        if not accepts:
            self.far, self.near = self.near, self.far
        self._started = threading.Event()
        threading.Thread(target=self._receive, daemon=True).start()
        self._started.wait()
        time.sleep(0.02)

    def _receive(self) -> None:
        self.tid = threading.get_native_id()
        self._started.set()
        while self.near.recv(1 << 16):
            pass

    def close(self) -> None:
        self.far.close()
        time.sleep(0.02)
        self.near.close()


def measure(meter: TransferMeter, *tids: int, frames: tuple[Frame, ...] = ()) -> list[int]:
    time.sleep(0.05)
    threads = [ThreadStack(thread=f"thread {tid}", frames=frames, tid=tid) for tid in tids]
    awaited = {tid: read_awaited(os.getpid(), tid, PROC_ROOT) for tid in tids}
    measured = meter.measure_threads(threads, os.getpid(), awaited)
    return [thread.moved_bytes or 0 for thread in measured]


@pytest.mark.parametrize("accepts", [False, True])
def test_received_bytes_count_for_the_thread_that_waits(
    listener: socket.socket, accepts: bool
) -> None:
    busy, idle = Receiver(listener, accepts=accepts), Receiver(listener)
    meter = TransferMeter()
    before = measure(meter, busy.tid, idle.tid)
    busy.far.sendall(bytes(SIZE))
    after = measure(meter, busy.tid, idle.tid)
    assert SIZE <= after[0] - before[0] < 2 * SIZE
    assert after[1] - before[1] < 1000
    busy.close()
    idle.close()


def test_connection_that_no_thread_waits_for_counts_where_the_wait_is_not_known(
    listener: socket.socket,
) -> None:
    """As for a download by native threads."""
    far = socket.create_connection(listener.getsockname())
    near, _ = listener.accept()
    unknown, asleep = threading.Event(), threading.Event()
    waiting = [threading.Thread(target=event.wait, daemon=True) for event in (unknown, asleep)]
    for thread in waiting:
        thread.start()
    tids = [thread.native_id or 0 for thread in waiting]
    meter = TransferMeter()
    before = measure(meter, tids[0]) + measure(meter, tids[1], frames=(SLEEPS,))
    near.sendall(bytes(20_000))
    assert measure(meter, tids[1], frames=(SLEEPS,))[0] - before[1] < 1000
    near.sendall(bytes(20_000))
    assert measure(meter, tids[0])[0] - before[0] >= 20_000
    far.close()
    near.close()
    unknown.set()
    asleep.set()


def test_read_and_written_files_count_for_their_thread(tmp_path: Path) -> None:
    meter = TransferMeter()
    me = threading.get_native_id()
    before = measure(meter, me)
    (tmp_path / "file").write_bytes(bytes(SIZE))
    assert len((tmp_path / "file").read_bytes()) == SIZE
    assert measure(meter, me)[0] - before[0] >= 2 * SIZE


def test_child_that_downloads(listener: socket.socket) -> None:
    port = str(listener.getsockname()[1])
    with subprocess.Popen([sys.executable, "-S", "-c", CLIENT, port]) as child:
        near, _ = listener.accept()
        meter = TransferMeter()
        before = meter.measure_tree(child.pid, os.getpid())
        near.sendall(bytes(SIZE))
        time.sleep(0.05)
        assert meter.measure_tree(child.pid, os.getpid()) - before >= SIZE
        near.close()
