"""Arguments that may differ between the members of a group but must fit between two of them: what
one rank sends is what the other expects.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from hangwatch.diagnosis.split_sizes import SplitExchange
from hangwatch.model.calls import Call, Signature, StreamKind
from hangwatch.model.groups import Group
from hangwatch.model.verdicts import CallClass
from hangwatch.tracking.attempt import Attempt
from hangwatch.tracking.call_stream import CallStream

MAX_CLASSES_SHOWN = 16  # of an all-to-all, in which every member may have different sizes
_MAX_OUTLIERS_FIRST = 8  # whose calls are shown before those of the other members


@dataclass(frozen=True, slots=True, kw_only=True)
class PairMismatch:
    """Two or more ranks whose calls do not fit. ``outliers`` are the culprits: all of the ranks if
    it is unknown which one is wrong.

    ``ranks`` made the call, and ``calls`` are those of some of them. ``exchange`` is a pair of
    sizes in an all-to-all that an outlier has wrong.
    """

    group: Group
    seq: int
    outliers: tuple[int, ...]
    differing_fields: tuple[str, ...]
    calls: tuple[CallClass, ...]
    ranks: tuple[int, ...]
    began_at: float
    exchange: SplitExchange | None = None


def find_pair_mismatches(attempt: Attempt) -> list[PairMismatch]:
    """The first mismatch of each channel and of each group's all-to-all calls, among the calls
    whose arguments are known.
    """
    mismatches: list[PairMismatch] = []
    for rank in sorted(attempt.sender_ranks):
        for stream in attempt.processes[rank].streams.values():
            if stream.kind is not StreamKind.SEND or not stream.calls or stream.other_end is None:
                continue
            mismatch = _compare_channel(rank, stream, stream.other_end)
            if mismatch is not None:
                mismatches.append(mismatch)
    for key in attempt.uneven_groups:
        mismatch = _compare_splits(attempt.streams_by_group[key])
        if mismatch is not None:
            mismatches.append(mismatch)
    return mismatches


def _compare_channel(rank: int, sending: CallStream, receiving: CallStream) -> PairMismatch | None:
    for seq in sorted(sending.calls):
        if not (sending.is_counted(seq) and receiving.is_counted(seq)):
            break
        sent, expected = sending.calls[seq], receiving.calls.get(seq)
        if expected is None or sending.peer is None:
            continue
        differing_fields = _compare_channel_fields(sent.signature, expected.signature)
        if differing_fields:
            return PairMismatch(
                group=sending.group,
                seq=seq,
                outliers=tuple(sorted((rank, sending.peer))),
                differing_fields=differing_fields,
                calls=(
                    CallClass(ranks=(rank,), call=replace(sent, peer=sending.peer)),
                    CallClass(ranks=(sending.peer,), call=replace(expected, peer=rank)),
                ),
                ranks=(rank, sending.peer),
                began_at=max(sending.entered_at, receiving.entered_at),
            )
    return None


def _compare_channel_fields(sent: Signature, expected: Signature) -> tuple[str, ...]:
    if "?" in (sent.op, expected.op):
        return ()
    differing_fields: list[str] = []
    if sent.dtype != expected.dtype:
        differing_fields.append("dtype")
    if sent.numel != expected.numel:
        differing_fields.append("shape")
    return tuple(differing_fields)


def _compare_splits(members: dict[int, CallStream]) -> PairMismatch | None:
    """The group's first all-to-all in which some member sends other sizes than their receivers
    expect.
    """
    group = next(iter(members.values())).group
    for seq, calls in sorted(_collect_uneven_calls(group, members).items()):
        conflicts = list(_find_split_conflicts(group, calls))
        if conflicts:
            return _make_split_mismatch(group, seq, members, calls, conflicts)
    return None


def _collect_uneven_calls(
    group: Group, members: dict[int, CallStream]
) -> dict[int, dict[int, Call]]:
    """By number and rank, the calls with split sizes."""
    calls_by_seq: dict[int, dict[int, Call]] = {}
    for rank, stream in members.items():
        if not stream.calls or rank not in group.ranks:
            continue
        for seq, call in stream.calls.items():
            if call.signature.splits is not None and stream.is_counted(seq):
                calls_by_seq.setdefault(seq, {})[rank] = call
    return calls_by_seq


def _find_split_conflicts(group: Group, calls: dict[int, Call]) -> Iterator[SplitExchange]:
    for sender, sending in calls.items():
        for receiver, receiving in calls.items():
            if sender == receiver:
                continue
            sent = _get_split_elements(sending, 0, group, receiver)
            expected = _get_split_elements(receiving, 1, group, sender)
            if sent != expected:
                yield SplitExchange(sender=sender, receiver=receiver, sent=sent, expected=expected)


def _make_split_mismatch(
    group: Group,
    seq: int,
    members: dict[int, CallStream],
    calls: dict[int, Call],
    conflicts: list[SplitExchange],
) -> PairMismatch:
    """The ranks with the most conflicts are the outliers."""
    counts: Counter[int] = Counter()
    for conflict in conflicts:
        counts.update((conflict.sender, conflict.receiver))
    most = max(counts.values())
    outliers = tuple(sorted(rank for rank, count in counts.items() if count == most))
    exchange = _select_exchange(conflicts, outliers)
    shown_first = outliers[:_MAX_OUTLIERS_FIRST]
    if exchange is not None:
        shown_first += (exchange.sender, exchange.receiver)
    return PairMismatch(
        group=group,
        seq=seq,
        outliers=outliers,
        differing_fields=("splits",),
        calls=_group_by_splits(calls, shown_first, outliers),
        ranks=tuple(sorted(calls)),
        began_at=max(members[rank].entered_at for rank in calls),
        exchange=exchange,
    )


def _select_exchange(
    conflicts: Iterable[SplitExchange], outliers: tuple[int, ...]
) -> SplitExchange | None:
    """The first conflict of an outlier in which both sizes are known."""
    for conflict in conflicts:
        is_of_outlier = conflict.sender in outliers or conflict.receiver in outliers
        if is_of_outlier and min(conflict.sent, conflict.expected) >= 0:
            return conflict
    return None


def _group_by_splits(
    calls: dict[int, Call], shown_first: tuple[int, ...], outliers: tuple[int, ...]
) -> tuple[CallClass, ...]:
    """The ranks with equal sizes together, the outliers separate from the others."""
    classes: dict[object, list[int]] = {}
    for rank in dict.fromkeys((*shown_first, *sorted(calls))):
        key = (rank in outliers, calls[rank].signature.splits)
        classes.setdefault(key, []).append(rank)
    shown = list(classes.values())[:MAX_CLASSES_SHOWN]
    return tuple(CallClass(ranks=tuple(sorted(ranks)), call=calls[ranks[0]]) for ranks in shown)


def _get_split_elements(call: Call, side: int, group: Group, other: int) -> float:
    """The number of elements that a call sends to (side 0) or expects from (side 1) global rank
    ``other``, -1 if it is unknown. A single number means equal parts.
    """
    assert call.signature.splits is not None
    parts = call.signature.splits[side]
    if len(parts) == 1:
        return parts[0] / len(group.ranks)
    index = group.ranks.index(other)
    return parts[index] if index < len(parts) else -1.0
