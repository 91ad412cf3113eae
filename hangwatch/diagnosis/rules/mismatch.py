"""Calls that should be equal on every member of a group and are not, found by their running hashes."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass
from itertools import chain

from hangwatch.diagnosis.alignment import MAX_WINDOW_CALLS
from hangwatch.model.calls import Call, Signature, StreamKind
from hangwatch.model.groups import Group, GroupKey
from hangwatch.model.verdicts import CallClass
from hangwatch.tracking.attempt import find_first_conflict
from hangwatch.tracking.call_stream import CallStream, list_histories

_MAX_CALLS_TO_FETCH = 64
COMPARED_FIELDS = ("op", "dtype", "shape", "reduce_op", "root")

_CallClass = tuple[int, list[int]]  # a running hash, and the ranks that have it


@dataclass(frozen=True, slots=True, kw_only=True)
class CallMismatch:
    """Where the members of a group made different calls: at ``seq``, for the first time.

    ``classes`` are the ranks with equal calls up to and including ``seq``, the largest class first.
    ``calls_to_fetch`` are the calls without which the rest is uncertain: (rank, stream uid, from
    seq).
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
    """The first difference in each group that has one: only ``diverged_groups`` can."""
    if not diverged_groups:
        return []
    mismatches: list[CallMismatch] = []
    for key, members in streams_by_group.items():
        seq = find_first_conflict(members) if key in diverged_groups else None
        if seq:
            mismatches.append(_make_call_mismatch(key, members, seq, streams_by_group))
    return mismatches


def _make_call_mismatch(
    key: GroupKey,
    members: dict[int, CallStream],
    seq: int,
    streams_by_group: dict[GroupKey, dict[int, CallStream]],
) -> CallMismatch:
    classes, unclassified = _classify_members(members, seq)
    calls: list[CallClass] = []
    for _, ranks in classes:
        call = _find_call(members, ranks, seq)
        if call is not None:
            calls.append(CallClass(ranks=tuple(ranks), call=call))
    any_stream = next(iter(members.values()))
    return CallMismatch(
        group=any_stream.group,
        kind=any_stream.kind,
        seq=seq,
        classes=tuple(tuple(ranks) for _, ranks in classes),
        outliers=_find_outliers(key, seq, classes, streams_by_group),
        calls=tuple(calls),
        differing_fields=_compare_fields([c.call.signature for c in calls]),
        calls_to_fetch=_list_calls_to_fetch(members, seq, classes, unclassified),
    )


def _classify_members(
    members: dict[int, CallStream], seq: int
) -> tuple[list[_CallClass], list[int]]:
    """The classes of members with equal hashes, and the members past ``seq`` whose class is
    unknown.
    """
    ranks_by_hash: dict[int, list[int]] = {}
    unclassified: list[int] = []
    hash_by_history = {
        id(history): dict(history).get(seq) for history in list_histories(members.values())
    }
    for rank in sorted(members):
        stream = members[rank]
        running_hash = hash_by_history[id(stream.reported_hashes)]
        if running_hash is not None:
            ranks_by_hash.setdefault(running_hash, []).append(rank)
        elif stream.entered >= seq:
            unclassified.append(rank)
    if unclassified:
        _classify_by_later_hash(members, seq, ranks_by_hash, unclassified)
    classes = sorted(ranks_by_hash.items(), key=lambda item: (-len(item[1]), item[1]))
    return classes, unclassified


def _classify_by_later_hash(
    members: dict[int, CallStream],
    seq: int,
    ranks_by_hash: dict[int, list[int]],
    unclassified: list[int],
) -> None:
    """Moves members without a hash at ``seq`` to the class with which they share a later hash."""
    classes_by_later_hash: dict[tuple[int, int], int] = {}
    for running_hash, ranks in ranks_by_hash.items():
        for rank in ranks:
            for position in members[rank].hashes_by_seq.items():
                if position[0] > seq:
                    classes_by_later_hash[position] = running_hash
    for rank in list(unclassified):
        for position in members[rank].hashes_by_seq.items():
            if position in classes_by_later_hash:
                ranks_by_hash[classes_by_later_hash[position]].append(rank)
                unclassified.remove(rank)
                break
    for ranks in ranks_by_hash.values():
        ranks.sort()


