"""The collectives of one process group on all its members, as Flight Recorders tell them: what
fits, and where they part. Pure.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from hangwatch.diagnosis import messages
from hangwatch.model.calls import Call
from hangwatch.model.groups import Group, GroupKey
from hangwatch.model.operator_spec import ListSide, MustMatch
from hangwatch.model.operators import FLIGHT_OPERATIONS
from hangwatch.model.signatures import CHAIN_BASE, UINT64_MASK, extend_chain, with_agreement_hash
from hangwatch.tracking.attempt import Attempt
from hangwatch.tracking.call_stream import CallStream as Place

from .calls import ARRIVALS_ONLY_BACKEND, FlightRecord
from .signatures import is_invalid_call

CALLS_BEFORE = 160  # calls of a rank up to its newest and to a difference: more than are aligned
CALLS_AFTER = 32  # and behind these
# Operations whose sizes may differ between members, so that they are compared across all of them.
_ALL_TO_ALL_OPS = frozenset(op for op, spec in FLIGHT_OPERATIONS.items() if spec.split_args)
_ROOT_LIST_SIDES = {
    op: spec.list_side
    for op, spec in FLIGHT_OPERATIONS.items()
    if spec.is_rooted and spec.list_side is not None
}

RecordsByRank = dict[
    int, list[FlightRecord]
]  # by rank, its records of the group in the order of their numbers


@dataclass(slots=True, kw_only=True)
class OfflineJob:
    """A job's state from dumps. ``assumed`` has, by rank, the groups of which its calls are not
    known.

    ``queued`` are the ranks whose device has not begun a call that others have begun; ``wrong``
    those whose call, where the calls of a group part, cannot be right whatever the others do.
    ``notes`` say what is odd and tells nobody's fault.
    """

    attempt: Attempt
    completion_backends: set[str] = field(
        default_factory=set
    )  # backends that tell which calls are over
    p2p_groups: set[str] = field(
        default_factory=set
    )  # groups with sends and receives, which the recorder's counts count as well
    assumed_groups: dict[int, set[str]] = field(default_factory=dict)
    queued_ranks: dict[tuple[GroupKey, int], set[int]] = field(default_factory=dict)
    invalid_ranks: dict[GroupKey, set[int]] = field(default_factory=dict)
    ambiguous_groups: set[GroupKey] = field(
        default_factory=set
    )  # groups of which such a note was made
    notes: list[str] = field(default_factory=list)


def find_record(records: Sequence[FlightRecord], seq: int) -> FlightRecord | None:
    at = bisect_left(records, seq, key=lambda record: record.seq)
    return records[at] if at < len(records) and records[at].seq == seq else None


def reconcile_calls(job: OfflineJob, group: Group, members: RecordsByRank) -> int:
    """Where the calls of a group part, 0 where they do not.

    Some of that no rank's record tells alone: with those of all members, a call may have two roots,
    or send more than is expected.
    """
    calls: dict[int, dict[int, FlightRecord]] = {}
    for rank, mine in members.items():
        for record in mine:
            if record.signature.op in _ALL_TO_ALL_OPS or record.signature.op in _ROOT_LIST_SIDES:
                calls.setdefault(record.seq, {})[rank] = record
    roots: dict[int, set[int]] = {}
    for seq, told in calls.items():
        if (
            told.keys() == set(group.ranks)
            and len({record.signature.op for record in told.values()}) == 1
        ):
            fitted = (
                _reconcile_all_to_all(job, group, told)
                if told[group.ranks[0]].signature.op in _ALL_TO_ALL_OPS
                else _reconcile_rooted(group, told, seq, roots)
            )
            for rank, record in fitted.items():
                mine = members[rank]
                mine[bisect_left(mine, seq, key=lambda record: record.seq)] = record
    conflict = _find_conflict(members)
    if group.backend != ARRIVALS_ONLY_BACKEND:
        _find_invalid_calls(job, group, members, conflict)
    if conflict in roots:
        job.invalid_ranks[group.key] = roots[conflict]
    return conflict


def _reconcile_all_to_all(
    job: OfflineJob, group: Group, records_by_rank: dict[int, FlightRecord]
) -> dict[int, FlightRecord]:
    """An all-to-all. Part sizes that fit need no second look; where only totals are told, the one
    that differs is to blame.
    """
    records = [records_by_rank[rank] for rank in group.ranks]
    splits = [record.signature.splits for record in records]
    if all(part is not None and len(part[0]) == len(part[1]) == len(records) for part in splits):
        sent, expected = ([part[side] for part in splits if part is not None] for side in (0, 1))
        if list(zip(*sent, strict=True)) == expected:
            return {
                rank: replace(record, signature=replace(record.signature, splits=None))
                for rank, record in records_by_rank.items()
            }
        return {}
    totals, times = Counter(record.sizes.elements for record in records).most_common(1)[0]
    given, taken = (sum(record.sizes.elements[side] for record in records) for side in (0, 1))
    if given == taken or any(part is not None for part in splits):
        return {}
    if totals[0] == totals[1] and 2 * times > len(records):  # even parts will show who differs
        return {
            rank: replace(
                record,
                signature=replace(
                    record.signature,
                    splits=((record.sizes.elements[0],), (record.sizes.elements[1],)),
                ),
            )
            for rank, record in records_by_rank.items()
        }
    if not any(record.completed for record in records) and group.key not in job.ambiguous_groups:
        job.ambiguous_groups.add(group.key)
        where = f"{records[0].signature.op} ({messages.describe_position(group, records[0].seq)})"
        job.notes.append(
            f"{where} sends {given} elements in all and expects {taken}: nothing tells which rank's"
            " number is wrong"
        )
    return {}


def _reconcile_rooted(
    group: Group,
    records_by_rank: dict[int, FlightRecord],
    seq: int,
    claimed_roots: dict[int, set[int]],
) -> dict[int, FlightRecord]:
    """A gather or scatter: whoever has the list, which gloo makes one tensor, holds itself to be
    the root.
    """
    op = records_by_rank[group.ranks[0]].signature.op
    side = 1 if _ROOT_LIST_SIDES[op] is ListSide.OUTPUTS else 0
    sizes = {rank: record.sizes for rank, record in records_by_rank.items()}
    several = {
        rank
        for rank, size in sizes.items()
        if size.tensors[side] > 1 or size.elements[side] > size.elements[1 - side]
    }
    if len(several) < 2:
        return {}
    claimed_roots[seq] = several
    rooted = {
        rank: replace(records_by_rank[rank].signature, root=group.ranks.index(rank))
        for rank in several
    }
    return {
        rank: replace(
            records_by_rank[rank],
            signature=with_agreement_hash(made, MustMatch.DTYPE | MustMatch.ROOT, ()),
        )
        for rank, made in rooted.items()
    }


def _find_conflict(members: RecordsByRank) -> int:
    """The first call that two ranks made differently. What was cut off at the beginning of a ring
    is not compared.
    """
    seen: dict[int, int] = {}
    found = 0
    for mine in members.values():
        for record in mine:
            if (
                not record.may_be_truncated
                and seen.setdefault(record.seq, record.signature.agree) != record.signature.agree
            ):
                found = min(found or record.seq, record.seq)
    return found


def _find_invalid_calls(
    job: OfflineJob, group: Group, members: RecordsByRank, conflict: int
) -> None:
    """Calls that cannot be right: some ranks' where the calls part, or the unfinished one of all."""
    size = len(group.ranks)
    if conflict:
        at = {
            rank: record
            for rank, mine in members.items()
            if (record := find_record(mine, conflict)) is not None
        }
        job.invalid_ranks[group.key] = {
            rank
            for rank, record in at.items()
            if is_invalid_call(record.signature.op, record.sizes, size)
        }
        return
    newest = [mine[-1] for mine in members.values() if mine and not mine[-1].completed]
    if newest and is_invalid_call((first := newest[0]).signature.op, first.sizes, size):
        where = f"{first.signature.op} ({messages.describe_position(group, first.seq)})"
        (given, taken), (sent, received) = first.sizes.tensors, first.sizes.elements
        told = (
            f"{sent} elements in {given} tensor{'s' * (given > 1)} go in, and {received} in {taken}"
            " come out"
        )
        job.notes.append(f"{where} cannot be right on any of its {size} ranks: {told}")


