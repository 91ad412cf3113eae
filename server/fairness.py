"""An event loop on which those who ask do not wait for those who report.

One pass of asyncio's loop handles every connection on which something has come. At 100,000 ranks these may be the heartbeats of hundreds
of node agents, and it takes as long as a second to read them: here a pass reads only some of them, and all that anybody else sends.
"""

from __future__ import annotations

import asyncio
import selectors

REPORTS = 16  # connections of node agents that are read in one pass

_Ready = list[tuple[selectors.SelectorKey, int]]


class _Selector(selectors.DefaultSelector):
    """Tells of only some of those in ``reporting`` at a time, and of the rest later, each in its turn."""

    def __init__(self, reporting: set[int]) -> None:
        super().__init__()
        self._reporting = reporting
        self._waiting: dict[int, None] = {}  # those of which it was not told yet, the first to come first

    def select(self, timeout: float | None = None) -> _Ready:
        ready = super().select(timeout)
        if len(ready) <= REPORTS:
            self._waiting = {}
            return ready
        reports = {one[0].fd: one for one in ready if one[0].fd in self._reporting}
        turns = [fd for fd in self._waiting if fd in reports]
        turns += [fd for fd in reports if fd not in self._waiting]
        self._waiting = dict.fromkeys(turns[REPORTS:])
        return [one for one in ready if one[0].fd not in reports] + [reports[fd] for fd in turns[:REPORTS]]


class Loop(asyncio.SelectorEventLoop):
    """``reporting`` are the file descriptors of connections on which heartbeats come, or nothing came yet."""

    def __init__(self) -> None:
        self.reporting: set[int] = set()
        super().__init__(_Selector(self.reporting))
