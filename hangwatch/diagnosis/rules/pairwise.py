"""What need not be equal on all members of a group, yet must fit between two of them: what one
sends, the other expects.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

from hangwatch.diagnosis.split_sizes import SplitExchange
from hangwatch.model.calls import Call, Signature, StreamKind
from hangwatch.model.groups import Group
from hangwatch.model.verdicts import CallClass
from hangwatch.tracking.attempt import Attempt
from hangwatch.tracking.call_stream import CallStream

MAX_CLASSES_SHOWN = 16  # of an all-to-all, in which every member may have sizes of its own


@dataclass(frozen=True, slots=True, kw_only=True)
class PairMismatch:
    """Two or more ranks whose calls do not fit: ``odd`` are to blame, all of them where nothing
    tells who.

    ``ranks`` made the call; ``calls`` may be those of some of them. ``pair`` is a part of an
    all-to-all that one of the odd has wrong.
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
    """The first misfit of each channel and of each group's all-to-all calls, among the calls whose
    arguments are known.
    """
    known = (
        (rank, s)
        for rank in sorted(attempt.sender_ranks)
        for s in list_sends(attempt, rank)
        if s.calls
    )
    found = [m for rank, s in known if (m := _compare_channel(attempt, rank, s)) is not None]
    return found + [
        m
        for key in attempt.uneven_groups
        if (m := _compare_splits(attempt.streams_by_group[key])) is not None
    ]


def list_sends(attempt: Attempt, rank: int) -> list[CallStream]:
    return [s for s in attempt.processes[rank].streams.values() if s.kind is StreamKind.SEND]


def find_other_end(attempt: Attempt, rank: int, stream: CallStream) -> CallStream | None:
    """The peer's side of a rank's channel, if it ever used it."""
    process = attempt.processes.get(stream.peer if stream.peer is not None else -1)
    wanted = StreamKind.RECV if stream.kind is StreamKind.SEND else StreamKind.SEND
    for other in process.streams.values() if process is not None else ():
        if (
            other.kind is wanted
            and other.peer == rank
            and other.tag == stream.tag
            and other.group.key == stream.group.key
        ):
            return other
    return None


def _compare_channel(attempt: Attempt, rank: int, sending: CallStream) -> PairMismatch | None:
    receiving = find_other_end(attempt, rank, sending)
    if receiving is None or sending.peer is None:
        return None
    for seq in sorted(sending.calls.keys() & receiving.calls.keys()):
        sent, expected = sending.calls[seq], receiving.calls[seq]
        fields = _compare_channel_fields(sent.signature, expected.signature)
        if fields:
            return PairMismatch(
                group=sending.group,
                seq=seq,
                outliers=tuple(sorted((rank, sending.peer))),
                differing_fields=fields,
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
    return tuple(
        name
        for name, a, b in (
            ("dtype", sent.dtype, expected.dtype),
            ("shape", sent.numel, expected.numel),
        )
        if a != b
    )


def _compare_splits(members: dict[int, CallStream]) -> PairMismatch | None:
    """What i sends to j must be what j expects from i."""
    group = next(iter(members.values())).group
    by_seq: dict[int, dict[int, Call]] = {}
    for rank, sequence in [item for item in members.items() if item[1].calls]:
        for seq, call in sequence.calls.items():
            if call.signature.splits is not None and rank in group.ranks:
                by_seq.setdefault(seq, {})[rank] = call
    for seq in sorted(by_seq):
        calls = by_seq[seq]
        blame: Counter[int] = Counter()
        unfit: list[SplitExchange] = []
        for i, mine in calls.items():
            for j, theirs in calls.items():
                sent, expected = (
                    _get_split_elements(mine, 0, group, j),
                    _get_split_elements(theirs, 1, group, i),
                )
                if i != j and sent != expected:
                    blame.update((i, j))
                    unfit.append(SplitExchange(sender=i, receiver=j, sent=sent, expected=expected))
        if blame:
            most = max(blame.values())
            odd = tuple(sorted(rank for rank, times in blame.items() if times == most))
            pair = next(
                (
                    e
                    for e in unfit
                    if {e.sender, e.receiver} & set(odd) and min(e.sent, e.expected) >= 0
                ),
                None,
            )
            first = odd[:8] if pair is None else (*odd[:8], pair.sender, pair.receiver)
            return PairMismatch(
                group=group,
                seq=seq,
                outliers=odd,
                differing_fields=("splits",),
                calls=_group_by_splits(calls, first, odd),
                ranks=tuple(sorted(calls)),
                began_at=max(members[rank].entered_at for rank in calls),
                exchange=pair,
            )
    return None


def _group_by_splits(
    calls: dict[int, Call], first: tuple[int, ...], outliers: tuple[int, ...]
) -> tuple[CallClass, ...]:
    """Those with equal sizes together, the ``odd`` apart from the others."""
    classes: dict[object, list[int]] = {}
    for rank in dict.fromkeys((*first, *sorted(calls))):
        classes.setdefault((rank in outliers, calls[rank].signature.splits), []).append(rank)
    shown = list(classes.values())[:MAX_CLASSES_SHOWN]
    return tuple(CallClass(ranks=tuple(sorted(ranks)), call=calls[ranks[0]]) for ranks in shown)


def _get_split_elements(call: Call, side: int, group: Group, other: int) -> float:
    """Elements that a call sends to (side 0) or expects from (side 1) global rank ``other``; one
    number means even parts.
    """
    assert call.signature.splits is not None
    parts = call.signature.splits[side]
    if len(parts) == 1:
        return parts[0] / len(group.ranks)
    index = group.ranks.index(other)
    return parts[index] if index < len(parts) else -1.0
