"""The diagnosis from Flight Recorder dumps alone: who called what, and who did not come. Of the processes themselves nothing is known.

Each dump is taken to be of a job that stands still, since nothing in it says when it was written. A rank without a dump is missing
evidence, not a dead rank: it is accused only where nobody else is left to be waited for, and said to be so.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from hangwatch import wire
from hangwatch.diagnosis import diagnose, words
from hangwatch.flight_recorder import Dump, Record
from hangwatch.operators import Agree
from hangwatch.signature import chain, with_agreement
from hangwatch.state import Attempt, Process, first_conflict
from hangwatch.state import Sequence as Place
from hangwatch.types import Call, Group, Kind, Lifecycle, Limits, SequenceKind, Verdict, ranges

_NOW = 1e6  # seconds: everything in a dump has stood for long
_HEARD = _NOW - 5.0
_ROOTED = ("broadcast", "reduce", "gather", "scatter")
_ARRIVALS = "gloo"  # its states always say "scheduled", and "retired" may be late: of its calls only who entered them is sure


Assumed = dict[int, set[str]]  # by rank, the groups of which its calls are not known


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """``absent`` are ranks of the job without a dump; ``notes`` say what could not be known."""

    verdicts: tuple[Verdict, ...]
    absent: tuple[int, ...]
    notes: tuple[str, ...]


def analyze(dumps: Sequence[Dump], job: str = "dump") -> Finding:
    """What is wrong with the job that wrote the dumps, one from each rank."""
    by_rank = {dump.rank: dump for dump in dumps}
    attempt, assumed = _attempt(by_rank, job)
    absent = tuple(sorted(attempt.ranks.keys() - by_rank.keys()))
    verdicts = tuple(_told(by_rank, assumed, verdict) for verdict in diagnose(attempt, _NOW, Limits()).verdicts if verdict.due)
    notes = (*_notes(dumps, absent), *(_unexplained(attempt) if not verdicts else ()))
    return Finding(verdicts=verdicts, absent=absent, notes=notes)


def _notes(dumps: Sequence[Dump], absent: Sequence[int]) -> Iterable[str]:
    if absent:
        yield f"no dump of rank{'s' if len(absent) > 1 else ''} {ranges(absent)}: that is missing evidence, not a sign of death"
    if any(_ARRIVALS in dump.backends for dump in dumps):
        yield "gloo's recorder notes no point-to-point calls and no end of calls: only who entered which collective is known"
    if any(not dump.records for dump in dumps):
        empty = [dump.rank for dump in dumps if not dump.records]
        yield f"the dump{'s' if len(empty) > 1 else ''} of rank{'s' if len(empty) > 1 else ''} {ranges(empty)} hold no calls"


def _unexplained(attempt: Attempt) -> Iterable[str]:
    """Calls that are not known to be finished, though nobody is known to be missed in them."""
    inside: dict[str, list[int]] = {}
    for members in attempt.places.values():
        for rank, place in members.items():
            if place.pending:
                inside.setdefault(f"{place.op} ({words.where(place.group, place.entered)})", []).append(rank)
    for call, ranks in sorted(inside.items()):
        yield f"{words.those(tuple(ranks))} may still be in {call}; the dumps do not tell why"


def _told(dumps: Mapping[int, Dump], assumed: Assumed, verdict: Verdict) -> Verdict:
    """A verdict in the words that fit what a dump can tell."""
    if verdict.kind is not Kind.MISSING_RANK:
        return verdict
    assert verdict.group is not None and verdict.seq is not None
    count, op = len(verdict.waiting), next((c.call.signature.op for c in verdict.calls), "a collective")
    sure = {wait.on for wait in verdict.waits if wait.group not in assumed.get(wait.on, ())}
    known = tuple(rank for rank in verdict.culprits if rank in sure or rank not in assumed)
    if not known:
        evidence = "record of that time" if dumps.keys() & set(verdict.culprits) else "dump"
        return replace(
            verdict,
            summary=f"{words.those(verdict.waiting)} wait in {op} ({words.where(verdict.group, verdict.seq)}) "
            f"for {words.those(verdict.culprits)}, of which there is no {evidence}",
            advice="Without it nothing tells whether a rank entered the call, hung elsewhere or had ended: look for its log.",
        )
    last = [(rank, record) for rank in known if (record := _last(dumps[rank])) is not None]
    seen = [f"rank {rank} was last seen in {record.signature.op} at {record.site}" for rank, record in last if record.site]
    return replace(
        verdict,
        culprits=known,
        summary=words.not_entered(known, op, verdict.group, verdict.seq, count),
        advice=(f"{'; '.join(seen[:4])}. " if seen else "") + "What it did after that, a dump does not tell.",
        site=last[0][1].site if last else None,
    )


def _last(dump: Dump) -> Record | None:
    return max(dump.records, key=lambda record: record.number, default=None)


def _attempt(dumps: Mapping[int, Dump], job: str) -> tuple[Attempt, Assumed]:
    groups = _groups(dumps)
    ranks = sorted({*dumps, *(rank for group in groups.values() for rank in group.ranks)})
    attempt = Attempt(job=job, number=0, opened_at=0.0, world_size=len(ranks), heard_at=_HEARD)
    for rank in ranks:
        identity = wire.Identity(job=job, rank=rank, world_size=len(ranks), pid=0, start_ticks=0)
        attempt.ranks[rank] = Process(
            key=str(rank), host="?", identity=identity, started_at=0.0, heard_at=_HEARD, told_at=_HEARD,
            lifecycle=Lifecycle.INITIALISED, state="S",
        )
    assumed: Assumed = {}
    for group in groups.values():
        for rank in _collectives(attempt, group, dumps):
            assumed.setdefault(rank, set()).add(group.name)
        _channels(attempt, group, dumps)
    return attempt, assumed


def _groups(dumps: Mapping[int, Dump]) -> dict[tuple[str, tuple[int, ...]], Group]:
    """Every process group that some rank used. Where its members are not told, they are those that used it; of the default group, all."""
    used: dict[tuple[str, tuple[int, ...]], Group] = {}
    for dump in dumps.values():
        for name, description in dump.descriptions.items():
            ranks = dump.groups.get(name)
            if ranks is None and description == "default_pg":
                ranks = tuple(range(max(dumps) + 1))
            if ranks is None:
                ranks = tuple(sorted(rank for rank, other in dumps.items() if name in other.descriptions and name not in other.groups))
            backend = next((record.backend for record in dump.records if record.group == name), "")
            used.setdefault((name, ranks), Group(name=name, desc=description, ranks=ranks, backend=backend))
    return used


def _place(attempt: Attempt, rank: int, kind: SequenceKind, group: Group, peer: int | None = None) -> Place:
    process = attempt.ranks[rank]
    place = Place(uid=len(process.sequences) + 1, kind=kind, group=group, peer=peer)
    attempt.add(process, place)
    return place


def _collectives(attempt: Attempt, group: Group, dumps: Mapping[int, Dump]) -> list[int]:
    """Fills in its members' places, and returns those of whom nothing is known.

    Of them it is assumed that they finished what all others did, and no more.
    """
    places: dict[int, Place] = {}
    records: dict[int, list[Record]] = {}
    for rank in group.ranks:
        dump = dumps.get(rank)
        mine = [r for r in dump.records if r.group == group.name and r.peer is None] if dump is not None else []
        entered = max((r.seq for r in mine), default=_enqueued(dumps, rank, group.name))
        if entered is None and (dump is None or dump.wrapped):
            continue
        place = places[rank] = _place(attempt, rank, SequenceKind.COLLECTIVE, group)
        place.entered, records[rank] = entered or 0, mine
        place.completed = place.entered
    _fit(group, records)
    for rank, place in places.items():
        if records[rank]:
            _progress(place, records[rank], places, records)
    _compare(places, records)
    if first_conflict(places):
        attempt.doubted.add(group.key)
    finished = min((place.completed or 0 for place in places.values()), default=0)
    unknown = [rank for rank in group.ranks if rank not in places]
    for rank in unknown:
        place = _place(attempt, rank, SequenceKind.COLLECTIVE, group)
        place.entered = place.completed = finished
    return unknown


def _enqueued(dumps: Mapping[int, Dump], rank: int, name: str) -> int | None:
    """From the recorder's counts, where its ring holds no call of the group any more."""
    if rank not in dumps:
        return None
    for uid, count in dumps[rank].enqueued.items():
        if {other.uids[uid] for other in dumps.values() if uid in other.uids} == {name}:
            return max(count, 0)
    return None


