"""Where output has colours."""

from __future__ import annotations

import io

from hangwatch.agent.cli.terminal import detect_paint


class FakeTerminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_colour_only_on_supporting_terminals() -> None:
    assert detect_paint({}, FakeTerminal()).colour
    assert not detect_paint({}, io.StringIO()).colour
    assert not detect_paint({"NO_COLOR": "1"}, FakeTerminal()).colour
    assert not detect_paint({"TERM": "dumb"}, FakeTerminal()).colour
