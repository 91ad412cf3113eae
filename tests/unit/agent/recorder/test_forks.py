"""What a forked child of a rank leaves alone: the ring is its parent's."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from unittest import mock

import pytest

import hangwatch
from hangwatch.agent.environment import run_dir
from hangwatch.agent.recorder import faults, installation, poller


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


def test_child_forked_during_the_start_of_a_node_agent_keeps_no_lock(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Otherwise no rank could start another node agent as long as the child lives."""
    monkeypatch.setattr("subprocess.Popen", mock.Mock())
    supervisor = poller.AgentSupervisor(tmp_path)
    supervisor._start_agent(now=0.0)
    ends_of_pipe = os.pipe()
    child = os.fork()
    if not child:  # the child ends once its parent has closed the pipe
        os.close(ends_of_pipe[1])
        os.read(ends_of_pipe[0], 1)
        os._exit(0)
    try:
        supervisor._release_start_lock()
        with (tmp_path / run_dir.START_LOCK_NAME).open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises while the lock is held
    finally:
        os.close(ends_of_pipe[0])
        os.close(ends_of_pipe[1])
        os.waitpid(child, 0)