def _progress(place: Place, mine: list[Record], places: Mapping[int, Place], records: Mapping[int, list[Record]]) -> None:
    """Which call the rank is in. A device runs the calls of a group in order: what is queued behind is not yet entered."""
    arrivals = mine[-1].backend == _ARRIVALS
    if arrivals:
        # Where all made the same call, it is finished for everybody once somebody got past it; but a root may leave before the others.
        newest = mine[-1]
        together = newest.signature.op not in _ROOTED
        same = [rank for rank, told in records.items() for r in told if (r.seq, r.signature.agree) == (newest.seq, newest.signature.agree)]
        past = newest.retired or (together and any(r.retired for rank in same for r in records[rank] if r.seq == newest.seq))
        past |= together and len(same) == len(places) and any(other.entered > newest.seq for other in places.values())
        unfinished = [] if past else [newest.seq]
    else:
        unfinished = [r.seq for r in mine if not r.done]
    for record in mine:
        place.calls[record.seq] = Call(seq=record.seq, signature=record.signature, site=record.site)
    if unfinished:
        place.completed, place.pending_at = min(unfinished) - 1, 0.0
        if not arrivals:
            place.entered = min(unfinished)
            place.calls[place.entered] = replace(place.calls[place.entered], blocking=True)
    place.op = place.calls[place.entered].signature.op if place.entered in place.calls else ""


