"""hangwatch names the rank, the call and the line that hang a distributed PyTorch job.

A training script does not have to call anything here: recording starts automatically if
HANGWATCH_URL is set. These functions report what hangwatch cannot observe. Without an active
recorder they do nothing, and errors inside hangwatch never reach the caller. Nor do they do
anything in a function that torch.compile compiles: its graphs are the same with hangwatch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

__version__ = "0.1.0"
__all__ = ["collective", "phase", "step"]


class _Watcher(Protocol):
    """The recorder's interface to this module."""

    def enter_phase(self, name: str, limit: float | None) -> None: ...
    def leave_phase(self) -> None: ...
    def step(self, number: int) -> None: ...
    def enter_collective(self, name: str, group: Any, ranks: Iterable[int] | None) -> Any: ...
    def leave_collective(self, token: Any, returned: bool) -> None: ...


# Set by the recorder. A child that was forked inside a block has none: the block is its parent's.
_watcher: _Watcher | None = None
_is_compiled: Callable[[], bool] | None = None  # torch.compiler.is_dynamo_compiling


def _get_watcher() -> _Watcher | None:
    """The recorder's interface; None if nothing watches, or while torch.compile traces the caller."""
    return None if _is_compiled is not None and _is_compiled() else _watcher


@contextlib.contextmanager
def phase(name: str, limit: float | None = None) -> Iterator[None]:
    """Declares legitimately long work, up to ``limit`` seconds, during which other ranks may wait
    for this one.

    Without a limit, the server's --slow-limit applies. Phases may nest; the innermost one counts.
    """
    watcher = _get_watcher()
    if watcher is not None:
        watcher.enter_phase(str(name), limit)
    try:
        yield
    finally:
        if watcher is not None and watcher is _watcher:
            watcher.leave_phase()


def step(number: int) -> None:
    """Reports the training step. Only needed if no torch optimizer is used."""
    watcher = _get_watcher()
    if watcher is not None:
        watcher.step(number)


@contextlib.contextmanager
def collective(
    name: str, group: Any = None, *, ranks: Iterable[int] | None = None
) -> Iterator[None]:
    """Declares communication outside torch.distributed. Every member must make the same calls in
    the same order.

    ``group`` is either a process group (None: the default one) or the name of another library's
    communicator. A call on a process group is ordered with that group's other calls. A communicator
    has its own order of calls; its members are the global ranks ``ranks`` (None: all ranks), at
    least two. Threads that communicate at the same time need a communicator each.

    Place the block around the code in which the rank may wait for other ranks: for an asynchronous
    operation, around the wait. An exception that leaves the block ends the call. Blocks may nest;
    within one group or communicator, the innermost one counts.
    """
    watcher = _get_watcher()
    token = watcher.enter_collective(str(name), group, ranks) if watcher is not None else None
    returned = False
    try:
        yield
        returned = True
    finally:
        if watcher is not None and watcher is _watcher:
            watcher.leave_collective(token, returned)
