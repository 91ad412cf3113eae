"""A recording as files for other tools: a flame graph, and a profile for speedscope."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

from hangwatch.model.threads import Frame
from hangwatch.stacks.call_tree import ProfileBar, layout_bars
from hangwatch.stacks.profile import Profile, profiles_to_speedscope

from . import rendering

IMAGE_WIDTH_PX = 1200
FRAME_HEIGHT_PX = 18  # of one frame
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
        width = thread.sample_count / total
        root = Frame(function=label, file="", line=0)
        bars.append(
            ProfileBar(
                x=x, width=width, depth=0, frame=root, samples=thread.sample_count, is_user=False
            )
        )
        bars += layout_bars(
            ((frames[:MAX_STACK_DEPTH], count) for frames, count in thread.stacks),
            x,
            1,
            total,
            MIN_BAR_WIDTH_PX / IMAGE_WIDTH_PX,
        )
        x += width
    height = FRAME_HEIGHT_PX * (max((bar.depth for bar in bars), default=0) + 1) + 40
    return rendering.render_text(
        "recording.svg",
        title=title,
        bars=list(_iter_template_bars(bars, rate)),
        bar=FRAME_HEIGHT_PX,
        width=IMAGE_WIDTH_PX,
        height=height,
    )


def _iter_template_bars(bars: Sequence[ProfileBar], rate: int) -> Iterator[dict[str, object]]:
    for bar in bars:
        frame = bar.frame
        label = frame.function
        if frame.file:
            label += f" {frame.file}"
        if frame.line:
            label += f":{frame.line}"
        yield {
            "x": round(IMAGE_WIDTH_PX * bar.x, 2),
            "y": 32 + FRAME_HEIGHT_PX * bar.depth,
            "width": round(IMAGE_WIDTH_PX * bar.width, 2),
            "name": frame.function,
            "label": f"{label}, {bar.samples / rate:.2f} s",
            "user": bar.is_user,
        }


def render_speedscope(title: str, profiles: RankProfiles, rate: int) -> str:
    return json.dumps(
        profiles_to_speedscope(
            title, ((f"rank {rank}", profile) for rank, profile in profiles), rate
        )
    )
