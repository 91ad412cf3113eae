"""The server's event loop, on which queries do not wait for reports; see `priority_selector`."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from typing import Any

from .priority_selector import PrioritySelector, QueueMarker


class PriorityEventLoop(asyncio.SelectorEventLoop):
    """The HTTP protocol reports to its ``selector`` what each connection is used for."""

    def __init__(self) -> None:
        self.selector = PrioritySelector()
        super().__init__(self.selector)


class ThrottledListener(socket.socket):
    """A listening socket whose pending connections are accepted over several passes."""

    def accept(self) -> tuple[socket.socket, Any]:
        loop = asyncio.get_running_loop()
        if isinstance(loop, PriorityEventLoop) and not loop.selector.take_accept():
            raise BlockingIOError
        return super().accept()


def delay_reports() -> contextlib.AbstractContextManager[None]:
    """Only urgent reports are read meanwhile. No effect on loops of another class."""
    loop = asyncio.get_running_loop()
    return (
        loop.selector.delay_reports()
        if isinstance(loop, PriorityEventLoop)
        else contextlib.nullcontext()
    )


def place_marker() -> QueueMarker:
    """Places a marker behind all reports that have arrived by now. On a loop of another class it is
    passed immediately.
    """
    loop = asyncio.get_running_loop()
    if isinstance(loop, PriorityEventLoop):
        return loop.selector.place_marker()
    return QueueMarker(since=time.monotonic(), waited_s=0.0)
