"""What a forked child of a rank leaves alone: the ring is its parent's."""

from __future__ import annotations

from unittest import mock

import pytest

import hangwatch
from hangwatch.agent.recorder import faults, installation


def test_child_reports_no_faults_in_the_ring_of_its_parent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(faults, "fault_counts", {})
    reported: list[list[str]] = []
    faults.set_listener(lambda: reported.append(list(faults.fault_counts)))
    faults.record_message("of the parent")
    installation._reset_after_fork()
    faults.record_message("of the child")
    assert reported == [["of the parent"]]


def test_child_does_not_end_the_phase_of_its_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    watcher = mock.Mock()
    monkeypatch.setattr(hangwatch, "_watcher", watcher)
    with hangwatch.phase("evaluation"):
        installation._reset_after_fork()
    watcher.enter_phase.assert_called_once_with("evaluation", None)
    watcher.leave_phase.assert_not_called()
