"""From Flight Recorder dumps to a job's state, as if heartbeats had told it: each rank's place in each of its process groups. Pure.

Nothing is matched by where it stands in a ring: collectives by their number in the group, sends and receives by their order on the
channel where both rings reach back to its beginning, and else from the first that is unfinished.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from hangwatch.diagnosis import messages
from hangwatch.model.calls import Call, SequenceKind, Signature
from hangwatch.model.groups import Group, GroupKey
from hangwatch.model.ranks import Lifecycle
from hangwatch.protocol import heartbeat
from hangwatch.tracking.attempt import Attempt
from hangwatch.tracking.call_stream import Sequence as Place
from hangwatch.tracking.process import Process

from .calls import NCCL, Record
from .collectives import BEHIND, KEPT, Job, Members, find, fit, show
from .dumps import MOST_RANKS, Dump, Use

NOW = 1e6  # seconds: everything in a dump has stood for long
_HEARD = NOW - 5.0
_ROOTED = ("broadcast", "reduce", "gather", "scatter")

Dumps = Mapping[int, Dump]


def job_of(dumps: Dumps, name: str) -> Job:
    """All that the dumps tell, by rank."""
    groups = _groups(dumps)
    ranks = sorted({*dumps, *(rank for group, _ in groups for rank in group.ranks)})
    attempt = Attempt(job=name, number=0, opened_at=0.0, world_size=len(ranks), heard_at=_HEARD)
    for rank in ranks:
        identity = heartbeat.Identity(job=name, rank=rank, world_size=len(ranks), pid=0, start_ticks=0)
        attempt.ranks[rank] = Process(
            key=str(rank),
            host="?",
            identity=identity,
            started_at=0.0,
            heard_at=_HEARD,
            told_at=_HEARD,
            lifecycle=Lifecycle.INITIALISED,
            state="S",
        )
    job = Job(attempt=attempt, notes=list(_contradictions(dumps)))
    job.ends_told = _ends_told(dumps)
    job.messaged = {name for dump in dumps.values() for name, _ in dump.messages}
    for group, uses in groups:
        for rank in _collectives(job, group, uses, dumps):
            job.assumed.setdefault(rank, set()).add(group.name)
        _channels(attempt, group, uses, dumps)
    for process in attempt.ranks.values():
        process.settle()
        for place in process.sequences.values():
            attempt.learn(process, place, place.calls.values())
        attempt.judge(process)
    return job


def _groups(dumps: Dumps) -> list[tuple[Group, dict[int, Use]]]:
    """Every process group that some rank used, and what each rank calls it.

    Where its members are not told, they are those that used it; of the default group, all. A name that is given again after its
    group was destroyed is another group: those are counted from the first, or where a ring has lost it from the last.
    """
    most: dict[str, int] = {}
    for dump in dumps.values():
        for name, nth in dump.uses:
            most[name] = max(most.get(name, 0), nth + 1)
    told: dict[str, set[tuple[int, ...]]] = {}
    users: dict[str, set[int]] = {}
    for rank, dump in dumps.items():
        for name, ranks in dump.groups.items():
            told.setdefault(name, set()).add(ranks)
        for name, _ in dump.uses:
            users.setdefault(name, set()).add(rank)
    found: dict[GroupKey, tuple[Group, dict[int, Use]]] = {}
    for rank, dump in dumps.items():
        uses = sorted(dump.uses)
        had = {name: nth + 1 for name, nth in uses}
        for name, nth in uses:
            generation = nth + 1 + (most[name] - had[name] if dump.wrapped else 0)
            desc = dump.descriptions[name]
            ranks = dump.groups.get(name) or _members(rank, desc, told.get(name, ()), users[name], dumps)
            group = Group(name=name, desc=desc, ranks=ranks, backend=dump.backends[name, nth], generation=generation)
            found.setdefault(group.key, (group, {}))[1][rank] = (name, nth)
    return list(found.values())


def _ends_told(dumps: Dumps) -> set[str]:
    """The backends that tell which calls are over: those that do so of some call, and those known to, were the first call to hang."""
    told = {
        dump.backends[use]
        for dump in dumps.values()
        for kept in (dump.calls, dump.messages)
        for use, records in kept.items()
        if any(record.started for record in records)
    }
    return told.union(NCCL)


def _contradictions(dumps: Dumps) -> Iterable[str]:
    """Ranks that say to be in other groups of a name than others say."""
    told: dict[str, set[tuple[int, ...]]] = {}
    for dump in dumps.values():
        for name, ranks in dump.groups.items():
            told.setdefault(name, set()).add(ranks)
    for name, members in sorted(told.items()):
        if len(members) > 1:
            mine = {rank: dump.groups[name] for rank, dump in dumps.items() if name in dump.groups}
            apart = tuple(rank for rank, told_by_it in mine.items() if any(rank in ranks and ranks != told_by_it for ranks in members))
            if apart:
                yield f"{messages.those(apart)} and others tell other members of group {name}: were groups made in another order?"


def _members(rank: int, description: str, told: Iterable[tuple[int, ...]], users: set[int], dumps: Dumps) -> tuple[int, ...]:
    """Of a group whose members the rank's own dump does not tell."""
    mine = [ranks for ranks in told if rank in ranks]
    if len(mine) == 1:
        return mine[0]
    if description == "default_pg":
        return tuple(range(min(max(dumps) + 1, MOST_RANKS)))
    return tuple(sorted(other for other in users if not any(other in ranks for ranks in told)))


