"""The node agent's log: lines on stderr, which is the run dir's agent.log; its size is limited."""

from __future__ import annotations

import contextlib
import os
import stat
import sys
import time

from hangwatch.report.text import clean_text

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
