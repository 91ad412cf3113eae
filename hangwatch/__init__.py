"""hangwatch names the rank, the call and the line that hang a distributed PyTorch job.

A training script needs none of this: recording starts by itself where HANGWATCH_URL is set. What follows tells hangwatch what
it cannot see. Every call is a no-op where nothing watches, and none can raise on hangwatch's account.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Protocol

__version__ = "0.1.0"
__all__ = ["collective", "phase", "step"]


class _Watcher(Protocol):
    """What the recorder offers to this module."""

    def enter_phase(self, name: str, limit: float | None) -> Any: ...
    def leave_phase(self, token: Any) -> None: ...
    def step(self, number: int) -> None: ...
    def enter_collective(self, name: str, group: Any) -> Any: ...
    def leave_collective(self, token: Any, returned: bool) -> None: ...


_watcher: _Watcher | None = None  # set by the recorder


@contextlib.contextmanager
def phase(name: str, limit: float | None = None) -> Iterator[None]:
    """Declares work that may legally take long, up to ``limit`` seconds: others may wait for this rank meanwhile.

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
def collective(name: str, group: Any = None) -> Iterator[None]:
    """Declares communication that does not go through torch.distributed: every member of ``group`` must make it in turn.

    ``group`` is a process group, None the default one.
    """
    watcher = _watcher
    token = watcher.enter_collective(str(name), group) if watcher is not None else None
    returned = False
    try:
        yield
        returned = True
    finally:
        if watcher is not None:
            watcher.leave_collective(token, returned)
