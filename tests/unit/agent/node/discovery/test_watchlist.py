"""The processes that are watched; for those that exit before they can be watched, how and when they
exited is still reported.
"""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import time
from pathlib import Path

from hangwatch.agent.environment import run_dir
from hangwatch.agent.node.discovery import rings
from hangwatch.agent.node.discovery.watchlist import Watchlist
from hangwatch.agent.node.main import open_rank_pidfds
from hangwatch.agent.node.system.runtime import AgentLog
from hangwatch.agent.recorder.writer import RingWriter
from hangwatch.model.ranks import ExitInfo


def start_rank(folder: Path) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(["sleep", "60"])
    ticks = run_dir.read_start_ticks(process.pid)
    ring = RingWriter(folder / f"{process.pid}-{ticks}.ring", pid=process.pid, start_ticks=ticks)
    ring.write_identity({"job": "j", "rank": 0, "world_size": 1})
    ring.write_pulse(time.monotonic_ns())
    return process


def test_zombie_exit_time_is_last_sign_of_life(tmp_path: Path) -> None:
    process = start_rank(tmp_path)
    pulse = time.monotonic_ns()
    process.send_signal(signal.SIGKILL)
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    try:
        exits: list[str] = []
        with selectors.DefaultSelector() as selector:
            watchlist = Watchlist(
                tmp_path, selector, AgentLog(), on_exit=lambda: exits.append("one")
            )
            (watched,) = watchlist.scan_processes(pulse + 3_000_000_000)
        assert exits == ["one"]
        assert watched.exit == ExitInfo(signal=signal.SIGKILL)
        assert abs(watched.exited_at_ns - pulse) < 1e9
    finally:
        process.wait()


def test_exit_status_of_held_process_is_known_after_reaping(tmp_path: Path) -> None:
    process = start_rank(tmp_path)
    pulse = time.monotonic_ns()
    pidfds = open_rank_pidfds(tmp_path)
    (fd,) = pidfds.values()
    process.send_signal(signal.SIGKILL)
    process.wait()
    is_status_kept = (
        rings._read_pidfd_status(fd) is not None
    )  # the kernel keeps it since Linux 6.15
    with selectors.DefaultSelector() as selector:
        (watched,) = Watchlist(tmp_path, selector, AgentLog(), early_pidfds=pidfds).scan_processes(
            pulse + 3_000_000_000
        )
    assert watched.exit == (ExitInfo(signal=signal.SIGKILL) if is_status_kept else ExitInfo())
    assert abs(watched.exited_at_ns - pulse) < 1e9
    assert pidfds == {}


def test_rank_in_long_unchanged_folder_is_found(tmp_path: Path) -> None:
    first = start_rank(tmp_path)
    second: subprocess.Popen[bytes] | None = None
    try:
        os.utime(tmp_path, (0, time.time() - 3600))
        with selectors.DefaultSelector() as selector:
            watchlist = Watchlist(tmp_path, selector, AgentLog())
            assert [w.pid for w in watchlist.scan_processes(time.monotonic_ns())] == [first.pid]
            assert watchlist.scan_processes(time.monotonic_ns()) == []
            second = start_rank(tmp_path)
            assert [w.pid for w in watchlist.scan_processes(time.monotonic_ns())] == [second.pid]
            watchlist.close()
    finally:
        for process in (first, second):
            if process is not None:
                process.kill()
                process.wait()


def test_two_ranks_starting_in_quick_succession_are_found(tmp_path: Path) -> None:
    ranks: list[subprocess.Popen[bytes]] = []
    try:
        with selectors.DefaultSelector() as selector:
            watchlist = Watchlist(tmp_path, selector, AgentLog())
            # One tick of the kernel's clock may hold a listing and what comes after it.
            for _ in range(5):
                ranks.append(start_rank(tmp_path))
                assert [w.pid for w in watchlist.scan_processes(time.monotonic_ns())] == [
                    ranks[-1].pid
                ]
            watchlist.close()
    finally:
        for process in ranks:
            process.kill()
            process.wait()
