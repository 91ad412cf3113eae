"""A profile as a tree from the outside in: the user's functions and their share of the time, with libraries' frames folded. Pure."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from hangwatch.model.threads import Frame

from .frames import is_library

LEAST = 0.005  # of all samples: what is rarer is left out
_DEEPEST = 60  # nodes below each other: recursion would go on for ever
_LINES = 5
_WRAPPER = re.compile(r"<locals>|^(wrapper|inner|wrapped|decorate_context)$|_call_impl$")

Stacks = Iterable[tuple[tuple[Frame, ...], int]]  # outermost frame first, samples


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A function of the user's; or, with ``library``, what the user's line above calls, down to where it ``ends`` most often."""

    function: str
    file: str
    library: bool
    samples: int  # in it, and in what it calls
    own: int  # of these, in its own lines
    lines: tuple[tuple[int, int], ...] = ()  # where it stood, the most frequent first, and how often
    ends: Frame | None = None
    children: tuple[Node, ...] = ()


@dataclass(slots=True)
class _Growing:
    first: Frame
    library: bool
    samples: int = 0
    own: int = 0
    lines: Counter[int] = field(default_factory=Counter)
    ends: Counter[Frame] = field(default_factory=Counter)
    children: dict[tuple[str, str, bool], _Growing] = field(default_factory=dict)


def fold(stacks: Stacks) -> tuple[Node, ...]:
    """The roots of the tree, the heaviest first, and so at every branch.

    Libraries' frames between two of the user's are left out. Those below the user's innermost frame become one node, by the
    outermost of them that is not merely a decorator's wrapper: what the user called.
    """
    root, total = _Growing(Frame(function="", file="", line=0), False), 0
    for frames, count in stacks:
        total += count
        node = root
        for step in _steps(frames):
            node = node.children.setdefault((step[0].function, step[0].file, step[1]), _Growing(step[0], step[1]))
            node.samples += count
            if step[1]:
                node.ends[frames[-1]] += count
            elif step[0].line:
                node.lines[step[0].line] += count
        node.own += count
    return _grown(root, total * LEAST)


def _steps(frames: tuple[Frame, ...]) -> Iterator[tuple[Frame, bool]]:
    """The frames that become nodes, and whether each is a library's."""
    mine = [n for n, frame in enumerate(frames) if not is_library(frame.file)]
    yield from ((frames[n], False) for n in mine[:_DEEPEST])
    below = frames[mine[-1] + 1 :] if mine else frames
    if below and len(mine) < _DEEPEST:
        yield next((frame for frame in below if not _WRAPPER.search(frame.function)), below[0]), True


def _grown(node: _Growing, least: float) -> tuple[Node, ...]:
    kept = sorted((c for c in node.children.values() if c.samples >= least), key=lambda c: -c.samples)
    return tuple(
        Node(
            function=c.first.function,
            file=c.first.file,
            library=c.library,
            samples=c.samples,
            own=c.own,
            lines=tuple(c.lines.most_common(_LINES)),
            ends=max(c.ends, key=lambda frame: c.ends[frame]) if c.ends else None,
            children=_grown(c, least),
        )
        for c in kept
    )


def hottest(stacks: Stacks, most: int = 5) -> tuple[tuple[Frame, int], ...]:
    """The user's innermost functions with the samples in them or in what libraries do for them, each at its most frequent line.

    Where no frame is the user's, the innermost function counts.
    """
    found: dict[tuple[str, str], Counter[Frame]] = {}
    for frames, count in stacks:
        if frames:
            frame = next((f for f in reversed(frames) if not is_library(f.file)), frames[-1])
            found.setdefault((frame.function, frame.file), Counter())[frame] += count
    ranked = sorted(((lines.most_common(1)[0][0], lines.total()) for lines in found.values()), key=lambda item: -item[1])
    return tuple(ranked[:most])


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """One frame of a flame graph; ``x`` and ``width`` as shares of all samples."""

    x: float
    width: float
    depth: int
    frame: Frame
    samples: int
    user: bool


def bars(stacks: Stacks, x: float, depth: int, total: int, least: float) -> list[Bar]:
    """A flame graph's bars from ``x`` on, with nothing folded; those narrower than ``least`` are left out."""
    found: list[Bar] = []
    waiting = [(sorted(stacks, key=lambda item: [(f.function, f.file, f.line) for f in item[0]]), x, 0)]
    while waiting:  # not by recursion: stacks are deeper than Python's own limit allows
        level, at, deep = waiting.pop()
        groups: dict[Frame, list[tuple[tuple[Frame, ...], int]]] = {}
        for frames, count in level:
            if deep < len(frames):
                groups.setdefault(frames[deep], []).append((frames, count))
        for frame, inside in groups.items():
            samples = sum(count for _, count in inside)
            width = samples / total
            if width >= least:
                user = not is_library(frame.file)
                found.append(Bar(x=at, width=width, depth=depth + deep, frame=frame, samples=samples, user=user))
                waiting.append((inside, at, deep + 1))
            at += width
    return found
