"""What threads of this process wait for in the kernel, and which children hold the other end."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from hangwatch.agent.node.system.awaited import Awaited, find_holders, read_awaited
from hangwatch.agent.node.system.processes import PROC_ROOT

IDLE = "import sys; sys.stdin.read()"  # a child that ends with the test


def wait_in_thread(function: Callable[[], object]) -> tuple[int, Awaited]:
    """The id of a thread that calls the function, which blocks, and what it waits for."""
    tids: list[int] = []

    def run() -> None:
        tids.append(threading.get_native_id())
        with contextlib.suppress(OSError):  # the test has closed it
            function()

    threading.Thread(target=run, daemon=True).start()
    awaited = Awaited(descriptors=None)
    for _ in range(400):
        time.sleep(0.005)
        if tids:
            awaited = read_awaited(os.getpid(), tids[0], PROC_ROOT)
            if awaited.descriptors or awaited.address or awaited.child:
                break
    return tids[0], awaited


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    """A child that holds the end of a pipe into which it would write."""
    with subprocess.Popen(
        [sys.executable, "-S", "-c", IDLE], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        yield process
        process.kill()


def find_children(tid: int, awaited: Awaited, *pids: int) -> dict[int, tuple[int, ...]]:
    return find_holders({tid: awaited}, os.getpid(), pids, PROC_ROOT)


def test_receiving_and_polling_threads_wait_for_their_sockets() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert wait_in_thread(lambda: ours.recv(1))[1].descriptors == {ours.fileno()}
        theirs.settimeout(20.0)
        assert wait_in_thread(lambda: theirs.recv(1))[1].descriptors == {theirs.fileno()}
        ours.send(b"xy")
        theirs.send(b"x")


def test_child_that_holds_the_other_end_of_a_pipe(child: subprocess.Popen[bytes]) -> None:
    output = child.stdout
    assert output is not None
    tid, awaited = wait_in_thread(lambda: output.read(1))
    assert awaited.descriptors == {output.fileno()}
    assert find_children(tid, awaited, child.pid) == {child.pid: (tid,)}


def test_forked_sibling_that_inherited_both_ends_does_not_count() -> None:
    context = multiprocessing.get_context("fork")
    reader, writer = context.Pipe(duplex=False)
    stop = context.Event()

    def close_one_end() -> None:
        reader.close()
        stop.wait()

    owner = context.Process(target=close_one_end, daemon=True)
    heir = context.Process(target=stop.wait, daemon=True)
    owner.start()
    heir.start()
    try:
        assert owner.pid
        assert heir.pid
        time.sleep(0.1)
        tid, awaited = wait_in_thread(lambda: reader.poll(20.0))
        assert find_children(tid, awaited, owner.pid, heir.pid) == {owner.pid: (tid,)}
        assert find_children(tid, awaited, heir.pid) == {heir.pid: (tid,)}, "it may be the one"
        writer.send(1)
    finally:
        stop.set()
        owner.join()
        heir.join()


def test_child_that_shares_a_semaphore() -> None:
    context = multiprocessing.get_context("fork")
    semaphore, stop = context.Semaphore(0), context.Event()
    sharing = context.Process(target=stop.wait, daemon=True)
    sharing.start()
    with subprocess.Popen([sys.executable, "-S", "-c", IDLE], stdin=subprocess.PIPE) as other:
        try:
            assert sharing.pid
            tid, awaited = wait_in_thread(semaphore.acquire)
            assert awaited.address
            assert find_children(tid, awaited, sharing.pid, other.pid) == {sharing.pid: (tid,)}
            semaphore.release()
        finally:
            stop.set()
            sharing.join()
            other.kill()


def test_child_whose_end_is_awaited(child: subprocess.Popen[bytes]) -> None:
    tid, awaited = wait_in_thread(child.wait)
    assert awaited.child == child.pid
    assert find_children(tid, awaited, child.pid) == {child.pid: (tid,)}
    child.kill()


def test_thread_that_computes_or_has_ended_waits_for_nothing_known() -> None:
    stop = threading.Event()

    def compute() -> None:
        while not stop.is_set():
            pass

    thread = threading.Thread(target=compute)
    thread.start()
    tid = thread.native_id or 0
    found = [read_awaited(os.getpid(), tid, PROC_ROOT) for _ in range(20)]
    stop.set()
    thread.join()
    assert not any(awaited.descriptors or awaited.child for awaited in found)
    assert read_awaited(os.getpid(), tid, PROC_ROOT).descriptors is None
