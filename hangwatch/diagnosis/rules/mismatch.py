"""Calls that should be equal on every member of a group and are not, found by their running hashes."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass

from hangwatch.diagnosis.alignment import MAX_WINDOW_CALLS
from hangwatch.model.calls import Call, Signature, StreamKind
from hangwatch.model.groups import Group, GroupKey
from hangwatch.model.verdicts import CallClass
from hangwatch.tracking.attempt import find_first_conflict
from hangwatch.tracking.call_stream import CallStream

COMPARED_FIELDS = ("op", "dtype", "shape", "reduce_op", "root")


@dataclass(frozen=True, slots=True, kw_only=True)
class CallMismatch:
    """Where the members of a group made different calls: at ``seq``, for the first time.

    ``classes`` hold the ranks with equal sequences up to and including ``seq``, the largest first.
    ``missing`` are ranks whose calls must be fetched before the rest is certain: (rank, sequence
    uid, from seq).
    """

    group: Group
    kind: StreamKind
    seq: int
    classes: tuple[tuple[int, ...], ...]
    outliers: tuple[int, ...]
    calls: tuple[CallClass, ...] = ()
    differing_fields: tuple[str, ...] = ()
    calls_to_fetch: tuple[tuple[int, int, int], ...] = ()


def find_call_mismatches(
    streams_by_group: dict[GroupKey, dict[int, CallStream]], diverged_groups: Collection[GroupKey]
) -> list[CallMismatch]:
    """The first difference in each group that has one: those are all among the ``doubted``."""
    found = []
    for key in (
        [key for key in streams_by_group if key in diverged_groups] if diverged_groups else ()
    ):
        if seq := find_first_conflict(streams_by_group[key]):
            found.append(_make_call_mismatch(key, streams_by_group[key], seq, streams_by_group))
    return found


def _make_call_mismatch(
    key: GroupKey,
    members: dict[int, CallStream],
    seq: int,
    streams_by_group: dict[GroupKey, dict[int, CallStream]],
) -> CallMismatch:
    by_hash: dict[int, list[int]] = {}
    unclear: list[int] = []
    for rank in sorted(members):
        sequence = members[rank]
        if (value := sequence.hashes_by_seq.get(seq)) is not None:
            by_hash.setdefault(value, []).append(rank)
        elif sequence.entered >= seq:
            unclear.append(rank)
    _classify_by_later_hash(members, seq, by_hash, unclear)
    classes = sorted(by_hash.items(), key=lambda item: (-len(item[1]), item[1]))
    agreed = max((s for s in _find_common_positions(members, classes) if s < seq), default=0)
    group = next(iter(members.values())).group
    first = max(
        1, min(agreed + 1, seq - MAX_WINDOW_CALLS // 2)
    )  # some calls from before the parting show how it came about
    missing = []
    for _, ranks in classes:
        # One rank stands for its class: equal hashes are equal histories.
        if not any(_has_chained_calls(members[rank], agreed + 1, seq) for rank in ranks):
            fetchable = [rank for rank in ranks if members[rank].fetched_to < seq]
            missing += [(rank, members[rank].uid, first) for rank in fetchable[:1]]
    missing += [
        (rank, members[rank].uid, first) for rank in unclear if members[rank].fetched_to < seq
    ]
    odd = _find_outliers(key, seq, classes, streams_by_group)
    calls = [
        CallClass(ranks=tuple(ranks), call=call)
        for _, ranks in classes
        if (call := _find_call(members, ranks, seq)) is not None
    ]
    return CallMismatch(
        group=group,
        kind=next(iter(members.values())).kind,
        seq=seq,
        classes=tuple(tuple(ranks) for _, ranks in classes),
        outliers=odd,
        calls=tuple(calls),
        differing_fields=_compare_fields([c.call.signature for c in calls]),
        calls_to_fetch=tuple(missing[:64]),
    )


def _classify_by_later_hash(
    members: dict[int, CallStream], seq: int, by_hash: dict[int, list[int]], unclear: list[int]
) -> None:
    """A member that told no hash at the parting, ``seq``, belongs with those whose hash it shares
    later on.
    """
    later: dict[tuple[int, int], int] = {}
    for value, ranks in by_hash.items():
        for rank in ranks:
            later.update(
                {item: value for item in members[rank].hashes_by_seq.items() if item[0] > seq}
            )
    for rank in list(unclear):
        for item in members[rank].hashes_by_seq.items():
            if item in later:
                by_hash[later[item]].append(rank)
                unclear.remove(rank)
                break
    for ranks in by_hash.values():
        ranks.sort()


def _find_common_positions(
    members: dict[int, CallStream], classes: list[tuple[int, list[int]]]
) -> set[int]:
    """Positions at which every class has told the same hash."""
    per_class = []
    for _, ranks in classes:
        told: dict[int, int] = {}
        for rank in ranks:
            told.update(members[rank].hashes_by_seq)
        per_class.append(told)
    first, *others = per_class
    return {seq for seq, value in first.items() if all(told.get(seq) == value for told in others)}


def _has_chained_calls(stream: CallStream, first: int, last: int) -> bool:
    return all(seq in stream.calls and stream.calls[seq].chain for seq in range(first, last + 1))


def _find_call(members: dict[int, CallStream], ranks: list[int], seq: int) -> Call | None:
    return next((members[rank].calls[seq] for rank in ranks if seq in members[rank].calls), None)


def _find_outliers(
    key: GroupKey,
    seq: int,
    classes: list[tuple[int, list[int]]],
    streams_by_group: dict[GroupKey, dict[int, CallStream]],
) -> tuple[int, ...]:
    """All but the majority. A tie is broken by what the group's twins did there, such as the other
    tensor-parallel groups.
    """
    if len(classes) > 1 and len(classes[0][1]) == len(classes[1][1]):
        votes = {value: 0 for value, _ in classes}
        for other, members in streams_by_group.items():
            if (
                other != key
                and (other[0], other[3]) == (key[0], key[3])
                and len(other[2]) == len(key[2])
            ):
                for value in {
                    value
                    for s in members.values()
                    for at, value in s.reported_hashes
                    if at == seq and value in votes
                }:
                    votes[value] += 1
        ranked = sorted(votes.values(), reverse=True)
        if ranked[0] == ranked[1]:
            return tuple(sorted(rank for _, ranks in classes for rank in ranks))
        best = max(votes, key=lambda value: votes[value])
        return tuple(sorted(rank for value, ranks in classes if value != best for rank in ranks))
    return tuple(sorted(rank for _, ranks in classes[1:] for rank in ranks))


def _compare_fields(signatures: list[Signature]) -> tuple[str, ...]:
    """In what the calls differ. Another operation makes all else incomparable."""
    if len(signatures) < 2:
        return ()
    first = signatures[0]
    if any(s.op != first.op for s in signatures):
        return ("op",)
    differing = [
        name
        for name, read in _FIELD_READERS.items()
        if any(read(s) != read(first) for s in signatures[1:])
    ]
    return tuple(name for name in COMPARED_FIELDS if name in differing) or (
        ("detail",) if any(s.detail != first.detail for s in signatures) else ()
    )


_FIELD_READERS: dict[str, Callable[[Signature], object]] = {
    "dtype": lambda s: s.dtype,
    "shape": lambda s: (s.numel, *map(math.prod, s.shapes)),
    "reduce_op": lambda s: s.reduce_op,
    "root": lambda s: s.root,
}
