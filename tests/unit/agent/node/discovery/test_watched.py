"""Why a rank that is known from /proc has no ring, and what is reported of one that has."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from hangwatch.agent.node.discovery.rings import RingFile
from hangwatch.agent.node.discovery.watched import (
    TORCH_IMPORT_S,
    WatchedProcess,
    find_unrecorded_reason,
)
from hangwatch.agent.node.system.processes import CpuActivity
from hangwatch.agent.recorder.writer import RingWriter

_URL = {"HANGWATCH_URL": "http://master:8642"}


def _make_process(proc: Path, environ: dict[str, str], maps: str = "") -> None:
    (proc / "7").mkdir()
    (proc / "7" / "environ").write_bytes(
        b"\0".join(f"{k}={v}".encode() for k, v in environ.items())
    )
    (proc / "7" / "maps").write_text(maps)
    os.symlink("/opt/other/bin/python3.11", proc / "7" / "exe")


@pytest.mark.parametrize(
    ("environ", "maps", "watched_s", "reason"),
    [
        ({}, "", 0.0, "HANGWATCH_URL is not in its environment"),
        (_URL | {"HANGWATCH_DISABLE": "1"}, "", 0.0, "HANGWATCH_DISABLE=1"),
        (
            _URL,
            "7f0 /x/torch/lib/libtorch_cpu.so\n",
            TORCH_IMPORT_S + 1,
            "/opt/other/bin/python3.11",
        ),
        (_URL, "7f0 /x/torch/lib/libtorch_cpu.so\n", TORCH_IMPORT_S - 1, ""),
        (_URL, "7f0 /x/libc.so.6\n", TORCH_IMPORT_S + 1, ""),
    ],
)
def test_unrecorded_reason(
    tmp_path: Path, environ: dict[str, str], maps: str, watched_s: float, reason: str
) -> None:
    _make_process(tmp_path, environ, maps)
    found = find_unrecorded_reason(7, watched_s, str(tmp_path))
    assert reason in found and bool(found) == bool(reason)


def test_unrecorded_reason_of_ended_process(tmp_path: Path) -> None:
    assert find_unrecorded_reason(8, 60.0, str(tmp_path)) == ""


def test_pauses_by_own_pyspy_do_not_count_as_silence(tmp_path: Path) -> None:
    path = tmp_path / "a.ring"
    ring = RingWriter(path, pid=os.getpid(), start_ticks=1)
    ring.write_identity({"job": "j", "rank": 1, "world_size": 4})
    watched = WatchedProcess(
        pid=os.getpid(),
        start_ticks=1,
        activity=CpuActivity(last_busy_ns=0),
        found_ns=0,
        ring=RingFile(path=path, pid=os.getpid(), start_ticks=1),
    )

    def report_pulse_s(silent_s: float) -> float:
        now_ns = time.monotonic_ns() + int(silent_s * 1e9)
        watched.read_state(now_ns)
        update = watched.compose_update(now_ns)
        assert update is not None and update.pulse_s is not None
        return update.pulse_s

    ring.write_pulse(0)
    assert report_pulse_s(4.0) == pytest.approx(4.0, abs=0.5)
    watched.activity.paused_ns += 3_500_000_000
    assert report_pulse_s(4.0) == pytest.approx(0.5, abs=0.5)
    assert report_pulse_s(9.0) == pytest.approx(5.5, abs=0.5), "it still does not run"
    time.sleep(0.01)
    ring.write_pulse(0)
    assert report_pulse_s(4.0) == pytest.approx(4.0, abs=0.5), "the pause was before its last pulse"
