"""Who waits for whom: the wait-for graph of a job, through its first unfinished calls.

The ends of its chains are causes, a cycle is a deadlock, and everybody else is a victim.
Prior art: T. Hilbrich et al., "MPI runtime error detection with MUST" (2012), on wait-for graphs for MPI.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from hangwatch.frames import waits_for_communication, waits_for_work
from hangwatch.state import STANDING, Attempt, Process, Sequence
from hangwatch.types import GroupKey, Lifecycle, SequenceKind, Wait, unpack_ranks

from .silence import Silence, silences

IDLE = 1.0  # seconds without CPU: a thread that waits

Shared = dict[tuple[int, tuple[int, ...], int, bool], Mapping[int, int]]  # by members, call, and whether that is certain


@dataclass(frozen=True, slots=True, kw_only=True)
class Edge:
    """A wait, and the sequence of the rank that waits."""

    wait: Wait
    sequence: Sequence


@dataclass(frozen=True, slots=True)
class Stop:
    """A rank waits in a call. Those whom it waits for, each with the call of it that is missing, all who wait for the same ones share."""

    rank: int
    sequence: Sequence
    awaited: Mapping[int, int]
    any: bool  # any one of them will do

    @property
    def since(self) -> float:
        return self.sequence.entered_at

    def edge(self, on: int) -> Edge:
        wait = Wait(rank=self.rank, on=on, group=self.sequence.group.name, seq=self.awaited[on])
        return Edge(wait=wait, sequence=self.sequence)


@dataclass(slots=True)
class WaitGraph:
    """``stops`` by waiting rank; ``stuck`` are blocked in a call that all others entered; ``doubtful`` may or may not wait.

    The ``released`` were last seen in a send or a receive for which the other end is there now: they go on at any moment.
    What the ``silent`` do is not known, so that they wait for nobody here. Whoever waits for the same ranks does so by one crowd: the
    graph grows with the ranks, and not with their square.
    """

    stops: dict[int, list[Stop]] = field(default_factory=dict)
    stuck: dict[int, Sequence] = field(default_factory=dict)
    doubtful: set[int] = field(default_factory=set)
    silent: dict[int, Silence] = field(default_factory=dict)
    released: set[int] = field(default_factory=set)
    _crowds: list[list[Stop]] | None = None
    _into: dict[int, list[int]] = field(default_factory=dict)

    def crowds(self) -> list[list[Stop]]:
        """All stops, those together that wait for the same ranks."""
        if self._crowds is None:
            by: dict[int, list[Stop]] = {}
            for stops in self.stops.values():
                for stop in stops:
                    by.setdefault(id(stop.awaited), []).append(stop)
            self._crowds = list(by.values())
            for n, crowd in enumerate(self._crowds):
                for on in crowd[0].awaited:
                    self._into.setdefault(on, []).append(n)
        return self._crowds

    def waiting(self) -> set[int]:
        return {*self.stops, *self.stuck}

    def edges(self, rank: int) -> Iterator[Edge]:
        return (stop.edge(on) for stop in self.stops.get(rank, ()) for on in stop.awaited)

    def ends(self) -> set[int]:
        """Ranks that others wait for and that wait for nobody."""
        self.crowds()
        return self._into.keys() - self.stops.keys()

    def reaching(self, targets: Iterable[int]) -> set[int]:
        """The ranks from which a chain of waits leads to any of ``targets``, without these."""
        crowds = self.crowds()
        goals = set(targets)
        seen, open_ = set(goals), list(goals)
        passed: set[int] = set()
        while open_:
            for n in self._into.get(open_.pop(), ()):
                if n not in passed:
                    passed.add(n)
                    fresh = [stop.rank for stop in crowds[n] if stop.rank not in seen]
                    seen.update(fresh)
                    open_ += fresh
        return seen - goals

    def together(self, ends: Iterable[int]) -> list[set[int]]:
        """``ends`` in sets of those that hold up some rank in common."""
        crowds = self.crowds()
        found = {end: {end} for end in sorted(ends)}
        owner: dict[int, int] = dict(zip(found, found, strict=True))  # of a rank, or of a crowd as -1 - its number
        for end in list(found):
            open_ = [end]
            while open_:
                for n in self._into.get(open_.pop(), ()):
                    if (held := owner.get(-1 - n)) is None:
                        for stop in crowds[n]:
                            if (other := owner.get(stop.rank)) is None:
                                owner[stop.rank] = end
                                open_.append(stop.rank)
                            else:
                                _unite(found, end, other)
                        owner[-1 - n] = end
                    else:
                        _unite(found, end, held)
        return list({id(joined): joined for joined in found.values()}.values())

    def knots(self) -> list[set[int]]:
        """Sets of ranks that wait for one another and from which no chain leads anywhere else."""
        closed = self.stops.keys() - self.reaching(self.ends())
        knots: list[set[int]] = []
        while closed:
            rank = min(closed)
            while outside := (knot := self._ahead(rank)) - {rank} - self.reaching([rank]):
                rank = min(outside)  # it leads further in, and no way leads back
            knots.append(knot)
            closed -= knot | self.reaching(knot)
        return knots

    def _ahead(self, rank: int) -> set[int]:
        seen: set[int] = set()
        passed: set[int] = set()
        open_ = [rank]
        while open_:
            for stop in self.stops.get(open_.pop(), ()):
                if id(stop.awaited) not in passed:
                    passed.add(id(stop.awaited))
                    fresh = [on for on in stop.awaited if on not in seen]
                    seen.update(fresh)
                    open_ += fresh
        return seen


def _unite(sets: dict[int, set[int]], one: int, other: int) -> None:
    """Joins the sets of two members; every member of a set leads to the same object."""
    small, large = sorted((sets[one], sets[other]), key=len)
    if small is not large:
        large |= small
        sets.update(dict.fromkeys(small, large))


def wait_graph(attempt: Attempt, places: dict[GroupKey, dict[int, Sequence]], now: float, lost_after: float) -> WaitGraph:
    """The graph at time ``now``, of all waits that stand for `STANDING` seconds."""
    graph = WaitGraph(silent=silences(attempt, places, now, lost_after))
    known: Shared = {}
    before = now - STANDING
    for rank, process in attempt.ranks.items():
        # Some call may be unfinished, and none was made for a while: whoever makes further calls is not waiting.
        pending = [
            s
            for s in process.sequences.values()
            if (s.completed is None or s.completed < s.entered) and s.entered > 0 and s.entered_at <= before
        ]
        if not pending or not process.alive or rank in graph.silent or process.frozen(now) is not None:
            continue
        certain = [s for s in pending if _blocked_in(s)]
        stops: list[Stop] = []
        stuck: list[Sequence] = []
        for sequence in certain or pending:
            awaited = awaited_by(attempt, places, rank, sequence, bool(certain), now, graph.silent, known)
            if awaited:
                stops.append(Stop(rank, sequence, awaited, _from_any(sequence)))
            elif sequence.completed is not None and (sequence.peer is None or _waits_on_channel(process, sequence)):
                stuck.append(sequence)
        if not stops and not stuck and all(s.peer is None for s in pending):
            continue
        if not certain:
            waits = _thread_waits(process)
            if waits is False:
                continue
            if waits is None:
                graph.doubtful.add(rank)
        if stops:
            graph.stops[rank] = stops
        elif not stuck:
            graph.released.add(rank)
        else:
            graph.stuck[rank] = max(stuck, key=lambda s: s.entered_at)
    return graph


def _waits_on_channel(process: Process, sequence: Sequence) -> bool:
    """Of many sends it is never told that they are complete: only a stack shows that a rank waits for one that its peer received.

    What is received from any source may be what this call was to receive.
    """
    samples = [s for s in process.samples if s.taken_at >= sequence.entered_at and s.threads]
    any_source = any(s.peer == -1 for s in process.sequences.values())
    return bool(samples) and waits_for_work(samples[-1].main) and not any_source


def _blocked_in(sequence: Sequence) -> bool:
    """The calling thread sits in the sequence's newest call, since that call is synchronous."""
    newest = sequence.calls.get(sequence.entered)
    return sequence.completed is not None and newest is not None and newest.blocking is True


