"""The node agent's log: lines on stderr, which is the run dir's agent.log; small for ever."""

from __future__ import annotations

import contextlib
import os
import stat
import sys
import time

MAX_LOG_BYTES = 1 << 20  # bytes; then it starts anew


class AgentLog:
    """Writes lines. ``warnings`` counts those that somebody should see."""

    def __init__(self) -> None:
        self.warning_count = 0
        self._seen_warnings: set[str] = set()

    def info(self, text: str) -> None:
        with contextlib.suppress(
            OSError, ValueError
        ):  # a full disk or a closed stderr: there is nowhere to say it
            found = os.fstat(2)
            if stat.S_ISREG(found.st_mode) and found.st_size > MAX_LOG_BYTES:
                os.ftruncate(2, 0)
            print(f"{time.strftime('%Y-%m-%dT%H:%M:%S')} {text}", file=sys.stderr, flush=True)

    def warning(self, text: str) -> None:
        self.warning_count += 1
        self.info(f"warning: {text}")

    def warn_once(self, text: str) -> None:
        """A warning, the first time; a thousand different ones are enough."""
        if text not in self._seen_warnings and len(self._seen_warnings) < 1000:
            self._seen_warnings.add(text)
            self.warning(text)
