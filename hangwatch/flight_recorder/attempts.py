"""From Flight Recorder dumps to a job's state, as if heartbeats had told it: each rank's place in
each of its process groups. Pure.

Nothing is matched by where it stands in a ring: collectives by their number in the group, sends and
receives by their order on the channel where both rings reach back to its beginning, and else from
the first that is unfinished.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from hangwatch.diagnosis import messages
from hangwatch.model.backends import COALESCED_END_BACKENDS
from hangwatch.model.calls import Call, Signature, StreamKind
from hangwatch.model.groups import Group, GroupKey
from hangwatch.model.operators import OPERATIONS
from hangwatch.model.ranks import Lifecycle
from hangwatch.protocol import heartbeat
from hangwatch.tracking.attempt import Attempt
from hangwatch.tracking.call_stream import CallStream as Place
from hangwatch.tracking.process import Process

from .calls import FlightRecord
from .collectives import (
    CALLS_AFTER,
    CALLS_BEFORE,
    OfflineJob,
    RecordsByRank,
    fill_stream,
    find_record,
    reconcile_calls,
)
from .dumps import MAX_DUMP_RANKS, FlightDump, GroupInstance

NOW_S = 1e6  # seconds: everything in a dump has stood for long
_LAST_SEEN_S = NOW_S - 5.0
_ROOTED_OPS = frozenset(op for op, spec in OPERATIONS.items() if spec.is_rooted)

DumpsByRank = Mapping[int, FlightDump]


def build_job(dumps: DumpsByRank, name: str) -> OfflineJob:
    """All that the dumps tell, by rank."""
    groups = _collect_groups(dumps)
    ranks = sorted({*dumps, *(rank for group, _ in groups for rank in group.ranks)})
    attempt = Attempt(
        job=name, number=0, opened_at=0.0, world_size=len(ranks), last_seen_at=_LAST_SEEN_S
    )
    for rank in ranks:
        identity = heartbeat.ProcessIdentity(
            job=name, rank=rank, world_size=len(ranks), pid=0, start_ticks=0
        )
        attempt.processes[rank] = Process(
            key=str(rank),
            host="?",
            identity=identity,
            started_at=0.0,
            last_seen_at=_LAST_SEEN_S,
            reported_at=_LAST_SEEN_S,
            lifecycle=Lifecycle.INITIALISED,
            state="S",
        )
    job = OfflineJob(attempt=attempt, notes=list(_describe_contradictions(dumps)))
    job.completion_backends = _find_completion_backends(dumps)
    job.p2p_groups = {name for dump in dumps.values() for name, _ in dump.p2p_calls}
    for group, uses in groups:
        for rank in _fill_collectives(job, group, uses, dumps):
            job.assumed_groups.setdefault(rank, set()).add(group.name)
        _fill_channels(attempt, group, uses, dumps)
    for process in attempt.processes.values():
        process.refresh_streams()
        for place in process.streams.values():
            attempt.track_calls(process, place, place.calls.values())
        attempt.update_suspects(process)
    return job


def _collect_groups(dumps: DumpsByRank) -> list[tuple[Group, dict[int, GroupInstance]]]:
    """Every process group that some rank used, and what each rank calls it.

    Where its members are not told, they are those that used it; of the default group, all. A name
    that is given again after its group was destroyed is another group: those are counted from the
    first, or where a ring has lost it from the last.
    """
    most: dict[str, int] = {}
    for dump in dumps.values():
        for name, nth in dump.group_instances:
            most[name] = max(most.get(name, 0), nth + 1)
    told: dict[str, set[tuple[int, ...]]] = {}
    users: dict[str, set[int]] = {}
    for rank, dump in dumps.items():
        for name, ranks in dump.groups.items():
            told.setdefault(name, set()).add(ranks)
        for name, _ in dump.group_instances:
            users.setdefault(name, set()).add(rank)
    found: dict[GroupKey, tuple[Group, dict[int, GroupInstance]]] = {}
    for rank, dump in dumps.items():
        uses = sorted(dump.group_instances)
        had = {name: nth + 1 for name, nth in uses}
        for name, nth in uses:
            generation = nth + 1 + (most[name] - had[name] if dump.wrapped else 0)
            desc = dump.descriptions[name]
            ranks = dump.groups.get(name) or _infer_members(
                rank, desc, told.get(name, ()), users[name], dumps
            )
            group = Group(
                name=name,
                desc=desc,
                ranks=ranks,
                backend=dump.backends[name, nth],
                generation=generation,
            )
            found.setdefault(group.key, (group, {}))[1][rank] = (name, nth)
    return list(found.values())


def _find_completion_backends(dumps: DumpsByRank) -> set[str]:
    """The backends that tell which calls are over: those that do so of some call, and those known
    to, were the first call to hang.
    """
    told = {
        dump.backends[use]
        for dump in dumps.values()
        for kept in (dump.calls, dump.p2p_calls)
        for use, records in kept.items()
        if any(record.started for record in records)
    }
    return told.union(COALESCED_END_BACKENDS)


def _describe_contradictions(dumps: DumpsByRank) -> Iterable[str]:
    """Ranks that say to be in other groups of a name than others say."""
    told: dict[str, set[tuple[int, ...]]] = {}
    for dump in dumps.values():
        for name, ranks in dump.groups.items():
            told.setdefault(name, set()).add(ranks)
    for name, members in sorted(told.items()):
        if len(members) > 1:
            mine = {rank: dump.groups[name] for rank, dump in dumps.items() if name in dump.groups}
            apart = tuple(
                rank
                for rank, told_by_it in mine.items()
                if any(rank in ranks and ranks != told_by_it for ranks in members)
            )
            if apart:
                yield (
                    f"{messages.describe_ranks(apart)} and others tell other members of group"
                    f" {name}: were groups made in another order?"
                )


def _infer_members(
    rank: int,
    description: str,
    reported_members: Iterable[tuple[int, ...]],
    users: set[int],
    dumps: DumpsByRank,
) -> tuple[int, ...]:
    """Of a group whose members the rank's own dump does not tell."""
    mine = [ranks for ranks in reported_members if rank in ranks]
    if len(mine) == 1:
        return mine[0]
    if description == "default_pg":
        return tuple(range(min(max(dumps) + 1, MAX_DUMP_RANKS)))
    return tuple(
        sorted(other for other in users if not any(other in ranks for ranks in reported_members))
    )


