"""Where output has colours."""

from __future__ import annotations

import io

import pytest

from hangwatch.agent.cli.terminal import print_lines, shows_style
from hangwatch.report.text import as_error


class FakeTerminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_colour_only_on_supporting_terminals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr("sys.stdout", io.StringIO())
    assert not shows_style()
    monkeypatch.setattr("sys.stdout", FakeTerminal())
    assert shows_style()
    monkeypatch.setenv("TERM", "dumb")
    assert not shows_style()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")
    assert not shows_style()


@pytest.mark.parametrize(
    ("output", "expected"),
    [(FakeTerminal(), "\x1b[1;31mfailed\x1b[0m: 3\n"), (io.StringIO(), "failed: 3\n")],
)
def test_style_is_printed_only_where_it_shows(
    monkeypatch: pytest.MonkeyPatch, output: io.StringIO, expected: str
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr("sys.stdout", output)
    print_lines([f"{as_error('failed')}: 3"])
    assert output.getvalue() == expected
