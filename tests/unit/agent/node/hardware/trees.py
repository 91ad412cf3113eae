"""Constructed trees of /sys and /proc."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from hangwatch.agent.node.hardware.host import Host


def write_files(root: Path, files: Mapping[str, object]) -> None:
    """Writes each value as a line of the file with that path below ``root``."""
    for name, value in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{value}\n")


def make_host(
    root: Path,
    *,
    pids: tuple[int, ...] = (),
    environ: Mapping[str, str] | None = None,
    uptime_s: float = 1000.0,
) -> Host:
    """A host whose files are in ``root``: proc/, sys/ and kmsg."""
    return Host(
        proc=root / "proc",
        sys=root / "sys",
        kernel_log=root / "kmsg",
        environ=environ or {},
        pids=pids,
        uptime_s=lambda: uptime_s,
    )
