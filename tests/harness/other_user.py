"""Runs code as another user of the machine. That needs root."""

from __future__ import annotations

import os
import pickle
import traceback
from collections.abc import Callable
from typing import TypeVar

OTHER_UID = 65534  # nobody

T = TypeVar("T")


def run_as_other_user(action: Callable[[], T]) -> T:
    """The result of ``action`` in a child process of `OTHER_UID`. What it needs must be imported
    already: that user may not be able to read this interpreter's files. Raises RuntimeError with the
    traceback if it fails.
    """
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            os.setgroups([])
            os.setgid(OTHER_UID)
            os.setuid(OTHER_UID)
            try:
                outcome: tuple[bool, object] = (True, action())
            except Exception:
                outcome = (False, traceback.format_exc())
            with os.fdopen(writing, "wb") as pipe:
                pickle.dump(outcome, pipe)
            status = 0
        finally:
            os._exit(status)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        content = pipe.read()
    os.waitpid(pid, 0)
    if not content:
        raise RuntimeError("the child process ended early")
    succeeded, value = pickle.loads(content)
    if not succeeded:
        raise RuntimeError(value)
    result: T = value
    return result
