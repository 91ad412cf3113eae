"""How the node agent runs `py-spy record`: its arguments, its time limits, and the processes that it
must never sample.
"""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from hangwatch.agent.node.reporting.uplink import Outbox
from hangwatch.agent.node.requests import recordings
from hangwatch.agent.node.requests.recordings import (
    RecordingOrder,
    RecordingWorker,
    build_command,
)
from hangwatch.agent.node.stacks.pyspy import PySpy, PySpyError
from hangwatch.agent.node.system.processes import read_stat
from hangwatch.protocol.commands import Command, CommandKind, RecordingReply
from hangwatch.protocol.heartbeat import Heartbeat
from hangwatch.stacks.profile import unpack_profile
from tests.simulation.waiting import wait_for_value, wait_until

from ..discovery.test_rings import make_ring, watch_ring
from .test_commands import make_executor

PID = os.getpid()
TICKS = read_stat(PID).start_ticks
FAKE_PYSPY_SCRIPT = """#!/bin/sh
while [ $# -gt 0 ]; do [ "$1" = --output ] && out=$2; shift; done
samples() { echo "thread (PID): MainThread;crunch (/u/a.py:3) COUNT" > "$out"; exit 0; }
trap samples INT
MORE
samples
"""


def make_pyspy(folder: Path, more: str = "", count: int = 100, **options: str) -> PySpy:
    path = folder / "py-spy"
    path.write_text(
        FAKE_PYSPY_SCRIPT.replace("PID", str(PID))
        .replace("MORE", more)
        .replace("COUNT", str(count))
    )
    path.chmod(0o755)
    return PySpy(path=str(path), **options)  # type: ignore[arg-type]


def make_order(
    pid: int = PID, start_ticks: int = TICKS, request_id: str = "r", **options: Any
) -> RecordingOrder:
    fields: dict[str, Any] = {"key": "k", "seconds": 1, "rate": 1, **options}
    command = Command(id=request_id, kind=CommandKind.RECORD, **fields)
    return RecordingOrder(command=command, pid=pid, start_ticks=start_ticks)


RECORDING_REQUEST = make_order(rate=100)


def record_profile(pyspy: PySpy, order: RecordingOrder) -> RecordingReply:
    return RecordingWorker(pyspy, lambda: None).record_profile(order)


def test_job_is_paused_only_for_native_frames(tmp_path: Path) -> None:
    plain = build_command("py-spy", RECORDING_REQUEST, tmp_path / "o")
    assert plain[:4] == ["py-spy", "record", "--pid", str(PID)]
    assert {"--nonblocking", "--idle", "--full-filenames", "--threads"} <= set(plain)
    native = build_command(
        "py-spy",
        make_order(rate=9, native=True, gil=True),
        tmp_path / "o",
    )
    assert {"--native", "--gil"} <= set(native) and not {"--nonblocking", "--idle"} & set(native)


def test_incomplete_sampling_is_reported(tmp_path: Path) -> None:
    made = record_profile(make_pyspy(tmp_path), RECORDING_REQUEST)
    (thread,) = unpack_profile(made.profile).threads
    assert (thread.sample_count, made.note) == (100, "")
    assert (
        "70 of 100 samples"
        in record_profile(make_pyspy(tmp_path, count=70), RECORDING_REQUEST).note
    )


def test_recording_time_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recordings, "MAX_OVERRUN_S", -0.7)
    began = time.monotonic()
    with pytest.raises(PySpyError, match="was killed"):
        record_profile(make_pyspy(tmp_path, "exec sleep 9"), RECORDING_REQUEST)
    assert time.monotonic() - began < 3


def test_processes_that_cannot_be_sampled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recordings, "UNINTERRUPTIBLE_WAIT_S", 0.05)
    (tmp_path / "7").mkdir()
    fields = ["1"] * 60
    fields[19] = "55"
    for state, native, why in (("D", False, "uninterruptible"), ("T", True, "stopped")):
        (tmp_path / "7" / "stat").write_text(f"7 (python) {state} " + " ".join(fields[1:]))
        wish = make_order(7, 55, native=native)
        with pytest.raises(PySpyError, match=why):
            record_profile(make_pyspy(tmp_path, proc=str(tmp_path)), wish)
    with pytest.raises(PySpyError, match="has ended"):
        record_profile(make_pyspy(tmp_path), make_order(start_ticks=TICKS + 1))
    with pytest.raises(PySpyError, match="pip install py-spy"):
        record_profile(PySpy(path=None), RECORDING_REQUEST)
    with pytest.raises(PySpyError, match="--cap-add SYS_PTRACE"):
        record_profile(
            make_pyspy(tmp_path, "echo 'Permission Denied: Try again' >&2; exit 1"),
            RECORDING_REQUEST,
        )


