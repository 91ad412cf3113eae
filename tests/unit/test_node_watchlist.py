"""Processes that are dead before there is time to watch them: how and when they ended is told all the same."""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import time
from pathlib import Path

from hangwatch.agent import rundir
from hangwatch.agent.node import exits
from hangwatch.agent.node.log import Log
from hangwatch.agent.node.main import hold
from hangwatch.agent.node.watchlist import Watchlist
from hangwatch.agent.recorder.writer import RingWriter
from hangwatch.types import Ended


def a_rank(folder: Path) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(["sleep", "60"])
    ticks = rundir.start_ticks(process.pid)
    ring = RingWriter(folder / f"{process.pid}-{ticks}.ring", pid=process.pid, start_ticks=ticks)
    ring.identity({"job": "j", "rank": 0, "world_size": 1})
    ring.pulse(time.monotonic_ns())
    return process


def test_the_end_of_a_zombie_is_dated_by_its_last_sign_of_life(tmp_path: Path) -> None:
    process = a_rank(tmp_path)
    pulse = time.monotonic_ns()
    process.send_signal(signal.SIGKILL)
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    try:
        with selectors.DefaultSelector() as selector:
            (found,) = Watchlist(tmp_path, selector, Log()).scan(pulse + 3_000_000_000)
        assert found.ended == Ended(signal=signal.SIGKILL)
        assert abs(found.ended_ns - pulse) < 1e9
    finally:
        process.wait()


def test_how_a_held_process_ended_is_known_after_it_was_reaped(tmp_path: Path) -> None:
    process = a_rank(tmp_path)
    pulse = time.monotonic_ns()
    held = hold(tmp_path)
    (fd,) = held.values()
    process.send_signal(signal.SIGKILL)
    process.wait()
    told = exits._pidfd_status(fd) is not None  # by the kernel: since Linux 6.15
    with selectors.DefaultSelector() as selector:
        (found,) = Watchlist(tmp_path, selector, Log(), held=held).scan(pulse + 3_000_000_000)
    assert found.ended == (Ended(signal=signal.SIGKILL) if told else Ended())
    assert abs(found.ended_ns - pulse) < 1e9
    assert held == {}