def _place(attempt: Attempt, rank: int, kind: SequenceKind, group: Group, peer: int | None = None) -> Place:
    process = attempt.ranks[rank]
    place = Place(uid=len(process.sequences) + 1, kind=kind, group=group, peer=peer)
    attempt.add(process, place)
    return place


def _collectives(job: Job, group: Group, uses: Mapping[int, Use], dumps: Dumps) -> list[int]:
    """Fills in its members' places, and returns those of whom nothing is known.

    Of them it is assumed that they finished what all others did, and no more.
    """
    members: Members = {}
    places: dict[int, Place] = {}
    for rank in group.ranks:
        made = dumps[rank].calls.get(uses[rank], ()) if rank in uses else ()
        mine = [record for record in made if not record.unended]
        entered = mine[-1].seq if mine else made[0].seq - 1 if made else _counted(job, dumps.get(rank), group.name)
        if entered is not None:
            places[rank], members[rank] = _place(job.attempt, rank, SequenceKind.COLLECTIVE, group), mine
            places[rank].entered = places[rank].completed = entered
    conflict = fit(job, group, members)
    at: dict[int, dict[int, Record]] = {}
    tells = group.backend in job.ends_told
    begun = {first.seq for rank, mine in members.items() if (first := _unfinished(mine)) and first.started and dumps[rank].timed}
    for rank, place in places.items():
        mine = members[rank]
        first = _unfinished(mine) if tells else _unarrived(mine, members, len(group.ranks), at)
        if first is not None:
            place.completed, place.pending_at = first.seq - 1, 0.0
            if tells:
                # A device runs the calls of a group in order: what is queued behind is not yet entered.
                place.entered = first.seq
                if dumps[rank].timed and not first.started and first.seq in begun:
                    place.entered, place.pending_at = first.seq - 1, None
                    job.queued.setdefault((group.key, first.seq), set()).add(rank)
        show(place, mine, conflict, tells)
    if conflict:
        job.attempt.doubted.add(group.key)
    finished = min((place.completed or 0 for place in places.values()), default=0)
    unknown = [rank for rank in group.ranks if rank not in places]
    for rank in unknown:
        place = _place(job.attempt, rank, SequenceKind.COLLECTIVE, group)
        place.entered = place.completed = finished
    return unknown


