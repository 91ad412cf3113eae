"""Who waits for whom, as a picture: ranks that wait alike are one box, however many they are. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ..core import schema

MAX_SINGLE_CULPRITS = 8  # more culprits than this share boxes
MAX_BOXES = 24
BOX_WIDTH_PX, BOX_HEIGHT_PX, COLUMN_GAP_PX, ROW_GAP_PX = 230.0, 54.0, 190.0, 34.0
ARROW_BEND_PX = 34.0  # how far an arrow swerves from the straight line
LABEL_MARGIN_PX = 90.0  # room for a label beside the boxes

WaitLabel = tuple[str, int]  # group, call


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitClass:
    """Ranks that wait for the same others in the same calls."""

    ranks: tuple[int, ...]
    culprit: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitClassGraph:
    """``edges`` lead from a class, by its index, to one that it waits for."""

    classes: tuple[WaitClass, ...]
    edges: dict[tuple[int, int], tuple[WaitLabel, ...]]


def build_graph(incident: schema.Incident) -> WaitClassGraph:
    """The wait-for graph of an incident, its ranks merged into the coarsest classes that wait
    alike.
    """
    waits = {(w.rank, w.for_, w.group, w.seq) for w in incident.waits}
    # Of thousands of waits only some are kept. One rank stands for the rest of those that are in
    # the incident's own call.
    inside = (
        {r for c in incident.calls if c.seq == incident.seq for r in c.ranks}
        if waits
        else set(incident.waiting)
    )
    rest = sorted(inside & set(incident.waiting) - {w[0] for w in waits})
    where = (incident.group.name if incident.group else "", incident.seq or 0)
    waits |= {
        (rank, on, *where) for rank in rest[:1] for on in incident.culprits[:MAX_SINGLE_CULPRITS]
    }
    culprits = set(incident.culprits)
    ranks = sorted({r for w in waits for r in w[:2]} | culprits)
    of = _partition_ranks(ranks, culprits, waits)
    members: dict[int, list[int]] = {}
    for rank in ranks:
        members.setdefault(of[rank], []).append(rank)
    if rest and rest[0] in of:
        members[of[rest[0]]] = sorted({*members[of[rest[0]]], *rest})
    largest = sorted(
        members, key=lambda n: (not culprits.issuperset(members[n]), -len(members[n]), members[n])
    )[:MAX_BOXES]
    index = {n: i for i, n in enumerate(largest)}
    edges: dict[tuple[int, int], dict[WaitLabel, None]] = {}
    for rank, on, group, seq in sorted(waits):
        if of[rank] in index and of[on] in index:
            edges.setdefault((index[of[rank]], index[of[on]]), {})[(group, seq)] = None
    classes = tuple(
        WaitClass(ranks=tuple(members[n]), culprit=culprits.issuperset(members[n])) for n in largest
    )
    return WaitClassGraph(
        classes=classes, edges={ends: tuple(labels) for ends, labels in edges.items()}
    )


def _partition_ranks(
    ranks: list[int], culprits: set[int], waits: Iterable[tuple[int, int, str, int]]
) -> dict[int, int]:
    """Refines a first division until all ranks of a class wait for the same classes."""
    out: dict[int, list[tuple[int, str, int]]] = {r: [] for r in ranks}
    for rank, on, group, seq in waits:
        out[rank].append((on, group, seq))
    are_separate = len(culprits) <= MAX_SINGLE_CULPRITS
    class_of = {r: (r if are_separate else -1) if r in culprits else -2 for r in ranks}
    while True:
        keys = {
            r: (class_of[r], frozenset((class_of[on], group, seq) for on, group, seq in out[r]))
            for r in ranks
        }
        numbers = {key: n for n, key in enumerate(dict.fromkeys(keys.values()))}
        finer = {r: numbers[keys[r]] for r in ranks}
        if len(numbers) == len(set(class_of.values())):
            return finer
        class_of = finer


@dataclass(frozen=True, slots=True, kw_only=True)
class PictureBox:
    """``x`` and ``y`` are of its centre."""

    x: float
    y: float
    wait_class: WaitClass


@dataclass(frozen=True, slots=True, kw_only=True)
class PictureArrow:
    """A quadratic curve; its label's place is ``x``, ``y``."""

    path: str
    x: float
    y: float
    labels: tuple[WaitLabel, ...]
    waiter: int  # one of those who wait
    anchor: str = "middle"  # which part of the label is at its place


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphPicture:
    width: float
    height: float
    boxes: tuple[PictureBox, ...]
    arrows: tuple[PictureArrow, ...]


def draw_graph(graph: WaitClassGraph) -> GraphPicture:
    """Culprits on the right, in a circle where they wait for each other; who waits for them in
    columns to the left.
    """
    columns: dict[int, list[int]] = {}
    for i, depth in _compute_depths(graph).items():
        columns.setdefault(depth, []).append(i)
    last = columns.get(0, [])
    cycle = any(
        graph.classes[a].culprit and graph.classes[b].culprit and a != b for a, b in graph.edges
    )
    places = _place_ring(last) if cycle and len(last) > 1 else _place_column(last, 0.0)
    left = min((x for x, _ in places.values()), default=0.0)
    for depth, inside in columns.items():
        if depth:
            places |= _place_column(inside, left - depth * (BOX_WIDTH_PX + COLUMN_GAP_PX))
    return _shift_to_origin(graph, places)


