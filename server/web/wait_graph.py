"""The wait-for graph of an incident as a picture: ranks that wait alike are one box, and arrows
lead to the ranks that they wait for. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from hangwatch.model.incidents import Incident
from hangwatch.model.verdicts import Wait

MAX_SINGLE_CULPRITS = 8  # more culprits than this share boxes
MAX_CLASSES = 24
BOX_WIDTH_PX, BOX_HEIGHT_PX = 230.0, 54.0
COLUMN_GAP_PX, ROW_GAP_PX = 190.0, 34.0
ARROW_BEND_PX = 34.0  # how far an arrow deviates from the straight line
LABEL_MARGIN_PX = 90.0  # room for a label beside the boxes
LABEL_GAP_PX = 8.0
PICTURE_MARGIN_PX = 16.0
MIN_RING_RADIUS_PX = 95.0
RING_BOX_SPACING_PX = 60.0
RING_ASPECT = 1.3  # boxes are wider than high


class WaitLabel(NamedTuple):
    """The call that a wait is about."""

    group: str
    seq: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitClass:
    """Ranks that wait for the same others in the same calls."""

    ranks: tuple[int, ...]
    is_culprit: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitClassGraph:
    """``edges`` lead from the index of a class to the index of one that it waits for."""

    classes: tuple[WaitClass, ...]
    edges: dict[tuple[int, int], tuple[WaitLabel, ...]]


def build_graph(incident: Incident) -> WaitClassGraph:
    """The wait-for graph, its ranks merged into the coarsest classes that wait alike: the largest
    ones, and the edges between them. Culprits come first.
    """
    waits, culprits = set(incident.waits), set(incident.culprits)
    # The first unlisted waiter stands for all of them: they wait for the culprits in the incident's
    # own call.
    unlisted = _find_unlisted_waiters(incident)
    group = incident.group.name if incident.group else ""
    for rank in unlisted[:1]:
        for culprit in incident.culprits[:MAX_SINGLE_CULPRITS]:
            waits.add(Wait(rank=rank, on_rank=culprit, group=group, seq=incident.seq or 0))
    ranks = sorted({wait.rank for wait in waits} | {wait.on_rank for wait in waits} | culprits)
    class_of = _partition_ranks(ranks, culprits, waits)
    members: dict[int, list[int]] = {}
    for rank in ranks:
        members.setdefault(class_of[rank], []).append(rank)
    if unlisted and unlisted[0] in class_of:
        number = class_of[unlisted[0]]
        members[number] = sorted({*members[number], *unlisted})
    classes = [
        WaitClass(ranks=tuple(listed), is_culprit=culprits.issuperset(listed))
        for listed in members.values()
    ]
    numbered = sorted(
        zip(members, classes, strict=True),
        key=lambda item: (not item[1].is_culprit, -len(item[1].ranks), item[1].ranks),
    )
    index_of = {number: index for index, (number, _) in enumerate(numbered[:MAX_CLASSES])}
    labels: dict[tuple[int, int], dict[WaitLabel, None]] = {}
    for wait in sorted(waits, key=lambda w: (w.rank, w.on_rank, w.group, w.seq)):
        start, end = index_of.get(class_of[wait.rank]), index_of.get(class_of[wait.on_rank])
        if start is not None and end is not None:
            labels.setdefault((start, end), {})[WaitLabel(wait.group, wait.seq)] = None
    return WaitClassGraph(
        classes=tuple(wait_class for _, wait_class in numbered[:MAX_CLASSES]),
        edges={pair: tuple(pair_labels) for pair, pair_labels in labels.items()},
    )


def _find_unlisted_waiters(incident: Incident) -> list[int]:
    """Waiting ranks without a listed wait: an incident keeps only some of thousands of waits."""
    in_call = set(incident.waiting)
    if incident.waits:
        in_call = {
            rank
            for call_class in incident.calls
            if call_class.call.seq == incident.seq
            for rank in call_class.ranks
        }
    listed = {wait.rank for wait in incident.waits}
    return sorted((in_call & set(incident.waiting)) - listed)


def _partition_ranks(
    ranks: list[int], culprits: set[int], waits: Collection[Wait]
) -> dict[int, int]:
    """The number of each rank's class: all ranks of a class wait for the same classes."""
    waits_of: dict[int, list[Wait]] = {rank: [] for rank in ranks}
    for wait in waits:
        waits_of[wait.rank].append(wait)
    are_separate = len(culprits) <= MAX_SINGLE_CULPRITS
    class_of = dict.fromkeys(ranks, -2)
    for rank in culprits:
        class_of[rank] = rank if are_separate else -1
    while True:
        keys = {
            rank: (
                class_of[rank],
                frozenset((class_of[w.on_rank], w.group, w.seq) for w in waits_of[rank]),
            )
            for rank in ranks
        }
        numbers = {key: number for number, key in enumerate(dict.fromkeys(keys.values()))}
        refined = {rank: numbers[keys[rank]] for rank in ranks}
        if len(numbers) == len(set(class_of.values())):
            return refined
        class_of = refined


