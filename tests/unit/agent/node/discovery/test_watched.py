"""Why a rank that is known from /proc has no ring."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hangwatch.agent.node.discovery.watched import TORCH_IMPORT_S, find_unrecorded_reason

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
