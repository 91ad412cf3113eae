"""Failed heartbeats: how long to back off, and how the user learns that the server is away."""

from __future__ import annotations

import contextlib
from pathlib import Path

from ...environment import run_dir
from ..system.log import AgentLog
from .uplink import HeartbeatOutcome, draw_backoff_s


class OutageTracker:
    """Follows whether the server answers."""

    def __init__(self, folder: Path, log: AgentLog, notice_after_s: float) -> None:
        """``notice_after_s``: seconds without the server until the user is notified."""
        self._notice_path = folder / run_dir.NOTICE_NAME
        self._log = log
        self._notice_after_ns = int(notice_after_s * 1e9)
        self._consecutive_failures = 0
        self._consecutive_refusals = 0
        self._began_ns = 0
        self._problem = ""
        self._is_user_notified = False

    @property
    def is_failing(self) -> bool:
        """The last heartbeat failed."""
        return self._consecutive_failures > 0

    @property
    def is_refused_repeatedly(self) -> bool:
        """The server refused two heartbeats or more in succession."""
        return self._consecutive_refusals > 1

    def record_failure(self, outcome: HeartbeatOutcome, now_ns: int) -> float:
        """Returns after how many seconds to try again."""
        self._consecutive_failures += 1
        if outcome.is_refused:
            self._consecutive_refusals += 1
        if not self._began_ns:
            self._began_ns = now_ns
            self._problem = outcome.problem
            self._log.warning(f"{outcome.problem}; the job continues, heartbeats are retried")
        return outcome.retry_after_s + draw_backoff_s(self._consecutive_failures)

    def record_success(self, server: str) -> None:
        """``server`` is its name in the log."""
        self._consecutive_failures = self._consecutive_refusals = 0
        if self._began_ns:
            self._began_ns = 0
            self._log.info(f"{server} answers again")
            with contextlib.suppress(OSError):  # a rank has taken it
                self._notice_path.unlink()

    def write_user_notice(self, now_ns: int) -> None:
        """Writes a line for a rank to print, once the server has been away for a while: the ranks
        have the user's terminal.
        """
        if self._is_user_notified or not self._began_ns:
            return
        if now_ns - self._began_ns < self._notice_after_ns:
            return
        self._is_user_notified = True
        temporary = self._notice_path.with_suffix(".new")
        try:
            temporary.write_text(
                f"{self._problem}; the job continues, unwatched until the server answers\n"
            )
            temporary.replace(self._notice_path)
        except OSError as error:
            self._log.warn_once(f"cannot write the notice for the user: {error.strerror}")
