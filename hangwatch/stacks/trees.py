"""Trees of stacks: the stacks of many ranks with a branch for each difference, and a profile as a call
tree of the user's functions, with the frames of libraries folded.

The first is that of STAT, https://doi.org/10.1109/IPDPS.2007.370254: a prefix tree over call paths,
each branch with the ranks that are in it.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from hangwatch.model.ranks import Frame, Frames, Place, Ranks

from .frames import is_library
from .profile import CountedStack

MIN_SHARE = 0.005  # nodes with a smaller share of all samples are omitted
_MAX_DEPTH = 60  # the most nested nodes, in case of an endless recursion
_MAX_LINES = 5
_MAX_HOTTEST = 5  # functions
_WRAPPER = re.compile(r"<locals>|^(wrapper|inner|wrapped|decorate_context)$|_call_impl$")

# Ranks, and their frames from the innermost outwards.
RankedStack = tuple[Sequence[int], Sequence[Frame]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Branch:
    """Frames that the same ranks are in, outermost first, and where the ranks differ."""

    frames: Frames
    ranks: Ranks
    branches: tuple[Branch, ...] = ()

    def iter_frame_runs(self) -> Iterator[tuple[bool, Frames]]:
        """The frames in runs of the user's code (True) and of libraries."""
        for in_library, run in itertools.groupby(self.frames, lambda f: is_library(f.file)):
            yield not in_library, tuple(run)


@dataclass(slots=True)
class _PrefixTreeNode:
    frame: Frame
    ranks: set[int] = field(default_factory=set)
    children: dict[Place, _PrefixTreeNode] = field(default_factory=dict)


def merge_stacks(stacks: Iterable[RankedStack]) -> tuple[Branch, ...]:
    """The tree of all stacks. Branches with few ranks come first, since these are the outliers."""
    root = _PrefixTreeNode(Frame(function="", file="", line=0))
    for ranks, frames in stacks:
        node = root
        for frame in reversed(frames):
            child = node.children.get(frame.place)
            if child is None:
                child = node.children[frame.place] = _PrefixTreeNode(frame)
            child.ranks.update(ranks)
            node = child
    return _build_branches(root)


def _build_branches(node: _PrefixTreeNode) -> tuple[Branch, ...]:
    branches = []
    for child in node.children.values():
        frames = [child.frame]
        last = child
        while len(last.children) == 1:
            (only_child,) = last.children.values()
            if only_child.ranks != last.ranks:
                break
            frames.append(only_child.frame)
            last = only_child
        branch = Branch(
            frames=tuple(frames),
            ranks=tuple(sorted(child.ranks)),
            branches=_build_branches(last),
        )
        branches.append(branch)
    branches.sort(key=lambda branch: (len(branch.ranks), branch.ranks))
    return tuple(branches)


def format_folded_stacks(stacks: Iterable[RankedStack]) -> Iterator[str]:
    """A line for each stack, the outermost frame first, followed by the number of ranks, as flame
    graph tools read it.

    Format: https://github.com/brendangregg/FlameGraph#2-fold-stacks
    """
    for ranks, frames in stacks:
        # Semicolons separate frames; other characters could separate lines or control a terminal.
        path = ";".join(
            f"{frame.function} ({frame.file}:{frame.line})".replace(";", ":")
            for frame in reversed(frames)
        )
        path = "".join(c if c.isprintable() else " " for c in path)
        yield f"{path} {len(ranks)}"


@dataclass(frozen=True, slots=True)
class LineTime:
    line: int
    samples: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionTime:
    """A function of user code, or a library function that it calls, with what it calls."""

    function: str
    file: str
    library: bool
    samples: int  # the samples in the function and in what it calls
    own: int  # the samples in its own lines
    lines: tuple[LineTime, ...] = ()  # the most frequent ones
    # The most frequent innermost frame, if the function is a library's.
    innermost: Frame | None = None
    children: tuple[FunctionTime, ...] = ()


@dataclass(frozen=True, slots=True)
class _CallPath:
    steps: list[tuple[Frame, bool]]  # the frames that become nodes, and whether each is a library's
    innermost: Frame
    samples: int


