"""The positions of a group's members in its collectives, from Flight Recorder dumps. Pure.

If a backend reports completion, a member is in its first unfinished call. If it does not, as gloo,
a member is in its newest call unless the calls of other members show that it is complete.

Some errors show only when the calls of all members are compared: two roots of one call, or an
all-to-all that sends more than its members expect.

Both the status of a group and the states of its entries show how far a device has come. A host that
is blocked by a full queue has made an entry whose events are not recorded yet, and CUDA calls such
an event complete: so a completed entry behind pending ones proves nothing where there is a status.
"""

from __future__ import annotations

from collections import Counter, defaultdict
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
from hangwatch.model.groups import COALESCED_END_BACKENDS, Group, GroupKey
from hangwatch.model.operators import FLIGHT_OPERATIONS, OPERATIONS, ListSide, MustMatch
from hangwatch.model.verdicts import DeviceProgress
from hangwatch.tracking.attempt import Attempt
from hangwatch.tracking.call_stream import CallStream

from .calls import ARRIVALS_ONLY_BACKEND, FlightDump, FlightRecord, GroupCalls, GroupInstance
from .entries import is_invalid_call

NOW_S = 1e6  # by this time, every pending call of a dump has waited for minutes
LAST_SEEN_S = NOW_S - 5.0
# The calls of a rank that are kept, before and after its newest one and the first difference: more
# than the diagnosis aligns.
CALLS_BEFORE = 160
CALLS_AFTER = 32
_RECORD_ORDER_S = 1e-6
_NO_COLLECTIVE = -1  # the number of the last collective, where there is none
_ROOTED_OPS = frozenset(op for op, spec in OPERATIONS.items() if spec.is_rooted)
# Calls that can only be judged together with those of the other members: the sizes of an all-to-all
# may differ between them, and only the root of a gather or scatter passes a list of tensors.
_JOINT_SPECS = {
    op: spec
    for op, spec in FLIGHT_OPERATIONS.items()
    if spec.split_args or (spec.is_rooted and spec.list_side is not None)
}

CallsByRank = Mapping[int, GroupCalls]  # the calls of one group, by the ranks that made any


@dataclass(slots=True, kw_only=True)
class OfflineJob:
    """The attempt, as heartbeats would have built it, and the facts that only dumps provide."""

    attempt: Attempt
    dumps: Mapping[int, FlightDump]  # the keys are ranks
    # Backends whose dumps show which calls are complete: those that are known to, in case the first
    # call hangs, and each that did so for some call.
    completion_backends: set[str] = field(default_factory=lambda: set(COALESCED_END_BACKENDS))
    # Groups with sends and receives, which the recorder's counts include.
    p2p_groups: set[str] = field(default_factory=set)
    # The ranks, with the name of a group, whose calls in that group are unknown and were assumed to
    # match the others'.
    assumed: set[tuple[int, str]] = field(default_factory=set)
    # The number of collectives that the host has queued on its device, by group and rank.
    queued_counts: dict[GroupKey, dict[int, int]] = field(default_factory=dict)
    # Ranks whose call, at the first difference of a group, is invalid whatever the others called.
    invalid_ranks: dict[GroupKey, set[int]] = field(default_factory=dict)
    # Sentences for the user on oddities that accuse no rank.
    notes: list[str] = field(default_factory=list)


@dataclass(slots=True, kw_only=True)
class _Member:
    """A member of a group about which something is known."""

    rank: int
    dump: FlightDump
    stream: CallStream
    records: dict[int, FlightRecord]  # its submitted calls by number, in ascending order
    next_instance: GroupInstance  # the next group with the same name

    @property
    def newest(self) -> FlightRecord:
        """The newest of its records, if it has any."""
        return next(reversed(self.records.values()))

    def replace_signature(self, seq: int, signature: Signature) -> None:
        self.records[seq] = replace(self.records[seq], signature=signature)

    def select_records(self, around: int) -> list[FlightRecord]:
        seqs = range(around - CALLS_BEFORE, around + CALLS_AFTER + 1)
        return [self.records[seq] for seq in seqs if seq in self.records]


