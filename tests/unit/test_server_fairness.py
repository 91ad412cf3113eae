"""An event loop on which those who ask do not wait for those who report: with real sockets."""

from __future__ import annotations

import contextlib
import selectors
import socket
from collections.abc import Iterator

import pytest

from hangwatch.server.fairness import REPORTS, Loop, Selector

AGENTS = 5 * REPORTS


@pytest.fixture
def loop() -> Iterator[Loop]:
    loop = Loop()
    yield loop
    loop.close()


def one_pass(loop: Loop) -> None:
    loop.call_soon(loop.stop)
    loop.run_forever()


def test_a_pass_reads_some_of_the_reports_and_every_question(loop: Loop) -> None:
    read: list[int] = []
    with contextlib.ExitStack() as open_:
        pairs = [tuple(map(open_.enter_context, socket.socketpair())) for _ in range(AGENTS + 1)]
        for number, (mine, theirs) in enumerate(pairs):
            if number < AGENTS:
                loop.selector.reporting.add(mine.fileno())

            def come(number: int = number, mine: socket.socket = mine) -> None:
                mine.recv(1)
                read.append(number)

            loop.add_reader(mine, come)
            theirs.send(b"!")  # the question comes last
        one_pass(loop)
        assert len(read) == REPORTS + 1
        assert AGENTS in read
        first = set(read)
        for number in range(REPORTS):  # those who were read have something to say again: the others' turn is before that
            pairs[number][1].send(b"!")
        for _ in range(AGENTS // REPORTS - 1):
            one_pass(loop)
        assert {*range(AGENTS)} <= set(read)
        assert len(read) == AGENTS + 1, "nobody twice before everybody was read once"
        assert first < set(read)
        one_pass(loop)
        assert len(read) == AGENTS + 1 + REPORTS


def test_where_few_are_ready_all_of_them_are_read(loop: Loop) -> None:
    read: list[bytes] = []
    mine, theirs = socket.socketpair()
    with mine, theirs:
        loop.selector.reporting.add(mine.fileno())
        loop.add_reader(mine, lambda: read.append(mine.recv(1)))
        theirs.send(b"!")
        one_pass(loop)
        assert read == [b"!"]
        loop.remove_reader(mine)


def test_a_connection_that_asks_is_read_at_once_from_then_on(loop: Loop) -> None:
    selector = loop.selector
    with contextlib.ExitStack() as open_:
        pairs = [tuple(map(open_.enter_context, socket.socketpair())) for _ in range(AGENTS)]
        fds = [mine.fileno() for mine, _ in pairs]
        selector.reporting.update(fds)
        for mine, theirs in pairs:
            selector.register(mine, selectors.EVENT_READ, data="kept")
            theirs.send(b"!")
        asking = fds[-1]
        assert asking not in ready(selector)
        selector.asks(asking)
        assert len(found := ready(selector)) == REPORTS + 1
        assert asking in found
        assert (selector.get_key(asking).data, selector.get_map()[asking].data) == ("kept", "kept")


@pytest.mark.parametrize("reports", [True, False])
def test_what_is_waited_for_can_change_and_end(loop: Loop, reports: bool) -> None:
    selector = loop.selector
    mine, theirs = socket.socketpair()
    with mine, theirs:
        if reports:
            selector.reporting.add(mine.fileno())
        selector.register(mine, selectors.EVENT_READ)
        with pytest.raises(KeyError):
            selector.register(mine, selectors.EVENT_READ)
        assert mine.fileno() not in ready(selector)
        selector.modify(mine, selectors.EVENT_READ | selectors.EVENT_WRITE, data="more")
        assert dict(selector.select(0))[selector.get_key(mine)] == selectors.EVENT_WRITE
        selector.modify(mine, selectors.EVENT_READ)
        theirs.close()
        assert dict(selector.select(0))[selector.get_key(mine)] == selectors.EVENT_READ, "an end is to be read"
        selector.unregister(mine)
        assert mine.fileno() not in ready(selector)
        with pytest.raises(KeyError):
            selector.get_key(mine)


def ready(selector: Selector) -> set[int]:
    return {key.fd for key, _ in selector.select(0)}
