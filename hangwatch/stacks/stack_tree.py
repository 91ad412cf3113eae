"""The stacks of many ranks as one tree: common frames first, then a branch for each difference.
Pure.

After STAT, https://doi.org/10.1109/IPDPS.2007.370254: a prefix tree over call paths, each branch
with the ranks that are in it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from hangwatch.model.threads import Frame

from .frames import is_library

# Ranks, and their frames from the innermost outwards.
RankedStack = tuple[Sequence[int], Sequence[Frame]]


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
        run: list[Frame] = []
        for frame in self.frames:
            if run and is_library(run[0].file) != is_library(frame.file):
                yield not is_library(run[0].file), tuple(run)
                run = []
            run.append(frame)
        if run:
            yield not is_library(run[0].file), tuple(run)


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
        path = ";".join(map(_format_folded_frame, reversed(frames)))
        yield f"{path} {len(ranks)}"


def _format_folded_frame(frame: Frame) -> str:
    """Without the characters that separate frames and lines, or control a terminal."""
    text = f"{frame.function} ({frame.file}:{frame.line})".replace(";", ":")
    return "".join(c if c.isprintable() else " " for c in text)


def stacks_to_speedscope(
    name: str, stacks: Iterable[tuple[str, Sequence[Frame]]]
) -> dict[str, object]:
    """One profile for each named stack, so that they can be viewed one by one.

    Format: https://www.speedscope.app/file-format-schema.json
    """
    indices: dict[tuple[str, str, int], int] = {}
    profiles: list[dict[str, object]] = []
    for label, frames in stacks:
        sample: list[int] = []
        for frame in reversed(frames):
            key = (frame.function, frame.file, frame.line)
            sample.append(indices.setdefault(key, len(indices)))
        profiles.append(
            {
                "type": "sampled",
                "name": label,
                "unit": "none",
                "startValue": 0,
                "endValue": 1,
                "samples": [sample],
                "weights": [1],
            }
        )
    shared_frames = [
        {"name": function, "file": file, "line": line} for function, file, line in indices
    ]
    return {
        "$schema": "https://www.speedscope.app/file-format-schema.json",
        "name": name,
        "exporter": "hangwatch",
        "shared": {"frames": shared_frames},
        "profiles": profiles,
    }
