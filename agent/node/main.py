"""The node agent's entry point, ``hangwatch.agent.node.main:main``; the first rank of a host starts
it.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

from .system import daemon


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
        from ..environment import run_dir

        daemon.detach_process()
        daemon.reset_inherited_state(folder / run_dir.AGENT_LOG_NAME)
    sys.exit(_run_agent(folder, arguments.url, arguments.linger))


def _run_agent(folder: Path, url: str, linger_s: float) -> int:
    from ..environment.run_dir import check_owner

    try:
        check_owner(folder)
        lock = daemon.acquire_agent_lock(folder)
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
                owner=daemon.read_owner(folder),
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
        daemon.clean_run_dir(folder, lock, keep_log=failed or log.warning_count > 0)
    return int(failed)


def open_rank_pidfds(folder: Path) -> dict[str, int]:
    """Pidfds of the ranks with a ring, by process key: they may be reaped while the agent loads."""
    from .discovery import rings

    pidfds: dict[str, int] = {}
    with contextlib.suppress(OSError):  # the run dir cannot be read: the agent reports it
        files, _ = rings.find_ring_files(folder)
        for file in files:
            pidfd = rings.open_pidfd(file.pid, file.start_ticks)
            if pidfd is not None:
                pidfds[file.key] = pidfd
    return pidfds


if __name__ == "__main__":
    main()
