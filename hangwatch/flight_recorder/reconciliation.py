"""Compares the collectives of one process group on all its members: the first call that differs,
and calls that are invalid. Pure.

Some errors show only when the calls of all members are compared: two roots of one call, or an
all-to-all that sends more than its members expect.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from hangwatch.diagnosis import messages
from hangwatch.model.groups import Group
from hangwatch.model.operator_spec import ListSide, MustMatch
from hangwatch.model.operators import FLIGHT_OPERATIONS
from hangwatch.model.signatures import with_agreement_hash

from .calls import ARRIVALS_ONLY_BACKEND, FlightRecord
from .offline_job import OfflineJob
from .signatures import is_invalid_call

# Operations whose sizes may differ between members, so that they are compared across all of them.
_ALL_TO_ALL_OPS = frozenset(op for op, spec in FLIGHT_OPERATIONS.items() if spec.split_args)
_ROOT_LIST_SIDES = {
    op: spec.list_side
    for op, spec in FLIGHT_OPERATIONS.items()
    if spec.is_rooted and spec.list_side is not None
}

RecordsByRank = dict[int, list[FlightRecord]]  # of one group, each list ordered by number


def find_record_index(records: Sequence[FlightRecord], seq: int) -> int:
    """The index of the first record whose number is ``seq`` or higher."""
    return bisect_left(records, seq, key=lambda record: record.seq)


def find_record(records: Sequence[FlightRecord], seq: int) -> FlightRecord | None:
    index = find_record_index(records, seq)
    if index < len(records) and records[index].seq == seq:
        return records[index]
    return None


def reconcile_calls(job: OfflineJob, group: Group, members: RecordsByRank) -> int:
    """The number of the group's first call that differs between members, 0 if there is none.

    Replaces the records in ``members`` whose signature follows from the calls of all members.
    """
    roots_by_seq: dict[int, set[int]] = {}
    for seq, records in _collect_joint_calls(members).items():
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
                reconciled = _record_claimed_roots(group, records, roots)
        for rank, record in reconciled.items():
            members[rank][find_record_index(members[rank], seq)] = record
    conflict = _find_conflict(members)
    if group.backend != ARRIVALS_ONLY_BACKEND:
        _find_invalid_calls(job, group, members, conflict)
    if conflict in roots_by_seq:
        job.invalid_ranks[group.key] = roots_by_seq[conflict]
    return conflict


def _collect_joint_calls(members: RecordsByRank) -> dict[int, dict[int, FlightRecord]]:
    """By number and rank, the calls that can only be judged together with the other members'."""
    joint_calls: dict[int, dict[int, FlightRecord]] = {}
    for rank, records in members.items():
        for record in records:
            op = record.signature.op
            if op in _ALL_TO_ALL_OPS or op in _ROOT_LIST_SIDES:
                joint_calls.setdefault(record.seq, {})[rank] = record
    return joint_calls


def _reconcile_all_to_all(
    job: OfflineJob, group: Group, records_by_rank: dict[int, FlightRecord]
) -> dict[int, FlightRecord]:
    """An all-to-all. Split sizes that match between all members need no further comparison. If only
    totals are recorded and most ranks have the same, the ranks with others are the outliers.
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
    """The ranks that called a gather or scatter as its root: those that passed the list of tensors,
    which gloo records as one larger tensor.
    """
    op = next(iter(records_by_rank.values())).signature.op
    side = 1 if _ROOT_LIST_SIDES[op] is ListSide.OUTPUTS else 0
    roots: set[int] = set()
    for rank, record in records_by_rank.items():
        sizes = record.sizes
        if sizes.tensors[side] > 1 or sizes.elements[side] > sizes.elements[1 - side]:
            roots.add(rank)
    return roots


def _record_claimed_roots(
    group: Group, records_by_rank: dict[int, FlightRecord], roots: set[int]
) -> dict[int, FlightRecord]:
    """The records of several roots, with each rank itself as the root, so that they differ."""
    reconciled: dict[int, FlightRecord] = {}
    for rank in roots:
        record = records_by_rank[rank]
        signature = replace(record.signature, root=group.ranks.index(rank))
        hashed = with_agreement_hash(signature, MustMatch.DTYPE | MustMatch.ROOT, ())
        reconciled[rank] = replace(record, signature=hashed)
    return reconciled


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
    """Records calls that are invalid whatever the others called: at the first difference those of
    some ranks, otherwise the unfinished call that all made.
    """
    size = len(group.ranks)
    if conflict:
        invalid_ranks: set[int] = set()
        for rank, records in members.items():
            record = find_record(records, conflict)
            if record is not None and _is_invalid_record(record, size):
                invalid_ranks.add(rank)
        job.invalid_ranks[group.key] = invalid_ranks
        return
    newest = [records[-1] for records in members.values() if records]
    unfinished = next((record for record in newest if not record.completed), None)
    if unfinished is not None and _is_invalid_record(unfinished, size):
        input_count, output_count = unfinished.sizes.tensors
        sent, received = unfinished.sizes.elements
        inputs = "tensors" if input_count > 1 else "tensor"
        outputs = "tensors" if output_count > 1 else "tensor"
        job.notes.append(
            f"{_describe_call(group, unfinished)} is invalid on each of its {size} ranks:"
            f" {input_count} input {inputs} with {sent} elements, {output_count} output {outputs}"
            f" with {received}"
        )


def _is_invalid_record(record: FlightRecord, member_count: int) -> bool:
    return is_invalid_call(record.signature.op, record.sizes, member_count)


def _describe_call(group: Group, record: FlightRecord) -> str:
    return f"{record.signature.op} ({messages.describe_position(group, record.seq)})"
