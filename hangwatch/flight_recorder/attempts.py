"""Rebuilds a job's state from Flight Recorder dumps, as heartbeats would have built it: each rank's
position in each of its process groups. Pure.

Calls are never matched by their position in a ring. Collectives are matched by their number in the
group; `channels` says how sends and receives are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hangwatch.model.backends import COALESCED_END_BACKENDS
from hangwatch.model.calls import StreamKind
from hangwatch.model.groups import Group
from hangwatch.model.operators import OPERATIONS
from hangwatch.model.ranks import Lifecycle
from hangwatch.protocol import heartbeat
from hangwatch.tracking.attempt import Attempt
from hangwatch.tracking.call_stream import CallStream as Place
from hangwatch.tracking.process import Process

from .calls import FlightRecord
from .channels import fill_channels
from .collectives import (
    OfflineJob,
    RecordsByRank,
    fill_stream,
    find_record,
    reconcile_calls,
)
from .dumps import FlightDump, GroupInstance
from .group_members import DumpsByRank, collect_groups, describe_contradictions
from .streams import add_stream, find_unfinished

NOW_S = 1e6  # seconds: everything in a dump has waited for long
_LAST_SEEN_S = NOW_S - 5.0
_ROOTED_OPS = frozenset(op for op, spec in OPERATIONS.items() if spec.is_rooted)


def build_job(dumps: DumpsByRank, name: str) -> OfflineJob:
    """The state of the job at the time of the dumps."""
    groups = collect_groups(dumps)
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
    job = OfflineJob(attempt=attempt, notes=list(describe_contradictions(dumps)))
    job.completion_backends = _find_completion_backends(dumps)
    job.p2p_groups = {name for dump in dumps.values() for name, _ in dump.p2p_calls}
    for group, uses in groups:
        for rank in _fill_collectives(job, group, uses, dumps):
            job.assumed_groups.setdefault(rank, set()).add(group.name)
        fill_channels(attempt, group, uses, dumps)
    for process in attempt.processes.values():
        process.refresh_streams()
        for place in process.streams.values():
            attempt.track_calls(process, place, place.calls.values())
        attempt.update_suspects(process)
    return job


def _find_completion_backends(dumps: DumpsByRank) -> set[str]:
    """The backends that report completion: those that did so for some call, and those known to,
    in case the first call hangs.
    """
    reporting = {
        dump.backends[use]
        for dump in dumps.values()
        for kept in (dump.calls, dump.p2p_calls)
        for use, records in kept.items()
        if any(record.started for record in records)
    }
    return reporting.union(COALESCED_END_BACKENDS)


def _fill_collectives(
    job: OfflineJob, group: Group, uses: Mapping[int, GroupInstance], dumps: DumpsByRank
) -> list[int]:
    """Sets the positions of a group's members and returns the members about which nothing is known.

    These are assumed to have completed what all others did, and no more.
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
                add_stream(job.attempt, rank, StreamKind.COLLECTIVE, group),
                mine,
            )
            places[rank].entered = places[rank].completed = entered
    conflict = reconcile_calls(job, group, members)
    at: dict[int, dict[int, FlightRecord]] = {}
    tells = group.backend in job.completion_backends
    begun = {
        first.seq
        for rank, mine in members.items()
        if (first := find_unfinished(mine)) and first.started and dumps[rank].reports_starts
    }
    for rank, place in places.items():
        mine = members[rank]
        first = (
            find_unfinished(mine) if tells else _find_unarrived(mine, members, len(group.ranks), at)
        )
        if first is not None:
            place.completed, place.pending_at = first.seq - 1, 0.0
            if tells:
                # A device runs the calls of a group in order: calls queued behind the first
                # unfinished one count as not entered.
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
        place = add_stream(job.attempt, rank, StreamKind.COLLECTIVE, group)
        place.entered = place.completed = finished
    return unknown


def _count_collectives(job: OfflineJob, dump: FlightDump | None, name: str) -> int | None:
    """How many collectives a rank made if its ring holds none of the group: by the recorder's
    counts, or 0 if its ring has lost nothing. None if that is unknown.
    """
    if dump is not None and name in dump.enqueued_counts and name not in job.p2p_groups:
        return dump.enqueued_counts[name]
    return 0 if dump is not None and not dump.wrapped else None


def _find_unarrived(
    records: Sequence[FlightRecord],
    members: RecordsByRank,
    size: int,
    records_by_seq: dict[int, dict[int, FlightRecord]],
) -> FlightRecord | None:
    """The newest call on a backend that does not report completion, such as gloo; None if it must
    be complete.

    If all members made the same call, it is complete for all of them after any of them made a later
    call. The root of a rooted operation is an exception: it may continue before the others.
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
