"""An event loop on which those who ask do not wait for those who report: with real sockets."""

from __future__ import annotations

import contextlib
import errno
import os
import selectors
import socket
from collections.abc import Iterator

import pytest

from hangwatch.server.core.event_loop import NEWCOMERS, REPORTS, Loop, Selector

Pairs = list[tuple[socket.socket, socket.socket]]

READ = REPORTS[0]  # in one pass
AGENTS = 5 * READ


@pytest.fixture
def loop() -> Iterator[Loop]:
    loop = Loop()
    yield loop
    loop.close()


def one_pass(loop: Loop) -> None:
    loop.call_soon(loop.stop)
    loop.run_forever()


@pytest.fixture
def pairs() -> Iterator[Pairs]:
    """Of each the server's end, and the other."""
    with contextlib.ExitStack() as open_:
        made = [socket.socketpair() for _ in range(AGENTS + 1)]
        yield [(open_.enter_context(mine), open_.enter_context(theirs)) for mine, theirs in made]


def test_a_pass_reads_some_of_the_reports_and_every_question(loop: Loop, pairs: Pairs) -> None:
    read: list[int] = []
    for number, (mine, theirs) in enumerate(pairs):

        def come(number: int = number, mine: socket.socket = mine) -> None:
            mine.recv(1)
            read.append(number)

        loop.add_reader(mine, come)
        if number < AGENTS:
            loop.selector.reports(mine.fileno())
        theirs.send(b"!")  # the question comes last
    one_pass(loop)
    assert len(read) == READ + 1
    assert AGENTS in read
    first = set(read)
    for number in range(
        READ
    ):  # those who were read have something to say again: the others' turn is before that
        pairs[number][1].send(b"!")
    for _ in range(AGENTS // READ - 1):
        one_pass(loop)
    assert {*range(AGENTS)} <= set(read)
    assert len(read) == AGENTS + 1, "nobody twice before everybody was read once"
    assert first < set(read)
    one_pass(loop)
    assert len(read) == AGENTS + 1 + READ


def test_where_few_are_ready_all_of_them_are_read(loop: Loop) -> None:
    read: list[bytes] = []
    mine, theirs = socket.socketpair()
    with mine, theirs:
        loop.add_reader(mine, lambda: read.append(mine.recv(1)))
        loop.selector.reports(mine.fileno())
        theirs.send(b"!")
        one_pass(loop)
        assert read == [b"!"]
        loop.remove_reader(mine)


def test_while_reports_are_held_back_a_newcomer_is_read_and_then_known(
    loop: Loop, pairs: Pairs
) -> None:
    selector, fds = loop.selector, [mine.fileno() for mine, _ in pairs]
    newcomers, agents = set(fds[:READ]), set(fds[READ:])
    for mine, theirs in pairs:
        selector.comes(mine.fileno())
        selector.register(mine, selectors.EVENT_READ, data="kept")
        theirs.send(b"!")
    for fd in agents:
        selector.reports(fd)
    assert (len(ready(selector) & newcomers), len(ready(selector) & agents)) == (NEWCOMERS[0], READ)
    with selector.holding():
        assert len(found := ready(selector)) == NEWCOMERS[1]
        assert found <= newcomers
        asking, *others = newcomers
        selector.asks(asking)
        assert asking in ready(selector) and asking in ready(selector), (
            "from then on it is read at once"
        )
        assert (selector.get_key(asking).data, selector.get_map()[asking].data) == ("kept", "kept")
        for fd in others:
            selector.reports(fd)
        assert ready(selector) == {asking}
    assert len(ready(selector)) == READ + 1


def test_an_urgent_report_waits_behind_none(loop: Loop, pairs: Pairs) -> None:
    selector, usual, urgent = loop.selector, pairs[:-2], pairs[-1]
    for mine, _ in pairs:
        selector.register(mine, selectors.EVENT_READ, data="kept")
        selector.reports(mine.fileno())
    for _, theirs in usual:
        theirs.send(b"POST /api/v1/heartbeats HTTP/1.1\r\n\r\nPriority: u=1\r\n\r\n")  # in its body
    assert len(ready(selector)) == READ
    urgent[1].send(b"POST /api/v1/heartbeats HTTP/1.1\r\nPriority: u=1\r\n\r\n{}")
    fd = urgent[0].fileno()
    found = [ready(selector) for _ in range(2)]
    assert fd in found[0] | found[1], "it is behind several passes' worth of others"
    assert selector.get_key(fd).data == "kept"
    with selector.holding():
        assert ready(selector) == {fd}, "it is read even where no other is"
        urgent[0].recv(1000)
        selector.reports(fd)  # as its head says
        urgent[1].send(b"the rest of it")
        assert ready(selector) == {fd}
        urgent[0].recv(1000)
        selector.reported(fd)  # the next one may be as others are
        assert ready(selector) == set()
        urgent[1].send(b"POST /api/v1/heartbeats HTTP/1.1\r\npriority: u=1\r\n\r\n{}")
        assert ready(selector) | ready(selector) == {fd}
        pairs[-2][1].close()  # ended without a word
        selector.unregister(urgent[0])
        selector.goes(fd)
        assert ready(selector) == set()


def test_a_mark_is_passed_when_all_reports_that_came_before_it_have_been_read(
    loop: Loop, pairs: Pairs
) -> None:
    selector = loop.selector
    for mine, theirs in pairs:
        loop.add_reader(mine, mine.recv, 1)
        selector.reports(mine.fileno())
        theirs.send(b"!")
    mark = selector.mark()
    for _ in range(AGENTS // READ):
        one_pass(loop)
        assert not mark.passed
    assert mark.age_s > 0.0
    pairs[0][1].send(b"!")  # after it
    with selector.holding():
        one_pass(loop)
        assert not mark.passed, "none is read"
    one_pass(loop)
    assert mark.passed
    assert mark.age_s == mark.waited_s
    one_pass(loop)
    assert selector.mark() is not mark  # left for the loop to close


def test_whose_connection_it_is_stays_known_while_nothing_is_read_from_it_and_no_longer(
    loop: Loop,
) -> None:
    selector = loop.selector
    mine, theirs = socket.socketpair()
    with mine, theirs:
        fd = mine.fileno()
        selector.register(mine, selectors.EVENT_READ)  # as TLS does, before there is a request
        selector.comes(fd)
        selector.unregister(mine)
        selector.reports(fd)
        selector.register(mine, selectors.EVENT_READ)
        theirs.send(b"!")
        with selector.holding():
            assert ready(selector) == set()
        assert ready(selector) == {fd}
        selector.unregister(mine)
        selector.goes(fd)
        selector.register(mine, selectors.EVENT_READ)  # another connection with the same number
        with selector.holding():
            assert ready(selector) == {fd}


def test_where_no_more_files_can_be_open_nobody_waits_for_the_reports(
    loop: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> int:
        raise OSError(errno.EMFILE, "too many open files")

    monkeypatch.setattr(os, "eventfd", refuse)
    assert loop.selector.mark().passed


@pytest.mark.parametrize("reports", [True, False])
def test_what_is_waited_for_can_change_and_end(loop: Loop, reports: bool) -> None:
    selector = loop.selector
    mine, theirs = socket.socketpair()
    with mine, theirs:
        selector.register(mine, selectors.EVENT_READ)
        if reports:
            selector.reports(mine.fileno())
        with pytest.raises(KeyError):
            selector.register(mine, selectors.EVENT_READ)
        assert mine.fileno() not in ready(selector)
        selector.modify(mine, selectors.EVENT_READ | selectors.EVENT_WRITE, data="more")
        assert dict(selector.select(0))[selector.get_key(mine)] == selectors.EVENT_WRITE
        selector.modify(mine, selectors.EVENT_READ)
        theirs.close()
        assert dict(selector.select(0))[selector.get_key(mine)] == selectors.EVENT_READ, (
            "an end is to be read"
        )
        selector.unregister(mine)
        assert mine.fileno() not in ready(selector)
        with pytest.raises(KeyError):
            selector.get_key(mine)


def ready(selector: Selector) -> set[int]:
    return {key.fd for key, _ in selector.select(0)}