def fill_stream(
    stream: Place, records: Sequence[FlightRecord], conflict: int, calls_block: bool
) -> None:
    """Gives the place the calls that may be shown, with running hashes around the ``conflict``.
    ``waits``: a call holds who is in it.
    """
    for record in _slice_records(
        records, stream.entered - CALLS_BEFORE, stream.entered + CALLS_AFTER
    ):
        blocking = (
            True if calls_block and stream.is_pending and record.seq == stream.entered else None
        )
        stream.calls[record.seq] = Call(
            seq=record.seq, signature=record.signature, site=record.site, blocking=blocking
        )
    stream.op = stream.calls[stream.entered].signature.op if stream.entered in stream.calls else ""
    value = last = 0
    for record in (
        _slice_records(records, conflict - CALLS_BEFORE, conflict + CALLS_AFTER) if conflict else ()
    ):
        if record.seq < conflict:  # up to there all are equal, wherever their rings begin
            value = _get_common_hash(record.seq)
        elif record.may_be_truncated or (record.seq > conflict and last != record.seq - 1):
            break
        else:
            value = extend_chain(
                _get_common_hash(record.seq - 1) if record.seq == conflict else value,
                record.signature.agree,
            )
        last = record.seq
        known = stream.calls.get(last) or Call(
            seq=last, signature=record.signature, site=record.site
        )
        stream.calls[last] = replace(known, chain=value)
        stream.reported_hashes.append((last, value))


def _slice_records(
    records: Sequence[FlightRecord], first: int, last: int
) -> Sequence[FlightRecord]:
    start, end = (
        bisect_left(records, seq, key=lambda record: record.seq) for seq in (first, last + 1)
    )
    return records[start:end]


def _get_common_hash(seq: int) -> int:
    return (seq * CHAIN_BASE | 1) & UINT64_MASK
