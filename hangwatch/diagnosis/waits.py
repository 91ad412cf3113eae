"""Who waits for whom: the wait-for graph of a job, through its first unfinished calls.

The ends of its chains are causes, a cycle is a deadlock, and everybody else is a victim.
Prior art: T. Hilbrich et al., "MPI runtime error detection with MUST" (2012), on wait-for graphs for MPI.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from hangwatch.activity import activity, waits_apart
from hangwatch.frames import is_user, waits_for_communication, waits_for_work
from hangwatch.state import IDLE, Attempt, Process, Sequence
from hangwatch.types import STANDING, Lifecycle, ThreadStack, Wait

from .awaited import Others, from_any
from .silence import Silence, silences

_KNOT_SEARCHED = 64  # ranks, at most, of a knot whose cycles are compared
_CYCLES_TRIED = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Edge:
    """A wait, and the sequence of the rank that waits."""

    wait: Wait
    sequence: Sequence


@dataclass(slots=True, eq=False)  # a frozen one takes three times as long to make, and there is one for each rank
class Stop:
    """A rank waits in a call. Those whom it waits for, each with the call of it that is missing, all who wait for the same ones share."""

    rank: int
    sequence: Sequence
    since: float
    awaited: Mapping[int, int]
    any: bool  # any one of them will do

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

    def into(self, rank: int) -> Iterator[Stop]:
        """The waits for it, one of each crowd: all of that are in the same call."""
        crowds = self.crowds()
        return (crowds[n][0] for n in self._into.get(rank, ()))

    def reaching(self, targets: Iterable[int], within: Collection[int] | None = None) -> set[int]:
        """The ranks from which a chain of waits leads to any of ``targets``, without these; ``within`` some ranks alone."""
        crowds = self.crowds()
        goals = set(targets)
        seen, open_ = set(goals), list(goals)
        passed: set[int] = set()
        while open_:
            for n in self._into.get(open_.pop(), ()):
                if n not in passed:
                    passed.add(n)
                    fresh = [stop.rank for stop in crowds[n] if stop.rank not in seen and (within is None or stop.rank in within)]
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

    def held(self) -> set[int]:
        """The ranks that can never go on, whatever becomes of those who wait for nobody.

        A call needs all whom it waits for, unless any one of them will do. A rank with several calls may wait in any one of these.
        """
        crowds = self.crowds()
        lacking = [1 if crowd[0].any else len(crowd[0].awaited) for crowd in crowds]
        held = set(self.stops)
        open_ = list(self.ends())
        while open_:
            for n in self._into.get(open_.pop(), ()):
                lacking[n] -= 1
                if lacking[n] == 0:
                    fresh = {stop.rank for stop in crowds[n] if stop.rank in held}
                    held -= fresh
                    open_ += fresh
        return held

    def knots(self, held: set[int]) -> list[set[int]]:
        """Sets of ranks that wait for one another, and of which none waits for others of the ``held``."""
        left = set(held)
        knots: list[set[int]] = []
        while left:
            rank = min(left)
            while outside := (knot := self._ahead(rank, held)) - {rank} - self.reaching([rank], held):
                rank = min(outside)  # it leads further in, and no way leads back
            knots.append(knot)
            left -= knot | self.reaching(knot, held)
        return knots

    def cycle(self, knot: set[int]) -> list[Edge]:
        """A shortest cycle of waits in a knot, from its lowest rank on; through a rank that all lead through, if there is one."""
        starts = sorted(self.unavoidable(knot) or knot)[:_CYCLES_TRIED]
        shortest = min((self._round(start, knot) for start in starts), key=len)
        lowest = min(range(len(shortest)), key=lambda n: shortest[n].wait.rank)
        return shortest[lowest:] + shortest[:lowest]

    def unavoidable(self, knot: set[int]) -> set[int]:
        """The ranks that every cycle of a knot leads through: without any one of them there would be none. Not told of a large one."""
        if len(knot) > _KNOT_SEARCHED:
            return set()
        ahead = {rank: {on for stop in self.stops[rank] for on in stop.awaited if on in knot} for rank in knot}
        return {rank for rank in knot if _acyclic({r: on - {rank} for r, on in ahead.items() if r != rank})}

    def _round(self, start: int, knot: set[int]) -> list[Edge]:
        """The shortest way from a rank of a knot back to it."""
        came: dict[int, Edge] = {}
        level = [start]
        while start not in came:
            reached: list[int] = []
            for rank in level:
                for stop in self.stops[rank]:
                    for on in stop.awaited:
                        if on in knot and on not in came:
                            came[on] = stop.edge(on)
                            reached.append(on)
            level = reached
        way = [came[start]]
        while way[-1].wait.rank != start:
            way.append(came[way[-1].wait.rank])
        return way[::-1]

    def _ahead(self, rank: int, within: set[int]) -> set[int]:
        seen: set[int] = set()
        passed: set[int] = set()
        open_ = [rank]
        while open_:
            for stop in self.stops.get(open_.pop(), ()):
                if id(stop.awaited) not in passed:
                    passed.add(id(stop.awaited))
                    fresh = [on for on in stop.awaited if on in within and on not in seen]
                    seen.update(fresh)
                    open_ += fresh
        return seen


def _acyclic(ahead: dict[int, set[int]]) -> bool:
    """Whether nobody is left once all who wait for nobody have gone, and those who wait for them."""
    left = dict(ahead)
    while free := [rank for rank, on in left.items() if left.keys().isdisjoint(on)]:
        for rank in free:
            del left[rank]
    return not left


def _unite(sets: dict[int, set[int]], one: int, other: int) -> None:
    """Joins the sets of two members; every member of a set leads to the same object."""
    small, large = sorted((sets[one], sets[other]), key=len)
    if small is not large:
        large |= small
        sets.update(dict.fromkeys(small, large))


def wait_graph(attempt: Attempt, now: float, lost_after: float) -> WaitGraph:
    """The graph at time ``now``, of all waits that stand for `STANDING` seconds."""
    graph = WaitGraph(silent=silences(attempt, now, lost_after))
    others = Others(attempt, now, graph.silent)
    before = now - STANDING
    for rank, process in attempt.ranks.items():
        # Some call may be unfinished, and none was made for a while: whoever makes further calls is not waiting.
        pending = [s for s in process.unfinished if s.entered_at <= before and s.entered > 0]
        if not pending or process.getting_on_at > process.heard_at or rank in others.out or rank in graph.silent:
            continue
        certain = _blocked_in(process, before)
        got_on_at = 0.0
        if not certain and (got_on_at := process.got_on_at) > before:
            continue
        stops: list[Stop] = []
        stuck: list[Sequence] = []
        for sequence in certain or pending:
            awaited = others.awaited(rank, sequence, bool(certain))
            if awaited:
                stops.append(Stop(rank, sequence, max(sequence.entered_at, got_on_at), awaited, from_any(sequence)))
            elif sequence.completed is not None and (sequence.peer is None or _waits_on_channel(process, sequence)):
                stuck.append(sequence)
        if not stops and not stuck and all(s.peer is None for s in pending):
            continue
        if not certain:
            waits = thread_waits(process)
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


def _blocked_in(process: Process, before: float) -> list[Sequence]:
    """The calls that the process as a whole is blocked in: not those of a thread beside which others go on."""
    blocked = [s for s in process.blocked_in if s.entered_at <= before]
    if not blocked:
        return blocked
    since = max(s.entered_at for s in blocked)
    if process.newest_at > since + STANDING:
        return []
    if not process.samples:
        return blocked
    main = main_since(process, since)
    works = waits_for_communication(main) is False and process.told_at - process.idle_at < IDLE
    return [] if (works or waits_apart(main)) and _several_call(process) else blocked


def _several_call(process: Process) -> bool:
    """Several threads of it make calls: in some jobs all is done by a thread to the end of which the main thread sleeps."""
    return len({call.thread for s in process.sequences.values() for call in s.calls.values() if call.thread}) > 1


def main_since(process: Process, since: float) -> ThreadStack | None:
    """The main thread's newest stack, if it was taken since then."""
    samples = [s for s in process.samples if s.taken_at >= since and s.threads]
    return samples[-1].main if samples else None


def works_beside(process: Process, since: float) -> bool:
    """A thread was seen in the user's code, where it waits for nobody: the missing call may be its own."""
    threads = [t for s in process.samples if s.taken_at >= since for t in s.threads if t.pid is None and any(map(is_user, t.frames))]
    return any(waits_for_communication(t) is False and not _waits_for_thread(t) for t in threads)


def _waits_for_thread(stack: ThreadStack) -> bool:
    waits = activity(stack).waits
    return waits is not None and waits.thread


def thread_waits(process: Process) -> bool | None:
    """Whether the main thread waits for communication: by its stack, else by its idleness; None where only guessed."""
    main = main_since(process, process.got_on_at)
    if (told := waits_for_communication(main)) is not None:
        return told and not waits_apart(main)
    return None if process.told_at - process.idle_at >= IDLE else False


def not_up(process: Process | None) -> bool:
    """The rank has not reached init_process_group, or not again since it destroyed its groups."""
    return process is None or (process.alive and (process.lifecycle <= Lifecycle.STARTING or process.lifecycle is Lifecycle.DESTROYED))
