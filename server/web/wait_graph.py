"""The wait-for graph of an incident as a picture: ranks that wait alike are one box, and arrows
lead to the ranks that they wait for. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from hangwatch.model.incidents import Incident
from hangwatch.model.verdicts import Wait

MAX_SINGLE_CULPRITS = 8  # more culprits than this share boxes
MAX_BOXES = 24
BOX_WIDTH_PX, BOX_HEIGHT_PX = 230.0, 54.0
COLUMN_GAP_PX, ROW_GAP_PX = 190.0, 34.0
ARROW_BEND_PX = 34.0  # how far an arrow deviates from the straight line
LABEL_MARGIN_PX = 90.0  # room for a label beside the boxes
LABEL_GAP_PX = 8.0
PICTURE_MARGIN_PX = 16.0
MIN_RING_RADIUS_PX = 95.0
RING_BOX_SPACING_PX = 60.0
RING_ASPECT = 1.3  # boxes are wider than high

# The calls in which the ranks of one box wait for those of another, by the numbers of both boxes.
# A call is the name of its group and its sequence number.
CallsByEdge = dict[tuple[int, int], list[tuple[str, int]]]


@dataclass(slots=True, kw_only=True)
class PictureBox:
    """Ranks that wait for the same others in the same calls. ``x`` and ``y`` are its centre."""

    ranks: tuple[int, ...]
    is_culprit: bool
    label: str = ""  # where one of the ranks is, or what it does
    x: float = 0.0
    y: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PictureArrow:
    """A curve as an SVG path. Its label is at ``x``, ``y``."""

    path: str
    x: float
    y: float
    anchor: str  # SVG's text-anchor of the label
    waiter: int  # one of the waiting ranks
    calls: Sequence[tuple[str, int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphPicture:
    width: float
    height: float
    boxes: Sequence[PictureBox]  # culprits first, then the largest
    arrows: Sequence[PictureArrow]


def draw_graph(incident: Incident, places: Mapping[int, str]) -> GraphPicture:
    """The wait-for graph, with all ranks that wait alike in one box, and the largest boxes only.
    ``places`` is where ranks are, as far as that is known.
    """
    boxes, calls_by_edge = _merge_ranks(incident)
    for box in boxes:
        known_places = (places[rank] for rank in box.ranks if rank in places)
        box.label = next(known_places, "culprit" if box.is_culprit else "waiting")
    _place_boxes(boxes, calls_by_edge)
    has_mutual_waits = any((end, start) in calls_by_edge for start, end in calls_by_edge)
    y_margin = PICTURE_MARGIN_PX + ARROW_BEND_PX + BOX_HEIGHT_PX / 2
    x_margin = PICTURE_MARGIN_PX + ARROW_BEND_PX + BOX_WIDTH_PX / 2
    if has_mutual_waits:
        x_margin += LABEL_MARGIN_PX
    xs = [box.x for box in boxes] or [0.0]
    ys = [box.y for box in boxes] or [0.0]
    left, top = min(xs) - x_margin, min(ys) - y_margin
    for box in boxes:
        box.x = round(box.x - left, 1)
        box.y = round(box.y - top, 1)
    return GraphPicture(
        width=round(round(max(xs) - left, 1) + x_margin),
        height=round(round(max(ys) - top, 1) + y_margin),
        boxes=boxes,
        arrows=[
            _draw_arrow(boxes[start], boxes[end], calls, is_mutual=(end, start) in calls_by_edge)
            for (start, end), calls in calls_by_edge.items()
        ],
    )


def _merge_ranks(incident: Incident) -> tuple[list[PictureBox], CallsByEdge]:
    waits, culprits = set(incident.waits), set(incident.culprits)
    # An incident keeps only some of thousands of waits. The first waiting rank without one
    # represents all of them: they wait for the culprits in the incident's own call.
    in_call = set(incident.waiting)
    if waits:
        in_call.intersection_update(
            rank
            for call_class in incident.calls
            if call_class.call.seq == incident.seq
            for rank in call_class.ranks
        )
    unlisted = sorted(in_call.difference(wait.rank for wait in waits))
    group = incident.group.name if incident.group else ""
    for rank in unlisted[:1]:
        for culprit in incident.culprits[:MAX_SINGLE_CULPRITS]:
            waits.add(Wait(rank=rank, on_rank=culprit, group=group, seq=incident.seq or 0))

    class_of = _classify_ranks(waits, culprits)
    members: dict[int, set[int]] = {}
    for rank, number in class_of.items():
        members.setdefault(number, set()).add(rank)
    if unlisted and unlisted[0] in class_of:
        members[class_of[unlisted[0]]].update(unlisted)
    box_of_class = {
        number: PictureBox(ranks=tuple(sorted(ranks)), is_culprit=ranks <= culprits)
        for number, ranks in members.items()
    }
    boxes = sorted(
        box_of_class.values(), key=lambda box: (not box.is_culprit, -len(box.ranks), box.ranks)
    )
    index_of_class = {number: boxes.index(box) for number, box in box_of_class.items()}

    calls_by_edge: CallsByEdge = {}
    for wait in sorted(waits, key=lambda w: (w.rank, w.on_rank, w.group, w.seq)):
        edge = index_of_class[class_of[wait.rank]], index_of_class[class_of[wait.on_rank]]
        if max(edge) < MAX_BOXES:
            calls = calls_by_edge.setdefault(edge, [])
            if (wait.group, wait.seq) not in calls:
                calls.append((wait.group, wait.seq))
    return boxes[:MAX_BOXES], calls_by_edge


def _classify_ranks(waits: Collection[Wait], culprits: set[int]) -> dict[int, int]:
    """The number of each rank's class: all ranks of a class wait for the same classes in the same
    calls, and there are as few classes as possible.
    """
    waits_of: dict[int, list[Wait]] = {}
    for wait in waits:
        waits_of.setdefault(wait.rank, []).append(wait)
    ranks = culprits.union(waits_of, (wait.on_rank for wait in waits))
    class_of = dict.fromkeys(ranks, -2)
    for rank in culprits:
        class_of[rank] = rank if len(culprits) <= MAX_SINGLE_CULPRITS else -1
    class_count = 0
    while class_count < len(set(class_of.values())):
        class_count = len(set(class_of.values()))
        numbers: dict[object, int] = {}
        refined: dict[int, int] = {}
        for rank in ranks:
            awaited = frozenset(
                (class_of[w.on_rank], w.group, w.seq) for w in waits_of.get(rank, ())
            )
            refined[rank] = numbers.setdefault((class_of[rank], awaited), len(numbers))
        class_of = refined
    return class_of


def _place_boxes(boxes: Sequence[PictureBox], calls_by_edge: CallsByEdge) -> None:
    """Culprits are on the right, on a ring if they wait for each other; the ranks that wait for
    them are in columns to the left.
    """
    culprits = [index for index, box in enumerate(boxes) if box.is_culprit]
    # The number of waits from each box to a culprit; without culprits, 0 for all boxes.
    depths = dict.fromkeys(culprits or range(len(boxes)), 0)
    reached = list(depths)
    for awaited in reached:  # it grows meanwhile
        for start, end in calls_by_edge:
            if end == awaited and start not in depths:
                depths[start] = depths[awaited] + 1
                reached.append(start)
    columns: dict[int, list[PictureBox]] = {}
    for index, box in enumerate(boxes):
        columns.setdefault(depths.get(index, 1), []).append(box)

    left = 0.0
    if any(start != end and {start, end} <= set(culprits) for start, end in calls_by_edge):
        ring = columns.pop(0)
        circumference = len(ring) * (BOX_WIDTH_PX + RING_BOX_SPACING_PX)
        radius = max(MIN_RING_RADIUS_PX, circumference / (2 * math.pi))
        for position, box in enumerate(ring):
            angle = 2 * math.pi * position / len(ring) - math.pi / 2
            box.x = RING_ASPECT * radius * math.cos(angle)
            box.y = radius * math.sin(angle)
        left = min(box.x for box in ring)
    for depth, column in columns.items():
        for row, box in enumerate(column):
            box.x = left - depth * (BOX_WIDTH_PX + COLUMN_GAP_PX)
            box.y = (row - (len(column) - 1) / 2) * (BOX_HEIGHT_PX + ROW_GAP_PX)


def _draw_arrow(
    start: PictureBox, end: PictureBox, calls: Sequence[tuple[str, int]], *, is_mutual: bool
) -> PictureArrow:
    anchor = "middle"
    if start is end:  # from the top to the right side: the box's ranks wait for each other
        top, right = start.y - BOX_HEIGHT_PX / 2, start.x + BOX_WIDTH_PX / 2
        tail_x = start.x + 30
        path = (
            f"M{tail_x:.1f} {top:.1f}"
            f"C{tail_x:.1f} {top - 40:.1f} {right + 44:.1f} {top - 30:.1f} {right:.1f} {start.y:.1f}"
        )
        label_x, label_y = start.x + 60, top - 22
    else:
        width, height = end.x - start.x, end.y - start.y
        bend = 2 * ARROW_BEND_PX if is_mutual else 0.0
        length = math.hypot(width, height)
        middle_x, middle_y = (start.x + end.x) / 2, (start.y + end.y) / 2
        x = middle_x - height / length * bend
        y = middle_y + width / length * bend
        tail_x, tail_y = _find_box_edge(start, x, y)
        head_x, head_y = _find_box_edge(end, x, y)
        path = f"M{tail_x:.1f} {tail_y:.1f}Q{x:.1f} {y:.1f} {head_x:.1f} {head_y:.1f}"
        label_x = (tail_x + 2 * x + head_x) / 4
        label_y = (tail_y + 2 * y + head_y) / 4
        if is_mutual and abs(height) > abs(width):
            # The two arrows are side by side: each has its label on its outer side.
            anchor = "start" if x > middle_x else "end"
            label_x += LABEL_GAP_PX if anchor == "start" else -LABEL_GAP_PX
    return PictureArrow(
        path=path,
        x=round(label_x, 1),
        y=round(label_y, 1),
        anchor=anchor,
        waiter=start.ranks[0],
        calls=calls,
    )


def _find_box_edge(box: PictureBox, x: float, y: float) -> tuple[float, float]:
    """Where the line from a box's centre to a point leaves the box."""
    width, height = x - box.x, y - box.y
    x_share = BOX_WIDTH_PX / 2 / abs(width) if width else math.inf
    y_share = BOX_HEIGHT_PX / 2 / abs(height) if height else math.inf
    share = min(x_share, y_share)
    return box.x + width * share, box.y + height * share
