"""What happens to hangwatch's own errors in somebody else's training process: swallowed, counted,
logged once each.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator

MAX_FAULTS = 8  # different faults worth keeping

_fault_counts: dict[str, int] = {}
_listeners: list[Callable[[], None]] = []


def record_fault(where: str, error: BaseException) -> None:
    """Counts an error of ours; its first occurrence is one line on stderr."""
    record_message(f"{where}: {type(error).__name__}: {error}")


def record_message(line: str) -> None:
    """As `fault`, with the words given."""
    if line in _fault_counts:
        _fault_counts[line] += 1
    elif len(_fault_counts) < MAX_FAULTS:
        _fault_counts[line] = 1
        sys.stderr.write(
            f"hangwatch: {line}\n"
        )  # in one piece: the ranks' lines share one terminal
    else:
        _fault_counts["further faults"] = _fault_counts.get("further faults", 0) + 1
    for tell in _listeners:
        tell()


@contextlib.contextmanager
def swallow_errors(where: str) -> Iterator[None]:
    """No error gets out of it: somebody else's code goes on."""
    try:
        yield
    except Exception as error:
        record_fault(where, error)


def add_listener(listener: Callable[[], None]) -> None:
    """``tell`` is called after each fault."""
    _listeners.append(listener)


def format_lines() -> list[str]:
    return [
        line if times == 1 else f"{line} ({times} times)" for line, times in _fault_counts.items()
    ]


def count_faults() -> int:
    return sum(_fault_counts.values())
