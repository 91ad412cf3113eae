"""The wait-for graph of an incident, with ranks that wait alike merged. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from hangwatch.model.incidents import Incident
from hangwatch.model.verdicts import Wait

MAX_SINGLE_CULPRITS = 8  # more culprits than this share boxes
MAX_CLASSES = 24


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
    """The wait-for graph, its ranks merged into the coarsest classes that wait alike."""
    unlisted = _find_unlisted_waiters(incident)
    waits = {*incident.verdict.waits, *_assume_waits(incident, unlisted)}
    culprits = set(incident.culprits)
    ranks = sorted({wait.rank for wait in waits} | {wait.on_rank for wait in waits} | culprits)
    class_of = _partition_ranks(ranks, culprits, waits)
    members: dict[int, list[int]] = {}
    for rank in ranks:
        members.setdefault(class_of[rank], []).append(rank)
    if unlisted and unlisted[0] in class_of:
        number = class_of[unlisted[0]]
        members[number] = sorted({*members[number], *unlisted})
    return _build_class_graph(members, class_of, culprits, waits)


def _find_unlisted_waiters(incident: Incident) -> list[int]:
    """Waiting ranks without a listed wait: of thousands of waits, an incident keeps only some."""
    if incident.verdict.waits:
        in_call = {
            rank
            for call_class in incident.verdict.calls
            if call_class.call.seq == incident.seq
            for rank in call_class.ranks
        }
    else:
        in_call = set(incident.waiting)
    listed = {wait.rank for wait in incident.verdict.waits}
    return sorted((in_call & set(incident.waiting)) - listed)


def _assume_waits(incident: Incident, unlisted: list[int]) -> list[Wait]:
    """The first unlisted waiter stands for all of them: they wait for the culprits in the incident's
    own call.
    """
    group = incident.group.name if incident.group else ""
    return [
        Wait(rank=rank, on_rank=culprit, group=group, seq=incident.seq or 0)
        for rank in unlisted[:1]
        for culprit in incident.culprits[:MAX_SINGLE_CULPRITS]
    ]


def _build_class_graph(
    members: Mapping[int, list[int]],
    class_of: Mapping[int, int],
    culprits: set[int],
    waits: Collection[Wait],
) -> WaitClassGraph:
    """The largest classes and the edges between them; culprits first."""
    ordered = sorted(
        members,
        key=lambda n: (not culprits.issuperset(members[n]), -len(members[n]), members[n]),
    )
    shown = ordered[:MAX_CLASSES]
    index_of = {number: index for index, number in enumerate(shown)}
    labels: dict[tuple[int, int], dict[WaitLabel, None]] = {}
    for wait in sorted(waits, key=lambda w: (w.rank, w.on_rank, w.group, w.seq)):
        start, end = index_of.get(class_of[wait.rank]), index_of.get(class_of[wait.on_rank])
        if start is not None and end is not None:
            labels.setdefault((start, end), {})[WaitLabel(wait.group, wait.seq)] = None
    classes = tuple(
        WaitClass(ranks=tuple(members[n]), is_culprit=culprits.issuperset(members[n]))
        for n in shown
    )
    return WaitClassGraph(
        classes=classes, edges={pair: tuple(pair_labels) for pair, pair_labels in labels.items()}
    )


def _partition_ranks(
    ranks: list[int], culprits: set[int], waits: Collection[Wait]
) -> dict[int, int]:
    """The number of each rank's class. Refines a first partition until all ranks of a class wait for
    the same classes.
    """
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