def _list_calls_to_fetch(
    members: dict[int, CallStream], seq: int, classes: list[_CallClass], unclassified: list[int]
) -> tuple[tuple[int, int, int], ...]:
    """The calls up to ``seq`` that are missing, with some from before the divergence, which show
    how it came about.
    """
    common_seqs = [s for s in _find_common_positions(members, classes) if s < seq]
    first_different = max(common_seqs, default=0) + 1
    from_seq = max(1, min(first_different, seq - MAX_WINDOW_CALLS // 2))
    to_fetch: list[int] = []
    for _, ranks in classes:
        # One rank represents its class, since equal hashes mean equal calls.
        known = [members[rank] for rank in ranks if members[rank].calls]
        if any(_has_chained_calls(stream, first_different, seq) for stream in known):
            continue
        to_fetch += [rank for rank in ranks if members[rank].fetched_to < seq][:1]
    to_fetch += [rank for rank in unclassified if members[rank].fetched_to < seq]
    return tuple((rank, members[rank].uid, from_seq) for rank in to_fetch[:_MAX_CALLS_TO_FETCH])


def _find_common_positions(members: dict[int, CallStream], classes: list[_CallClass]) -> set[int]:
    """Positions at which every class has reported the same hash."""
    hashes_by_class: list[dict[int, int]] = []
    for _, ranks in classes:
        histories = list_histories(members[rank] for rank in ranks)
        hashes_by_class.append(dict(chain.from_iterable(histories)))
    first, *others = hashes_by_class
    return {
        seq
        for seq, running_hash in first.items()
        if all(other.get(seq) == running_hash for other in others)
    }


def _has_chained_calls(stream: CallStream, first: int, last: int) -> bool:
    return all(seq in stream.calls and stream.calls[seq].chain for seq in range(first, last + 1))


def _find_call(members: dict[int, CallStream], ranks: list[int], seq: int) -> Call | None:
    return next((members[rank].calls[seq] for rank in ranks if seq in members[rank].calls), None)


def _find_outliers(
    key: GroupKey,
    seq: int,
    classes: list[_CallClass],
    streams_by_group: dict[GroupKey, dict[int, CallStream]],
) -> tuple[int, ...]:
    """All ranks but the majority. On a tie, similar groups decide, such as the other
    tensor-parallel groups; if they do not, all ranks.
    """
    majority_hash: int | None = classes[0][0]
    if len(classes) > 1 and len(classes[0][1]) == len(classes[1][1]):
        votes = _count_similar_groups(key, seq, classes, streams_by_group)
        ranked = sorted(votes, key=lambda running_hash: -votes[running_hash])
        majority_hash = ranked[0]
        if votes[ranked[0]] == votes[ranked[1]]:
            majority_hash = None
    outliers: list[int] = []
    for running_hash, ranks in classes:
        if running_hash != majority_hash:
            outliers += ranks
    return tuple(sorted(outliers))


def _count_similar_groups(
    key: GroupKey,
    seq: int,
    classes: list[_CallClass],
    streams_by_group: dict[GroupKey, dict[int, CallStream]],
) -> dict[int, int]:
    """By the hash of each class, the number of similar groups in which a member has this hash."""
    votes = {running_hash: 0 for running_hash, _ in classes}
    generation, _, ranks, world_size = key
    for other_key, members in streams_by_group.items():
        other_generation, _, other_ranks, other_world_size = other_key
        is_similar = (
            (other_generation, other_world_size) == (generation, world_size)
            and len(other_ranks) == len(ranks)
            and other_key != key
        )
        if not is_similar:
            continue
        reported: set[int] = set()
        for history in list_histories(members.values()):
            reported.update(value for at, value in history if at == seq)
        for running_hash in reported & votes.keys():
            votes[running_hash] += 1
    return votes


def _compare_fields(signatures: list[Signature]) -> tuple[str, ...]:
    """The fields that differ. If the operations differ, no other field is comparable."""
    if len(signatures) < 2:
        return ()
    first = signatures[0]
    if any(other.op != first.op for other in signatures):
        return ("op",)
    differing_fields: list[str] = []
    for name in COMPARED_FIELDS:
        read = _FIELD_READERS.get(name)
        if read is not None and any(read(other) != read(first) for other in signatures):
            differing_fields.append(name)
    if not differing_fields and any(other.detail != first.detail for other in signatures):
        differing_fields.append("detail")
    return tuple(differing_fields)


_FIELD_READERS: dict[str, Callable[[Signature], object]] = {
    "dtype": lambda s: s.dtype,
    "shape": lambda s: (s.numel, *map(math.prod, s.shapes)),
    "reduce_op": lambda s: s.reduce_op,
    "root": lambda s: s.root,
}
