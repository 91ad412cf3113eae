"""The event loop on which queries do not wait for reports: with real sockets."""

from __future__ import annotations

import contextlib
import errno
import os
import selectors
import socket
from collections.abc import Iterator

import pytest

from hangwatch.server.core.event_loop import PriorityEventLoop
from hangwatch.server.core.priority_selector import (
    NEW_CONNECTIONS_PER_PASS,
    REPORTS_PER_PASS,
    PrioritySelector,
)

SocketPairs = list[tuple[socket.socket, socket.socket]]

READ_PER_PASS = REPORTS_PER_PASS[0]
AGENT_COUNT = 5 * READ_PER_PASS


@pytest.fixture
def loop() -> Iterator[PriorityEventLoop]:
    loop = PriorityEventLoop()
    yield loop
    loop.close()


def run_one_pass(loop: PriorityEventLoop) -> None:
    loop.call_soon(loop.stop)
    loop.run_forever()


@pytest.fixture
def pairs() -> Iterator[SocketPairs]:
    """Of each the server's end, and the other."""
    with contextlib.ExitStack() as open_:
        made = [socket.socketpair() for _ in range(AGENT_COUNT + 1)]
        yield [(open_.enter_context(mine), open_.enter_context(theirs)) for mine, theirs in made]


def test_one_pass_reads_some_reports_and_all_queries(
    loop: PriorityEventLoop, pairs: SocketPairs
) -> None:
    read: list[int] = []
    for number, (mine, theirs) in enumerate(pairs):

        def on_readable(number: int = number, mine: socket.socket = mine) -> None:
            mine.recv(1)
            read.append(number)

        loop.add_reader(mine, on_readable)
        if number < AGENT_COUNT:
            loop.selector.assign_to_reports(mine.fileno())
        theirs.send(b"!")  # the question comes last
    run_one_pass(loop)
    assert len(read) == READ_PER_PASS + 1
    assert AGENT_COUNT in read
    first = set(read)
    for number in range(
        READ_PER_PASS
    ):  # those who were read have something to say again: the others' turn is before that
        pairs[number][1].send(b"!")
    for _ in range(AGENT_COUNT // READ_PER_PASS - 1):
        run_one_pass(loop)
    assert {*range(AGENT_COUNT)} <= set(read)
    assert len(read) == AGENT_COUNT + 1, "no connection is read twice before all were read once"
    assert first < set(read)
    run_one_pass(loop)
    assert len(read) == AGENT_COUNT + 1 + READ_PER_PASS


def test_few_ready_connections_are_all_read(loop: PriorityEventLoop) -> None:
    read: list[bytes] = []
    mine, theirs = socket.socketpair()
    with mine, theirs:
        loop.add_reader(mine, lambda: read.append(mine.recv(1)))
        loop.selector.assign_to_reports(mine.fileno())
        theirs.send(b"!")
        run_one_pass(loop)
        assert read == [b"!"]
        loop.remove_reader(mine)


def test_new_connection_is_read_while_reports_are_delayed(
    loop: PriorityEventLoop, pairs: SocketPairs
) -> None:
    selector, fds = loop.selector, [mine.fileno() for mine, _ in pairs]
    newcomers, agents = set(fds[:READ_PER_PASS]), set(fds[READ_PER_PASS:])
    for mine, theirs in pairs:
        selector.add_connection(mine.fileno())
        selector.register(mine, selectors.EVENT_READ, data="kept")
        theirs.send(b"!")
    for fd in agents:
        selector.assign_to_reports(fd)
    assert (len(select_ready(selector) & newcomers), len(select_ready(selector) & agents)) == (
        NEW_CONNECTIONS_PER_PASS[0],
        READ_PER_PASS,
    )
    with selector.delay_reports():
        assert len(ready := select_ready(selector)) == NEW_CONNECTIONS_PER_PASS[1]
        assert ready <= newcomers
        asking, *others = newcomers
        selector.assign_to_queries(asking)
        assert asking in select_ready(selector) and asking in select_ready(selector), (
            "from then on it is read immediately"
        )
        assert (selector.get_key(asking).data, selector.get_map()[asking].data) == ("kept", "kept")
        for fd in others:
            selector.assign_to_reports(fd)
        assert select_ready(selector) == {asking}
    assert len(select_ready(selector)) == READ_PER_PASS + 1


def test_urgent_report_is_read_first(loop: PriorityEventLoop, pairs: SocketPairs) -> None:
    selector, usual, urgent = loop.selector, pairs[:-2], pairs[-1]
    for mine, _ in pairs:
        selector.register(mine, selectors.EVENT_READ, data="kept")
        selector.assign_to_reports(mine.fileno())
    for _, theirs in usual:
        theirs.send(b"POST /api/v1/heartbeats HTTP/1.1\r\n\r\nPriority: u=1\r\n\r\n")  # in its body
    assert len(select_ready(selector)) == READ_PER_PASS
    urgent[1].send(b"POST /api/v1/heartbeats HTTP/1.1\r\nPriority: u=1\r\n\r\n{}")
    fd = urgent[0].fileno()
    passes = [select_ready(selector) for _ in range(2)]
    assert fd in passes[0] | passes[1], "it is behind several passes' worth of others"
    assert selector.get_key(fd).data == "kept"
    with selector.delay_reports():
        assert select_ready(selector) == {fd}, "it is read even where no other is"
        urgent[0].recv(1000)
        selector.assign_to_reports(fd)  # as its head says
        urgent[1].send(b"the rest of it")
        assert select_ready(selector) == {fd}
        urgent[0].recv(1000)
        selector.finish_report(fd)  # the next one may be as others are
        assert select_ready(selector) == set()
        urgent[1].send(b"POST /api/v1/heartbeats HTTP/1.1\r\npriority: u=1\r\n\r\n{}")
        assert select_ready(selector) | select_ready(selector) == {fd}
        pairs[-2][1].close()  # ended without a word
        selector.unregister(urgent[0])
        selector.remove_connection(fd)
        assert select_ready(selector) == set()


def test_mark_is_passed_after_all_earlier_reports(
    loop: PriorityEventLoop, pairs: SocketPairs
) -> None:
    selector = loop.selector
    for mine, theirs in pairs:
        loop.add_reader(mine, mine.recv, 1)
        selector.assign_to_reports(mine.fileno())
        theirs.send(b"!")
    mark = selector.place_marker()
    for _ in range(AGENT_COUNT // READ_PER_PASS):
        run_one_pass(loop)
        assert not mark.is_passed
    assert mark.age_s > 0.0
    pairs[0][1].send(b"!")  # after it
    with selector.delay_reports():
        run_one_pass(loop)
        assert not mark.is_passed, "none is read"
    run_one_pass(loop)
    assert mark.is_passed
    assert mark.age_s == mark.waited_s
    run_one_pass(loop)
    assert selector.place_marker() is not mark  # left for the loop to close


def test_connection_owner_is_known_until_next_read(
    loop: PriorityEventLoop,
) -> None:
    selector = loop.selector
    mine, theirs = socket.socketpair()
    with mine, theirs:
        fd = mine.fileno()
        selector.register(mine, selectors.EVENT_READ)  # as TLS does, before there is a request
        selector.add_connection(fd)
        selector.unregister(mine)
        selector.assign_to_reports(fd)
        selector.register(mine, selectors.EVENT_READ)
        theirs.send(b"!")
        with selector.delay_reports():
            assert select_ready(selector) == set()
        assert select_ready(selector) == {fd}
        selector.unregister(mine)
        selector.remove_connection(fd)
        selector.register(mine, selectors.EVENT_READ)  # another connection with the same number
        with selector.delay_reports():
            assert select_ready(selector) == {fd}


def test_no_report_delay_when_out_of_file_descriptors(
    loop: PriorityEventLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse_file(*_: object) -> int:
        raise OSError(errno.EMFILE, "too many open files")

    monkeypatch.setattr(os, "eventfd", refuse_file)
    assert loop.selector.place_marker().is_passed


@pytest.mark.parametrize("reports", [True, False])
def test_awaited_events_can_change_and_end(loop: PriorityEventLoop, reports: bool) -> None:
    selector = loop.selector
    mine, theirs = socket.socketpair()
    with mine, theirs:
        selector.register(mine, selectors.EVENT_READ)
        if reports:
            selector.assign_to_reports(mine.fileno())
        with pytest.raises(KeyError):
            selector.register(mine, selectors.EVENT_READ)
        assert mine.fileno() not in select_ready(selector)
        selector.modify(mine, selectors.EVENT_READ | selectors.EVENT_WRITE, data="more")
        assert dict(selector.select(0))[selector.get_key(mine)] == selectors.EVENT_WRITE
        selector.modify(mine, selectors.EVENT_READ)
        theirs.close()
        assert dict(selector.select(0))[selector.get_key(mine)] == selectors.EVENT_READ, (
            "an end is to be read"
        )
        selector.unregister(mine)
        assert mine.fileno() not in select_ready(selector)
        with pytest.raises(KeyError):
            selector.get_key(mine)


def select_ready(selector: PrioritySelector) -> set[int]:
    return {key.fd for key, _ in selector.select(0)}
