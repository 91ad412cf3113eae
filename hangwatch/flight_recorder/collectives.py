"""The positions of a group's members in its collectives, from Flight Recorder dumps. Pure.

If a backend reports completion, a member is in its first unfinished call. If it does not, as gloo,
a member is in its newest call unless the calls of other members show that it is complete.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from hangwatch.model.calls import Call, StreamKind
from hangwatch.model.groups import Group
from hangwatch.model.operators import OPERATIONS
from hangwatch.model.signatures import CHAIN_BASE, UINT64_MASK, extend_chain
from hangwatch.tracking.call_stream import CallStream

from .calls import FlightRecord
from .device_positions import measure_device
from .dump_calls import GroupInstance
from .dumps import FlightDump
from .group_members import DumpsByRank
from .offline_job import LAST_SEEN_S, OfflineJob
from .reconciliation import RecordsByRank, find_record, find_record_index, reconcile_calls
from .streams import add_stream

# How many calls of a rank are kept, before and after its newest one and the first difference: more
# than the diagnosis aligns.
CALLS_BEFORE = 160
CALLS_AFTER = 32
_RECORD_ORDER_S = 1e-6
_ROOTED_OPS = frozenset(op for op, spec in OPERATIONS.items() if spec.is_rooted)


@dataclass(slots=True, kw_only=True)
class _GroupRecords:
    """The records of one group, by rank, of the members about which something is known."""

    group: Group
    streams: dict[int, CallStream] = field(default_factory=dict)
    members: RecordsByRank = field(default_factory=dict)
    # By number and rank, the calls that were searched for so far.
    records_by_seq: dict[int, dict[int, FlightRecord]] = field(default_factory=dict)

    def get_call_records(self, seq: int) -> dict[int, FlightRecord]:
        """The records of one call, by rank."""
        if seq not in self.records_by_seq:
            found = {rank: find_record(records, seq) for rank, records in self.members.items()}
            self.records_by_seq[seq] = {
                rank: record for rank, record in found.items() if record is not None
            }
        return self.records_by_seq[seq]


def fill_collectives(
    job: OfflineJob, group: Group, uses: Mapping[int, GroupInstance], dumps: DumpsByRank
) -> list[int]:
    """Sets the positions of a group's members and returns the members about which nothing is known.

    These are assumed to have completed what all others did, and no more.
    """
    records = _collect_records(job, group, uses, dumps)
    conflict = reconcile_calls(job, group, records.members)
    if group.backend in job.completion_backends:
        _set_positions_by_completion(job, records, uses, dumps)
        calls_block = True
    else:
        _set_positions_by_arrival(records)
        calls_block = False
    for rank, stream in records.streams.items():
        _fill_stream(stream, records.members[rank], calls_block)
        if conflict:
            _add_running_hashes(stream, records.members[rank], conflict)
        else:
            _add_hashes_of_calls(stream, records.members[rank])
    if conflict:
        job.attempt.diverged_groups.add(group.key)
    completed_by_all = min((s.completed or 0 for s in records.streams.values()), default=0)
    unknown_ranks = [rank for rank in group.ranks if rank not in records.streams]
    for rank in unknown_ranks:
        stream = add_stream(job.attempt, rank, StreamKind.COLLECTIVE, group)
        stream.entered = stream.completed = completed_by_all
    return unknown_ranks


def _collect_records(
    job: OfflineJob, group: Group, uses: Mapping[int, GroupInstance], dumps: DumpsByRank
) -> _GroupRecords:
    """The members' records, and streams with the number of calls that each has entered."""
    collected = _GroupRecords(group=group)
    for rank in group.ranks:
        recorded: Sequence[FlightRecord] = ()
        if rank in uses:
            recorded = dumps[rank].calls.get(uses[rank], ())
        submitted = [record for record in recorded if not record.never_submitted]
        entered: int | None
        if submitted:
            entered = submitted[-1].seq
        elif recorded:
            entered = recorded[0].seq - 1
        else:
            entered = _count_collectives(job, dumps.get(rank), group.name)
        if entered is not None:
            stream = add_stream(job.attempt, rank, StreamKind.COLLECTIVE, group)
            stream.entered = stream.completed = entered
            collected.streams[rank] = stream
            collected.members[rank] = submitted
    return collected


def _count_collectives(job: OfflineJob, dump: FlightDump | None, name: str) -> int | None:
    """How many collectives a rank made if its ring holds none of the group: by the recorder's
    counts, or 0 if its ring has lost nothing. None if that is unknown.
    """
    if dump is None:
        return None
    if name in dump.statuses and name not in job.p2p_groups:
        return max(dump.statuses[name].enqueued, 0)
    return None if dump.wrapped else 0


