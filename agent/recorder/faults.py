"""The handling of hangwatch's own errors in a training process: each one is swallowed, counted, and
logged once. A method of torch that `extend_method` extends raises none of them.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

from .dynamo import Result, run_uncompiled

MAX_FAULTS = 8  # different messages kept

Arguments = tuple[Any, ...]
KeywordArguments = dict[str, Any]

fault_counts: dict[str, int] = {}  # by message
_listener: Callable[[], None] | None = None


def record_fault(where: str, error: BaseException) -> None:
    """Counts an error of ours. The first time, its message is written to stderr."""
    run_uncompiled(lambda: record_message(f"{where}: {type(error).__name__}: {error}"))


def run_guarded(where: str, function: Callable[..., Result], *args: Any) -> Result | None:
    """Calls the function as `run_uncompiled` does. Records an error, which is ours; returns None."""
    try:
        return run_uncompiled(function, *args)
    except Exception as error:
        record_fault(where, error)
        return None


def record_message(message: str) -> None:
    """Counts a message of ours. The first time, it is written to stderr."""
    if message in fault_counts:
        fault_counts[message] += 1
    elif len(fault_counts) < MAX_FAULTS:
        fault_counts[message] = 1
        # One write keeps the line whole: the output of all ranks goes to the same terminal.
        sys.stderr.write(f"hangwatch: {message}\n")
    else:
        fault_counts["further faults"] = fault_counts.get("further faults", 0) + 1
    if _listener is not None:
        _listener()


def extend_method(
    owner: Any, name: str, after: Callable[[Any, Arguments, KeywordArguments], None], where: str
) -> None:
    """Calls ``after(object, args, kwargs)`` whenever a method of torch has returned. Errors of
    ``after`` are recorded instead of raised. A method is extended only once.
    """
    original = getattr(owner, name, None)
    if original is None or hasattr(original, "__hangwatch__"):
        return

    @functools.wraps(original)
    def extended(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        run_guarded(where, after, self, args, kwargs)
        return result

    extended.__hangwatch__ = True  # type: ignore[attr-defined]
    setattr(owner, name, extended)


def set_listener(listener: Callable[[], None] | None) -> None:
    """Calls ``listener`` after each recorded fault."""
    global _listener
    _listener = listener
