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

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from hangwatch.diagnosis.messages import describe_position
from hangwatch.model.calls import (
    CHAIN_BASE,
    UINT64_MASK,
    Call,
    Signature,
    StreamKind,
    extend_chain,
    with_agreement_hash,
)
from hangwatch.model.groups import Group, GroupKey
from hangwatch.model.operators import FLIGHT_OPERATIONS, OPERATIONS, ListSide, MustMatch
from hangwatch.model.verdicts import DeviceProgress
from hangwatch.tracking.attempt import Attempt
from hangwatch.tracking.call_stream import CallStream

from .calls import ARRIVALS_ONLY_BACKEND, FlightDump, FlightRecord, GroupCalls
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

SignaturesByRank = dict[int, Signature]
CallsByRank = Mapping[int, GroupCalls]  # the calls of one group, by the ranks that made any


@dataclass(slots=True, kw_only=True)
class OfflineJob:
    """The attempt, as heartbeats would have built it, and the facts that only dumps provide."""

    attempt: Attempt
    dumps: Mapping[int, FlightDump]  # the keys are ranks
    # Backends whose dumps show which calls are complete.
    completion_backends: set[str]
    # Groups with sends and receives, which the recorder's counts include.
    p2p_groups: set[str]
    # Each rank's groups whose calls are unknown and were assumed to match the others'.
    assumed_groups: dict[int, set[str]] = field(default_factory=dict)
    # The number of collectives that the host has queued on its device, by group and rank.
    queued_counts: dict[GroupKey, dict[int, int]] = field(default_factory=dict)
    # Ranks whose call, at the first difference of a group, is invalid whatever the others called.
    invalid_ranks: dict[GroupKey, set[int]] = field(default_factory=dict)
    # Sentences for the user on oddities that accuse no rank.
    notes: list[str] = field(default_factory=list)


def fill_collectives(job: OfflineJob, group: Group, calls_by_rank: CallsByRank) -> list[int]:
    """Sets the positions of a group's members and returns the members about which nothing is known.

    These are assumed to have completed the calls that all others have completed, and no more.
    """
    members = _GroupMembers(job=job, group=group, calls_by_rank=calls_by_rank)
    members.read_records()
    conflict = members.reconcile_calls()
    calls_block = group.backend in job.completion_backends
    if calls_block:
        members.set_positions_by_completion()
    else:
        members.set_positions_by_arrival()
    for rank, stream in members.streams.items():
        _fill_stream(stream, members.records[rank], calls_block, conflict)
    if conflict:
        job.attempt.diverged_groups.add(group.key)
    completed_by_all = min((s.completed or 0 for s in members.streams.values()), default=0)
    unknown_ranks = [rank for rank in group.ranks if rank not in members.streams]
    for rank in unknown_ranks:
        stream = add_stream(job.attempt, rank, StreamKind.COLLECTIVE, group)
        stream.entered = stream.completed = completed_by_all
    return unknown_ranks


