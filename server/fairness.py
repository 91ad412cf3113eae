"""An event loop on which those who ask do not wait for those who report.

One pass of asyncio's loop handles every connection on which something has come. At 100,000 ranks these may be the heartbeats of hundreds
of node agents, and it takes as long as a second to read them: here a pass reads only some of them, and all that anybody else sends. While
another thread works, each read and each write may cost as long as the system lets a thread run, some milliseconds: then no report is read.
"""

from __future__ import annotations

import asyncio
import contextlib
import select
import selectors
import socket
from collections import ChainMap
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

REPORTS = 12  # connections of node agents that are read in one pass
ACCEPTED = 8, 1  # connections that are accepted in one pass, and while reports are held back


class _HasFileno(Protocol):
    def fileno(self) -> int: ...


_File = int | _HasFileno


class Selector(selectors.BaseSelector):
    """Keeps the connections of those who report apart, in an epoll of their own, which gives each its turn."""

    def __init__(self) -> None:
        self.reporting: set[int] = set()
        self._others = selectors.DefaultSelector()
        self._reports = select.epoll()
        self._keys: dict[int, selectors.SelectorKey] = {}  # of those in `_reports`
        self._others.register(self._reports.fileno(), selectors.EVENT_READ)
        self._held = False
        self._acceptable = 0  # in this pass

    @contextlib.contextmanager
    def holding(self) -> Iterator[None]:
        """No report is read meanwhile."""
        self._held = True
        self._others.unregister(self._reports.fileno())
        try:
            yield
        finally:
            self._held = False
            self._others.register(self._reports.fileno(), selectors.EVENT_READ)

    def accepts(self) -> bool:
        """One more connection in this pass."""
        self._acceptable -= 1
        return self._acceptable >= 0

    def register(self, fileobj: _File, events: int, data: Any = None) -> selectors.SelectorKey:
        fd = _fd(fileobj)
        if fd not in self.reporting:
            return self._others.register(fileobj, events, data)
        if fd in self._keys:
            raise KeyError(f"{fileobj!r} is registered")
        self._reports.register(fd, _mask(events))
        self._keys[fd] = selectors.SelectorKey(fileobj, fd, events, data)
        return self._keys[fd]

    def unregister(self, fileobj: _File) -> selectors.SelectorKey:
        key = self._keys.pop(_fd(fileobj), None)
        if key is None:
            return self._others.unregister(fileobj)
        with contextlib.suppress(OSError):  # closed already
            self._reports.unregister(key.fd)
        return key

    def modify(self, fileobj: _File, events: int, data: Any = None) -> selectors.SelectorKey:
        key = self._keys.get(_fd(fileobj))
        if key is None:
            return self._others.modify(fileobj, events, data)
        if events != key.events:
            self._reports.modify(key.fd, _mask(events))
        self._keys[key.fd] = key._replace(events=events, data=data)
        return self._keys[key.fd]

    def asks(self, fd: int) -> None:
        """Who is at the other end of it asks, and no longer waits for others' reports."""
        self.reporting.discard(fd)
        if fd in self._keys:
            key = self.unregister(fd)
            self._others.register(key.fileobj, key.events, key.data)

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self._acceptable = ACCEPTED[self._held]
        told = self._others.select(timeout)
        ready = [one for one in told if one[0].fd != self._reports.fileno()]
        if len(ready) < len(told):
            for fd, mask in self._reports.poll(0, REPORTS):
                if (key := self._keys.get(fd)) is not None:
                    ready.append((key, _events(mask) & key.events))
        return ready

    def close(self) -> None:
        self._reports.close()
        self._others.close()

    def get_map(self) -> Mapping[_File, selectors.SelectorKey]:
        return ChainMap(self._keys, self._others.get_map())  # type: ignore[arg-type]  # both are asked for file descriptors

    def get_key(self, fileobj: _File) -> selectors.SelectorKey:
        key = self._keys.get(_fd(fileobj))
        return key if key is not None else self._others.get_key(fileobj)


class Loop(asyncio.SelectorEventLoop):
    """A connection whose file descriptor is in ``selector.reporting`` before it is read belongs to those who report."""

    def __init__(self) -> None:
        self.selector = Selector()
        super().__init__(self.selector)


class Listening(socket.socket):
    """A listening socket of which asyncio does not accept all that wait at once."""

    def accept(self) -> tuple[socket.socket, Any]:
        loop = asyncio.get_running_loop()
        if isinstance(loop, Loop) and not loop.selector.accepts():
            raise BlockingIOError
        return super().accept()


def holding() -> contextlib.AbstractContextManager[None]:
    """On another event loop than `Loop` nothing is held back."""
    loop = asyncio.get_running_loop()
    return loop.selector.holding() if isinstance(loop, Loop) else contextlib.nullcontext()


def _fd(fileobj: _File) -> int:
    return fileobj if isinstance(fileobj, int) else fileobj.fileno()


def _mask(events: int) -> int:
    return (select.EPOLLIN if events & selectors.EVENT_READ else 0) | (select.EPOLLOUT if events & selectors.EVENT_WRITE else 0)


def _events(mask: int) -> int:
    """An end or an error is for either to see."""
    write = selectors.EVENT_WRITE if mask & ~select.EPOLLIN else 0
    return write | (selectors.EVENT_READ if mask & ~select.EPOLLOUT else 0)
