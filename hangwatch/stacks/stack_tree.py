"""The stacks of many ranks as one tree: where they stand together, and where they part. Pure.

After STAT, https://doi.org/10.1109/IPDPS.2007.370254: a prefix tree over call paths, each branch
with the ranks that are in it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from hangwatch.model.threads import Frame

from .frames import is_library

RankedStack = tuple[
    Sequence[int], Sequence[Frame]
]  # ranks, and their frames from the innermost outwards


@dataclass(frozen=True, slots=True, kw_only=True)
class Branch:
    """Frames that the same ranks stand in, the outermost first, and where these part from each
    other.
    """

    frames: tuple[Frame, ...]
    ranks: tuple[int, ...]
    branches: tuple[Branch, ...] = ()

    def iter_frame_runs(self) -> Iterator[tuple[bool, tuple[Frame, ...]]]:
        """The frames in runs of the user's (True) and of libraries'."""
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
    """The tree of all stacks; the branches of fewest ranks first, since those are the odd ones."""
    root = _PrefixTreeNode(Frame(function="", file="", line=0))
    for ranks, frames in stacks:
        node = root
        for frame in reversed(frames):
            key = (frame.function, frame.file, frame.line)
            if (child := node.children.get(key)) is None:
                child = node.children[key] = _PrefixTreeNode(frame)
            child.ranks.update(ranks)
            node = child
    return _build_branches(root)


def _build_branches(node: _PrefixTreeNode) -> tuple[Branch, ...]:
    found = []
    for child in node.children.values():
        frames, end = [child.frame], child
        while (
            len(end.children) == 1
            and (only := next(iter(end.children.values()))).ranks == end.ranks
        ):
            frames.append(only.frame)
            end = only
        found.append(
            Branch(
                frames=tuple(frames),
                ranks=tuple(sorted(child.ranks)),
                branches=_build_branches(end),
            )
        )
    return tuple(sorted(found, key=lambda b: (len(b.ranks), b.ranks)))


def format_folded_stacks(stacks: Iterable[RankedStack]) -> Iterator[str]:
    """A line for each stack, the outermost frame first, then how many ranks: what flame graph tools
    read.

    Format: https://github.com/brendangregg/FlameGraph#2-fold-stacks
    """
    for ranks, frames in stacks:
        path = ";".join(
            f"{f.function} ({f.file}:{f.line})".replace(";", ":").replace("\n", " ")
            for f in reversed(frames)
        )
        yield f"{path} {len(ranks)}"


def stacks_to_speedscope(
    name: str, stacks: Iterable[tuple[str, Sequence[Frame]]]
) -> dict[str, object]:
    """One profile for each named stack, so that they can be looked at one by one.

    Format: https://www.speedscope.app/file-format-schema.json
    """
    numbers: dict[tuple[str, str, int], int] = {}
    profiles = [
        {
            "type": "sampled",
            "name": label,
            "unit": "none",
            "startValue": 0,
            "endValue": 1,
            "samples": [
                [
                    numbers.setdefault((f.function, f.file, f.line), len(numbers))
                    for f in reversed(frames)
                ]
            ],
            "weights": [1],
        }
        for label, frames in stacks
    ]
    return {
        "$schema": "https://www.speedscope.app/file-format-schema.json",
        "name": name,
        "exporter": "hangwatch",
        "shared": {
            "frames": [
                {"name": function, "file": file, "line": line} for function, file, line in numbers
            ]
        },
        "profiles": profiles,
    }
