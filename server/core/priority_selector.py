"""A selector by which queries do not wait for the reports of node agents.

One pass of asyncio's loop handles every readable connection. At 100,000 ranks these may be the
heartbeats of hundreds of node agents, which take up to a second to read. Here a pass reads only some
of them, and everything that other clients send.

While another thread works, each read and write may take as long as the system lets a thread run,
some milliseconds; reports are then not read at all. Urgent reports, by their Priority header,
are always read first.
"""

from __future__ import annotations

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

# How many connections one pass reads or accepts: usually, and while reports are delayed.
REPORTS_PER_PASS = 8, 0  # of node agents
URGENT_PER_PASS = 8, 2  # of node agents with an urgent report
NEW_CONNECTIONS_PER_PASS = 8, 2  # whose first request has not been read
ACCEPTED_PER_PASS = 8, 1
MAX_REPORTS_REPLACED = 6  # of a pass's usual reports, by urgent ones

MAX_HEADS_CHECKED = 256  # new reports per pass whose head is checked for urgency
_HEAD_SIZE = 1024  # bytes of a request that are searched for its priority
_URGENT_HEADER = f"priority: {heartbeat.URGENT_PRIORITY}".encode()


class _HasFileno(Protocol):
    def fileno(self) -> int: ...


_File = int | _HasFileno


@dataclass(slots=True, kw_only=True)
class QueueMarker:
    """A position in the queue of unread reports."""

    since: float
    waited_s: float | None = None  # until all earlier reports had been read

    @property
    def is_passed(self) -> bool:
        return self.waited_s is not None

    @property
    def age_s(self) -> float:
        """How long a report that arrived with the marker waited, or has waited so far."""
        return time.monotonic() - self.since if self.waited_s is None else self.waited_s


class _ConnectionQueue(selectors.EpollSelector):
    """Returns its ready connections a few at a time, in the order in which they became ready."""

    def __init__(self, share: tuple[int, int]) -> None:
        super().__init__()
        self._share = share
        # The same epoll, because `select` always returns all that are ready.
        self._epoll = select.epoll.fromfd(os.dup(self.fileno()))

    def poll_share(
        self, is_delayed: bool, taken: int = 0
    ) -> Iterator[tuple[selectors.SelectorKey, int]]:
        """The connections to read in this pass: its share, less the ``taken`` by urgent ones."""
        remaining = self._share[is_delayed] - taken
        if remaining <= 0:
            return
        for fd, mask in self._epoll.poll(0, remaining):
            key = self.get_map().get(fd)
            if key is not None and isinstance(key.data, QueueMarker):
                key.data.waited_s = time.monotonic() - key.data.since
                self.unregister(fd)
                os.close(fd)
            elif key is not None:
                yield key, _convert_mask(mask) & key.events

    def close(self) -> None:
        for key in self.get_map().values():
            if isinstance(key.data, QueueMarker):
                os.close(key.fd)
        self._epoll.close()
        super().close()


class _ReportQueue(_ConnectionQueue):
    """Also finds which of the reports in it are urgent."""

    def __init__(self, share: tuple[int, int]) -> None:
        super().__init__(share)
        self.arrivals = select.epoll()  # returns each report once, when it arrives

    def register(self, fileobj: _File, events: int, data: Any = None) -> selectors.SelectorKey:
        key = super().register(fileobj, events, data)
        if not isinstance(data, QueueMarker):
            self.arrivals.register(key.fd, select.EPOLLIN | select.EPOLLET)
        return key

    def unregister(self, fileobj: _File) -> selectors.SelectorKey:
        key = super().unregister(fileobj)
        if not isinstance(key.data, QueueMarker):
            with contextlib.suppress(OSError):  # closed already: epoll has removed it
                self.arrivals.unregister(key.fd)
        return key

    def find_urgent(self) -> list[int]:
        """The urgent ones among the reports that arrived since the last call, up to a limit."""
        return [fd for fd, _ in self.arrivals.poll(0, MAX_HEADS_CHECKED) if _is_urgent(fd)]

    def close(self) -> None:
        self.arrivals.close()
        super().close()


