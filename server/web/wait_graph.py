"""Who waits for whom, as a picture: ranks that wait alike are one box, however many they are. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ..core import schema

OWN_BOX = 8  # more culprits than this share boxes
MOST_BOXES = 24
WIDTH, HEIGHT, GAP_X, GAP_Y = 230.0, 54.0, 190.0, 34.0
BEND = 34.0  # how far an arrow swerves from the straight line
LABEL = 90.0  # room for a label beside the boxes

Label = tuple[str, int]  # group, call


@dataclass(frozen=True, slots=True, kw_only=True)
class Class:
    """Ranks that wait for the same others in the same calls."""

    ranks: tuple[int, ...]
    culprit: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Graph:
    """``edges`` lead from a class, by its index, to one that it waits for."""

    classes: tuple[Class, ...]
    edges: dict[tuple[int, int], tuple[Label, ...]]


def graph(incident: schema.Incident) -> Graph:
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
    waits |= {(rank, on, *where) for rank in rest[:1] for on in incident.culprits[:OWN_BOX]}
    culprits = set(incident.culprits)
    ranks = sorted({r for w in waits for r in w[:2]} | culprits)
    of = _classes(ranks, culprits, waits)
    members: dict[int, list[int]] = {}
    for rank in ranks:
        members.setdefault(of[rank], []).append(rank)
    if rest and rest[0] in of:
        members[of[rest[0]]] = sorted({*members[of[rest[0]]], *rest})
    largest = sorted(
        members, key=lambda n: (not culprits.issuperset(members[n]), -len(members[n]), members[n])
    )[:MOST_BOXES]
    index = {n: i for i, n in enumerate(largest)}
    edges: dict[tuple[int, int], dict[Label, None]] = {}
    for rank, on, group, seq in sorted(waits):
        if of[rank] in index and of[on] in index:
            edges.setdefault((index[of[rank]], index[of[on]]), {})[(group, seq)] = None
    classes = tuple(
        Class(ranks=tuple(members[n]), culprit=culprits.issuperset(members[n])) for n in largest
    )
    return Graph(classes=classes, edges={ends: tuple(labels) for ends, labels in edges.items()})


def _classes(
    ranks: list[int], culprits: set[int], waits: Iterable[tuple[int, int, str, int]]
) -> dict[int, int]:
    """Refines a first division until all ranks of a class wait for the same classes."""
    out: dict[int, list[tuple[int, str, int]]] = {r: [] for r in ranks}
    for rank, on, group, seq in waits:
        out[rank].append((on, group, seq))
    apart = len(culprits) <= OWN_BOX
    of = {r: (r if apart else -1) if r in culprits else -2 for r in ranks}
    while True:
        keys = {
            r: (of[r], frozenset((of[on], group, seq) for on, group, seq in out[r])) for r in ranks
        }
        numbers = {key: n for n, key in enumerate(dict.fromkeys(keys.values()))}
        finer = {r: numbers[keys[r]] for r in ranks}
        if len(numbers) == len(set(of.values())):
            return finer
        of = finer


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """``x`` and ``y`` are of its centre."""

    x: float
    y: float
    of: Class


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrow:
    """A quadratic curve; its label's place is ``x``, ``y``."""

    path: str
    x: float
    y: float
    labels: tuple[Label, ...]
    waiter: int  # one of those who wait
    anchor: str = "middle"  # which part of the label is at its place


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    width: float
    height: float
    boxes: tuple[Box, ...]
    arrows: tuple[Arrow, ...]


def picture(of: Graph) -> Picture:
    """Culprits on the right, in a circle where they wait for each other; who waits for them in
    columns to the left.
    """
    columns: dict[int, list[int]] = {}
    for i, depth in _depths(of).items():
        columns.setdefault(depth, []).append(i)
    last = columns.get(0, [])
    cycle = any(of.classes[a].culprit and of.classes[b].culprit and a != b for a, b in of.edges)
    places = _ring(last) if cycle and len(last) > 1 else _column(last, 0.0)
    left = min((x for x, _ in places.values()), default=0.0)
    for depth, inside in columns.items():
        if depth:
            places |= _column(inside, left - depth * (WIDTH + GAP_X))
    return _framed(of, places)


