"""Flame graphs as images: a bar for each frame, as wide as its share, below the bar of its caller."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .rendering import render_text

WIDTH_PX = 1200  # of the whole image


@dataclass(frozen=True, slots=True, kw_only=True)
class FlameBar:
    """One frame. ``x`` and ``width`` are shares of the image's width; ``label`` is the tooltip."""

    x: float
    width: float
    depth: int
    text: str
    label: str
    is_user: bool


def render_flame_graph(title: str, bars: Sequence[FlameBar]) -> str:
    """The image as SVG."""
    rows = 1 + max((bar.depth for bar in bars), default=0)
    return render_text("flamegraph.svg", title=title, bars=bars, rows=rows, width=WIDTH_PX)