class Point(NamedTuple):
    x: float
    y: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PictureBox:
    """A class of ranks. ``x`` and ``y`` are its centre."""

    x: float
    y: float
    wait_class: WaitClass


@dataclass(frozen=True, slots=True, kw_only=True)
class PictureArrow:
    """A curve as an SVG path. Its label is at ``x``, ``y``."""

    path: str
    x: float
    y: float
    labels: tuple[WaitLabel, ...]
    waiter: int  # one of the waiting ranks
    anchor: str  # SVG's text-anchor of the label


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphPicture:
    width: float
    height: float
    boxes: tuple[PictureBox, ...]
    arrows: tuple[PictureArrow, ...]


def draw_graph(graph: WaitClassGraph) -> GraphPicture:
    """Culprits are on the right, on a ring if they wait for each other; the ranks that wait for
    them are in columns to the left.
    """
    columns: dict[int, list[int]] = {}
    for index, depth in _compute_depths(graph).items():
        columns.setdefault(depth, []).append(index)
    rightmost = columns.pop(0, [])
    culprits = {index for index, c in enumerate(graph.classes) if c.is_culprit}
    has_culprit_cycle = any(a != b and {a, b} <= culprits for a, b in graph.edges)
    if has_culprit_cycle and len(rightmost) > 1:
        circumference = len(rightmost) * (BOX_WIDTH_PX + RING_BOX_SPACING_PX)
        radius = max(MIN_RING_RADIUS_PX, circumference / (2 * math.pi))
        centres: dict[int, Point] = {}
        for position, index in enumerate(rightmost):
            angle = 2 * math.pi * position / len(rightmost) - math.pi / 2
            x, y = RING_ASPECT * radius * math.cos(angle), radius * math.sin(angle)
            centres[index] = Point(x, y)
    else:
        centres = _place_column(rightmost, 0.0)
    left = min((point.x for point in centres.values()), default=0.0)
    for depth, indices in columns.items():
        centres |= _place_column(indices, left - depth * (BOX_WIDTH_PX + COLUMN_GAP_PX))
    return _build_picture(graph, centres)


def _compute_depths(graph: WaitClassGraph) -> dict[int, int]:
    """The number of waits from each class to a culprit; without culprits, 0 for all classes."""
    depths = {index: 0 for index, c in enumerate(graph.classes) if c.is_culprit}
    default_depth = 1 if depths else 0
    reached = set(depths)
    while reached:
        next_reached: dict[int, int] = {}
        for waiter, awaited in graph.edges:
            if awaited in reached and waiter not in depths:
                next_reached[waiter] = depths[awaited] + 1
        depths |= next_reached
        reached = set(next_reached)
    return {index: depths.get(index, default_depth) for index in range(len(graph.classes))}


def _place_column(indices: Sequence[int], x: float) -> dict[int, Point]:
    middle = (len(indices) - 1) / 2
    pitch = BOX_HEIGHT_PX + ROW_GAP_PX
    return {index: Point(x, (row - middle) * pitch) for row, index in enumerate(indices)}


