"""An event loop on which those who ask do not wait for those who report: with real sockets."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

import pytest

from hangwatch.server.fairness import REPORTS, Loop

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
                loop.reporting.add(mine.fileno())

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
        loop.reporting.add(mine.fileno())
        loop.add_reader(mine, lambda: read.append(mine.recv(1)))
        theirs.send(b"!")
        one_pass(loop)
        assert read == [b"!"]
        loop.remove_reader(mine)
