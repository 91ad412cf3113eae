"""What happens to hangwatch's own errors in somebody else's training process: swallowed, counted,
logged once each.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator

MOST = 8  # different faults worth keeping

_seen: dict[str, int] = {}
_listeners: list[Callable[[], None]] = []


def fault(where: str, error: BaseException) -> None:
    """Counts an error of ours; its first occurrence is one line on stderr."""
    note(f"{where}: {type(error).__name__}: {error}")


def note(line: str) -> None:
    """As `fault`, with the words given."""
    if line in _seen:
        _seen[line] += 1
    elif len(_seen) < MOST:
        _seen[line] = 1
        sys.stderr.write(
            f"hangwatch: {line}\n"
        )  # in one piece: the ranks' lines share one terminal
    else:
        _seen["further faults"] = _seen.get("further faults", 0) + 1
    for tell in _listeners:
        tell()


@contextlib.contextmanager
def ours(where: str) -> Iterator[None]:
    """No error gets out of it: somebody else's code goes on."""
    try:
        yield
    except Exception as error:
        fault(where, error)


def listen(tell: Callable[[], None]) -> None:
    """``tell`` is called after each fault."""
    _listeners.append(tell)


def lines() -> list[str]:
    return [line if times == 1 else f"{line} ({times} times)" for line, times in _seen.items()]


def count() -> int:
    return sum(_seen.values())
