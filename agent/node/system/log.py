"""The node agent's log: lines on stderr, which is the run dir's agent.log; small for ever."""

from __future__ import annotations

import contextlib
import os
import stat
import sys
import time

MOST = 1 << 20  # bytes; then it starts anew


class Log:
    """Writes lines. ``warnings`` counts those that somebody should see."""

    def __init__(self) -> None:
        self.warnings = 0
        self._said: set[str] = set()

    def info(self, text: str) -> None:
        with contextlib.suppress(
            OSError, ValueError
        ):  # a full disk or a closed stderr: there is nowhere to say it
            found = os.fstat(2)
            if stat.S_ISREG(found.st_mode) and found.st_size > MOST:
                os.ftruncate(2, 0)
            print(f"{time.strftime('%Y-%m-%dT%H:%M:%S')} {text}", file=sys.stderr, flush=True)

    def warning(self, text: str) -> None:
        self.warnings += 1
        self.info(f"warning: {text}")

    def once(self, text: str) -> None:
        """A warning, the first time; a thousand different ones are enough."""
        if text not in self._said and len(self._said) < 1000:
            self._said.add(text)
            self.warning(text)
