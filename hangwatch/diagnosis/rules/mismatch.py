"""Calls that should be equal on every member of a group and are not, found by their running hashes."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass

from hangwatch.diagnosis.alignment import MAX_WINDOW_CALLS
from hangwatch.diagnosis.call_classes import HashClass, classify_members
from hangwatch.model.calls import Call, Signature, StreamKind
from hangwatch.model.groups import Group, GroupKey
from hangwatch.model.signatures import UNKNOWN_OP
from hangwatch.model.verdicts import CallClass
from hangwatch.tracking.attempt import find_divergence
from hangwatch.tracking.call_stream import CallStream, CallWindow, DivergenceBounds, list_histories

_MAX_CALLS_TO_FETCH = 64
_MAX_ASKED_PER_CLASS = 3  # for the same calls
_MAX_PROBES = 64  # calls that are compared at a time to find where a divergence began
COMPARED_FIELDS = ("op", "dtype", "shape", "reduce_op", "root")


@dataclass(frozen=True, slots=True, kw_only=True)
class CallMismatch:
    """Where the members of a group made different calls: at ``seq``, for the first time. If that is not
    exact, it was at some call after ``last_equal``, up to which all are known to have made equal ones.

    ``classes`` are the ranks with equal calls up to and including ``seq``, the largest class first.
    ``calls`` are empty unless ``seq`` is exact. ``calls_to_fetch`` are the calls without which the rest
    is uncertain, by rank.
    """

    group: Group
    kind: StreamKind
    seq: int
    classes: tuple[tuple[int, ...], ...]
    outliers: tuple[int, ...]
    calls: tuple[CallClass, ...] = ()
    differing_fields: tuple[str, ...] = ()
    last_equal: int = 0
    calls_to_fetch: tuple[tuple[int, CallWindow], ...] = ()

    @property
    def is_exact(self) -> bool:
        """Whether the calls up to the one before ``seq`` are known to be equal."""
        return self.seq == self.last_equal + 1


def find_call_mismatches(
    streams_by_group: dict[GroupKey, dict[int, CallStream]], diverged_groups: Collection[GroupKey]
) -> list[CallMismatch]:
    """The first difference in each group that has one: only ``diverged_groups`` can."""
    if not diverged_groups:
        return []
    mismatches: list[CallMismatch] = []
    for key, members in streams_by_group.items():
        divergence = find_divergence(members) if key in diverged_groups else None
        if divergence is not None:
            mismatches.append(_make_call_mismatch(key, members, divergence, streams_by_group))
    return mismatches


def _make_call_mismatch(
    key: GroupKey,
    members: dict[int, CallStream],
    divergence: DivergenceBounds,
    streams_by_group: dict[GroupKey, dict[int, CallStream]],
) -> CallMismatch:
    seq = divergence.first_different
    classes, unclassified = classify_members(members, seq)
    calls: list[CallClass] = []
    for _, ranks in classes if divergence.is_exact else ():
        call = _find_call(members, ranks, seq)
        if call is not None:
            calls.append(CallClass(ranks=tuple(ranks), call=call))
    any_stream = next(iter(members.values()))
    return CallMismatch(
        group=any_stream.group,
        kind=any_stream.kind,
        seq=seq,
        last_equal=divergence.last_equal,
        classes=tuple(tuple(ranks) for _, ranks in classes),
        outliers=_find_outliers(key, seq, classes, streams_by_group),
        calls=tuple(calls),
        differing_fields=_compare_fields([c.call.signature for c in calls]),
        calls_to_fetch=_list_calls_to_fetch(members, divergence, classes, unclassified),
    )


def _list_calls_to_fetch(
    members: dict[int, CallStream],
    divergence: DivergenceBounds,
    classes: list[HashClass],
    unclassified: list[int],
) -> tuple[tuple[int, CallWindow], ...]:
    """The calls that show where the divergence began, with some from before, which show how it came
    about. If it may have begun at any of many calls, first some of these, whose hashes narrow it down.
    """
    seq = divergence.first_different
    window = choose_window(divergence)
    to_fetch: list[tuple[int, CallWindow]] = []
    for _, ranks in classes:
        # One rank represents its class, since equal hashes mean equal calls; the next one does if the
        # calls of the first are lost.
        if any(_knows_calls(members[rank], window, divergence.last_equal) for rank in ranks):
            continue
        asked = [rank for rank in ranks if members[rank].has_answered(window)]
        if len(asked) < _MAX_ASKED_PER_CLASS:
            to_fetch += [(rank, window) for rank in ranks if rank not in asked][:1]
    at_seq = CallWindow(seq, seq)
    for rank in unclassified:
        if not members[rank].has_answered(at_seq):
            to_fetch.append((rank, at_seq))
    return tuple(to_fetch[:_MAX_CALLS_TO_FETCH])


def choose_window(divergence: DivergenceBounds) -> CallWindow:
    """The next calls to compare between the sides of a divergence."""
    first, last = divergence.last_equal + 1, divergence.first_different
    if last - first < MAX_WINDOW_CALLS:
        return CallWindow(max(1, min(first, last - MAX_WINDOW_CALLS // 2)), last)
    step = 1
    while (last - first) // step >= _MAX_PROBES:
        step *= 2
    return CallWindow(first, last, step)


def _knows_calls(stream: CallStream, window: CallWindow, last_equal: int) -> bool:
    """Whether the calls of a window that came after call ``last_equal`` are known; of a sparse window,
    whether their hashes are.
    """
    if window.step > 1:
        first = -(-window.first // window.step) * window.step
        hashes = stream.hashes_by_seq
        return all(seq in hashes for seq in range(first, window.last + 1, window.step))
    calls = stream.calls
    return bool(calls) and all(
        seq in calls and calls[seq].chain for seq in range(last_equal + 1, window.last + 1)
    )


def _find_call(members: dict[int, CallStream], ranks: list[int], seq: int) -> Call | None:
    for rank in ranks:
        call = members[rank].calls.get(seq)
        if call is not None and call.signature.op != UNKNOWN_OP:
            return call
    return None


def _find_outliers(
    key: GroupKey,
    seq: int,
    classes: list[HashClass],
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
    classes: list[HashClass],
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