def _thread_waits(process: Process) -> bool | None:
    """Whether the main thread waits for communication: by its stack, else by its idleness; None where only guessed."""
    samples = [s for s in process.samples if s.taken_at >= process.got_on_at and s.threads]
    told = waits_for_communication(samples[-1].main) if samples else None
    if told is not None:
        return told
    return None if process.told_at - process.idle_at >= IDLE else False


def awaited_by(
    attempt: Attempt, places: dict[GroupKey, dict[int, Sequence]], rank: int, sequence: Sequence, certain: bool, now: float,
    silent: Collection[int], known: Shared,
) -> Mapping[int, int]:  # fmt: skip
    """The ranks without which a sequence cannot go on, each with the first call of it that the rank has not entered.

    A thread blocked in the newest call needs all who are behind; else it may sit in any unfinished call, and needs at least those
    who are furthest behind. Those who are silent may be anywhere: they are awaited where they were last seen behind, or where
    nobody else is. All in the same call of a group share one mapping, kept in ``known``.
    """
    if _from_any(sequence):
        return _awaited_senders(attempt, rank, sequence)
    if sequence.kind in (SequenceKind.SEND, SequenceKind.RECV):
        awaited = _awaited_peer(attempt, rank, sequence)
        if sequence.peer is not None and sequence.peer in silent:
            return awaited or {sequence.peer: sequence.entered}
        return awaited
    members = sequence.group.ranks
    if sequence.kind is SequenceKind.SETUP and (concerned := _concerned(sequence, sequence.entered)) is not None:
        members = concerned
    held = places.get(sequence.group.key, {})
    by = (id(held), members, sequence.entered, certain)
    if by not in known:
        known[by] = _awaited_members(attempt, held, members, sequence.entered, certain, now, silent)
    return known[by]


