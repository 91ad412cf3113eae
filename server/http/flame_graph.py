"""Flame graphs as images: a bar for each frame, as wide as its share, below the bar of its caller."""

from __future__ import annotations

from collections.abc import Sequence

from hangwatch.stacks.call_tree import ProfileBar

from .rendering import render_text

WIDTH_PX = 1200  # of the whole image

LabelledBar = tuple[ProfileBar, str, str]  # with its text and its tooltip


def render_flame_graph(title: str, bars: Sequence[LabelledBar]) -> str:
    """The image as SVG."""
    rows = 1 + max((bar.depth for bar, _, _ in bars), default=0)
    return render_text("flamegraph.svg", title=title, bars=bars, rows=rows, width=WIDTH_PX)
