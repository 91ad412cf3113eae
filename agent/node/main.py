"""The node agent's entry point, ``hangwatch.agent.node.main:main``. The first rank of a host starts
it; it becomes a daemon, the only one of its run dir.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import gc
import os
import secrets
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

from ..environment import run_dir

# A rank that tests whether the lock is taken holds it itself for some microseconds.
_LOCK_ATTEMPTS = 15
_LOCK_RETRY_S = 0.02
_OWNER_BYTES = 16


def main(argv: Sequence[str] | None = None) -> None:
    """Runs a node agent and exits: 0 when done or when another one serves the run dir, 1 on an
    error, 2 on wrong usage.

    It forks first: the rank that started it waits for it, and must not wait for imports. Modules
    that start threads or take long to load are imported later.
    """
    parser = argparse.ArgumentParser(
        prog="hangwatch node agent", description="watches the ranks of one host"
    )
    parser.add_argument("--run-dir", type=Path, required=True, help="the folder with the rings")
    parser.add_argument(
        "--url",
        default=os.environ.get("HANGWATCH_URL", ""),
        help="the server (default: HANGWATCH_URL)",
    )
    parser.add_argument(
        "--foreground", action="store_true", help="do not become a daemon, log to stderr"
    )
    parser.add_argument(
        "--linger",
        type=float,
        default=3.0,
        help="seconds to stay without a rank (default: %(default)s)",
    )
    arguments = parser.parse_args(argv)
    folder: Path = arguments.run_dir.absolute()
    if not arguments.foreground:
        # The agent continues in a child with its own session. No thread may run yet.
        if os.fork():
            os._exit(0)
        with contextlib.suppress(PermissionError):  # it is a session leader already
            os.setsid()
        reset_inherited_state(folder / run_dir.AGENT_LOG_NAME)
    sys.exit(_run_agent(folder, arguments.url, arguments.linger))


def _run_agent(folder: Path, url: str, linger_s: float) -> int:
    try:
        run_dir.check_owner(folder)
        lock = acquire_agent_lock(folder)
    except OSError as error:
        reason = error.strerror or error
        print(f"hangwatch: the run dir {folder} cannot be used: {reason}", file=sys.stderr)
        return 1
    if lock is None:
        return 0
    early_pidfds = open_rank_pidfds(folder)
    from ..transport.client import TargetError, parse_targets
    from .agent import NodeAgent
    from .stacks.pyspy import PySpy, locate_pyspy
    from .system.runtime import AgentLog

    log = AgentLog()
    failed = True
    try:
        targets = parse_targets(url, os.environ.get("HANGWATCH_TOKEN", ""))
        log.info(f"node agent {os.getpid()} watches {folder}")
        # Most objects live for one scan only: collecting them would be a tenth of the agent's work.
        gc.set_threshold(50_000)
        while True:
            agent = NodeAgent(
                folder,
                targets,
                PySpy(path=locate_pyspy()),
                log,
                linger_s=linger_s,
                early_pidfds=early_pidfds,
                owner=read_owner(folder),
            )
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, lambda *_, agent=agent: agent.request_stop())
            agent.run_loop()
            # While this agent ends, it holds the lock. Ranks that have started meanwhile, such as
            # those of a restarted job, rely on it: they may exit before they try the lock again.
            early_pidfds = {} if agent.is_stop_requested else open_rank_pidfds(folder)
            if not early_pidfds:
                break
        failed = False
    except TargetError as error:
        log.warning(str(error))
    except Exception:  # the log is the only place to report it
        log.warning(
            "the node agent ends because of an internal error, please report"
            f" it:\n{traceback.format_exc()}"
        )
    with contextlib.suppress(OSError):  # the folder is gone, and the lock with it
        clean_run_dir(folder, lock, keep_log=failed or log.warning_count > 0)
    return int(failed)


def open_rank_pidfds(folder: Path) -> dict[str, int]:
    """Pidfds of the ranks with a ring, by process key: they may be reaped while the agent loads."""
    from .discovery import rings

    pidfds = {}
    with contextlib.suppress(OSError):  # the run dir cannot be read: the agent reports it
        files, _ = rings.find_ring_files(folder)
        for file in files:
            pidfd = rings.open_pidfd(file.pid, file.start_ticks)
            if pidfd is not None:
                pidfds[file.key] = pidfd
    return pidfds


def reset_inherited_state(log_path: Path) -> None:
    """Resets working folder, signals and descriptors. stderr goes to ``log_path``."""
    os.chdir("/")
    os.umask(0o077)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    null_fd = os.open(os.devnull, os.O_RDWR)
    log_fd = null_fd
    with contextlib.suppress(OSError):  # no space left: the log is lost
        log_fd = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600)
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
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(fd, 32, 0).strip()
            os.close(fd)
            is_other = holder.isdigit() and int(holder) != os.getpid()
            if is_other and os.path.exists(f"/proc/{int(holder)}"):
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
    present = os.listdir(folder)
    if not any(name.endswith(run_dir.RING_SUFFIX) for name in present):
        # Children of ranks may have left such files.
        suffixes = (run_dir.GPU_CORE_SUFFIX, run_dir.GPU_PIPE_SUFFIX)
        names[:0] = [name for name in present if name.endswith(suffixes)]
        for name in names:
            with contextlib.suppress(OSError):  # never created, or already removed
                (folder / name).unlink()
        with contextlib.suppress(OSError):  # not empty: the log stays, or a new rank has started
            folder.rmdir()
            folder.parent.rmdir()
    os.close(lock_fd)


if __name__ == "__main__":
    main()