def _awaited_members(
    attempt: Attempt, held: dict[int, Sequence], members: Iterable[int], entered: int, certain: bool, now: float,
    silent: Collection[int],
) -> dict[int, int]:  # fmt: skip
    behind = {m: count + 1 for m in members if (count := held[m].entered if m in held else 0) < entered}
    if behind and not certain:
        furthest = min((seq for m, seq in behind.items() if m not in silent), default=0)
        behind = {m: seq for m, seq in behind.items() if seq == furthest or m in silent}
    # They entered, and will never finish.
    gone = {m: entered for m in members if m in held and held[m].pending and _out_of_action(attempt.ranks.get(m), now)}
    unheard = {m: entered for m in members if m in silent} if silent and not behind else {}
    return gone | unheard | behind


def _out_of_action(process: Process | None, now: float) -> bool:
    """It cannot finish a call that it is in."""
    return process is not None and (not process.alive or process.frozen(now) is not None)


def _concerned(sequence: Sequence, seq: int) -> tuple[int, ...] | None:
    """new_group holds up its members only; the call says who they are."""
    call = sequence.calls.get(seq)
    detail = call.signature.detail if call is not None else None
    if detail is None or not detail.startswith("ranks="):
        return None
    try:
        return unpack_ranks(detail[6:])
    except ValueError:
        return None


def _awaited_peer(attempt: Attempt, rank: int, sequence: Sequence) -> dict[int, int]:
    """The other end of a channel, if it has made fewer calls on it. Matched by count, never by time."""
    peer = sequence.peer
    if peer is None:
        return {}
    wanted = SequenceKind.RECV if sequence.kind is SequenceKind.SEND else SequenceKind.SEND
    made = sum(s.entered for s in _channels(attempt, peer, wanted, sequence, rank))
    if wanted is SequenceKind.RECV and (anybody := sum(s.entered for s in _channels(attempt, peer, wanted, sequence, -1))):
        # Others' messages that arrived took their part of what it received from any source.
        others = [s for other in sequence.group.ranks if other != rank for s in _channels(attempt, other, sequence.kind, sequence, peer)]
        made += max(0, anybody - sum(s.completed or 0 for s in others))
    return {peer: made + 1} if made < sequence.entered else {}


def _awaited_senders(attempt: Attempt, rank: int, sequence: Sequence) -> dict[int, int]:
    """All who may still send to a receiver from any source, unless enough was sent: any one of them will do."""
    sent = {m: sum(s.entered for s in _channels(attempt, m, SequenceKind.SEND, sequence, rank)) for m in sequence.group.ranks if m != rank}
    told = sum(s.completed or 0 for m in sent for s in _channels(attempt, rank, SequenceKind.RECV, sequence, m))
    if sum(sent.values()) - told >= sequence.entered:
        return {}
    here = {m for m in sent if (p := attempt.ranks.get(m)) is None or (p.alive and p.lifecycle < Lifecycle.DESTROYED)}
    return {m: sent[m] + 1 for m in here or sent}


def _channels(attempt: Attempt, rank: int, kind: SequenceKind, like: Sequence, peer: int) -> list[Sequence]:
    """A rank's channel of the same group and tag, to or from ``peer``."""
    process = attempt.ranks.get(rank)
    held = process.sequences.values() if process is not None else ()
    return [s for s in held if s.kind is kind and s.peer == peer and s.tag == like.tag and s.group.key == like.group.key]


def _from_any(sequence: Sequence) -> bool:
    return sequence.kind is SequenceKind.RECV and sequence.peer == -1


def not_up(process: Process | None) -> bool:
    """The rank has not reached init_process_group."""
    return process is None or (process.alive and process.lifecycle <= Lifecycle.STARTING)
