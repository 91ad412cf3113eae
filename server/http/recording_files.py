"""A recording as files for other tools: a flame graph, and a profile for speedscope."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

from hangwatch.model.threads import Frame
from hangwatch.stacks.call_tree import ProfileBar, layout_bars
from hangwatch.stacks.profile import Profile, profiles_to_speedscope

from . import rendering

WIDTH, HEIGHT = 1200, 18  # of the whole picture, and of one frame
NARROWEST = 0.5  # what would be narrower is left out
DEEPEST = 250

Profiles = Sequence[tuple[int, Profile]]  # by rank


def flamegraph(title: str, profiles: Profiles, rate: int) -> str:
    """An SVG in which each frame is as wide as the time that was spent in it, nothing folded: a
    tower for each thread that did anything.
    """
    threads = [
        (f"rank {rank}, {thread.thread}", thread)
        for rank, profile in profiles
        for thread in profile.shown_threads
    ]
    total = max(1, sum(thread.sample_count for _, thread in threads))
    found: list[ProfileBar] = []
    x = 0.0
    for label, thread in threads:
        width = thread.sample_count / total
        root = Frame(function=label, file="", line=0)
        found.append(
            ProfileBar(
                x=x, width=width, depth=0, frame=root, samples=thread.sample_count, is_user=False
            )
        )
        found += layout_bars(
            ((frames[:DEEPEST], count) for frames, count in thread.stacks),
            x,
            1,
            total,
            NARROWEST / WIDTH,
        )
        x += width
    height = HEIGHT * (max((bar.depth for bar in found), default=0) + 1) + 40
    drawn = list(_drawn(found, rate))
    return rendering.text(
        "recording.svg", title=title, bars=drawn, bar=HEIGHT, width=WIDTH, height=height
    )


def _drawn(found: Sequence[ProfileBar], rate: int) -> Iterator[dict[str, object]]:
    for bar in found:
        frame = bar.frame
        place = (
            f" {frame.file}:{frame.line}" if frame.line else f" {frame.file}" if frame.file else ""
        )
        yield {
            "x": round(WIDTH * bar.x, 2),
            "y": 32 + HEIGHT * bar.depth,
            "width": round(WIDTH * bar.width, 2),
            "name": frame.function,
            "told": f"{frame.function}{place}, {bar.samples / rate:.2f} s",
            "user": bar.is_user,
        }


def for_speedscope(title: str, profiles: Profiles, rate: int) -> str:
    return json.dumps(
        profiles_to_speedscope(
            title, ((f"rank {rank}", profile) for rank, profile in profiles), rate
        )
    )
