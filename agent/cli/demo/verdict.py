"""Whether an incident names the fault that the demo planted."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

CULPRIT_RANK = 2


def names_planted_line(document: Mapping[str, Any], file: str, line: int) -> bool:
    """Whether an incident blames the planted rank alone and has the planted line: its site, or a
    frame of its stacks.
    """
    culprits = document.get("culprits")
    frames = [
        f
        for s in document.get("stacks") or []
        if s.get("ranks") == [CULPRIT_RANK]
        for f in s.get("frames") or []
    ]
    places = [*frames, document.get("site") or {}]
    return culprits == [CULPRIT_RANK] and any(
        Path(str(p.get("file", ""))).name == file and p.get("line") == line for p in places
    )


def has_culprit_stack(document: Mapping[str, Any]) -> bool:
    """Whether a culprit's stack was taken, or the attempt to take it failed."""
    culprits = set(document.get("culprits") or [])
    return any(
        culprits & set(s.get("ranks") or []) and (s.get("frames") or s.get("error"))
        for s in document.get("stacks") or []
    )
