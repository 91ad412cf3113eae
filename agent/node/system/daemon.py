"""Turns this process into a daemon, the only one of its run dir.

MERGED: Waits for events: for the end of processes, and for other threads that wake the loop.

MERGED: The node agent's own intervals and timeouts.

MERGED: The node agent's log: lines on stderr, which is the run dir's agent.log; its size is limited.

MERGED: Measures what the node agent costs its host.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import resource
import secrets
import selectors
import signal
import stat
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from hangwatch.protocol.heartbeat import AgentCost
from hangwatch.report.text import clean_text

from ...environment import run_dir

# A rank that tests whether the lock is taken holds it itself for some microseconds.
_LOCK_ATTEMPTS = 15
_LOCK_RETRY_S = 0.02
_OWNER_BYTES = 16


def detach_process() -> None:
    """Continues in a child with a session of its own; the original process exits here. Must be
    called before any thread is started.
    """
    if os.fork():
        os._exit(0)
    with contextlib.suppress(PermissionError):  # already a session leader
        os.setsid()


def reset_inherited_state(log_path: Path | None) -> None:
    """Resets what was inherited from the rank: working folder, signals, descriptors. stderr goes to
    ``log_path`` if given.
    """
    os.chdir("/")
    os.umask(0o077)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    null_fd = os.open(os.devnull, os.O_RDWR)
    log_fd = null_fd
    if log_path is not None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
        with contextlib.suppress(OSError):  # no space left: the log is lost
            log_fd = os.open(log_path, flags, 0o600)
    os.dup2(null_fd, 0)
    os.dup2(null_fd, 1)
    os.dup2(log_fd, 2)
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2:
            with contextlib.suppress(OSError):  # the listing's own descriptor
                os.close(int(name))


def acquire_agent_lock(folder: Path) -> int | None:
    """Takes the lock of a run dir and writes this process's pid into it. Returns a descriptor to
    keep open, or None if another node agent holds the lock.

    Raises OSError if the folder cannot be used.
    """
    path = folder / run_dir.AGENT_LOCK_NAME
    for _ in range(_LOCK_ATTEMPTS):
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(fd, 32, 0).strip()
            os.close(fd)
            if holder.isdigit() and int(holder) != os.getpid() and _is_running(int(holder)):
                return None
            time.sleep(_LOCK_RETRY_S)
            continue
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.stat(path), os.fstat(fd)):
                os.ftruncate(fd, 0)
                os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
                return fd
        # The previous holder has removed the file: the next attempt uses the new one.
        os.close(fd)
    return None


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def read_owner(folder: Path) -> str:
    """The secret by which the server knows that a node agent replaces an earlier one of this run
    dir. The first agent creates it. Must be called while the agent's lock is held.
    """
    path = folder / run_dir.OWNER_NAME
    owner = ""
    with contextlib.suppress(OSError, UnicodeDecodeError):
        owner = path.read_text(encoding="ascii").strip()
    if len(owner) != 2 * _OWNER_BYTES:
        owner = secrets.token_hex(_OWNER_BYTES)
        # No space left: a successor will be accepted only once this agent has been silent.
        with contextlib.suppress(OSError):
            path.write_text(owner, encoding="ascii")
    return owner


def clean_run_dir(folder: Path, lock_fd: int, *, keep_log: bool) -> None:
    """If there is no ring left, removes the agent's files, and the folder if it is empty then. The
    lock is removed last, while it is held.
    """
    names = [run_dir.NOTICE_NAME, run_dir.START_LOCK_NAME, run_dir.OWNER_NAME]
    if not keep_log:
        names.append(run_dir.AGENT_LOG_NAME)
    names.append(run_dir.AGENT_LOCK_NAME)
    if not any(name.endswith(run_dir.RING_SUFFIX) for name in os.listdir(folder)):
        for name in names:
            with contextlib.suppress(OSError):  # never created, or already removed
                (folder / name).unlink()
        with contextlib.suppress(OSError):  # not empty: the log stays, or a new rank has started
            folder.rmdir()
            folder.parent.rmdir()
    os.close(lock_fd)


_READ_BYTES = 4096


class WakeupSelector:
    """A selector that any thread or signal handler can wake.

    Other descriptors are registered in `selector` with a key as their data.
    """

    def __init__(self) -> None:
        self.selector = selectors.DefaultSelector()
        self._read_fd, self._write_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self.selector.register(self._read_fd, selectors.EVENT_READ)

    def wake(self) -> None:
        with contextlib.suppress(BlockingIOError):  # the pipe is full, so it wakes anyway
            os.write(self._write_fd, b"\0")

    def wait(self, timeout_s: float) -> list[str]:
        """Waits until woken, or until a registered descriptor is ready, and returns the keys of
        those that are.
        """
        ready_keys: list[str] = []
        for selector_key, _ in self.selector.select(max(0.0, timeout_s)):
            if selector_key.data is not None:
                ready_keys.append(selector_key.data)
                continue
            with contextlib.suppress(BlockingIOError):  # already empty
                os.read(self._read_fd, _READ_BYTES)
        return ready_keys


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentTiming:
    """All times are in seconds."""

    scan_interval_s: float = 0.5
    fast_scan_interval_s: float = 0.2  # while processes start, or where a ring fills quickly
    startup_window_s: float = 10.0  # after a new process: more of them are expected
    heartbeat_interval_s: float = 0.5  # until the server sets another one
    linger_s: float = 3.0  # without a live process
    first_process_timeout_s: float = 5.0
    absent_server_timeout_s: float = 30.0  # with something left to report
    user_notice_after_s: float = 3.0  # without the server, until the user is notified
    last_heartbeat_timeout_s: float = 2.0


MAX_LOG_BYTES = 1 << 20  # then it is truncated
_MAX_UNIQUE_WARNINGS = 1000


class AgentLog:
    """Writes lines to the log, and counts the warnings."""

    def __init__(self) -> None:
        self.warning_count = 0
        self._seen_warnings: set[str] = set()

    def info(self, text: str) -> None:
        """Writes one line. ``text`` may quote a server or a job."""
        # On a full disk or with a closed stderr, there is no place to report the error.
        with contextlib.suppress(OSError, ValueError):
            status = os.fstat(2)
            if stat.S_ISREG(status.st_mode) and status.st_size > MAX_LOG_BYTES:
                os.ftruncate(2, 0)
            print(
                f"{time.strftime('%Y-%m-%dT%H:%M:%S')} {clean_text(text)}",
                file=sys.stderr,
                flush=True,
            )

    def warning(self, text: str) -> None:
        self.warning_count += 1
        self.info(f"warning: {text}")

    def warn_once(self, text: str) -> None:
        """Writes each warning only once, and a limited number of different ones."""
        if text in self._seen_warnings or len(self._seen_warnings) >= _MAX_UNIQUE_WARNINGS:
            return
        self._seen_warnings.add(text)
        self.warning(text)


_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def measure_cost(dropped_count: int) -> AgentCost:
    """CPU time, including that of helper processes, and resident memory, see proc(5)."""
    cpu_s = 0.0
    for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN):
        usage = resource.getrusage(who)
        cpu_s += usage.ru_utime + usage.ru_stime
    try:
        with open("/proc/self/statm", "rb") as f:
            pages = int(f.read().split()[1])
    except (OSError, ValueError, IndexError):
        pages = 0
    return AgentCost(
        cpu_s=round(cpu_s, 3),
        memory=pages * _PAGE_BYTES,
        dropped=dropped_count,
    )
