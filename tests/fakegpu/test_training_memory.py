"""hangwatch does not raise the peak of a training's device memory, whichever recorder is in use."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from tests.benchmarks.nccl import MAX_MEMORY_PERCENT, measure_peak_memory
from tests.harness.processes import clean_up_job

pytestmark = pytest.mark.fakegpu


def test_peak_memory_of_ddp(
    torch_version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HANGWATCH_RUN_DIR", str(tmp_path))
    monkeypatch.setenv("HANGWATCH_CACHE_DIR", str(tmp_path / "cache"))
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        peaks = measure_peak_memory(torch_version, f"http://127.0.0.1:{unused.getsockname()[1]}")
    clean_up_job(tmp_path, 0)
    limit_mb = peaks["none"] * (1 + MAX_MEMORY_PERCENT / 100)
    assert peaks["native"] <= limit_mb, peaks
    assert peaks["python"] <= limit_mb, peaks