def _shift_to_origin(
    graph: WaitClassGraph, centres: Mapping[int, tuple[float, float]]
) -> GraphPicture:
    """Moves everything to where no coordinate is negative."""
    margin = 16.0 + ARROW_BEND_PX
    beside = LABEL_MARGIN_PX if any((b, a) in graph.edges for a, b in graph.edges) else 0.0
    x0 = min((x for x, _ in centres.values()), default=0.0) - BOX_WIDTH_PX / 2 - margin - beside
    y0 = min((y for _, y in centres.values()), default=0.0) - BOX_HEIGHT_PX / 2 - margin
    moved = {i: (round(x - x0, 1), round(y - y0, 1)) for i, (x, y) in centres.items()}
    return GraphPicture(
        width=round(
            max((x for x, _ in moved.values()), default=0.0) + BOX_WIDTH_PX / 2 + margin + beside
        ),
        height=round(max((y for _, y in moved.values()), default=0.0) + BOX_HEIGHT_PX / 2 + margin),
        boxes=tuple(
            PictureBox(x=moved[i][0], y=moved[i][1], wait_class=c)
            for i, c in enumerate(graph.classes)
        ),
        arrows=tuple(
            _draw_arrow(
                moved[a], moved[b], labels, graph.classes[a].ranks[0], (b, a) in graph.edges
            )
            for (a, b), labels in graph.edges.items()
        ),
    )


def _compute_depths(graph: WaitClassGraph) -> dict[int, int]:
    """How many waits lead from each class to a culprit; where there is none, all are in the first
    column.
    """
    depths = {i: 0 for i, c in enumerate(graph.classes) if c.culprit}
    reached = set(depths)
    while reached:
        found = {a: depths[b] + 1 for a, b in graph.edges if b in reached and a not in depths}
        depths |= found
        reached = set(found)
    return {i: depths.get(i, 0 if not depths else 1) for i in range(len(graph.classes))}


def _place_column(indices: list[int], x: float) -> dict[int, tuple[float, float]]:
    return {
        i: (x, (n - (len(indices) - 1) / 2) * (BOX_HEIGHT_PX + ROW_GAP_PX))
        for n, i in enumerate(indices)
    }


def _place_ring(indices: list[int]) -> dict[int, tuple[float, float]]:
    radius = max(95.0, len(indices) * (BOX_WIDTH_PX + 60) / (2 * math.pi))
    turns = [2 * math.pi * n / len(indices) - math.pi / 2 for n in range(len(indices))]
    return {
        i: (1.3 * radius * math.cos(t), radius * math.sin(t))
        for i, t in zip(indices, turns, strict=True)
    }


def _draw_arrow(
    start: tuple[float, float],
    end: tuple[float, float],
    labels: tuple[WaitLabel, ...],
    waiter: int,
    is_mutual: bool,
) -> PictureArrow:
    (ax, ay), (bx, by) = start, end
    if start == end:  # ranks of one class wait for each other
        top, right = ay - BOX_HEIGHT_PX / 2, ax + BOX_WIDTH_PX / 2
        loop = (
            f"M{ax + 30:.1f} {top:.1f}C{ax + 30:.1f} {top - 40:.1f} {right + 44:.1f} {top - 30:.1f}"
            f" {right:.1f} {ay:.1f}"
        )
        return PictureArrow(
            path=loop, x=round(ax + 60, 1), y=round(top - 22, 1), labels=labels, waiter=waiter
        )
    length = math.hypot(bx - ax, by - ay)
    bend = 2 * ARROW_BEND_PX if is_mutual else 0.0
    cx, cy = (ax + bx) / 2 - (by - ay) / length * bend, (ay + by) / 2 + (bx - ax) / length * bend
    sx, sy = _find_box_edge((ax, ay), (cx, cy))
    tx, ty = _find_box_edge((bx, by), (cx, cy))
    x, y = (sx + 2 * cx + tx) / 4, (sy + 2 * cy + ty) / 4
    anchor = "middle"
    if is_mutual and abs(by - ay) > abs(
        bx - ax
    ):  # two arrows side by side: each has its label on its outer side
        anchor = "start" if cx > (ax + bx) / 2 else "end"
        x += 8 if anchor == "start" else -8
    path = f"M{sx:.1f} {sy:.1f}Q{cx:.1f} {cy:.1f} {tx:.1f} {ty:.1f}"
    return PictureArrow(
        path=path, x=round(x, 1), y=round(y, 1), labels=labels, waiter=waiter, anchor=anchor
    )


def _find_box_edge(
    centre: tuple[float, float], towards: tuple[float, float]
) -> tuple[float, float]:
    """Where the line from a box's centre leaves the box."""
    dx, dy = towards[0] - centre[0], towards[1] - centre[1]
    share = min(
        BOX_WIDTH_PX / 2 / abs(dx) if dx else math.inf,
        BOX_HEIGHT_PX / 2 / abs(dy) if dy else math.inf,
    )
    return centre[0] + dx * share, centre[1] + dy * share