@dataclass(slots=True, kw_only=True)
class _GroupMembers:
    """The members of one group, as far as something is known about them: the records of each by
    number, in ascending order, and its stream.
    """

    job: OfflineJob
    group: Group
    calls_by_rank: CallsByRank
    records: dict[int, dict[int, FlightRecord]] = field(default_factory=dict)
    streams: dict[int, CallStream] = field(default_factory=dict)
    is_ambiguous: bool = False  # there is a note on sizes that do not add up

    def read_records(self) -> None:
        """Sets the records, and makes streams with the number of calls that each has entered."""
        name = self.group.name
        for rank in self.group.ranks:
            calls = self.calls_by_rank.get(rank)
            recorded = {} if calls is None else calls.collectives
            submitted = {seq: r for seq, r in recorded.items() if not r.never_submitted}
            entered: int | None = None
            if submitted:
                entered = _get_newest(submitted).seq
            elif recorded:
                entered = min(recorded) - 1
            elif (dump := self.job.dumps.get(rank)) is not None:
                # The ring of this rank holds no call of the group: the recorder's count says how
                # many it made, and without one a ring that has lost nothing shows that it made none.
                if name in dump.statuses and name not in self.job.p2p_groups:
                    entered = max(dump.statuses[name].enqueued, 0)
                elif not dump.wrapped:
                    entered = 0
            if entered is not None:
                stream = add_stream(self.job.attempt, rank, StreamKind.COLLECTIVE, self.group)
                stream.entered = stream.completed = entered
                self.streams[rank] = stream
                self.records[rank] = submitted

    def set_positions_by_completion(self) -> None:
        """Each member is in the first call that its device has not completed. A call that its
        device has only queued, while another device has started it, counts as not entered.
        """
        unfinished: dict[int, FlightRecord] = {}  # the keys are ranks
        for rank, records in self.records.items():
            stream = self.streams[rank]
            stream.device = self._measure_device(rank, stream.entered)
            self.job.queued_counts.setdefault(self.group.key, {})[rank] = stream.entered
            completed = 0
            if stream.device is not None:
                self.job.attempt.device_groups[self.group.key] = None
                completed = stream.device.completed
            record = next((record for seq, record in records.items() if seq > completed), None)
            if record is not None:
                unfinished[rank] = record
        started_seqs = {
            record.seq
            for rank, record in unfinished.items()
            if record.started and self.job.dumps[rank].reports_starts
        }
        for rank, record in unfinished.items():
            stream = self.streams[rank]
            stream.completed = record.seq - 1
            # The number is not a time, but it orders the first unfinished calls of a rank's groups.
            stream.pending_at = record.record_id * _RECORD_ORDER_S
            is_queued = self.job.dumps[rank].reports_starts and not record.started
            # A device runs the calls of a group in order: calls queued behind the first unfinished
            # one count as not entered.
            is_entered = not is_queued or record.seq not in started_seqs
            stream.entered = record.seq if is_entered else record.seq - 1

    def set_positions_by_arrival(self) -> None:
        """Each member is in its newest call, unless that must be complete.

        If all members made the same call, it is complete for all of them after any of them made a
        later call. The root of a rooted operation is an exception: it may continue before the
        others.
        """
        newest_by_rank = {rank: _get_newest(own) for rank, own in self.records.items() if own}
        last_seq = max((newest.seq for newest in newest_by_rank.values()), default=0)
        are_complete: dict[tuple[int, int], bool] = {}
        for rank, newest in newest_by_rank.items():
            seq, agree = newest.seq, newest.signature.agree
            if (seq, agree) not in are_complete:
                made = [records[seq] for records in self.records.values() if seq in records]
                same_calls = [record for record in made if record.signature.agree == agree]
                made_by_all = len(same_calls) >= len(self.group.ranks)
                is_retired = any(record.retired for record in same_calls)
                are_complete[seq, agree] = is_retired or (made_by_all and seq < last_seq)
            is_complete = are_complete[seq, agree] and newest.signature.op not in _ROOTED_OPS
            if not is_complete and not newest.retired:
                self.streams[rank].completed = seq - 1
                self.streams[rank].pending_at = 0.0

    def _measure_device(self, rank: int, entered: int) -> DeviceProgress | None:
        """The progress of the member's device, for which its host has queued ``entered``
        collectives; None if it is unknown.
        """
        dump, records, name = self.job.dumps[rank], self.records[rank], self.group.name
        calls = self.calls_by_rank.get(rank)
        next_instance = (name, 1 if calls is None else calls.index + 1)
        status = dump.statuses.get(name)
        if name in self.job.p2p_groups or next_instance in dump.groups:
            # The status counts other calls too, or belongs to a later group of that name.
            status = None
        if status is not None and status.enqueued <= _NO_COLLECTIVE:
            status = None
        completed = max((seq for seq, record in records.items() if record.completed), default=0)
        if status is not None and status.completed > _NO_COLLECTIVE:
            completed = status.completed
            for seq, record in records.items():
                if not record.completed:
                    break
                completed = max(completed, seq)
        elif status is None and not completed:
            queued_before = min(records) - 1 if records else entered
            if queued_before:
                return None  # the ring has lost the calls that would show it
        started = None if status is None else status.started
        if dump.reports_starts or started is not None:
            started_seqs = [seq for seq, record in records.items() if record.started]
            started = max(completed, started or 0, *started_seqs)
        return DeviceProgress(
            enqueued=max(entered, completed),
            started=started,
            completed=completed,
            read_at=LAST_SEEN_S,
        )

    def reconcile_calls(self) -> int:
        """The number of the group's first call that differs between members, 0 if there is none.

        Replaces the records whose signature follows from the calls of all members.
        """
        # The calls that can only be judged together with the other members', by number and rank.
        joint_calls: dict[int, dict[int, FlightRecord]] = {}
        for rank, records in self.records.items():
            for seq, record in records.items():
                op = record.signature.op
                if op in _ALL_TO_ALL_OPS or op in _ROOT_LIST_SIDES:
                    joint_calls.setdefault(seq, {})[rank] = record
        roots_by_seq: dict[int, set[int]] = {}
        for seq, records in joint_calls.items():
            ops = {record.signature.op for record in records.values()}
            if len(ops) > 1 or records.keys() != set(self.group.ranks):
                continue
            signatures: SignaturesByRank = {}
            if ops <= _ALL_TO_ALL_OPS:
                signatures = self._reconcile_all_to_all(records)
            elif len(roots := _find_claimed_roots(records)) > 1:
                roots_by_seq[seq] = roots
                for rank in roots:  # each rank itself becomes the root, so that they differ
                    root = self.group.ranks.index(rank)
                    signatures[rank] = with_agreement_hash(
                        replace(records[rank].signature, root=root),
                        MustMatch.DTYPE | MustMatch.ROOT,
                        (),
                    )
            for rank, signature in signatures.items():
                self.records[rank][seq] = replace(records[rank], signature=signature)
        conflict = self._find_conflict()
        if self.group.backend != ARRIVALS_ONLY_BACKEND:
            self._find_invalid_calls(conflict)
        if conflict in roots_by_seq:
            self.job.invalid_ranks[self.group.key] = roots_by_seq[conflict]
        return conflict

    def _reconcile_all_to_all(self, records_by_rank: dict[int, FlightRecord]) -> SignaturesByRank:
        """The signatures of an all-to-all that change. Split sizes that match between all members
        need no further comparison. If only totals are recorded and most ranks have the same, the
        ranks with others are the outliers.
        """
        records = [records_by_rank[rank] for rank in self.group.ranks]
        signatures = {rank: record.signature for rank, record in records_by_rank.items()}
        splits = [r.signature.splits for r in records if r.signature.splits is not None]
        has_all_splits = len(splits) == len(records) and all(
            len(sent) == len(expected) == len(records) for sent, expected in splits
        )
        if has_all_splits:
            sent_splits = [sent for sent, _ in splits]
            expected_splits = [expected for _, expected in splits]
            if list(zip(*sent_splits, strict=True)) != expected_splits:
                return {}
            return {rank: replace(s, splits=None) for rank, s in signatures.items()}
        sent_total = sum(record.sizes.elements[0] for record in records)
        expected_total = sum(record.sizes.elements[1] for record in records)
        if splits or sent_total == expected_total:
            return {}
        elements, count = Counter(record.sizes.elements for record in records).most_common(1)[0]
        if elements[0] == elements[1] and 2 * count > len(records):
            for rank, record in records_by_rank.items():
                sent, expected = record.sizes.elements
                signatures[rank] = replace(record.signature, splits=((sent,), (expected,)))
            return signatures
        if not self.is_ambiguous and not any(record.completed for record in records):
            self.is_ambiguous = True
            self.job.notes.append(
                f"{self._describe_call(records[0])} sends {sent_total} elements in total and"
                f" expects {expected_total}: the dumps do not show which rank's number is wrong"
            )
        return {}

    def _find_conflict(self) -> int:
        """The number of the first call that two ranks made differently, or 0. A call that the
        beginning of a ring may have truncated is not compared.
        """
        hashes: dict[int, int] = {}
        differing_seqs: set[int] = set()
        for records in self.records.values():
            for seq, record in records.items():
                agree = record.signature.agree
                if not record.may_be_truncated and hashes.setdefault(seq, agree) != agree:
                    differing_seqs.add(seq)
        return min(differing_seqs, default=0)

    def _find_invalid_calls(self, conflict: int) -> None:
        """Records calls that are invalid whatever the others called: some ranks' calls at the first
        difference, otherwise the unfinished call that all made.
        """
        size = len(self.group.ranks)
        if conflict:
            self.job.invalid_ranks[self.group.key] = {
                rank
                for rank, records in self.records.items()
                if (record := records.get(conflict)) is not None
                and is_invalid_call(record.signature.op, record.sizes, size)
            }
            return
        newest = [_get_newest(records) for records in self.records.values() if records]
        call = next((record for record in newest if not record.completed), None)
        if call is not None and is_invalid_call(call.signature.op, call.sizes, size):
            input_count, output_count = call.sizes.tensors
            sent, received = call.sizes.elements
            inputs = "tensors" if input_count > 1 else "tensor"
            outputs = "tensors" if output_count > 1 else "tensor"
            self.job.notes.append(
                f"{self._describe_call(call)} is invalid on each of its {size} ranks:"
                f" {input_count} input {inputs} with {sent} elements, {output_count} output {outputs}"
                f" with {received}"
            )

    def _describe_call(self, record: FlightRecord) -> str:
        return f"{record.signature.op} ({describe_position(self.group, record.seq)})"


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