def _counted(job: Job, dump: Dump | None, name: str) -> int | None:
    """How many collectives a rank made whose ring holds none of the group: by the recorder's counts, or none where nothing was lost."""
    if dump is not None and name in dump.enqueued and name not in job.messaged:
        return dump.enqueued[name]
    return 0 if dump is not None and not dump.wrapped else None


def _unfinished(mine: Sequence[Record]) -> Record | None:
    """The first behind the last that is over: they are run in order, whatever is told of some that was never looked at again."""
    over = _over(mine)
    return mine[over] if over < len(mine) else None


def _over(mine: Sequence[Record]) -> int:
    return next((at + 1 for at in range(len(mine) - 1, -1, -1) if mine[at].done), 0)


def _unarrived(mine: Sequence[Record], members: Members, size: int, at: dict[int, dict[int, Record]]) -> Record | None:
    """Where no ends are told, as on gloo, the newest call, unless it must be over.

    Where all made the same call, it is finished for everybody once somebody got past it; but a root may leave before the others.
    """
    if not mine:
        return None
    newest = mine[-1]
    if newest.seq not in at:
        at[newest.seq] = {rank: record for rank, told in members.items() if (record := find(told, newest.seq)) is not None}
    same = {rank for rank, record in at[newest.seq].items() if record.signature.agree == newest.signature.agree}
    together = newest.signature.op not in _ROOTED
    past = newest.retired or (together and any(at[newest.seq][rank].retired for rank in same))
    past |= together and len(same) == size and any(told[-1].seq > newest.seq for told in members.values())
    return None if past else newest


def _channels(attempt: Attempt, group: Group, uses: Mapping[int, Use], dumps: Dumps) -> None:
    """Sends and receives by channel; a receive from any source only where every ring reaches back to the beginning."""
    told: dict[tuple[SequenceKind, int, int], list[Record]] = {}
    for rank, use in uses.items():
        for record in dumps[rank].messages.get(use, ()):
            if record.peer is not None and record.peer < len(group.ranks) and not record.unended:
                peer = group.ranks[record.peer] if record.peer >= 0 else -1
                told.setdefault((SequenceKind(record.signature.op), rank, peer), []).append(record)
    whole_group = all(rank in dumps and not dumps[rank].wrapped for rank in group.ranks)
    for (kind, rank, peer), mine in told.items():
        other = SequenceKind.RECV if kind is SequenceKind.SEND else SequenceKind.SEND
        theirs = told.get((other, peer, rank), [])
        if peer < 0 and (kind is SequenceKind.SEND or not whole_group):
            continue
        whole = whole_group or (peer in dumps and not dumps[rank].wrapped and not dumps[peer].wrapped)
        place = _place(attempt, rank, kind, group, peer)
        _channel(place, mine, theirs, whole, dumps[rank].timed)
        if not theirs and peer in attempt.ranks and peer not in dumps:
            mirrored = _place(attempt, peer, other, group, rank)
            mirrored.entered = mirrored.completed = place.completed or 0


def _channel(place: Place, mine: list[Record], theirs: list[Record], whole: bool, timed: bool) -> None:
    pending, opposite = _unfinished(mine), _unfinished(theirs)
    over = _over(mine)
    counted = mine if whole else mine[over:]
    place.completed, place.op = over if whole else 0, place.kind.value
    # Counted from the first unfinished ones, the two ends surely speak of the same message only once both are at it.
    both = whole or (pending is not None and opposite is not None and pending.started and opposite.started)
    for seq, record in enumerate(counted, 1):
        if -KEPT < seq - place.completed <= BEHIND:
            signature = record.signature if both else Signature(op=place.kind.value)
            place.calls[seq] = Call(seq=seq, signature=signature, site=record.site, blocking=True if seq > place.completed else None)
    # The rest of a device's queue is not yet entered.
    queued = pending is None or (timed and not pending.started and opposite is not None and opposite.started)
    place.entered = place.completed + (not queued)
    place.pending_at = None if queued else 0.0
