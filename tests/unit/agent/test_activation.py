"""The door into a training process: shut without HANGWATCH_URL, and never in the way."""

from __future__ import annotations

import sys

import pytest

from hangwatch.agent import activation


@pytest.fixture(autouse=True)
def _not_activated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activation, "_activated", False)
    monkeypatch.delenv("HANGWATCH_URL", raising=False)
    monkeypatch.delenv("HANGWATCH_DISABLE", raising=False)


@pytest.mark.parametrize(
    ("url", "disable", "wanted"),
    [("", "", False), ("http://x", "", True), ("http://x", "1", False), ("http://x", "0", True)],
)
def test_activation_needs_a_url_and_is_not_disabled(
    monkeypatch: pytest.MonkeyPatch, url: str, disable: str, wanted: bool
) -> None:
    monkeypatch.setenv("HANGWATCH_URL", url)
    monkeypatch.setenv("HANGWATCH_DISABLE", disable)
    assert activation.is_enabled() is wanted


def test_unsupported_platform_warns_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HANGWATCH_URL", "http://x")
    monkeypatch.setattr(sys, "platform", "darwin")
    activation.activate()
    activation.activate()
    assert capsys.readouterr().err.count("only Linux") == 1


def test_internal_errors_are_contained(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HANGWATCH_URL", "http://x")
    monkeypatch.setitem(sys.modules, "hangwatch.agent.recorder", None)  # its import fails
    activation.activate()
    assert "not watching this process" in capsys.readouterr().err
