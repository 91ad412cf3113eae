"""Waits for events: for the end of processes, and for other threads that wake the loop."""

from __future__ import annotations

import contextlib
import os
import selectors

_READ_BYTES = 4096


class WakeupSelector:
    """A selector that any thread or signal handler can wake.

    Other descriptors are registered in `selector` with a key as their data.
    """

    def __init__(self) -> None:
        self.selector = selectors.DefaultSelector()
        self._read_fd, self._write_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self.selector.register(self._read_fd, selectors.EVENT_READ)

    def wake(self) -> None:
        with contextlib.suppress(BlockingIOError):  # the pipe is full, so it wakes anyway
            os.write(self._write_fd, b"\0")

    def wait(self, timeout_s: float) -> list[str]:
        """Waits until woken, or until a registered descriptor is ready, and returns the keys of
        those that are.
        """
        ready_keys: list[str] = []
        for selector_key, _ in self.selector.select(max(0.0, timeout_s)):
            if selector_key.data is not None:
                ready_keys.append(selector_key.data)
                continue
            with contextlib.suppress(BlockingIOError):  # already empty
                os.read(self._read_fd, _READ_BYTES)
        return ready_keys