def fill_collectives(job: OfflineJob, group: Group, calls_by_rank: CallsByRank) -> None:
    """Sets the positions of a group's members. Members about which nothing is known are assumed to
    have completed the calls that all others have completed, and no more.
    """
    members = _list_members(job, group, calls_by_rank)
    collectives = _Collectives(job=job, group=group, members=members)
    conflict = collectives.reconcile_calls()
    calls_block = group.backend in job.completion_backends
    if calls_block:
        collectives.set_positions_by_completion()
    else:
        collectives.set_positions_by_arrival()
    for member in members:
        _fill_stream(member, calls_block, conflict)
    if conflict:
        job.attempt.diverged_groups.add(group.key)
    completed_by_all = min((member.stream.completed or 0 for member in members), default=0)
    known_ranks = {member.rank for member in members}
    for rank in group.ranks:
        if rank not in known_ranks:
            stream = add_stream(job.attempt, rank, StreamKind.COLLECTIVE, group)
            stream.entered = stream.completed = completed_by_all
            job.assumed.add((rank, group.name))


def _list_members(job: OfflineJob, group: Group, calls_by_rank: CallsByRank) -> list[_Member]:
    """The members about which something is known, with streams that have entered their calls."""
    name = group.name
    members = []
    for rank in group.ranks:
        dump = job.dumps.get(rank)
        if dump is None:
            continue
        calls = calls_by_rank.get(rank)
        recorded = {} if calls is None else calls.collectives
        submitted = {seq: r for seq, r in recorded.items() if not r.never_submitted}
        if submitted:
            entered = max(submitted)
        elif recorded:
            entered = min(recorded) - 1
        # The ring of this rank holds no call of the group: the recorder's count shows how many it
        # made, and without one a ring that has lost nothing shows that it made none.
        elif name in dump.statuses and name not in job.p2p_groups:
            entered = max(dump.statuses[name].enqueued, 0)
        elif not dump.wrapped:
            entered = 0
        else:
            continue
        stream = add_stream(job.attempt, rank, StreamKind.COLLECTIVE, group)
        stream.entered = stream.completed = entered
        next_index = 1 if calls is None else calls.index + 1
        member = _Member(
            rank=rank,
            dump=dump,
            stream=stream,
            records=submitted,
            next_instance=(name, next_index),
        )
        members.append(member)
    return members


