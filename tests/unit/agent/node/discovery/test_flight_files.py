"""The Flight Recorder files that the node agent reads, and those that it leaves alone."""

from __future__ import annotations

import os
import pickle
import time
from pathlib import Path

import pytest

from hangwatch.agent.node.discovery import flight_files
from hangwatch.agent.node.discovery.flight_files import FlightFileReader, find_prefixes
from hangwatch.agent.node.discovery.watched import WatchedProcess
from hangwatch.agent.node.reporting.acked import AckedState
from hangwatch.agent.node.system.processes import CpuActivity

CONTENT = pickle.dumps({"version": "2.10", "entries": []})


def make_reader(folder: Path, *, uid: int | None = None, age_s: float = 60.0) -> FlightFileReader:
    return FlightFileReader(
        prefixes=[str(folder / "rank_")],
        uid=os.getuid() if uid is None else uid,
        started_at=time.time() - age_s,
    )


def test_file_of_the_rank_is_read(tmp_path: Path) -> None:
    (tmp_path / "rank_3").write_bytes(CONTENT)
    reader = make_reader(tmp_path)
    reader.read_file(3)
    assert reader.file is not None
    assert (reader.file.path, reader.file.error) == (str(tmp_path / "rank_3"), None)
    watched = WatchedProcess(
        pid=1,
        start_ticks=1,
        activity=CpuActivity(last_busy_ns=0),
        found_ns=0,
        flight_reader=reader,
    )
    assert watched.has_unsent_flight_file
    watched.acked = AckedState(status_key=(reader.file,))
    assert not watched.has_unsent_flight_file


def test_foreign_old_and_linked_files_are_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "rank_3"
    path.write_bytes(CONTENT)
    (tmp_path / "rank_4").symlink_to(path)
    os.mkfifo(tmp_path / "rank_5")
    os.utime(path, (time.time() - 100, time.time() - 100))
    old = make_reader(tmp_path)
    for rank in (3, 4, 5, 6):
        old.read_file(rank)
    foreign = make_reader(tmp_path, uid=os.getuid() + 1, age_s=1000)
    foreign.read_file(3)
    assert old.file is None
    assert foreign.file is None


def test_hostile_and_large_files_become_errors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "rank_0").write_bytes(pickle.dumps(os.getpid))
    reader = make_reader(tmp_path)
    reader.read_file(0)
    assert reader.file is not None
    assert "not readable" in (reader.file.error or "")
    monkeypatch.setattr(flight_files, "MAX_FILE_BYTES", 4)
    reader.read_file(0)
    assert "larger than" in (reader.file.error or "")


def test_prefix_is_torchs() -> None:
    named = {"TORCH_FR_DUMP_TEMP_FILE": "/a/b_", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": "/c/d_"}
    assert find_prefixes(named) == ["/a/b_"]
    assert find_prefixes({"HOME": "/h"})[0] == "/h/.cache/torch/comm_lib_trace_rank_"
