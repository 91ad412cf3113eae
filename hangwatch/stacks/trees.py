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

from hangwatch.model.ranks import Frame

from .frames import is_library
from .profile import index_items, make_speedscope_document

MIN_SHARE = 0.005  # nodes with a smaller share of all samples are omitted
_MAX_DEPTH = 60  # the most nested nodes, in case of an endless recursion
_MAX_LINES = 5
_WRAPPER = re.compile(r"<locals>|^(wrapper|inner|wrapped|decorate_context)$|_call_impl$")

# Ranks, and their frames from the innermost outwards.
RankedStack = tuple[Sequence[int], Sequence[Frame]]
# Frames from the outermost inwards, and the number of samples.
CountedStacks = Iterable[tuple[tuple[Frame, ...], int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Branch:
    """Frames that the same ranks are in, the outermost first, and the branches in which the ranks
    differ.
    """

    frames: tuple[Frame, ...]
    ranks: tuple[int, ...]
    branches: tuple[Branch, ...] = ()

    def iter_frame_runs(self) -> Iterator[tuple[bool, tuple[Frame, ...]]]:
        """The frames in runs of the user's code (True) and of libraries."""
        for in_library, run in itertools.groupby(self.frames, lambda f: is_library(f.file)):
            yield not in_library, tuple(run)


@dataclass(slots=True)
class _PrefixTreeNode:
    frame: Frame
    ranks: set[int] = field(default_factory=set)
    children: dict[tuple[str, str, int], _PrefixTreeNode] = field(default_factory=dict)


def merge_stacks(stacks: Iterable[RankedStack]) -> tuple[Branch, ...]:
    """The tree of all stacks. Branches with few ranks come first, since these are the outliers."""
    root = _PrefixTreeNode(Frame(function="", file="", line=0))
    for ranks, frames in stacks:
        node = root
        for frame in reversed(frames):
            key = (frame.function, frame.file, frame.line)
            child = node.children.get(key)
            if child is None:
                child = node.children[key] = _PrefixTreeNode(frame)
            child.ranks.update(ranks)
            node = child
    return _build_branches(root)


def _build_branches(node: _PrefixTreeNode) -> tuple[Branch, ...]:
    branches: list[Branch] = []
    for child in node.children.values():
        frames, last = [child.frame], child
        while len(last.children) == 1:
            (only_child,) = last.children.values()
            if only_child.ranks != last.ranks:
                break
            frames.append(only_child.frame)
            last = only_child
        branches.append(
            Branch(
                frames=tuple(frames),
                ranks=tuple(sorted(child.ranks)),
                branches=_build_branches(last),
            )
        )
    return tuple(sorted(branches, key=lambda branch: (len(branch.ranks), branch.ranks)))


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


def stacks_to_speedscope(
    name: str, stacks: Iterable[tuple[str, Sequence[Frame]]]
) -> dict[str, object]:
    """One speedscope profile for each named stack, so that they can be viewed one by one."""
    indices: dict[tuple[str, str, int], int] = {}
    profiles: list[dict[str, object]] = []
    for label, frames in stacks:
        keys = ((frame.function, frame.file, frame.line) for frame in reversed(frames))
        profiles.append(
            {
                "type": "sampled",
                "name": label,
                "unit": "none",
                "startValue": 0,
                "endValue": 1,
                "samples": [index_items(indices, keys)],
                "weights": [1],
            }
        )
    shared_frames: list[dict[str, object]] = [
        {"name": function, "file": file, "line": line} for function, file, line in indices
    ]
    return make_speedscope_document(name, shared_frames, profiles)


@dataclass(frozen=True, slots=True)
class LineTime:
    line: int
    samples: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionTime:
    """A function of user code, or of a library that user code calls, with the functions that it
    calls.
    """

    function: str
    file: str
    library: bool
    samples: int  # the samples in the function and in what it calls
    own: int  # the samples in its own lines
    lines: tuple[LineTime, ...] = field(default_factory=tuple)  # the most frequent ones
    innermost: Frame | None = (
        None  # the most frequent innermost frame, if the function is a library's
    )
    children: tuple[FunctionTime, ...] = field(default_factory=tuple)


@dataclass(slots=True)
class _NodeBuilder:
    first_frame: Frame
    library: bool
    samples: int = 0
    own_samples: int = 0
    lines: Counter[int] = field(default_factory=Counter)
    leaf_frames: Counter[Frame] = field(default_factory=Counter)
    children: dict[tuple[str, str, bool], _NodeBuilder] = field(default_factory=dict)


def build_call_tree(stacks: CountedStacks) -> tuple[FunctionTime, ...]:
    """The roots of the tree. The heaviest branches come first everywhere.

    Library frames between two user frames are omitted. Those below the user's innermost frame
    become one node, with the function that the user called: the outermost of them that is not just
    the wrapper of a decorator.
    """
    root = _NodeBuilder(Frame(function="", file="", line=0), False)
    total = 0
    for frames, count in stacks:
        total += count
        node = root
        for frame, is_in_library in _iter_steps(frames):
            key = (frame.function, frame.file, is_in_library)
            node = node.children.setdefault(key, _NodeBuilder(frame, is_in_library))
            node.samples += count
            if is_in_library:
                node.leaf_frames[frames[-1]] += count
            elif frame.line:
                node.lines[frame.line] += count
        node.own_samples += count
    return _build_nodes(root, total * MIN_SHARE)


def _iter_steps(frames: tuple[Frame, ...]) -> Iterator[tuple[Frame, bool]]:
    """The frames that become nodes, and whether each is in a library."""
    user_indices = [i for i, frame in enumerate(frames) if not is_library(frame.file)]
    for index in user_indices[:_MAX_DEPTH]:
        yield frames[index], False
    below = frames[user_indices[-1] + 1 :] if user_indices else frames
    if below and len(user_indices) < _MAX_DEPTH:
        called = (frame for frame in below if not _WRAPPER.search(frame.function))
        yield next(called, below[0]), True


def _build_nodes(parent: _NodeBuilder, min_samples: float) -> tuple[FunctionTime, ...]:
    children = [child for child in parent.children.values() if child.samples >= min_samples]
    children.sort(key=lambda child: -child.samples)
    return tuple(
        FunctionTime(
            function=child.first_frame.function,
            file=child.first_frame.file,
            library=child.library,
            samples=child.samples,
            own=child.own_samples,
            lines=tuple(LineTime(*counted) for counted in child.lines.most_common(_MAX_LINES)),
            innermost=max(child.leaf_frames, key=child.leaf_frames.__getitem__, default=None),
            children=_build_nodes(child, min_samples),
        )
        for child in children
    )


def find_hottest_functions(stacks: CountedStacks, limit: int = 5) -> tuple[tuple[Frame, int], ...]:
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
    ranked: list[tuple[Frame, int]] = []
    for counts in frames_by_function.values():
        ((most_frequent, _),) = counts.most_common(1)
        ranked.append((most_frequent, counts.total()))
    ranked.sort(key=lambda item: -item[1])
    return tuple(ranked[:limit])


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
    stacks: CountedStacks, x: float, depth: int, total: int, min_width: float
) -> list[ProfileBar]:
    """The bars of a flame graph from ``x`` on, without folding. Bars narrower than ``min_width``
    are omitted.
    """
    bars: list[ProfileBar] = []
    ordered = sorted(stacks, key=lambda stack: [(f.function, f.file, f.line) for f in stack[0]])
    to_lay_out = [(ordered, x, 0)]
    while to_lay_out:  # A recursion could be deeper than Python's own limit allows.
        level_stacks, left, level = to_lay_out.pop()
        groups: dict[Frame, list[tuple[tuple[Frame, ...], int]]] = {}
        for frames, count in level_stacks:
            if level < len(frames):
                groups.setdefault(frames[level], []).append((frames, count))
        for frame, inside in groups.items():
            samples = sum(count for _, count in inside)
            width = samples / total
            if width >= min_width:
                bars.append(
                    ProfileBar(
                        x=left,
                        width=width,
                        depth=depth + level,
                        frame=frame,
                        samples=samples,
                        is_user=not is_library(frame.file),
                    )
                )
                to_lay_out.append((inside, left, level + 1))
            left += width
    return bars
