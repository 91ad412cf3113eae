"""A profile as a tree from the outside in: the user's functions and their share of the time, with
libraries' frames folded. Pure.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from hangwatch.model.threads import Frame

from .frames import is_library

MIN_SHARE = 0.005  # of all samples: what is rarer is left out
_MAX_DEPTH = 60  # nodes below each other: recursion would go on for ever
_MAX_LINES = 5
_WRAPPER = re.compile(r"<locals>|^(wrapper|inner|wrapped|decorate_context)$|_call_impl$")

CountedStacks = Iterable[tuple[tuple[Frame, ...], int]]  # outermost frame first, samples


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileNode:
    """A function of the user's; or, with ``library``, what the user's line above calls, down to
    where it ``ends`` most often.
    """

    function: str
    file: str
    library: bool
    samples: int  # in it, and in what it calls
    own_samples: int  # of these, in its own lines
    lines: tuple[
        tuple[int, int], ...
    ] = ()  # where it stood, the most frequent first, and how often
    leaf_frame: Frame | None = None
    children: tuple[ProfileNode, ...] = ()


@dataclass(slots=True)
class _NodeBuilder:
    first_frame: Frame
    library: bool
    samples: int = 0
    own_samples: int = 0
    lines: Counter[int] = field(default_factory=Counter)
    leaf_frames: Counter[Frame] = field(default_factory=Counter)
    children: dict[tuple[str, str, bool], _NodeBuilder] = field(default_factory=dict)


def build_call_tree(stacks: CountedStacks) -> tuple[ProfileNode, ...]:
    """The roots of the tree, the heaviest first, and so at every branch.

    Libraries' frames between two of the user's are left out. Those below the user's innermost frame
    become one node, by the outermost of them that is not merely a decorator's wrapper: what the
    user called.
    """
    root, total = _NodeBuilder(Frame(function="", file="", line=0), False), 0
    for frames, count in stacks:
        total += count
        node = root
        for step in _iter_steps(frames):
            node = node.children.setdefault(
                (step[0].function, step[0].file, step[1]), _NodeBuilder(step[0], step[1])
            )
            node.samples += count
            if step[1]:
                node.leaf_frames[frames[-1]] += count
            elif step[0].line:
                node.lines[step[0].line] += count
        node.own_samples += count
    return _build_nodes(root, total * MIN_SHARE)


def _iter_steps(frames: tuple[Frame, ...]) -> Iterator[tuple[Frame, bool]]:
    """The frames that become nodes, and whether each is a library's."""
    mine = [n for n, frame in enumerate(frames) if not is_library(frame.file)]
    yield from ((frames[n], False) for n in mine[:_MAX_DEPTH])
    below = frames[mine[-1] + 1 :] if mine else frames
    if below and len(mine) < _MAX_DEPTH:
        yield (
            next((frame for frame in below if not _WRAPPER.search(frame.function)), below[0]),
            True,
        )


def _build_nodes(node: _NodeBuilder, min_samples: float) -> tuple[ProfileNode, ...]:
    kept = sorted(
        (c for c in node.children.values() if c.samples >= min_samples), key=lambda c: -c.samples
    )
    return tuple(
        ProfileNode(
            function=c.first_frame.function,
            file=c.first_frame.file,
            library=c.library,
            samples=c.samples,
            own_samples=c.own_samples,
            lines=tuple(c.lines.most_common(_MAX_LINES)),
            leaf_frame=max(c.leaf_frames, key=lambda frame: c.leaf_frames[frame])
            if c.leaf_frames
            else None,
            children=_build_nodes(c, min_samples),
        )
        for c in kept
    )


def find_hottest_functions(stacks: CountedStacks, limit: int = 5) -> tuple[tuple[Frame, int], ...]:
    """The user's innermost functions with the samples in them or in what libraries do for them,
    each at its most frequent line.

    Where no frame is the user's, the innermost function counts.
    """
    found: dict[tuple[str, str], Counter[Frame]] = {}
    for frames, count in stacks:
        if frames:
            frame = next((f for f in reversed(frames) if not is_library(f.file)), frames[-1])
            found.setdefault((frame.function, frame.file), Counter())[frame] += count
    ranked = sorted(
        ((lines.most_common(1)[0][0], lines.total()) for lines in found.values()),
        key=lambda item: -item[1],
    )
    return tuple(ranked[:limit])


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileBar:
    """One frame of a flame graph; ``x`` and ``width`` as shares of all samples."""

    x: float
    width: float
    depth: int
    frame: Frame
    samples: int
    is_user: bool


def layout_bars(
    stacks: CountedStacks, x: float, depth: int, total: int, min_width: float
) -> list[ProfileBar]:
    """A flame graph's bars from ``x`` on, with nothing folded; those narrower than ``least`` are
    left out.
    """
    found: list[ProfileBar] = []
    waiting = [
        (sorted(stacks, key=lambda item: [(f.function, f.file, f.line) for f in item[0]]), x, 0)
    ]
    while waiting:  # not by recursion: stacks are deeper than Python's own limit allows
        level, at, deep = waiting.pop()
        groups: dict[Frame, list[tuple[tuple[Frame, ...], int]]] = {}
        for frames, count in level:
            if deep < len(frames):
                groups.setdefault(frames[deep], []).append((frames, count))
        for frame, inside in groups.items():
            samples = sum(count for _, count in inside)
            width = samples / total
            if width >= min_width:
                user = not is_library(frame.file)
                found.append(
                    ProfileBar(
                        x=at,
                        width=width,
                        depth=depth + deep,
                        frame=frame,
                        samples=samples,
                        is_user=user,
                    )
                )
                waiting.append((inside, at, deep + 1))
            at += width
    return found
