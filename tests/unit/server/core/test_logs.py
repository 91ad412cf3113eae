"""The server's log is limited by kind, and says what it left out."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from io import StringIO

import pytest

from hangwatch.server.core import logs
from hangwatch.server.core.logs import MAX_PER_WINDOW, LogLimit, PlainFormatter
from tests.simulation.waiting import wait_until


@pytest.fixture
def out(monkeypatch: pytest.MonkeyPatch) -> Iterator[StringIO]:
    """What is logged to `logs.log` and to the logger "limited"."""
    written = StringIO()
    handler = logging.StreamHandler(written)
    handler.setFormatter(PlainFormatter("%(message)s"))
    limit = LogLimit(window_s=0.5)
    handler.addFilter(limit.filter)
    for name in ("limited", logs.log.name):
        logging.getLogger(name).addHandler(handler)
    yield written
    limit.end_window()
    for name in ("limited", logs.log.name):
        logging.getLogger(name).removeHandler(handler)


FLOOD = 100  # messages; even a busy machine writes them all within one window


def fail(text: str) -> None:
    try:
        raise ValueError(text)
    except ValueError:
        logging.getLogger("limited").exception("%s failed", text)


def test_messages_beyond_the_limit_are_counted(out: StringIO) -> None:
    """SECURITY.md: "five messages of a kind in a minute", "and then how many were left out"."""
    for number in range(FLOOD):
        fail(f"number {number}")
    logging.getLogger("limited").warning("something else")
    text = out.getvalue()
    assert text.count("Traceback") == MAX_PER_WINDOW
    assert "number 0 failed" in text and f"number {MAX_PER_WINDOW} failed" not in text
    assert "something else" in text, "a flood of one kind hides no other"
    left_out = f"left out {FLOOD - MAX_PER_WINDOW} more messages like those of {__file__}:"
    assert wait_until(lambda: left_out in out.getvalue(), 10.0)
    fail("after the window")
    assert "after the window failed" in out.getvalue()


def test_errors_of_different_places_are_different_kinds(out: StringIO) -> None:
    def raise_in(place: str) -> None:
        namespace: dict[str, str] = {}
        exec(compile("raise KeyError(place)", place, "exec"), {"place": place}, namespace)

    for place in ("a.py", "b.py"):
        for _ in range(10):
            try:
                raise_in(place)
            except KeyError:
                logging.getLogger("limited").error("failed", exc_info=sys.exc_info())
    for place in ("a.py", "b.py"):
        assert out.getvalue().count(f"KeyError: '{place}'") == MAX_PER_WINDOW


def test_one_message_is_cut(out: StringIO) -> None:
    """SECURITY.md: "each of at most 16,000 characters"."""
    logging.getLogger("limited").error("x" * 1_000_000)
    assert len(out.getvalue()) <= logs.MAX_LENGTH + 1
