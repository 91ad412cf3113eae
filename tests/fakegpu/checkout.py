"""Puts this checkout's hangwatch on the path of the environments with a CUDA torch, which several checkouts share."""

from __future__ import annotations

import importlib.metadata
import os
from pathlib import Path

from tests.fakegpu.environment import cache_folder

_SITE = Path(__file__).with_name("site")
_DISTRIBUTION_FILES = ("METADATA", "entry_points.txt")


def hangwatch_folders() -> list[Path]:
    """Folders for PYTHONPATH: one makes `import hangwatch` find this checkout, one has its entry points.

    Raises `importlib.metadata.PackageNotFoundError` if hangwatch is not installed for this interpreter.
    """
    return [_SITE, _write_entry_points()]


def _write_entry_points() -> Path:
    """What `importlib.metadata` needs to find the entry point that torch calls."""
    installed = importlib.metadata.distribution("hangwatch")
    folder = cache_folder() / "hangwatch"
    described = folder / f"hangwatch-{installed.version}.dist-info"
    described.mkdir(parents=True, exist_ok=True)
    for name in _DISTRIBUTION_FILES:
        text = installed.read_text(name) or ""
        path = described / name
        if not path.exists() or path.read_text() != text:
            temporary = path.with_name(f".{name}.{os.getpid()}")
            temporary.write_text(text)
            temporary.replace(path)
    return folder