def _build_picture(graph: WaitClassGraph, centres: Mapping[int, Point]) -> GraphPicture:
    """Moves everything to where no coordinate is negative, and draws the arrows."""
    has_mutual_waits = any((b, a) in graph.edges for a, b in graph.edges)
    y_margin = PICTURE_MARGIN_PX + ARROW_BEND_PX + BOX_HEIGHT_PX / 2
    x_margin = PICTURE_MARGIN_PX + ARROW_BEND_PX + BOX_WIDTH_PX / 2
    if has_mutual_waits:
        x_margin += LABEL_MARGIN_PX
    left = min((point.x for point in centres.values()), default=0.0) - x_margin
    top = min((point.y for point in centres.values()), default=0.0) - y_margin
    moved = {
        index: Point(round(x - left, 1), round(y - top, 1)) for index, (x, y) in centres.items()
    }
    arrows: list[PictureArrow] = []
    for (start, end), labels in graph.edges.items():
        if start == end:
            path, label_place, anchor = _draw_loop(moved[start])
        else:
            is_mutual = (end, start) in graph.edges
            path, label_place, anchor = _draw_curve(moved[start], moved[end], is_mutual)
        arrow = PictureArrow(
            path=path,
            x=round(label_place.x, 1),
            y=round(label_place.y, 1),
            labels=labels,
            waiter=graph.classes[start].ranks[0],
            anchor=anchor,
        )
        arrows.append(arrow)
    return GraphPicture(
        width=round(max((point.x for point in moved.values()), default=0.0) + x_margin),
        height=round(max((point.y for point in moved.values()), default=0.0) + y_margin),
        boxes=tuple(
            PictureBox(x=moved[index].x, y=moved[index].y, wait_class=wait_class)
            for index, wait_class in enumerate(graph.classes)
        ),
        arrows=tuple(arrows),
    )


def _draw_curve(start: Point, end: Point, is_mutual: bool) -> tuple[str, Point, str]:
    """The arrow's path, and the place and the anchor of its label."""
    width, height = end.x - start.x, end.y - start.y
    length = math.hypot(width, height)
    bend = 2 * ARROW_BEND_PX if is_mutual else 0.0
    middle_x = (start.x + end.x) / 2
    control = Point(
        middle_x - height / length * bend, (start.y + end.y) / 2 + width / length * bend
    )
    tail = _find_box_edge(start, control)
    head = _find_box_edge(end, control)
    label_x = (tail.x + 2 * control.x + head.x) / 4
    label_y = (tail.y + 2 * control.y + head.y) / 4
    anchor = "middle"
    if is_mutual and abs(height) > abs(width):
        # The two arrows are side by side: each has its label on its outer side.
        anchor = "start" if control.x > middle_x else "end"
        label_x += LABEL_GAP_PX if anchor == "start" else -LABEL_GAP_PX
    path = f"M{tail.x:.1f} {tail.y:.1f}Q{control.x:.1f} {control.y:.1f} {head.x:.1f} {head.y:.1f}"
    return path, Point(label_x, label_y), anchor


def _draw_loop(centre: Point) -> tuple[str, Point, str]:
    """An arrow from the top of a box to its right side: the box's ranks wait for each other."""
    top, right = centre.y - BOX_HEIGHT_PX / 2, centre.x + BOX_WIDTH_PX / 2
    start_x = centre.x + 30
    path = (
        f"M{start_x:.1f} {top:.1f}"
        f"C{start_x:.1f} {top - 40:.1f} {right + 44:.1f} {top - 30:.1f} {right:.1f} {centre.y:.1f}"
    )
    return path, Point(centre.x + 60, top - 22), "middle"


def _find_box_edge(centre: Point, towards: Point) -> Point:
    """Where the line from a box's centre leaves the box."""
    width, height = towards.x - centre.x, towards.y - centre.y
    x_share = BOX_WIDTH_PX / 2 / abs(width) if width else math.inf
    y_share = BOX_HEIGHT_PX / 2 / abs(height) if height else math.inf
    share = min(x_share, y_share)
    return Point(centre.x + width * share, centre.y + height * share)
