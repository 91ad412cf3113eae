"""Becoming a daemon, and the only one of a run dir."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import time
from pathlib import Path

from ...environment import run_dir

# a rank that looks whether the lock is held holds it itself for some microseconds
_LOCK_ATTEMPTS = 15
_LOCK_RETRY_S = 0.02


def detach_process() -> None:
    """Goes on in a child with a session of its own; the process that was started ends here. Call
    before any thread is made.
    """
    if os.fork():
        os._exit(0)
    with contextlib.suppress(PermissionError):  # already the leader of one
        os.setsid()


def reset_inherited_state(log_path: Path | None) -> None:
    """Lets go of whatever the rank handed down: folder, signals, descriptors. stderr goes to
    ``log_path`` if given.
    """
    os.chdir("/")
    os.umask(0o077)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    nowhere = os.open(os.devnull, os.O_RDWR)
    log = nowhere
    if log_path is not None:
        with contextlib.suppress(OSError):  # no room for a log: it goes nowhere
            log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600)
    os.dup2(nowhere, 0)
    os.dup2(nowhere, 1)
    os.dup2(log, 2)
    for fd in [int(name) for name in os.listdir("/proc/self/fd")]:
        if fd > 2:
            with contextlib.suppress(OSError):  # the listing's own descriptor
                os.close(fd)


def acquire_agent_lock(folder: Path) -> int | None:
    """Takes the lock of a run dir and writes this process's pid into it: a descriptor to keep open,
    or None where it is held.

    Raises OSError where the folder cannot be used.
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
            found, held = os.stat(path), os.fstat(fd)
            if (found.st_dev, found.st_ino) == (held.st_dev, held.st_ino):
                os.ftruncate(fd, 0)
                os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
                return fd
        os.close(
            fd
        )  # the agent that held it before has removed the file: there is a new one, or will be
    return None


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def clean_run_dir(folder: Path, lock_fd: int, *, keep_log: bool) -> None:
    """Removes what belongs to no process any more, and the folder if nothing is left. The lock goes
    last, while it is held.
    """
    names = (
        [run_dir.NOTICE_NAME, run_dir.START_LOCK_NAME]
        if keep_log
        else [run_dir.NOTICE_NAME, run_dir.START_LOCK_NAME, run_dir.AGENT_LOG_NAME]
    )
    if not any(name.endswith(run_dir.RING_SUFFIX) for name in os.listdir(folder)):
        for name in [*names, run_dir.AGENT_LOCK_NAME]:
            with contextlib.suppress(OSError):  # never made, or taken away already
                (folder / name).unlink()
        with contextlib.suppress(OSError):  # not empty: the log stays, or a new rank has come
            folder.rmdir()
            folder.parent.rmdir()
    os.close(lock_fd)
