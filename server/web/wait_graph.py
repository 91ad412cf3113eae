"""The wait-for graph of an incident as a picture: ranks that wait alike are one box, and arrows
lead to the ranks that they wait for. Pure. A point is a complex number, x + y * 1j.
"""

from __future__ import annotations

import cmath
import math
import operator
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
LOOP_WIDTH_PX, LOOP_HEIGHT_PX = 45.0, 83.0  # beyond the corner of the box

# The calls in which the ranks of one box wait for those of another, by the numbers of both boxes.
# A call is the name of its group and its sequence number.
CallsByEdge = dict[tuple[int, int], list[tuple[str, int]]]


@dataclass(slots=True, kw_only=True)
class PictureBox:
    """Ranks that wait for the same others in the same calls."""

    ranks: tuple[int, ...]
    is_culprit: bool
    label: str = ""  # where one of the ranks is, or what it does
    centre: complex = 0j


@dataclass(frozen=True, slots=True, kw_only=True)
class PictureArrow:
    """A curve as an SVG path. Its label is at ``label``."""

    path: str
    label: complex
    anchor: str  # SVG's text-anchor of the label
    waiter: int  # one of the waiting ranks
    calls: Sequence[tuple[str, int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphPicture:
    corner: complex  # at the upper left
    size: complex
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
    margin = complex(BOX_WIDTH_PX, BOX_HEIGHT_PX) / 2
    margin += (PICTURE_MARGIN_PX + ARROW_BEND_PX) * (1 + 1j)
    arrows = []
    has_mutual_arrows = False
    for (start, end), calls in calls_by_edge.items():
        is_mutual = (end, start) in calls_by_edge
        has_mutual_arrows |= is_mutual
        arrows.append(_draw_arrow(boxes[start], boxes[end], calls, is_mutual=is_mutual))
    if has_mutual_arrows:
        margin += LABEL_MARGIN_PX
    xs = [box.centre.real for box in boxes] or [0.0]
    ys = [box.centre.imag for box in boxes] or [0.0]
    corner = complex(min(xs), min(ys)) - margin
    size = complex(max(xs), max(ys)) + margin - corner
    return GraphPicture(corner=corner, size=size, boxes=boxes, arrows=arrows)


def _merge_ranks(incident: Incident) -> tuple[list[PictureBox], CallsByEdge]:
    waits = set(incident.waits)
    culprits = set(incident.culprits)
    # An incident keeps only some of thousands of waits. The first waiting rank without one
    # represents all of them: they wait for the culprits in the incident's own call.
    unlisted = set(incident.waiting) - culprits
    if waits:
        unlisted.difference_update(wait.rank for wait in waits)
        callers: set[int] = set()
        for call_class in incident.calls:
            if call_class.call.seq == incident.seq:
                callers.update(call_class.ranks)
        unlisted &= callers
    if unlisted:
        representative = min(unlisted)
        group = incident.group.name if incident.group else ""
        for culprit in incident.culprits[:MAX_SINGLE_CULPRITS]:
            wait = Wait(rank=representative, on_rank=culprit, group=group, seq=incident.seq or 0)
            waits.add(wait)
    class_of = _classify_ranks(waits, culprits)
    if unlisted and representative in class_of:
        class_of |= dict.fromkeys(unlisted, class_of[representative])

    members: dict[int, list[int]] = {}
    for rank in sorted(class_of):
        members.setdefault(class_of[rank], []).append(rank)
    boxes = [
        PictureBox(ranks=tuple(ranks), is_culprit=culprits.issuperset(ranks))
        for ranks in members.values()
    ]
    boxes.sort(key=lambda box: (not box.is_culprit, -len(box.ranks), box.ranks))
    box_of_rank = {rank: number for number, box in enumerate(boxes) for rank in box.ranks}
    calls_by_edge: CallsByEdge = {}
    for wait in sorted(waits, key=operator.attrgetter("rank", "on_rank", "group", "seq")):
        edge = box_of_rank[wait.rank], box_of_rank[wait.on_rank]
        if max(edge) < MAX_BOXES:
            call = wait.group, wait.seq
            calls = calls_by_edge.setdefault(edge, [])
            if call not in calls:
                calls.append(call)
    return boxes[:MAX_BOXES], calls_by_edge


def _classify_ranks(waits: Collection[Wait], culprits: set[int]) -> dict[int, int]:
    """The number of each rank's class: all ranks of a class wait for the same classes in the same
    calls, and there are as few classes as possible.
    """
    class_of: dict[int, int] = {}
    for wait in waits:
        class_of[wait.rank] = class_of[wait.on_rank] = -2
    for rank in culprits:
        class_of[rank] = rank if len(culprits) <= MAX_SINGLE_CULPRITS else -1
    while True:
        awaited: dict[int, set[object]] = {rank: set() for rank in class_of}
        for wait in waits:
            awaited[wait.rank].add((class_of[wait.on_rank], wait.group, wait.seq))
        numbers: dict[object, int] = {}
        refined = {}
        for rank, number in class_of.items():
            behaviour = number, frozenset(awaited[rank])
            refined[rank] = numbers.setdefault(behaviour, len(numbers))
        if len(numbers) == len(set(class_of.values())):
            return refined
        class_of = refined


def _place_boxes(boxes: Sequence[PictureBox], calls_by_edge: CallsByEdge) -> None:
    """Culprits are on the right, on a ring if they wait for each other, the others to the left."""
    culprits = {number for number, box in enumerate(boxes) if box.is_culprit}
    # The number of waits from each box to a culprit; without culprits, 0 for all boxes.
    depths = dict.fromkeys(sorted(culprits) or range(len(boxes)), 0)
    reached = list(depths)
    for awaited in reached:  # it grows meanwhile
        for start, end in calls_by_edge:
            if end == awaited and start not in depths:
                depths[start] = depths[awaited] + 1
                reached.append(start)
    columns: dict[int, list[PictureBox]] = {}
    for number, box in enumerate(boxes):
        columns.setdefault(depths.get(number, 1), []).append(box)

    left = 0.0
    if any(start != end and culprits.issuperset((start, end)) for start, end in calls_by_edge):
        ring = columns.pop(0)
        circumference = len(ring) * (BOX_WIDTH_PX + RING_BOX_SPACING_PX)
        radius = max(MIN_RING_RADIUS_PX, circumference / math.tau)
        for position, box in enumerate(ring):
            point = cmath.rect(radius, math.tau * (position / len(ring) - 0.25))
            box.centre = complex(RING_ASPECT * point.real, point.imag)
        left = min(box.centre.real for box in ring)
    for depth, column in columns.items():
        x = left - depth * (BOX_WIDTH_PX + COLUMN_GAP_PX)
        for row, box in enumerate(column):
            y = (row - (len(column) - 1) / 2) * (BOX_HEIGHT_PX + ROW_GAP_PX)
            box.centre = complex(x, y)


def _draw_arrow(
    start: PictureBox, end: PictureBox, calls: Sequence[tuple[str, int]], *, is_mutual: bool
) -> PictureArrow:
    """A quadratic Bézier curve between the edges of the boxes."""
    line = end.centre - start.centre
    anchor, label_shift = "middle", 0.0
    if start is end:  # from the top to the right side: the box's ranks wait for each other
        tail = start.centre - BOX_HEIGHT_PX / 2 * 1j
        head = start.centre + BOX_WIDTH_PX / 2
        bend = complex(head.real + LOOP_WIDTH_PX, tail.imag - LOOP_HEIGHT_PX)
    else:
        bend = (start.centre + end.centre) / 2
        if is_mutual:
            bend += line / abs(line) * 2j * ARROW_BEND_PX
            if abs(line.imag) > abs(line.real):
                # The two arrows are side by side: each has its label on its outer side, which is
                # the left one of an arrow that points down.
                anchor, label_shift = "start", LABEL_GAP_PX
                if line.imag > 0:
                    anchor, label_shift = "end", -LABEL_GAP_PX
        tail, head = _find_box_edge(start, bend), _find_box_edge(end, bend)
    points = [f"{point.real:.1f} {point.imag:.1f}" for point in (tail, bend, head)]
    return PictureArrow(
        path=f"M{points[0]}Q{points[1]} {points[2]}",
        label=(tail + 2 * bend + head) / 4 + label_shift,
        anchor=anchor,
        waiter=start.ranks[0],
        calls=calls,
    )


def _find_box_edge(box: PictureBox, point: complex) -> complex:
    """Where the line from a box's centre to a point leaves the box."""
    line = point - box.centre
    length = max(abs(line.real) / BOX_WIDTH_PX, abs(line.imag) / BOX_HEIGHT_PX)
    return box.centre + line / (2 * length)