def _add_stream(
    attempt: Attempt, rank: int, kind: StreamKind, group: Group, peer: int | None = None
) -> Place:
    process = attempt.processes[rank]
    place = Place(uid=len(process.streams) + 1, kind=kind, group=group, peer=peer)
    attempt.add_stream(process, place)
    return place


def _fill_collectives(
    job: OfflineJob, group: Group, uses: Mapping[int, GroupInstance], dumps: DumpsByRank
) -> list[int]:
    """Fills in its members' places, and returns those of whom nothing is known.

    Of them it is assumed that they finished what all others did, and no more.
    """
    members: RecordsByRank = {}
    places: dict[int, Place] = {}
    for rank in group.ranks:
        made = dumps[rank].calls.get(uses[rank], ()) if rank in uses else ()
        mine = [record for record in made if not record.never_submitted]
        entered = (
            mine[-1].seq
            if mine
            else made[0].seq - 1
            if made
            else _count_collectives(job, dumps.get(rank), group.name)
        )
        if entered is not None:
            places[rank], members[rank] = (
                _add_stream(job.attempt, rank, StreamKind.COLLECTIVE, group),
                mine,
            )
            places[rank].entered = places[rank].completed = entered
    conflict = reconcile_calls(job, group, members)
    at: dict[int, dict[int, FlightRecord]] = {}
    tells = group.backend in job.completion_backends
    begun = {
        first.seq
        for rank, mine in members.items()
        if (first := _find_unfinished(mine)) and first.started and dumps[rank].reports_starts
    }
    for rank, place in places.items():
        mine = members[rank]
        first = (
            _find_unfinished(mine)
            if tells
            else _find_unarrived(mine, members, len(group.ranks), at)
        )
        if first is not None:
            place.completed, place.pending_at = first.seq - 1, 0.0
            if tells:
                # A device runs the calls of a group in order: what is queued behind is not yet
                # entered.
                place.entered = first.seq
                if dumps[rank].reports_starts and not first.started and first.seq in begun:
                    place.entered, place.pending_at = first.seq - 1, None
                    job.queued_ranks.setdefault((group.key, first.seq), set()).add(rank)
        fill_stream(place, mine, conflict, tells)
    if conflict:
        job.attempt.diverged_groups.add(group.key)
    finished = min((place.completed or 0 for place in places.values()), default=0)
    unknown = [rank for rank in group.ranks if rank not in places]
    for rank in unknown:
        place = _add_stream(job.attempt, rank, StreamKind.COLLECTIVE, group)
        place.entered = place.completed = finished
    return unknown


