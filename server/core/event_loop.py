"""An event loop on which those who ask do not wait for those who report.

One pass of asyncio's loop handles every connection on which something has come. At 100,000 ranks
these may be the heartbeats of hundreds of node agents, and it takes as long as a second to read
them: here a pass reads only some of them, and all that anybody else sends. While another thread
works, each read and each write may cost as long as the system lets a thread run, some milliseconds:
then no report is read. A report that says of itself that it is urgent waits behind none: what it
says decides.
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

from hangwatch.protocol import heartbeat

# How many connections a pass reads and accepts; and how many while reports are held back.
REPORTS = 8, 0  # of node agents
URGENT, URGENT_MOST = (
    (8, 2),
    6,
)  # of these, who have something urgent to say: in place of so many others
NEWCOMERS = 8, 2  # who have not said yet what they want
ACCEPTED = 8, 1

SEEN = 256  # reports of which a pass sees how urgent they are, when they come
_HEAD = 1024  # bytes of a request in which that should be
_SAYS_SO = f"priority: {heartbeat.URGENT_PRIORITY}".encode()


class _HasFileno(Protocol):
    def fileno(self) -> int: ...


_File = int | _HasFileno


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


class _Queue(selectors.EpollSelector):
    """Of what is in it, it gives a few at a time: the longest ready first."""

    def __init__(self, share: tuple[int, int]) -> None:
        super().__init__()
        self._share = share
        self._epoll = select.epoll.fromfd(
            os.dup(self.fileno())
        )  # the same, since `select` asks it for all that are ready

    def turns(self, held: bool, taken: int = 0) -> Iterator[tuple[selectors.SelectorKey, int]]:
        """Those whose turn it is in this pass, of which others have ``taken`` so many."""
        for fd, mask in (
            self._epoll.poll(0, left) if (left := self._share[held] - taken) > 0 else ()
        ):
            key = self.get_map().get(fd)
            if key is not None and isinstance(key.data, Mark):
                key.data.waited_s = time.monotonic() - key.data.since
                self.unregister(fd)
                os.close(fd)
            elif key is not None:
                yield key, _events(mask) & key.events

    def close(self) -> None:
        for key in self.get_map().values():
            if isinstance(key.data, Mark):
                os.close(key.fd)
        self._epoll.close()
        super().close()


class _Reports(_Queue):
    """It also tells which of all that wait in it are urgent."""

    def __init__(self, share: tuple[int, int]) -> None:
        super().__init__(share)
        self.coming = select.epoll()  # tells of each report once, when it comes

    def register(self, fileobj: _File, events: int, data: Any = None) -> selectors.SelectorKey:
        key = super().register(fileobj, events, data)
        if not isinstance(data, Mark):
            self.coming.register(key.fd, select.EPOLLIN | select.EPOLLET)
        return key

    def unregister(self, fileobj: _File) -> selectors.SelectorKey:
        key = super().unregister(fileobj)
        if not isinstance(key.data, Mark):
            with contextlib.suppress(OSError):  # as the other does where it is closed already
                self.coming.unregister(key.fd)
        return key

    def urgent(self) -> list[int]:
        """Of those that came since the last time, or some of them."""
        return [fd for fd, _ in self.coming.poll(0, SEEN) if _is_urgent(fd)]

    def close(self) -> None:
        self.coming.close()
        super().close()


class Selector(selectors.BaseSelector):
    """Keeps the connections of those who report apart, and those of newcomers."""

    def __init__(self) -> None:
        self._others = selectors.DefaultSelector()
        self._reports, self._urgent, self._newcomers = (
            _Reports(REPORTS),
            _Queue(URGENT),
            _Queue(NEWCOMERS),
        )
        for readable in (self._reports, self._reports.coming, self._urgent, self._newcomers):
            self._others.register(readable, selectors.EVENT_READ)
        self._queue_of: dict[int, _Queue] = {}  # also while nothing is read from the connection
        self._held = False
        self._acceptable = 0  # in this pass

    @contextlib.contextmanager
    def holding(self) -> Iterator[None]:
        """No report is read meanwhile, unless it is urgent."""
        self._held = True
        self._others.unregister(self._reports)
        try:
            yield
        finally:
            self._held = False
            self._others.register(self._reports, selectors.EVENT_READ)

    def accepts(self) -> bool:
        """One more connection in this pass."""
        self._acceptable -= 1
        return self._acceptable >= 0

    def comes(self, fd: int) -> None:
        """A connection is there: of whom, is not known."""
        self._assign(fd, self._newcomers)

    def reports(self, fd: int) -> None:
        """Who is at the other end of it is a node agent. What is urgent stays so until all of it
        has been read.
        """
        if self._queue_of.get(fd) is not self._urgent:
            self._assign(fd, self._reports)

    def reported(self, fd: int) -> None:
        """All of a report has been read: the next one may be less urgent."""
        if self._queue_of.get(fd) is self._urgent:
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
        mark = Mark(since=time.monotonic())
        self._reports.register(fd, selectors.EVENT_READ, mark)
        return mark

    def register(self, fileobj: _File, events: int, data: Any = None) -> selectors.SelectorKey:
        return self._of(fileobj).register(fileobj, events, data)

    def unregister(self, fileobj: _File) -> selectors.SelectorKey:
        return self._of(fileobj).unregister(fileobj)

    def modify(self, fileobj: _File, events: int, data: Any = None) -> selectors.SelectorKey:
        return self._of(fileobj).modify(fileobj, events, data)

    def get_key(self, fileobj: _File) -> selectors.SelectorKey:
        return self._of(fileobj).get_key(fileobj)

    def _of(self, fileobj: _File) -> selectors.BaseSelector:
        return self._queue_of.get(
            fileobj if isinstance(fileobj, int) else fileobj.fileno(), self._others
        )

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self._acceptable = ACCEPTED[self._held]
        ready: list[tuple[selectors.SelectorKey, int]] = []
        for key, events in self._others.select(timeout):
            if key.fileobj is self._reports.coming:
                for fd in self._reports.urgent():
                    self._assign(fd, self._urgent)
            elif not isinstance(key.fileobj, _Queue):
                ready.append((key, events))
        urgent = list(self._urgent.turns(self._held))
        return [
            *ready,
            *self._newcomers.turns(self._held),
            *urgent,
            *self._reports.turns(self._held, min(len(urgent), URGENT_MOST)),
        ]

    def close(self) -> None:
        for selector in self._all():
            selector.close()

    def get_map(self) -> Mapping[_File, selectors.SelectorKey]:
        return ChainMap(*(selector.get_map() for selector in self._all()))  # type: ignore[arg-type]

    def _all(self) -> tuple[selectors.BaseSelector, ...]:
        return self._reports, self._urgent, self._newcomers, self._others


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
    """A place behind all reports that have come by now. On another event loop than `Loop` none
    waits for its turn.
    """
    loop = asyncio.get_running_loop()
    return (
        loop.selector.mark()
        if isinstance(loop, Loop)
        else Mark(since=time.monotonic(), waited_s=0.0)
    )


def _is_urgent(fd: int) -> bool:
    """By the head of the request that lies there; not to be seen where it is encrypted."""
    connection = socket.socket(
        socket.AF_INET, socket.SOCK_STREAM, 0, fileno=fd
    )  # of any family: it only matters for addresses
    try:
        head = connection.recv(_HEAD, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except OSError:
        return False
    finally:
        connection.detach()
    return _SAYS_SO in head.partition(b"\r\n\r\n")[0].lower()


def _events(mask: int) -> int:
    """An end or an error is for either to see."""
    write = selectors.EVENT_WRITE if mask & ~select.EPOLLIN else 0
    return write | (selectors.EVENT_READ if mask & ~select.EPOLLOUT else 0)
