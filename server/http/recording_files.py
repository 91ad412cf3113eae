"""A recording as files for other tools: a flame graph, and a profile for speedscope."""

from __future__ import annotations

import json
from collections.abc import Sequence

from hangwatch.model.threads import Frame
from hangwatch.stacks.call_tree import ProfileBar, layout_bars
from hangwatch.stacks.profile import Profile, profiles_to_speedscope

from .rendering import FLAME_GRAPH_WIDTH_PX, render_flame_graph

MIN_BAR_WIDTH_PX = 0.5  # narrower bars are omitted
MAX_STACK_DEPTH = 250

RankProfiles = Sequence[tuple[int, Profile]]  # by rank


def render_flamegraph(title: str, profiles: RankProfiles, rate: int) -> str:
    """An SVG with a flame graph of each thread that was active. The width of a frame is the time
    spent in it.
    """
    threads = [
        (f"rank {rank}, {thread.thread}", thread)
        for rank, profile in profiles
        for thread in profile.shown_threads
    ]
    total = max(1, sum(thread.sample_count for _, thread in threads))
    bars: list[ProfileBar] = []
    x = 0.0
    for label, thread in threads:
        root = Frame(function=label, file="", line=0)
        stacks = (((root, *frames[:MAX_STACK_DEPTH]), count) for frames, count in thread.stacks)
        bars += layout_bars(stacks, x, 0, total, MIN_BAR_WIDTH_PX / FLAME_GRAPH_WIDTH_PX)
        x += thread.sample_count / total
    return render_flame_graph(
        title,
        [
            (bar, bar.frame.function, f"{_format_frame(bar.frame)}, {bar.samples / rate:.2f} s")
            for bar in bars
        ],
    )


def _format_frame(frame: Frame) -> str:
    file = f" {frame.file}" if frame.file else ""
    line = f":{frame.line}" if frame.line else ""
    return f"{frame.function}{file}{line}"


def render_speedscope(title: str, profiles: RankProfiles, rate: int) -> str:
    by_name = ((f"rank {rank}", profile) for rank, profile in profiles)
    return json.dumps(profiles_to_speedscope(title, by_name, rate))