def _fill_stream(
    stream: CallStream, records: dict[int, FlightRecord], calls_block: bool, conflict: int
) -> None:
    """Adds the calls around the newest one, and around the first difference if there is one, with
    running hashes. ``calls_block``: a pending call blocks its rank.
    """
    newest_records = _select_records(records, stream.entered)
    for record in newest_records:
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
    if conflict:
        _add_running_hashes(stream, _select_records(records, conflict), conflict)
        return
    # All members made equal calls, so that a hash of each of the newest ones serves.
    hashes = {
        record.seq: extend_chain(_get_common_hash(record.seq - 1), record.signature.agree)
        for record in newest_records
        if not record.may_be_truncated
    }
    stream.reported_hashes = tuple(sorted(hashes.items()))


def _add_running_hashes(stream: CallStream, records: list[FlightRecord], conflict: int) -> None:
    """Adds running hashes to the calls around the first difference.

    Before it all members have equal calls, wherever their rings begin, so that a hash of the number
    alone serves.
    """
    running_hash = last_seq = 0
    hashes = {conflict - 1: _get_common_hash(conflict - 1)}
    for record in records:
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


def _select_records(records: dict[int, FlightRecord], around: int) -> list[FlightRecord]:
    seqs = range(around - CALLS_BEFORE, around + CALLS_AFTER + 1)
    return [records[seq] for seq in seqs if seq in records]


def _get_newest(records: dict[int, FlightRecord]) -> FlightRecord:
    return next(reversed(records.values()))


def _get_common_hash(seq: int) -> int:
    return (seq * CHAIN_BASE | 1) & UINT64_MASK


def add_stream(
    attempt: Attempt, rank: int, kind: StreamKind, group: Group, peer: int | None = None
) -> CallStream:
    process = attempt.processes[rank]
    stream = CallStream(uid=len(process.streams) + 1, kind=kind, group=group, peer=peer)
    attempt.add_stream(process, stream)
    return stream
