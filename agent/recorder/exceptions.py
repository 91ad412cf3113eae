"""Describes the exceptions of a rank: the one that ends its program, and the one that it is handling
while it waits in a call, such as a barrier in a ``finally`` clause.
"""

from __future__ import annotations

import sys
import threading
import traceback
from time import monotonic_ns
from types import TracebackType
from typing import Any

from hangwatch.ring.layout import EXCEPTION

from .callers import CallSites, read_threads
from .recorder import Recorder

_MAX_MESSAGE_CHARS = 800
_QUIET_POLLS = 10  # about a second

ExceptionNote = dict[str, Any]  # the ring's note of an exception, without its time


def describe_exception(
    value: BaseException, message: str, trace: TracebackType | None, sites: CallSites
) -> ExceptionNote:
    """The note, with the innermost line of the user's code in the traceback."""
    description: ExceptionNote = {
        "type": type(value).__qualname__,
        "message": message[:_MAX_MESSAGE_CHARS],
    }
    for frame, line in reversed(list(traceback.walk_tb(trace))):
        code = frame.f_code
        if sites.is_user_code(code):
            description |= {"file": code.co_filename, "line": line, "function": code.co_name}
            break
    return description


class HandledExceptions:
    """Keeps the note of the exception that a thread is handling while no thread makes calls."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._call_count = 0
        self._quiet_polls = 0
        self._noted: ExceptionNote = {}

    def update_note(self, call_count: int) -> None:
        """Looks once a second while ``call_count`` stays the same; called ten times a second."""
        if call_count == self._call_count:
            self._quiet_polls += 1
        else:
            self._call_count = call_count
            self._quiet_polls = 0
        if self._quiet_polls % _QUIET_POLLS:
            return
        note = self._describe_handled() if self._quiet_polls else {}
        if note != self._noted:
            self._noted = note
            self._recorder.ring.write_note(
                EXCEPTION, {**note, "at_ns": monotonic_ns()} if note else {}
            )

    def _describe_handled(self) -> ExceptionNote:
        """The exception that the main thread is handling, or else another; empty if there is none."""
        by_thread = read_threads(sys._current_exceptions)
        main = threading.main_thread().ident or 0
        for thread in sorted(by_thread, key=lambda ident: ident != main):
            found: Any = by_thread[thread]  # a tuple, as of `sys.exc_info`, before Python 3.12
            value = found[1] if isinstance(found, tuple) else found
            if value is not None:
                # ``str(value)`` would run code of the program in this thread.
                first = next(iter(value.args), "")
                message = first if type(first) is str else ""
                trace = value.__traceback__
                note = describe_exception(value, message, trace, self._recorder.sites)
                return {**note, "is_handled": True}
        return {}