def test_stack_dump_of_same_process_goes_first(tmp_path: Path) -> None:
    """Only where its samples pause the process, so that py-spy could not attach a second time."""
    woken = threading.Event()
    recordings = RecordingWorker(make_pyspy(tmp_path, "while :; do sleep 0.05; done"), woken.set)
    assert recordings.submit_order(make_order(seconds=20, native=True))
    replies = wait_for_value(recordings.take_results, "the start of the recording")
    assert replies[0].begun and recordings.is_pausing("k") and not recordings.is_pausing("other")
    time.sleep(0.2)  # the shell sets its trap
    recordings.preempt_recording("other")
    recordings.preempt_recording("k")
    assert not recordings.is_pausing("k")
    replies += wait_for_value(recordings.take_results, "the profile")
    assert (
        "they come first" in replies[1].note
        and unpack_profile(replies[1].profile).threads[0].stacks
    )
    recordings.close()


def test_recording_can_be_stopped_early_or_before_it_begins(tmp_path: Path) -> None:
    woken = threading.Event()
    recordings = RecordingWorker(make_pyspy(tmp_path, "while :; do sleep 0.05; done"), woken.set)
    for name in ("first", "second"):
        assert recordings.submit_order(make_order(seconds=20, request_id=name))
    assert woken.wait(5)
    recordings.stop_recording("second")
    time.sleep(0.2)  # the shell sets its trap
    recordings.preempt_recording("k")
    assert len(recordings.take_results()) == 1, (
        "it does not pause the process: dumps and it need not wait for each other"
    )
    recordings.stop_recording("first")
    replies: list[RecordingReply] = []

    def has_both_results() -> bool:
        replies.extend(recordings.take_results())
        return len(replies) >= 2

    assert wait_until(has_both_results, 5.0)
    assert "of 20 s: it was stopped" in replies[0].note and replies[0].profile
    assert replies[1].error == "it was stopped before it began"
    recordings.close()


def test_one_profile_per_heartbeat_and_each_once() -> None:
    outbox = Outbox()
    refused = [RecordingReply(key="7-7", request=f"r{n}", error="no") for n in range(2)]
    begun = RecordingReply(key="1-1", request="r2", begun=True)
    profiles = [RecordingReply(key="1-1", request=f"r{n}", profile="{}") for n in (2, 3)]
    for reply in (*refused, begun, *profiles):
        outbox.add_reply(reply, 0)
    sent = outbox.list_pending(0)["recordings"]
    assert sent == (*refused, begun, profiles[0])
    outbox.mark_delivered(Heartbeat(host="h", agent="a", number=1, recordings=sent[:3]))
    assert outbox.list_pending(0)["recordings"] == (profiles[0],), "only its beginning was sent"
    outbox.mark_delivered(Heartbeat(host="h", agent="a", number=2, recordings=(profiles[0],)))
    assert outbox.list_pending(0)["recordings"] == (profiles[1],) and outbox


def test_every_request_gets_a_reply(tmp_path: Path) -> None:
    w = watch_ring(make_ring(tmp_path))
    pyspy, outbox = PySpy(path=None), Outbox()
    recordings = RecordingWorker(pyspy, lambda: None)
    executor = make_executor(w, outbox, recordings=recordings)
    for n, key in enumerate(("7-7", "7-8", w.key)):
        command = Command(id=f"r{n}", kind=CommandKind.RECORD, key=key, seconds=1, rate=1)
        executor.execute_command(command, 0)
        assert len(outbox.list_pending(0)["recordings"]) == min(n + 1, 2)

    def has_all_replies() -> bool:
        executor.collect_results()
        return len(outbox.list_pending(0)["recordings"]) >= 4

    assert wait_until(has_all_replies, 5.0)
    replies = outbox.list_pending(0)["recordings"]
    assert ["no such process" in str(t.error) for t in replies] == [True, True, False, False]
    assert replies[2].begun and "pip install py-spy" in str(replies[3].error)
    recordings.close()
    w.close()
