"""The positions of a group's members in its collectives, from Flight Recorder dumps. Pure.

If a backend reports completion, a member is in its first unfinished call. If it does not, as gloo,
a member is in its newest call unless the calls of other members show that it is complete.

Some errors show only when the calls of all members are compared: two roots of one call, or an
all-to-all that sends more than its members expect.

Both the status of a group and the states of its entries say how far a device has come. A host that
is blocked by a full queue has made an entry whose events are not recorded yet, and CUDA calls such
an event complete: so a completed entry behind pending ones proves nothing where there is a status.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from hangwatch.diagnosis.messages import describe_position
from hangwatch.model.calls import (
    CHAIN_BASE,
    UINT64_MASK,
    Call,
    StreamKind,
    extend_chain,
    with_agreement_hash,
)
from hangwatch.model.groups import DeviceCounters, Group, GroupKey
from hangwatch.model.operators import FLIGHT_OPERATIONS, OPERATIONS, ListSide, MustMatch
from hangwatch.model.verdicts import DeviceProgress
from hangwatch.tracking.attempt import Attempt
from hangwatch.tracking.call_stream import CallStream

from .calls import ARRIVALS_ONLY_BACKEND, FlightDump, FlightRecord, GroupInstance
from .entries import is_invalid_call

NOW_S = 1e6  # a time at which every pending call of a dump has waited for long
LAST_SEEN_S = NOW_S - 5.0
# The calls of a rank that are kept, before and after its newest one and the first difference: more
# than the diagnosis aligns.
CALLS_BEFORE = 160
CALLS_AFTER = 32
_RECORD_ORDER_S = 1e-6
_NO_COLLECTIVE = -1  # the number of the last collective, where there is none
_ROOTED_OPS = frozenset(op for op, spec in OPERATIONS.items() if spec.is_rooted)
# The sizes of these operations may differ between members, so they are compared across all of them.
_ALL_TO_ALL_OPS = frozenset(op for op, spec in FLIGHT_OPERATIONS.items() if spec.split_args)
_ROOT_LIST_SIDES = {
    op: spec.list_side
    for op, spec in FLIGHT_OPERATIONS.items()
    if spec.is_rooted and spec.list_side is not None
}

DumpsByRank = Mapping[int, FlightDump]
RecordsByRank = dict[int, list[FlightRecord]]  # one group's records, ordered by number


@dataclass(slots=True, kw_only=True)
class OfflineJob:
    """The attempt, as heartbeats would have built it, and the facts that only dumps provide."""

    attempt: Attempt
    # Backends whose dumps show which calls are complete.
    completion_backends: set[str] = field(default_factory=set)
    # Groups with sends and receives, which the recorder's counts include.
    p2p_groups: set[str] = field(default_factory=set)
    # Each rank's groups whose calls are unknown and were assumed to match the others'.
    assumed_groups: dict[int, set[str]] = field(default_factory=dict)
    # The number of collectives that the host has queued on its device, by group and rank.
    queued_counts: dict[GroupKey, dict[int, int]] = field(default_factory=dict)
    # Ranks whose call, at the first difference of a group, is invalid whatever the others called.
    invalid_ranks: dict[GroupKey, set[int]] = field(default_factory=dict)
    # Groups with a note on sizes that do not add up.
    ambiguous_groups: set[GroupKey] = field(default_factory=set)
    # Sentences for the user on oddities that accuse no rank.
    notes: list[str] = field(default_factory=list)


@dataclass(slots=True, kw_only=True)
class _GroupRecords:
    """The records of one group's members, as far as something is known about them."""

    group: Group
    streams: dict[int, CallStream] = field(default_factory=dict)
    members: RecordsByRank = field(default_factory=dict)
    # The calls that were searched for so far, by number and rank.
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

    These are assumed to have completed the calls that all others have completed, and no more.
    """
    records = _collect_records(job, group, uses, dumps)
    conflict = _reconcile_calls(job, group, records.members)
    calls_block = group.backend in job.completion_backends
    if calls_block:
        _set_positions_by_completion(job, records, uses, dumps)
    else:
        for rank, recorded in records.members.items():
            if recorded and not _is_newest_complete(records, recorded[-1]):
                stream = records.streams[rank]
                stream.completed = recorded[-1].seq - 1
                stream.pending_at = 0.0
    for rank, stream in records.streams.items():
        _fill_stream(stream, records.members[rank], calls_block)
        if conflict:
            _add_running_hashes(stream, records.members[rank], conflict)
        else:  # all members made equal calls, so that a hash of each of the newest ones serves
            hashes = {
                record.seq: extend_chain(_get_common_hash(record.seq - 1), record.signature.agree)
                for record in _slice_newest(stream, records.members[rank])
                if not record.may_be_truncated
            }
            stream.reported_hashes = tuple(sorted(hashes.items()))
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
        entered: int | None = None
        if submitted:
            entered = submitted[-1].seq
        elif recorded:
            entered = recorded[0].seq - 1
        elif (dump := dumps.get(rank)) is not None:
            # The ring of this rank holds no call of the group: the recorder's count says how many it
            # made, and without one a ring that has lost nothing shows that it made none.
            if group.name in dump.statuses and group.name not in job.p2p_groups:
                entered = max(dump.statuses[group.name].enqueued, 0)
            elif not dump.wrapped:
                entered = 0
        if entered is not None:
            stream = add_stream(job.attempt, rank, StreamKind.COLLECTIVE, group)
            stream.entered = stream.completed = entered
            collected.streams[rank] = stream
            collected.members[rank] = submitted
    return collected


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
        device = stream.device = _measure_device(
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
        # The number is not a time, but it orders the first unfinished calls of a rank's groups.
        stream.pending_at = record.record_id * _RECORD_ORDER_S
        is_queued = dumps[rank].reports_starts and not record.started
        # A device runs the calls of a group in order: calls queued behind the first unfinished one
        # count as not entered.
        is_entered = not is_queued or record.seq not in started_seqs
        stream.entered = record.seq if is_entered else record.seq - 1


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
    for record in _slice_newest(stream, records):
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


def _slice_newest(stream: CallStream, records: Sequence[FlightRecord]) -> Sequence[FlightRecord]:
    """The calls around the newest one."""
    return _slice_records(records, stream.entered - CALLS_BEFORE, stream.entered + CALLS_AFTER)


def _slice_records(
    records: Sequence[FlightRecord], first: int, last: int
) -> Sequence[FlightRecord]:
    """The records with numbers from ``first`` to ``last``."""
    return records[find_record_index(records, first) : find_record_index(records, last + 1)]


def _get_common_hash(seq: int) -> int:
    return (seq * CHAIN_BASE | 1) & UINT64_MASK


def add_stream(
    attempt: Attempt, rank: int, kind: StreamKind, group: Group, peer: int | None = None
) -> CallStream:
    process = attempt.processes[rank]
    stream = CallStream(uid=len(process.streams) + 1, kind=kind, group=group, peer=peer)
    attempt.add_stream(process, stream)
    return stream


def find_unfinished(records: Sequence[FlightRecord]) -> FlightRecord | None:
    """The first call after the last completed one. Calls run in order: one before that is complete
    even if its record was never updated.
    """
    completed = count_completed(records)
    return records[completed] if completed < len(records) else None


def count_completed(records: Sequence[FlightRecord]) -> int:
    """The number of records up to and including the last completed one."""
    return next((at + 1 for at in range(len(records) - 1, -1, -1) if records[at].completed), 0)


def find_record_index(records: Sequence[FlightRecord], seq: int) -> int:
    """The index of the first record whose number is ``seq`` or higher."""
    return bisect_left(records, seq, key=lambda record: record.seq)


def find_record(records: Sequence[FlightRecord], seq: int) -> FlightRecord | None:
    index = find_record_index(records, seq)
    if index < len(records) and records[index].seq == seq:
        return records[index]
    return None


def _reconcile_calls(job: OfflineJob, group: Group, members: RecordsByRank) -> int:
    """The number of the group's first call that differs between members, 0 if there is none.

    Replaces the records in ``members`` whose signature follows from the calls of all members.
    """
    # The calls that can only be judged together with the other members', by number and rank.
    joint_calls: dict[int, dict[int, FlightRecord]] = {}
    for rank, recorded in members.items():
        for record in recorded:
            if record.signature.op in _ALL_TO_ALL_OPS or record.signature.op in _ROOT_LIST_SIDES:
                joint_calls.setdefault(record.seq, {})[rank] = record
    roots_by_seq: dict[int, set[int]] = {}
    for seq, records in joint_calls.items():
        ops = {record.signature.op for record in records.values()}
        if len(ops) > 1 or records.keys() != set(group.ranks):
            continue
        if ops <= _ALL_TO_ALL_OPS:
            reconciled = _reconcile_all_to_all(job, group, records)
        else:
            roots = _find_claimed_roots(records)
            reconciled = {}
            if len(roots) > 1:
                roots_by_seq[seq] = roots
                for rank in roots:  # each rank itself becomes the root, so that they differ
                    signature = replace(records[rank].signature, root=group.ranks.index(rank))
                    must_match = MustMatch.DTYPE | MustMatch.ROOT
                    hashed = with_agreement_hash(signature, must_match, ())
                    reconciled[rank] = replace(records[rank], signature=hashed)
        for rank, record in reconciled.items():
            members[rank][find_record_index(members[rank], seq)] = record
    conflict = _find_conflict(members)
    if group.backend != ARRIVALS_ONLY_BACKEND:
        _find_invalid_calls(job, group, members, conflict)
    if conflict in roots_by_seq:
        job.invalid_ranks[group.key] = roots_by_seq[conflict]
    return conflict


def _reconcile_all_to_all(
    job: OfflineJob, group: Group, records_by_rank: dict[int, FlightRecord]
) -> dict[int, FlightRecord]:
    """The records of an all-to-all whose signatures change. Split sizes that match between all
    members need no further comparison. If only totals are recorded and most ranks have the same,
    the ranks with others are the outliers.
    """
    records = [records_by_rank[rank] for rank in group.ranks]
    splits = [record.signature.splits for record in records if record.signature.splits is not None]
    has_all_splits = len(splits) == len(records) and all(
        len(sent) == len(expected) == len(records) for sent, expected in splits
    )
    if has_all_splits:
        sent_splits = [sent for sent, _ in splits]
        expected_splits = [expected for _, expected in splits]
        if list(zip(*sent_splits, strict=True)) != expected_splits:
            return {}
        return {rank: _with_splits(record, None) for rank, record in records_by_rank.items()}
    sent_total = sum(record.sizes.elements[0] for record in records)
    expected_total = sum(record.sizes.elements[1] for record in records)
    if splits or sent_total == expected_total:
        return {}
    elements, count = Counter(record.sizes.elements for record in records).most_common(1)[0]
    if elements[0] == elements[1] and 2 * count > len(records):
        return {
            rank: _with_splits(record, ((record.sizes.elements[0],), (record.sizes.elements[1],)))
            for rank, record in records_by_rank.items()
        }
    if not any(record.completed for record in records) and group.key not in job.ambiguous_groups:
        job.ambiguous_groups.add(group.key)
        job.notes.append(
            f"{_describe_call(group, records[0])} sends {sent_total} elements in total and expects"
            f" {expected_total}: the dumps do not show which rank's number is wrong"
        )
    return {}


def _with_splits(
    record: FlightRecord, splits: tuple[tuple[int, ...], tuple[int, ...]] | None
) -> FlightRecord:
    return replace(record, signature=replace(record.signature, splits=splits))


def _find_claimed_roots(records_by_rank: dict[int, FlightRecord]) -> set[int]:
    """The ranks that called a gather or scatter as its root: they passed the list of tensors, which
    gloo records as one larger tensor.
    """
    op = next(iter(records_by_rank.values())).signature.op
    side = 1 if _ROOT_LIST_SIDES[op] is ListSide.OUTPUTS else 0
    roots: set[int] = set()
    for rank, record in records_by_rank.items():
        sizes = record.sizes
        if sizes.tensors[side] > 1 or sizes.elements[side] > sizes.elements[1 - side]:
            roots.add(rank)
    return roots


def _find_conflict(members: RecordsByRank) -> int:
    """The number of the first call that two ranks made differently, or 0. A call that the beginning
    of a ring may have truncated is not compared.
    """
    hashes: dict[int, int] = {}
    conflict = 0
    for records in members.values():
        for record in records:
            agree = record.signature.agree
            if record.may_be_truncated or hashes.setdefault(record.seq, agree) == agree:
                continue
            if not conflict or record.seq < conflict:
                conflict = record.seq
    return conflict


def _find_invalid_calls(
    job: OfflineJob, group: Group, members: RecordsByRank, conflict: int
) -> None:
    """Records calls that are invalid whatever the others called: some ranks' calls at the first
    difference, otherwise the unfinished call that all made.
    """
    size = len(group.ranks)
    if conflict:
        invalid_ranks: set[int] = set()
        for rank, records in members.items():
            record = find_record(records, conflict)
            if record is not None and is_invalid_call(record.signature.op, record.sizes, size):
                invalid_ranks.add(rank)
        job.invalid_ranks[group.key] = invalid_ranks
        return
    newest = [records[-1] for records in members.values() if records]
    unfinished = next((record for record in newest if not record.completed), None)
    if unfinished is not None and is_invalid_call(unfinished.signature.op, unfinished.sizes, size):
        input_count, output_count = unfinished.sizes.tensors
        sent, received = unfinished.sizes.elements
        inputs = "tensors" if input_count > 1 else "tensor"
        outputs = "tensors" if output_count > 1 else "tensor"
        job.notes.append(
            f"{_describe_call(group, unfinished)} is invalid on each of its {size} ranks:"
            f" {input_count} input {inputs} with {sent} elements, {output_count} output {outputs}"
            f" with {received}"
        )


def _describe_call(group: Group, record: FlightRecord) -> str:
    return f"{record.signature.op} ({describe_position(group, record.seq)})"


def _measure_device(
    dump: FlightDump,
    instance: GroupInstance,
    records: Sequence[FlightRecord],
    entered: int,
    *,
    is_counted: bool,
    read_at: float,
) -> DeviceProgress | None:
    """The device's progress in the collectives of one group; None if it is unknown.

    ``records`` are its calls, ordered by number. The host has queued ``entered`` of them.
    ``is_counted``: the recorder's status counts the group's collectives, and nothing else.
    """
    status = dump.statuses.get(instance[0]) if is_counted else None
    if (instance[0], instance[1] + 1) in dump.group_instances:
        status = None  # the status is that of a later group of the same name
    if status is not None and status.enqueued <= _NO_COLLECTIVE:
        status = None
    completed = _get_last_completed(records, entered, status)
    if completed is None:
        return None
    started = None if status is None else status.started
    if dump.reports_starts or started is not None:
        started = completed if started is None else max(completed, started)
        for record in records:
            if record.started:
                started = max(started, record.seq)
    return DeviceProgress(
        enqueued=max(entered, completed), started=started, completed=completed, read_at=read_at
    )


def _get_last_completed(
    records: Sequence[FlightRecord], entered: int, status: DeviceCounters | None
) -> int | None:
    """The number of the last completed collective; None if the ring has lost the calls that would
    show it.
    """
    if status is not None and status.completed > _NO_COLLECTIVE:
        completed = status.completed
        for record in records:
            if not record.completed:
                break
            completed = max(completed, record.seq)
        return completed
    count = count_completed(records)
    if count:
        return records[count - 1].seq
    queued_before = records[0].seq - 1 if records else entered
    return 0 if status is not None or queued_before == 0 else None