class PrioritySelector(selectors.BaseSelector):
    """Keeps separate queues for node agents' connections, urgent reports and new connections."""

    def __init__(self) -> None:
        self._others = selectors.DefaultSelector()
        self._reports = _ReportQueue(REPORTS_PER_PASS)
        self._urgent = _ConnectionQueue(URGENT_PER_PASS)
        self._new = _ConnectionQueue(NEW_CONNECTIONS_PER_PASS)
        for readable in (self._reports, self._reports.arrivals, self._urgent, self._new):
            self._others.register(readable, selectors.EVENT_READ)
        # By file descriptor; kept while the connection is not registered.
        self._queue_of: dict[int, _ConnectionQueue] = {}
        self._is_delayed = False
        self._accepts_left = 0  # in this pass

    @contextlib.contextmanager
    def delay_reports(self) -> Iterator[None]:
        """Meanwhile only urgent reports are read."""
        self._is_delayed = True
        self._others.unregister(self._reports)
        try:
            yield
        finally:
            self._is_delayed = False
            self._others.register(self._reports, selectors.EVENT_READ)

    def take_accept(self) -> bool:
        """Whether one more connection may be accepted in this pass; counts it."""
        self._accepts_left -= 1
        return self._accepts_left >= 0

    def add_connection(self, fd: int) -> None:
        """Adds a new connection, whose purpose is not known yet."""
        self._assign(fd, self._new)

    def assign_to_reports(self, fd: int) -> None:
        """Marks a connection as a node agent's. An urgent report stays urgent until it is read
        completely.
        """
        if self._queue_of.get(fd) is not self._urgent:
            self._assign(fd, self._reports)

    def finish_report(self, fd: int) -> None:
        """Records that a report was read completely: the next one may not be urgent."""
        if self._queue_of.get(fd) is self._urgent:
            self._assign(fd, self._reports)

    def assign_to_queries(self, fd: int) -> None:
        """Marks a connection as one that is read in every pass."""
        self._assign(fd, None)

    def remove_connection(self, fd: int) -> None:
        self._queue_of.pop(fd, None)

    def _assign(self, fd: int, queue: _ConnectionQueue | None) -> None:
        if self._queue_of.get(fd) is queue:
            return
        try:
            key = self.unregister(fd)
        except KeyError:  # it is not registered now
            key = None
        self._queue_of.pop(fd, None)
        if queue is not None:
            self._queue_of[fd] = queue
        if key is not None:
            self.register(key.fileobj, key.events, key.data)

    def place_marker(self) -> QueueMarker:
        """Places a marker behind all reports that have arrived by now."""
        try:
            fd = os.eventfd(1, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        except OSError:  # too many open files: callers then do not wait for the reports
            return QueueMarker(since=time.monotonic(), waited_s=0.0)
        marker = QueueMarker(since=time.monotonic())
        self._reports.register(fd, selectors.EVENT_READ, marker)
        return marker

    def register(self, fileobj: _File, events: int, data: Any = None) -> selectors.SelectorKey:
        return self._get_selector(fileobj).register(fileobj, events, data)

    def unregister(self, fileobj: _File) -> selectors.SelectorKey:
        return self._get_selector(fileobj).unregister(fileobj)

    def modify(self, fileobj: _File, events: int, data: Any = None) -> selectors.SelectorKey:
        return self._get_selector(fileobj).modify(fileobj, events, data)

    def get_key(self, fileobj: _File) -> selectors.SelectorKey:
        return self._get_selector(fileobj).get_key(fileobj)

    def _get_selector(self, fileobj: _File) -> selectors.BaseSelector:
        return self._queue_of.get(
            fileobj if isinstance(fileobj, int) else fileobj.fileno(), self._others
        )

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self._accepts_left = ACCEPTED_PER_PASS[self._is_delayed]
        ready: list[tuple[selectors.SelectorKey, int]] = []
        for key, events in self._others.select(timeout):
            if key.fileobj is self._reports.arrivals:
                for fd in self._reports.find_urgent():
                    self._assign(fd, self._urgent)
            elif not isinstance(key.fileobj, _ConnectionQueue):
                ready.append((key, events))
        urgent = list(self._urgent.poll_share(self._is_delayed))
        return [
            *ready,
            *self._new.poll_share(self._is_delayed),
            *urgent,
            *self._reports.poll_share(self._is_delayed, min(len(urgent), MAX_REPORTS_REPLACED)),
        ]

    def close(self) -> None:
        for selector in self._list_selectors():
            selector.close()

    def get_map(self) -> Mapping[_File, selectors.SelectorKey]:
        return ChainMap(*(selector.get_map() for selector in self._list_selectors()))  # type: ignore[arg-type]

    def _list_selectors(self) -> tuple[selectors.BaseSelector, ...]:
        return self._reports, self._urgent, self._new, self._others


def _is_urgent(fd: int) -> bool:
    """Whether the head of the unread request says so. An encrypted request is never urgent here."""
    # The family only matters for addresses: any will do.
    connection = socket.socket(socket.AF_INET, socket.SOCK_STREAM, 0, fileno=fd)
    try:
        head = connection.recv(_HEAD_SIZE, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except OSError:
        return False
    finally:
        connection.detach()
    return _URGENT_HEADER in head.partition(b"\r\n\r\n")[0].lower()


def _convert_mask(mask: int) -> int:
    """Selector events for an epoll mask. A hang-up or an error is both readable and writable."""
    write = selectors.EVENT_WRITE if mask & ~select.EPOLLIN else 0
    return write | (selectors.EVENT_READ if mask & ~select.EPOLLOUT else 0)