def _framed(of: Graph, places: Mapping[int, tuple[float, float]]) -> Picture:
    """Moves everything to where no coordinate is negative."""
    margin = 16.0 + BEND
    beside = LABEL if any((b, a) in of.edges for a, b in of.edges) else 0.0
    x0 = min((x for x, _ in places.values()), default=0.0) - WIDTH / 2 - margin - beside
    y0 = min((y for _, y in places.values()), default=0.0) - HEIGHT / 2 - margin
    moved = {i: (round(x - x0, 1), round(y - y0, 1)) for i, (x, y) in places.items()}
    return Picture(
        width=round(max((x for x, _ in moved.values()), default=0.0) + WIDTH / 2 + margin + beside),
        height=round(max((y for _, y in moved.values()), default=0.0) + HEIGHT / 2 + margin),
        boxes=tuple(Box(x=moved[i][0], y=moved[i][1], of=c) for i, c in enumerate(of.classes)),
        arrows=tuple(
            _arrow(moved[a], moved[b], labels, of.classes[a].ranks[0], (b, a) in of.edges)
            for (a, b), labels in of.edges.items()
        ),
    )


def _depths(of: Graph) -> dict[int, int]:
    """How many waits lead from each class to a culprit; where there is none, all are in the first
    column.
    """
    depths = {i: 0 for i, c in enumerate(of.classes) if c.culprit}
    reached = set(depths)
    while reached:
        found = {a: depths[b] + 1 for a, b in of.edges if b in reached and a not in depths}
        depths |= found
        reached = set(found)
    return {i: depths.get(i, 0 if not depths else 1) for i in range(len(of.classes))}


def _column(inside: list[int], x: float) -> dict[int, tuple[float, float]]:
    return {i: (x, (n - (len(inside) - 1) / 2) * (HEIGHT + GAP_Y)) for n, i in enumerate(inside)}


def _ring(inside: list[int]) -> dict[int, tuple[float, float]]:
    radius = max(95.0, len(inside) * (WIDTH + 60) / (2 * math.pi))
    turns = [2 * math.pi * n / len(inside) - math.pi / 2 for n in range(len(inside))]
    return {
        i: (1.3 * radius * math.cos(t), radius * math.sin(t))
        for i, t in zip(inside, turns, strict=True)
    }


def _arrow(
    start: tuple[float, float],
    end: tuple[float, float],
    labels: tuple[Label, ...],
    waiter: int,
    both: bool,
) -> Arrow:
    (ax, ay), (bx, by) = start, end
    if start == end:  # ranks of one class wait for each other
        top, right = ay - HEIGHT / 2, ax + WIDTH / 2
        loop = (
            f"M{ax + 30:.1f} {top:.1f}C{ax + 30:.1f} {top - 40:.1f} {right + 44:.1f} {top - 30:.1f}"
            f" {right:.1f} {ay:.1f}"
        )
        return Arrow(
            path=loop, x=round(ax + 60, 1), y=round(top - 22, 1), labels=labels, waiter=waiter
        )
    length = math.hypot(bx - ax, by - ay)
    bend = 2 * BEND if both else 0.0
    cx, cy = (ax + bx) / 2 - (by - ay) / length * bend, (ay + by) / 2 + (bx - ax) / length * bend
    sx, sy = _edge((ax, ay), (cx, cy))
    tx, ty = _edge((bx, by), (cx, cy))
    x, y = (sx + 2 * cx + tx) / 4, (sy + 2 * cy + ty) / 4
    anchor = "middle"
    if both and abs(by - ay) > abs(
        bx - ax
    ):  # two arrows side by side: each has its label on its outer side
        anchor = "start" if cx > (ax + bx) / 2 else "end"
        x += 8 if anchor == "start" else -8
    path = f"M{sx:.1f} {sy:.1f}Q{cx:.1f} {cy:.1f} {tx:.1f} {ty:.1f}"
    return Arrow(
        path=path, x=round(x, 1), y=round(y, 1), labels=labels, waiter=waiter, anchor=anchor
    )


def _edge(centre: tuple[float, float], towards: tuple[float, float]) -> tuple[float, float]:
    """Where the line from a box's centre leaves the box."""
    dx, dy = towards[0] - centre[0], towards[1] - centre[1]
    share = min(WIDTH / 2 / abs(dx) if dx else math.inf, HEIGHT / 2 / abs(dy) if dy else math.inf)
    return centre[0] + dx * share, centre[1] + dy * share