@dataclass(slots=True, kw_only=True)
class _Collectives:
    """The collectives of one group."""

    job: OfflineJob
    group: Group
    members: list[_Member]
    is_ambiguous: bool = False  # there is a note on sizes that do not add up

    def set_positions_by_completion(self) -> None:
        """Each member is in the first call that its device has not completed. A call that its
        device has only queued, while another device has started it, counts as not entered.
        """
        key = self.group.key
        self.job.queued_counts[key] = {m.rank: m.stream.entered for m in self.members}
        unfinished = []
        started_seqs = set()
        for member in self.members:
            device = member.stream.device = self._measure_device(member)
            completed = 0
            if device is not None:
                self.job.attempt.device_groups[key] = None
                completed = device.completed
            records = member.records.values()
            record = next((record for record in records if record.seq > completed), None)
            if record is not None:
                is_queued = member.dump.reports_starts and not record.started
                unfinished.append((member.stream, record, is_queued))
                if member.dump.reports_starts and record.started:
                    started_seqs.add(record.seq)
        for stream, record, is_queued in unfinished:
            stream.completed = stream.entered = record.seq - 1
            # The number is not a time, but it orders the first unfinished calls of a rank's groups.
            stream.pending_at = record.record_id * _RECORD_ORDER_S
            # A device runs the calls of a group in order: calls queued behind the first unfinished
            # one count as not entered.
            if not is_queued or record.seq not in started_seqs:
                stream.entered = record.seq

    def set_positions_by_arrival(self) -> None:
        """Each member is in its newest call, unless that must be complete.

        If all members made the same call, it is complete for all of them after any of them made a
        later call. The root of a rooted operation is an exception: it may continue before the
        others.
        """
        with_records = [member for member in self.members if member.records]
        last_seq = max([member.newest.seq for member in with_records], default=0)
        are_complete: dict[tuple[int, int], bool] = {}
        for member in with_records:
            newest = member.newest
            if newest.retired:
                continue
            call = (newest.seq, newest.signature.agree)
            if call not in are_complete:
                are_complete[call] = self._is_complete(*call, last_seq)
            if not are_complete[call] or newest.signature.op in _ROOTED_OPS:
                member.stream.completed = newest.seq - 1
                member.stream.pending_at = 0.0

    def _is_complete(self, seq: int, agree: int, last_seq: int) -> bool:
        """Whether a call is retired, or all members made it and some a later one."""
        made = [member.records[seq] for member in self.members if seq in member.records]
        same_calls = [record for record in made if record.signature.agree == agree]
        if any(record.retired for record in same_calls):
            return True
        return seq < last_seq and len(same_calls) >= len(self.group.ranks)

    def _measure_device(self, member: _Member) -> DeviceProgress | None:
        """The progress of the member's device; None if it is unknown."""
        dump, records, entered = member.dump, member.records, member.stream.entered
        name = self.group.name
        status = dump.statuses.get(name)
        # Whether the status counts other calls too, or belongs to a later group of that name.
        is_other = name in self.job.p2p_groups or member.next_instance in dump.groups
        if status is not None and (is_other or status.enqueued <= _NO_COLLECTIVE):
            status = None
        completed = max([seq for seq, record in records.items() if record.completed], default=0)
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
        callers_by_seq = defaultdict(list)
        for member in self.members:
            for seq, record in member.records.items():
                if record.signature.op in _JOINT_SPECS:
                    callers_by_seq[seq].append(member)
        roots_by_seq = {}
        for seq, callers in callers_by_seq.items():
            ops = {member.records[seq].signature.op for member in callers}
            if len(ops) > 1 or len(callers) < len(self.group.ranks):
                continue
            spec = _JOINT_SPECS[ops.pop()]
            if not spec.is_rooted:
                self._reconcile_all_to_all(seq)
                continue
            # The ranks that called it as its root passed the list of tensors, which gloo records as
            # one larger tensor.
            side = 1 if spec.list_side is ListSide.OUTPUTS else 0
            roots = []
            for member in callers:
                sizes = member.records[seq].sizes
                elements = sizes.elements
                if sizes.tensors[side] > 1 or elements[side] > elements[1 - side]:
                    roots.append(member)
            if len(roots) < 2:
                continue
            roots_by_seq[seq] = {member.rank for member in roots}
            for member in roots:  # each rank itself becomes the root, so that they differ
                root = self.group.ranks.index(member.rank)
                signature = replace(member.records[seq].signature, root=root)
                must_match = MustMatch.DTYPE | MustMatch.ROOT
                member.replace_signature(seq, with_agreement_hash(signature, must_match, ()))
        conflict = self._find_conflict()
        if self.group.backend != ARRIVALS_ONLY_BACKEND:
            self._find_invalid_calls(conflict)
        if conflict in roots_by_seq:
            self.job.invalid_ranks[self.group.key] = roots_by_seq[conflict]
        return conflict

    def _reconcile_all_to_all(self, seq: int) -> None:
        """Split sizes that match between all members need no further comparison. If only totals are
        recorded and most ranks have the same, the ranks with others are the outliers.
        """
        records = [member.records[seq] for member in self.members]
        count = len(records)
        splits = [r.signature.splits for r in records if r.signature.splits is not None]
        if splits:
            sent_splits = [sent for sent, _ in splits]
            expected_splits = [expected for _, expected in splits]
            are_complete = all(len(parts) == count for parts in (*sent_splits, *expected_splits))
            if are_complete and list(zip(*sent_splits, strict=True)) == expected_splits:
                for member, record in zip(self.members, records, strict=True):
                    member.replace_signature(seq, replace(record.signature, splits=None))
            return
        sizes = [record.sizes.elements for record in records]
        sent_total = sum(sent for sent, _ in sizes)
        expected_total = sum(expected for _, expected in sizes)
        if sent_total == expected_total:
            return
        (sent, expected), usual_count = Counter(sizes).most_common(1)[0]
        if sent == expected and 2 * usual_count > count:
            for member, record in zip(self.members, records, strict=True):
                sent, expected = record.sizes.elements
                signature = replace(record.signature, splits=((sent,), (expected,)))
                member.replace_signature(seq, signature)
        elif not self.is_ambiguous and not any(record.completed for record in records):
            self.is_ambiguous = True
            self.job.notes.append(
                f"{self._describe_call(records[0])} sends {sent_total} elements in total and"
                f" expects {expected_total}: the dumps do not show which rank's number is wrong"
            )

    def _find_conflict(self) -> int:
        """The number of the first call that two ranks made differently, or 0. A call that the
        beginning of a ring may have truncated is not compared.
        """
        hashes: dict[int, int] = {}
        differing_seqs = set()
        for member in self.members:
            for seq, record in member.records.items():
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
            invalid_ranks = set()
            for member in self.members:
                call = member.records.get(conflict)
                if call is not None and is_invalid_call(call.signature.op, call.sizes, size):
                    invalid_ranks.add(member.rank)
            self.job.invalid_ranks[self.group.key] = invalid_ranks
            return
        newest_calls = [member.newest for member in self.members if member.records]
        call = next((call for call in newest_calls if not call.completed), None)
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


