"""The server's log on stderr, limited by kind: what happens a thousand times a second must neither fill a
disk nor hide anything else.
"""

from __future__ import annotations

import atexit
import logging
import threading
from dataclasses import dataclass, field

from hangwatch.report.text import clean_text

WINDOW_S = 60.0
MAX_PER_WINDOW = 5  # messages of one kind
MAX_LENGTH = 16_000  # characters of a message, with its traceback

# The line of code that logs, and the type and the place of the exception that it logs, if any.
_Kind = tuple[str, int, type | None, str, int]

log = logging.getLogger("hangwatch.log")


class PlainFormatter(logging.Formatter):
    """Cleans each line: a job that is quoted must not control the operator's terminal."""

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)[:MAX_LENGTH]
        return "\n".join(map(clean_text, text.splitlines()))


@dataclass(slots=True)
class LogLimit:
    """A filter that lets `MAX_PER_WINDOW` messages of a kind pass in each window, and then logs how many it
    left out.
    """

    window_s: float = WINDOW_S
    _passed: dict[_Kind, int] = field(default_factory=dict)
    _left_out: dict[_Kind, int] = field(default_factory=dict)
    _timer: threading.Timer | None = None
    _lock: threading.RLock = field(default_factory=threading.RLock)

    def filter(self, record: logging.LogRecord) -> bool:
        if record.name == log.name:
            return True
        kind = _find_kind(record)
        with self._lock:
            if self._timer is None:
                self._timer = threading.Timer(self.window_s, self.end_window)
                self._timer.daemon = True
                self._timer.start()
            self._passed[kind] = passed = self._passed.get(kind, 0) + 1
            if passed > MAX_PER_WINDOW:
                self._left_out[kind] = passed - MAX_PER_WINDOW
            return passed <= MAX_PER_WINDOW

    def end_window(self) -> None:
        """Logs how many messages of each kind were left out, and begins to count anew."""
        with self._lock:
            left_out = self._left_out
            self._left_out = {}
            self._passed = {}
            self._timer = None
        for (path, line, *_), count in left_out.items():
            log.warning("left out %d more messages like those of %s:%d", count, path, line)


def _find_kind(record: logging.LogRecord) -> _Kind:
    error, traceback = None, None
    if record.exc_info:
        error, _, traceback = record.exc_info
    while traceback is not None and traceback.tb_next is not None:
        traceback = traceback.tb_next
    if traceback is None:
        return record.pathname, record.lineno, error, "", 0
    code = traceback.tb_frame.f_code
    return record.pathname, record.lineno, error, code.co_filename, traceback.tb_lineno


def configure_logging() -> None:
    handler = logging.StreamHandler()
    handler.setFormatter(PlainFormatter("hangwatch: %(message)s"))
    limit = LogLimit()
    handler.addFilter(limit.filter)
    atexit.register(limit.end_window)
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    # Malformed requests are not the operator's concern.
    logging.getLogger("uvicorn").setLevel(logging.ERROR)
