"""The exception that a thread is handling while it makes no calls."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hangwatch.agent.recorder.callers import CallSites
from hangwatch.agent.recorder.exceptions import HandledExceptions
from hangwatch.agent.recorder.writer import RingWriter
from hangwatch.ring.layout import IDENTITY
from hangwatch.ring.reader import RingReader


class BadRowError(ValueError):
    def __str__(self) -> str:
        raise AssertionError("code of the program is run")


class Recording:
    def __init__(self, path: Path) -> None:
        self.ring = RingWriter(path, pid=1, start_ticks=1)
        self.ring.write_note(IDENTITY, {})
        self.path = path
        recorder: Any = SimpleNamespace(ring=self.ring, sites=CallSites(self.ring))
        self.handled = HandledExceptions(recorder)
        self.call_count = 1

    def poll(self, times: int) -> None:
        for _ in range(times):
            self.handled.update_note(self.call_count)

    def read(self) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
        """The exception that ended the program, and the one that a thread is handling."""
        snapshot = RingReader(self.path.read_bytes()).read_snapshot(0)
        return snapshot.exception, snapshot.handled_exception


@pytest.fixture
def recording(tmp_path: Path) -> Recording:
    return Recording(tmp_path / "x.ring")


def read_row() -> None:
    raise BadRowError("a row has 7 columns")


def test_exception_is_noted_while_it_is_handled(recording: Recording) -> None:
    recording.poll(30)
    assert recording.read() == (None, None)
    try:
        read_row()
    except BadRowError:
        recording.call_count += 1
        recording.poll(10)
        assert recording.read() == (None, None), "not yet a second"
        recording.poll(1)
        ended, handled = recording.read()
        assert ended is None and handled is not None
        assert (handled["type"], handled["message"]) == ("BadRowError", "a row has 7 columns")
        assert (handled["function"], Path(handled["file"]).name) == (
            "read_row",
            "test_exceptions.py",
        )
        recording.poll(50)
        assert recording.read()[1] == handled, "unchanged, so that nothing is reported again"
    recording.poll(10)
    assert recording.read() == (None, None)


def test_note_goes_with_the_next_call(recording: Recording) -> None:
    try:
        read_row()
    except BadRowError:
        recording.poll(21)
        assert recording.read()[1] is not None
        recording.call_count += 1
        recording.poll(1)
        assert recording.read() == (None, None)


def test_exception_is_not_kept(recording: Recording) -> None:
    gc.disable()
    try:
        try:
            read_row()
        except BadRowError as error:
            kept = weakref.ref(error)
            recording.poll(21)
        assert kept() is None
    finally:
        gc.enable()