def _set_positions_by_completion(
    job: OfflineJob,
    records: _GroupRecords,
    uses: Mapping[int, GroupInstance],
    dumps: DumpsByRank,
) -> None:
    """Each member is in the first call that its device has not completed. A call that its device
    has only queued, while another device has started it, counts as not entered.
    """
    name = records.group.name
    unfinished: dict[int, FlightRecord] = {}
    for rank, recorded in records.members.items():
        stream = records.streams[rank]
        device = stream.device = measure_device(
            dumps[rank],
            uses.get(rank, (name, 0)),
            recorded,
            stream.entered,
            is_counted=name not in job.p2p_groups,
            read_at=LAST_SEEN_S,
        )
        job.queued_counts.setdefault(records.group.key, {})[rank] = stream.entered
        index = 0
        if device is not None:
            job.attempt.device_groups[records.group.key] = None
            index = find_record_index(recorded, device.completed + 1)
        if index < len(recorded):
            unfinished[rank] = recorded[index]
    started_seqs = {
        record.seq
        for rank, record in unfinished.items()
        if record.started and dumps[rank].reports_starts
    }
    for rank, record in unfinished.items():
        stream = records.streams[rank]
        stream.completed = record.seq - 1
        # Not a time, but it orders the first unfinished calls of a rank's groups.
        stream.pending_at = record.record_id * _RECORD_ORDER_S
        is_queued = dumps[rank].reports_starts and not record.started
        # A device runs the calls of a group in order: calls queued behind the first unfinished one
        # count as not entered.
        is_entered = not is_queued or record.seq not in started_seqs
        stream.entered = record.seq if is_entered else record.seq - 1


def _set_positions_by_arrival(records: _GroupRecords) -> None:
    """Each member is in its newest call unless that is known to be complete."""
    for rank, recorded in records.members.items():
        if recorded and not _is_newest_complete(records, recorded[-1]):
            stream = records.streams[rank]
            stream.completed = recorded[-1].seq - 1
            stream.pending_at = 0.0


def _is_newest_complete(records: _GroupRecords, newest: FlightRecord) -> bool:
    """Whether a member's newest call must be complete.

    If all members made the same call, it is complete for all of them after any of them made a later
    call. The root of a rooted operation is an exception: it may continue before the others.
    """
    if newest.retired:
        return True
    if newest.signature.op in _ROOTED_OPS:
        return False
    same_calls = [
        record
        for record in records.get_call_records(newest.seq).values()
        if record.signature.agree == newest.signature.agree
    ]
    if any(record.retired for record in same_calls):
        return True
    if len(same_calls) < len(records.group.ranks):
        return False
    return any(recorded[-1].seq > newest.seq for recorded in records.members.values())


def _fill_stream(stream: CallStream, records: Sequence[FlightRecord], calls_block: bool) -> None:
    """Adds the calls around the newest one. ``calls_block``: a pending call blocks its rank."""
    shown = _slice_records(records, stream.entered - CALLS_BEFORE, stream.entered + CALLS_AFTER)
    for record in shown:
        is_blocking = calls_block and stream.is_pending and record.seq == stream.entered
        stream.add_call(
            Call(
                seq=record.seq,
                signature=record.signature,
                site=record.site,
                blocking=True if is_blocking else None,
            )
        )
    newest = stream.calls.get(stream.entered)
    stream.op = newest.signature.op if newest is not None else ""


def _add_running_hashes(stream: CallStream, records: Sequence[FlightRecord], conflict: int) -> None:
    """Adds running hashes to the calls around the first difference.

    Before it all members have equal calls, wherever their rings begin, so that a hash of the number
    alone serves.
    """
    running_hash = last_seq = 0
    hashes = {conflict - 1: _get_common_hash(conflict - 1)}
    for record in _slice_records(records, conflict - CALLS_BEFORE, conflict + CALLS_AFTER):
        seq, agree = record.seq, record.signature.agree
        if seq < conflict:
            running_hash = _get_common_hash(seq)
        elif record.may_be_truncated:
            break
        elif seq == conflict:
            running_hash = extend_chain(_get_common_hash(seq - 1), agree)
        elif last_seq == seq - 1:
            running_hash = extend_chain(running_hash, agree)
        else:
            break
        last_seq = seq
        call = stream.calls.get(seq) or Call(seq=seq, signature=record.signature, site=record.site)
        stream.add_call(replace(call, chain=running_hash))
        hashes[seq] = running_hash
    stream.reported_hashes = tuple(sorted(hashes.items()))


def _add_hashes_of_calls(stream: CallStream, records: Sequence[FlightRecord]) -> None:
    """Adds a hash for each of the newest calls, of a group in which no two ranks made different ones."""
    hashes = {
        record.seq: extend_chain(_get_common_hash(record.seq - 1), record.signature.agree)
        for record in _slice_records(
            records, stream.entered - CALLS_BEFORE, stream.entered + CALLS_AFTER
        )
        if not record.may_be_truncated
    }
    stream.reported_hashes = tuple(sorted(hashes.items()))


def _slice_records(
    records: Sequence[FlightRecord], first: int, last: int
) -> Sequence[FlightRecord]:
    """The records with numbers from ``first`` to ``last``."""
    return records[find_record_index(records, first) : find_record_index(records, last + 1)]


def _get_common_hash(seq: int) -> int:
    return (seq * CHAIN_BASE | 1) & UINT64_MASK
