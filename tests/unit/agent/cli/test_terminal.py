"""Where output has colours."""

from __future__ import annotations

import io

import pytest

from hangwatch.agent.cli.terminal import detect_paint


class FakeTerminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_colour_only_on_supporting_terminals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdout", io.StringIO())
    assert not detect_paint({}).colour
    monkeypatch.setattr("sys.stdout", FakeTerminal())
    assert detect_paint({}).colour
    assert not detect_paint({"NO_COLOR": "1"}).colour
    assert not detect_paint({"TERM": "dumb"}).colour
