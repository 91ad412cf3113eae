"""Keeps the event loop responsive while thousands of node agents connect."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

ACCEPTED_PER_PASS = 8


class ThrottledListener(socket.socket):
    """A listening socket whose pending connections are accepted over several passes of asyncio's
    loop, which otherwise accepts thousands of them in one.
    """

    _accepted: int = 0  # in this pass

    def accept(self) -> tuple[socket.socket, Any]:
        if self._accepted == ACCEPTED_PER_PASS:
            raise BlockingIOError
        if not self._accepted:
            asyncio.get_running_loop().call_soon(self._end_pass)
        self._accepted += 1
        return super().accept()

    def _end_pass(self) -> None:
        self._accepted = 0
