"""An event loop on which those who ask do not wait for those who report.

One pass of asyncio's loop handles every connection on which something has come. At 100,000 ranks these may be the heartbeats of hundreds
of node agents, and it takes as long as a second to read them: here a pass reads only some of them, and all that anybody else sends. While
another thread works, each read and each write may cost as long as the system lets a thread run, some milliseconds: then no report is read.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import selectors
import socket
import time
from collections import ChainMap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

# How many connections a pass reads and accepts; and how many while reports are held back.
REPORTS = 12, 0  # of node agents
NEWCOMERS = 8, 2  # who have not said yet what they want
ACCEPTED = 8, 1


class _HasFileno(Protocol):
    def fileno(self) -> int: ...


_File = int | _HasFileno


class _Queue:
    """Connections in an epoll of their own, which gives each its turn: the longest ready first."""

    def __init__(self, share: tuple[int, int]) -> None:
        self.share = share
        self.epoll = select.epoll()
        self.keys: dict[int, selectors.SelectorKey] = {}

    def add(self, key: selectors.SelectorKey) -> selectors.SelectorKey:
        self.epoll.register(key.fd, _mask(key.events))
        self.keys[key.fd] = key
        return key

    def remove(self, fd: int) -> selectors.SelectorKey:
        key = self.keys.pop(fd)
        with contextlib.suppress(OSError):  # closed already
            self.epoll.unregister(fd)
        return key

    def modify(self, fd: int, events: int, data: Any) -> selectors.SelectorKey:
        if events != self.keys[fd].events:
            self.epoll.modify(fd, _mask(events))
        self.keys[fd] = self.keys[fd]._replace(events=events, data=data)
        return self.keys[fd]


@dataclass(slots=True, kw_only=True)
class Mark:
    """A place among the reports that wait to be read."""

    since: float
    waited_s: float | None = None  # until all that came before it had been read

    @property
    def passed(self) -> bool:
        return self.waited_s is not None

    @property
    def age_s(self) -> float:
        """For how long a report waits that came with it, or has waited so far."""
        return time.monotonic() - self.since if self.waited_s is None else self.waited_s


class Selector(selectors.BaseSelector):
    """Keeps the connections of those who report apart, and those of newcomers."""

    def __init__(self) -> None:
        self._others = selectors.DefaultSelector()
        self._reports, self._newcomers = _Queue(REPORTS), _Queue(NEWCOMERS)
        self._queues = {queue.epoll.fileno(): queue for queue in (self._reports, self._newcomers)}
        for fd in self._queues:
            self._others.register(fd, selectors.EVENT_READ)
        self._queue_of: dict[int, _Queue] = {}  # also while nothing is read from the connection
        self._marks: dict[int, Mark] = {}
        self._held = False
        self._acceptable = 0  # in this pass

    @contextlib.contextmanager
    def holding(self) -> Iterator[None]:
        """No report is read meanwhile."""
        self._held = True
        self._others.unregister(self._reports.epoll.fileno())
        try:
            yield
        finally:
            self._held = False
            self._others.register(self._reports.epoll.fileno(), selectors.EVENT_READ)

    def accepts(self) -> bool:
        """One more connection in this pass."""
        self._acceptable -= 1
        return self._acceptable >= 0

    def comes(self, fd: int) -> None:
        """A connection is there: of whom, is not known."""
        self._assign(fd, self._newcomers)

    def reports(self, fd: int) -> None:
        """Who is at the other end of it is a node agent."""
        self._assign(fd, self._reports)

    def asks(self, fd: int) -> None:
        """Who is at the other end of it wants to know something, and waits for nobody."""
        self._assign(fd, None)

    def goes(self, fd: int) -> None:
        self._queue_of.pop(fd, None)

    def _assign(self, fd: int, queue: _Queue | None) -> None:
        if self._queue_of.get(fd) is queue:
            return
        try:
            key = self.unregister(fd)
        except KeyError:  # nothing is read from it now
            key = None
        self._queue_of.pop(fd, None)
        if queue is not None:
            self._queue_of[fd] = queue
        if key is not None:
            self.register(key.fileobj, key.events, key.data)

    def mark(self) -> Mark:
        """A place behind all reports that have come by now."""
        try:
            fd = os.eventfd(1, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        except OSError:  # too many files are open: then nobody waits for the reports
            return Mark(since=time.monotonic(), waited_s=0.0)
        self._marks[fd] = Mark(since=time.monotonic())
        self._reports.epoll.register(fd, select.EPOLLIN)
        return self._marks[fd]

    def register(self, fileobj: _File, events: int, data: Any = None) -> selectors.SelectorKey:
        queue, fd = self._queue_of.get(_fd(fileobj)), _fd(fileobj)
        if queue is None:
            return self._others.register(fileobj, events, data)
        if fd in queue.keys:
            raise KeyError(f"{fileobj!r} is registered")
        return queue.add(selectors.SelectorKey(fileobj, fd, events, data))

    def unregister(self, fileobj: _File) -> selectors.SelectorKey:
        queue = self._queue_of.get(_fd(fileobj))
        return self._others.unregister(fileobj) if queue is None else queue.remove(_fd(fileobj))

    def modify(self, fileobj: _File, events: int, data: Any = None) -> selectors.SelectorKey:
        queue = self._queue_of.get(_fd(fileobj))
        return self._others.modify(fileobj, events, data) if queue is None else queue.modify(_fd(fileobj), events, data)

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self._acceptable = ACCEPTED[self._held]
        ready = []
        for key, events in self._others.select(timeout):
            if (queue := self._queues.get(key.fd)) is None:
                ready.append((key, events))
            else:
                ready += self._turns(queue)
        return ready

    def _turns(self, queue: _Queue) -> Iterator[tuple[selectors.SelectorKey, int]]:
        for fd, mask in queue.epoll.poll(0, queue.share[self._held]):
            if (key := queue.keys.get(fd)) is not None:
                yield key, _events(mask) & key.events
            elif (mark := self._marks.pop(fd, None)) is not None:
                mark.waited_s = time.monotonic() - mark.since
                os.close(fd)

    def close(self) -> None:
        for fd in self._marks:
            os.close(fd)
        for queue in self._queues.values():
            queue.epoll.close()
        self._others.close()

    def get_map(self) -> Mapping[_File, selectors.SelectorKey]:
        maps = self._reports.keys, self._newcomers.keys, self._others.get_map()
        return ChainMap(*maps)  # type: ignore[arg-type]  # all are asked for file descriptors

    def get_key(self, fileobj: _File) -> selectors.SelectorKey:
        queue = self._queue_of.get(_fd(fileobj))
        return self._others.get_key(fileobj) if queue is None else queue.keys[_fd(fileobj)]


class Loop(asyncio.SelectorEventLoop):
    """Its ``selector`` is told of each connection that comes, and of what it turns out to be for."""

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


def mark() -> Mark:
    """A place behind all reports that have come by now. On another event loop than `Loop` none waits for its turn."""
    loop = asyncio.get_running_loop()
    return loop.selector.mark() if isinstance(loop, Loop) else Mark(since=time.monotonic(), waited_s=0.0)


def _fd(fileobj: _File) -> int:
    return fileobj if isinstance(fileobj, int) else fileobj.fileno()


def _mask(events: int) -> int:
    return (select.EPOLLIN if events & selectors.EVENT_READ else 0) | (select.EPOLLOUT if events & selectors.EVENT_WRITE else 0)


def _events(mask: int) -> int:
    """An end or an error is for either to see."""
    write = selectors.EVENT_WRITE if mask & ~select.EPOLLIN else 0
    return write | (selectors.EVENT_READ if mask & ~select.EPOLLOUT else 0)
