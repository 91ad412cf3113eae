"""hangwatch names the rank, the call and the line that hang a distributed PyTorch job.

A training script needs none of this: recording starts by itself where HANGWATCH_URL is set. What
follows tells hangwatch what it cannot see. Every call is a no-op where nothing watches, and none
can raise on hangwatch's account.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any, Protocol

__version__ = "0.1.0"
__all__ = ["collective", "phase", "step"]


class _Watcher(Protocol):
    """What the recorder offers to this module."""

    def enter_phase(self, name: str, limit: float | None) -> Any: ...
    def leave_phase(self, token: Any) -> None: ...
    def step(self, number: int) -> None: ...
    def enter_collective(self, name: str, group: Any, ranks: Iterable[int] | None) -> Any: ...
    def leave_collective(self, token: Any, returned: bool) -> None: ...


_watcher: _Watcher | None = None  # set by the recorder


@contextlib.contextmanager
def phase(name: str, limit: float | None = None) -> Iterator[None]:
    """Declares work that may legally take long, up to ``limit`` seconds: others may wait for this
    rank meanwhile.

    Without a limit the server's --slow-limit holds. Phases nest; the innermost counts.
    """
    watcher = _watcher
    token = watcher.enter_phase(str(name), limit) if watcher is not None else None
    try:
        yield
    finally:
        if watcher is not None:
            watcher.leave_phase(token)


def step(number: int) -> None:
    """Tells the training step. Needed only where no torch optimizer steps."""
    if _watcher is not None:
        _watcher.step(number)


@contextlib.contextmanager
def collective(
    name: str, group: Any = None, *, ranks: Iterable[int] | None = None
) -> Iterator[None]:
    """Declares communication that does not go through torch.distributed: every member must make it,
    in one order of calls.

    ``group`` is a process group (None: the default one): then the call has its place among that
    group's calls. Or it is the name of another library's communicator, whose calls have an order of
    their own; its members are ``ranks``, global ones (None: all). Two ranks are enough, for a
    message from one to the other. Threads that communicate at the same time need a communicator
    each.

    The block is where the rank may wait for the others: of what is started here and awaited there,
    the waiting. An exception that leaves it ends the call. Blocks may nest; of those in one order
    of calls, the innermost counts.
    """
    watcher = _watcher
    token = watcher.enter_collective(str(name), group, ranks) if watcher is not None else None
    returned = False
    try:
        yield
        returned = True
    finally:
        if (
            watcher is not None and watcher is _watcher
        ):  # else this is a child that was forked inside: the call is its parent's
            watcher.leave_collective(token, returned)
