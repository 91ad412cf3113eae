"""The findings of `hangwatch doctor` on calls that a recorder of this host did not record."""

from __future__ import annotations

import os
from pathlib import Path

from hangwatch.agent.cli.commands.doctor import check_ring
from hangwatch.agent.environment import run_dir
from hangwatch.agent.node.discovery.rings import RingFile
from hangwatch.agent.recorder.streams import StreamRecorder
from hangwatch.agent.recorder.writer import RingWriter
from hangwatch.model.calls import LossReason
from hangwatch.ring.layout import FAULTS, LiveWord


def test_incomplete_recordings_are_reported(tmp_path: Path) -> None:
    pid = os.getpid()
    start_ticks = run_dir.read_start_ticks(pid)
    file = RingFile(path=tmp_path / f"{pid}-{start_ticks}.ring", pid=pid, start_ticks=start_ticks)
    ring = RingWriter(file.path, pid=pid, start_ticks=start_ticks)
    ring.write_identity({"job": "run7", "rank": 3})
    description = {"kind": "collective", "name": "0", "desc": "default_pg", "ranks": "0-3"}
    slot = ring.open_stream(1, description)
    stream = StreamRecorder(ring, 1, slot, lambda work: work)
    assert list(check_ring(file)) == []
    stream.mark_incomplete(LossReason.FAULT)
    ring.set_word(LiveWord.DROPPED, 2)
    ring.write_note(FAULTS, {"lines": ["recording all_reduce: OSError: injected"]})
    (finding,) = check_ring(file)
    assert finding.ok is None
    assert finding.detail == (
        f"rank 3 of run7, pid {pid}: calls of group default_pg are not completely recorded since"
        " call 1; 2 calls, groups or channels are not recorded (recording all_reduce: OSError:"
        " injected)"
    )