def _fill_stream(member: _Member, calls_block: bool, conflict: int) -> None:
    """Adds the calls around the newest one, and around the first difference if there is one, with
    hashes by which members are compared. ``calls_block``: a pending call blocks its rank.
    """
    stream = member.stream
    around_newest = member.select_records(stream.entered)
    compared = around_newest
    hashes: dict[int, int] = {}
    if conflict:
        compared = member.select_records(conflict)
        hashes[conflict - 1] = _get_common_hash(conflict - 1)
    for record in compared:
        seq = record.seq
        if seq < conflict:
            # Up to here all members have equal calls, wherever their rings begin, so that a hash of
            # the number alone serves.
            hashes[seq] = _get_common_hash(seq)
            continue
        before: int | None = _get_common_hash(seq - 1)
        if 0 < conflict < seq:  # the hash continues that of the call before
            before = hashes.get(seq - 1)
        if before is not None and not record.may_be_truncated:
            hashes[seq] = extend_chain(before, record.signature.agree)
    stream.reported_hashes = tuple(sorted(hashes.items()))
    selected = {record.seq: record for record in around_newest}
    selected |= {record.seq: record for record in compared if record.seq in hashes}
    blocking_seq = stream.entered if calls_block and stream.is_pending else None
    for seq, record in selected.items():
        call = Call(
            seq=seq,
            signature=record.signature,
            site=record.site,
            chain=hashes.get(seq, 0),
            blocking=True if seq == blocking_seq else None,
        )
        stream.add_call(call)
    newest = stream.calls.get(stream.entered)
    stream.op = "" if newest is None else newest.signature.op


def _get_common_hash(seq: int) -> int:
    return (seq * CHAIN_BASE | 1) & UINT64_MASK


def add_stream(
    attempt: Attempt, rank: int, kind: StreamKind, group: Group, peer: int | None = None
) -> CallStream:
    process = attempt.processes[rank]
    stream = CallStream(uid=len(process.streams) + 1, kind=kind, group=group, peer=peer)
    attempt.add_stream(process, stream)
    return stream