def _count_collectives(job: OfflineJob, dump: FlightDump | None, name: str) -> int | None:
    """How many collectives a rank made whose ring holds none of the group: by the recorder's
    counts, or none where nothing was lost.
    """
    if dump is not None and name in dump.enqueued_counts and name not in job.p2p_groups:
        return dump.enqueued_counts[name]
    return 0 if dump is not None and not dump.wrapped else None


def _find_unfinished(records: Sequence[FlightRecord]) -> FlightRecord | None:
    """The first behind the last that is over: they are run in order, whatever is told of some that
    was never looked at again.
    """
    over = _count_completed(records)
    return records[over] if over < len(records) else None


def _count_completed(records: Sequence[FlightRecord]) -> int:
    return next((at + 1 for at in range(len(records) - 1, -1, -1) if records[at].completed), 0)


def _find_unarrived(
    records: Sequence[FlightRecord],
    members: RecordsByRank,
    size: int,
    records_by_seq: dict[int, dict[int, FlightRecord]],
) -> FlightRecord | None:
    """Where no ends are told, as on gloo, the newest call, unless it must be over.

    Where all made the same call, it is finished for everybody once somebody got past it; but a root
    may leave before the others.
    """
    if not records:
        return None
    newest = records[-1]
    if newest.seq not in records_by_seq:
        records_by_seq[newest.seq] = {
            rank: record
            for rank, told in members.items()
            if (record := find_record(told, newest.seq)) is not None
        }
    same = {
        rank
        for rank, record in records_by_seq[newest.seq].items()
        if record.signature.agree == newest.signature.agree
    }
    together = newest.signature.op not in _ROOTED_OPS
    past = newest.retired or (
        together and any(records_by_seq[newest.seq][rank].retired for rank in same)
    )
    past |= (
        together
        and len(same) == size
        and any(told[-1].seq > newest.seq for told in members.values())
    )
    return None if past else newest


def _fill_channels(
    attempt: Attempt, group: Group, uses: Mapping[int, GroupInstance], dumps: DumpsByRank
) -> None:
    """Sends and receives by channel; a receive from any source only where every ring reaches back
    to the beginning.
    """
    told: dict[tuple[StreamKind, int, int], list[FlightRecord]] = {}
    for rank, use in uses.items():
        for record in dumps[rank].p2p_calls.get(use, ()):
            if (
                record.peer is not None
                and record.peer < len(group.ranks)
                and not record.never_submitted
            ):
                peer = group.ranks[record.peer] if record.peer >= 0 else -1
                told.setdefault((StreamKind(record.signature.op), rank, peer), []).append(record)
    whole_group = all(rank in dumps and not dumps[rank].wrapped for rank in group.ranks)
    for (kind, rank, peer), mine in told.items():
        other = StreamKind.RECV if kind is StreamKind.SEND else StreamKind.SEND
        theirs = told.get((other, peer, rank), [])
        if peer < 0 and (kind is StreamKind.SEND or not whole_group):
            continue
        whole = whole_group or (
            peer in dumps and not dumps[rank].wrapped and not dumps[peer].wrapped
        )
        place = _add_stream(attempt, rank, kind, group, peer)
        _fill_channel(place, mine, theirs, whole, dumps[rank].reports_starts)
        if not theirs and peer in attempt.processes and peer not in dumps:
            mirrored = _add_stream(attempt, peer, other, group, rank)
            mirrored.entered = mirrored.completed = place.completed or 0


def _fill_channel(
    stream: Place,
    records: list[FlightRecord],
    peer_records: list[FlightRecord],
    is_complete: bool,
    reports_starts: bool,
) -> None:
    pending, opposite = _find_unfinished(records), _find_unfinished(peer_records)
    over = _count_completed(records)
    counted = records if is_complete else records[over:]
    stream.completed, stream.op = over if is_complete else 0, stream.kind.value
    # Counted from the first unfinished ones, the two ends surely speak of the same message only
    # once both are at it.
    both = is_complete or (
        pending is not None and opposite is not None and pending.started and opposite.started
    )
    for seq, record in enumerate(counted, 1):
        if -CALLS_BEFORE < seq - stream.completed <= CALLS_AFTER:
            signature = record.signature if both else Signature(op=stream.kind.value)
            stream.calls[seq] = Call(
                seq=seq,
                signature=signature,
                site=record.site,
                blocking=True if seq > stream.completed else None,
            )
    # The rest of a device's queue is not yet entered.
    queued = pending is None or (
        reports_starts and not pending.started and opposite is not None and opposite.started
    )
    stream.entered = stream.completed + (not queued)
    stream.pending_at = None if queued else 0.0