def _compare(places: Mapping[int, Place], records: Mapping[int, list[Record]]) -> None:
    """Running hashes from the first call that all rings still hold."""
    first = max((told[0].seq for told in records.values() if told), default=0)
    for rank, place in places.items():
        value = 0
        for record in records[rank]:
            if record.seq >= first:
                value = chain(value, record.signature.agree)
                place.checkpoints[record.seq] = value
                place.calls[record.seq] = replace(place.calls[record.seq], chain=value)


def _fit(group: Group, records: dict[int, list[Record]]) -> None:
    """What no rank's record tells alone: with those of all members, a call may have two roots, or send more than is expected."""
    calls: dict[int, dict[int, int]] = {}
    for rank, made in records.items():
        for at, record in enumerate(made):
            calls.setdefault(record.seq, {})[rank] = at
    for places in calls.values():
        told = {rank: records[rank][at] for rank, at in places.items()}
        ops = {record.signature.op for record in told.values()}
        if told.keys() != set(group.ranks) or len(ops) > 1:
            continue
        sent, expected = (sum(record.totals[side] for record in told.values()) for side in (0, 1))
        uneven = sent != expected and ops <= {"all_to_all", "all_to_all_single", "all_to_all_v_single"}
        roots = [rank for rank, record in told.items() if record.root]
        for rank, record in told.items():
            signature = record.signature
            if uneven and signature.splits is None:  # even parts will show who differs
                signature = replace(signature, splits=((record.totals[0],), (record.totals[1],)))
            elif len(roots) > 1 and record.root:
                signature = with_agreement(replace(signature, root=group.ranks.index(rank)), Agree.DTYPE | Agree.ROOT, ())
            records[rank][places[rank]] = replace(record, signature=signature)


def _channels(attempt: Attempt, group: Group, dumps: Mapping[int, Dump]) -> None:
    """Sends and receives, numbered by channel: from the first where both rings reach back to it, else from the first unfinished one."""
    told: dict[tuple[SequenceKind, int, int], list[Record]] = {}
    for rank in group.ranks:
        for record in dumps[rank].records if rank in dumps else ():
            if record.group == group.name and record.peer is not None and record.peer < len(group.ranks):
                kind = SequenceKind(record.signature.op)
                told.setdefault((kind, rank, group.ranks[record.peer]), []).append(record)
    for (kind, rank, peer), mine in told.items():
        other = SequenceKind.RECV if kind is SequenceKind.SEND else SequenceKind.SEND
        theirs = told.get((other, peer, rank), [])
        whole = peer in dumps and not dumps[rank].wrapped and not dumps[peer].wrapped
        done = sum(r.done for r in mine)
        place = _place(attempt, rank, kind, group, peer)
        counted = mine if whole else [r for r in mine if not r.done]
        for seq, record in enumerate(counted, 1):
            pending = not record.done
            place.calls[seq] = Call(seq=seq, signature=record.signature, site=record.site, blocking=pending or None)
        place.completed = done if whole else 0
        # The rest of a device's queue is not yet entered.
        place.entered = min(place.completed + 1, len(counted))
        place.pending_at = 0.0 if place.entered > place.completed else None
        place.op = kind.value
        if not theirs and peer in attempt.ranks and peer not in dumps:
            mirrored = _place(attempt, peer, other, group, rank)
            mirrored.entered = mirrored.completed = place.completed