def build_call_tree(stacks: Iterable[CountedStack]) -> tuple[FunctionTime, ...]:
    """The roots of the tree. The heaviest branches come first everywhere.

    Library frames between two user frames are omitted. Those below the user's innermost frame
    become one node, with the function that the user called: the outermost of them that is not just
    the wrapper of a decorator.
    """
    paths = []
    sample_count = 0
    for frames, samples in stacks:
        sample_count += samples
        user_indices = [i for i, frame in enumerate(frames) if not is_library(frame.file)]
        steps = [(frames[index], False) for index in user_indices[:_MAX_DEPTH]]
        below = frames[user_indices[-1] + 1 :] if user_indices else frames
        if below and len(user_indices) < _MAX_DEPTH:
            called = (frame for frame in below if not _WRAPPER.search(frame.function))
            steps.append((next(called, below[0]), True))
        if steps:
            paths.append(_CallPath(steps, frames[-1], samples))
    return _build_nodes(paths, 0, sample_count * MIN_SHARE)


def _build_nodes(
    paths: Iterable[_CallPath], depth: int, min_samples: float
) -> tuple[FunctionTime, ...]:
    groups: dict[tuple[str, str, bool], list[_CallPath]] = {}
    for path in paths:
        if depth < len(path.steps):
            frame, is_in_library = path.steps[depth]
            groups.setdefault((frame.function, frame.file, is_in_library), []).append(path)
    nodes = []
    for (function, file, is_in_library), inside in groups.items():
        samples = own_samples = 0
        lines: Counter[int] = Counter()
        innermost: Counter[Frame] = Counter()
        for path in inside:
            samples += path.samples
            if len(path.steps) == depth + 1:
                own_samples += path.samples
            line = path.steps[depth][0].line
            if is_in_library:
                innermost[path.innermost] += path.samples
            elif line:
                lines[line] += path.samples
        if samples < min_samples:
            continue
        node = FunctionTime(
            function=function,
            file=file,
            library=is_in_library,
            samples=samples,
            own=own_samples,
            lines=tuple(LineTime(*counted) for counted in lines.most_common(_MAX_LINES)),
            innermost=max(innermost, key=innermost.__getitem__, default=None),
            children=_build_nodes(inside, depth + 1, min_samples),
        )
        nodes.append(node)
    nodes.sort(key=lambda node: -node.samples)
    return tuple(nodes)


def find_hottest_functions(stacks: Iterable[CountedStack]) -> tuple[tuple[Frame, int], ...]:
    """The user's innermost functions, each at its most frequent line, with the number of samples in
    it or in library functions that it calls.

    If no frame of a stack is the user's, its innermost function counts.
    """
    frames_by_function: dict[tuple[str, str], Counter[Frame]] = {}
    for frames, count in stacks:
        if frames:
            user_frames = (f for f in reversed(frames) if not is_library(f.file))
            frame = next(user_frames, frames[-1])
            key = (frame.function, frame.file)
            frames_by_function.setdefault(key, Counter())[frame] += count
    ranked = [
        (max(counts, key=counts.__getitem__), counts.total())
        for counts in frames_by_function.values()
    ]
    ranked.sort(key=lambda item: -item[1])
    return tuple(ranked[:_MAX_HOTTEST])


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileBar:
    """One frame of a flame graph. ``x`` and ``width`` are shares of all samples."""

    x: float
    width: float
    depth: int
    frame: Frame
    samples: int
    is_user: bool


def layout_bars(
    stacks: Iterable[CountedStack], x: float, total: int, min_width: float
) -> list[ProfileBar]:
    """The bars of a flame graph from ``x`` on, without those narrower than ``min_width``."""
    bars = []
    ordered = sorted(stacks, key=lambda stack: [frame.place for frame in stack[0]])
    to_lay_out = [(ordered, x, 0)]
    while to_lay_out:  # A recursion could be deeper than Python's own limit allows.
        level_stacks, left, depth = to_lay_out.pop()
        groups: dict[Frame, list[CountedStack]] = {}
        for frames, count in level_stacks:
            if depth < len(frames):
                groups.setdefault(frames[depth], []).append((frames, count))
        for frame, inside in groups.items():
            samples = sum(count for _, count in inside)
            width = samples / total
            if width >= min_width:
                bar = ProfileBar(
                    x=left,
                    width=width,
                    depth=depth,
                    frame=frame,
                    samples=samples,
                    is_user=not is_library(frame.file),
                )
                bars.append(bar)
                to_lay_out.append((inside, left, depth + 1))
            left += width
    return bars
