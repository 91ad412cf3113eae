"""What one rank sends is not what the other expects: messages of a channel, the parts of an all-to-all, a
gather or a scatter, and peers that are no ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import islice, permutations
from typing import NamedTuple

from hangwatch.model.calls import UNKNOWN_OP, Call, StreamKind, decode_invalid_peer
from hangwatch.model.groups import Group
from hangwatch.model.kinds import VerdictKind
from hangwatch.model.limits import MAX_EVIDENCE_WAIT_S, MIN_WAIT_S
from hangwatch.model.operators import OPERATIONS, ListSide
from hangwatch.model.verdicts import CallClass, Verdict
from hangwatch.tracking.attempt import find_divergence
from hangwatch.tracking.call_stream import CallStream, CallWindow, StreamsByRank

from ..context import DiagnosisContext, get_newest_call
from ..graph.edges import get_op_name, has_receives_from_any
from ..messages import describe_lost_calls, describe_mismatch, describe_position, describe_ranks
from .mismatch import choose_window, find_site_of, knows_calls

_MAX_REQUESTED_SIZES = 64  # calls of other members that are requested at a time
# Every member of an all-to-all may have different sizes. The calls of the first outliers are shown
# before those of the other members.
_MAX_CLASSES_SHOWN = 16
_MAX_OUTLIERS_FIRST = 8

_PAIR_MISMATCH_ADVICE = "What one rank sends is not what the other expects: compare the two lines."
_INVALID_PEER_ADVICE = (
    "Look at how this number is computed. A receive from any source is one without a source"
    " (src=None)."
)


def diagnose_exchanges(context: DiagnosisContext) -> None:
    """One verdict for each channel and each group's all-to-all calls whose two ends do not fit: on the
    first such call among those whose arguments are known.
    """
    attempt = context.attempt
    for rank in sorted(attempt.sender_ranks):
        for stream in attempt.processes[rank].streams.values():
            if stream.kind is StreamKind.SEND and stream.calls and stream.other_end is not None:
                _compare_channel(context, rank, stream, stream.other_end)
    for sending in list(attempt.diverged_channels.values()):
        _locate_divergence(context, sending)
    for key in attempt.uneven_groups:
        _compare_splits(context, attempt.streams_by_group[key])


def diagnose_invalid_peers(context: DiagnosisContext) -> None:
    """One verdict for each send or receive that does not complete because its peer is no rank of its
    group: only MPI knows such peers, and not every other backend checks the argument.
    """
    for rank in sorted(context.attempt.misaddressing_ranks):
        for stream in context.processes[rank].unfinished_streams:
            argument = decode_invalid_peer(stream.peer)
            if argument is None or context.now - stream.entered_at < MIN_WAIT_S:
                continue
            end = "destination" if stream.kind is StreamKind.SEND else "source"
            summary = (
                f"rank {rank} called {get_op_name(stream)} with {end} {argument}, which is no rank of"
                f" {stream.group.title}"
            )
            _accuse_callers(
                context,
                {rank: stream},
                (rank,),
                stream.entered,
                ("peer",),
                get_newest_call(stream, rank),
                summary,
                _INVALID_PEER_ADVICE,
            )


def _compare_channel(
    context: DiagnosisContext, rank: int, sending: CallStream, receiving: CallStream
) -> None:
    peer = sending.peer
    if peer is None:
        return
    receiver = context.processes.get(peer)
    if receiver is not None and has_receives_from_any(receiver, receiving):
        return
    for seq in sorted(sending.calls):
        if not (sending.is_counted(seq) and receiving.is_counted(seq)):
            return
        sent, expected = sending.calls[seq], receiving.calls.get(seq)
        if expected is None:
            continue
        ours, theirs = sent.signature, expected.signature
        fields = []
        if ours.dtype != theirs.dtype:
            fields.append("dtype")
        if ours.numel != theirs.numel:
            fields.append("shape")
        if not fields or UNKNOWN_OP in (ours.op, theirs.op):
            continue
        callers = {rank: sending, peer: receiving}
        outliers = tuple(sorted(callers))
        calls = (
            CallClass(ranks=(rank,), call=replace(sent, peer=peer)),
            CallClass(ranks=(peer,), call=replace(expected, peer=rank)),
        )
        differing_fields = tuple(fields)
        summary = describe_mismatch(outliers, calls, differing_fields, sending.group, seq)
        _accuse_callers(context, callers, outliers, seq, differing_fields, calls, summary)
        return


def _locate_divergence(context: DiagnosisContext, sending: CallStream) -> None:
    """Finds the first call at which the running hashes of a channel's two ends differ, and requests the
    calls around it for `_compare_channel`. If some are lost, the verdict gives the range of calls.
    """
    receiving = sending.other_end
    if receiving is None or sending.peer is None or receiving.peer is None:
        return
    ends = {receiving.peer: sending, sending.peer: receiving}
    divergence = find_divergence(ends)
    receiver = context.processes.get(sending.peer)
    if divergence is None or receiver is None or has_receives_from_any(receiver, receiving):
        return
    window = choose_window(divergence)
    last_equal = divergence.last_equal
    is_lost = False
    for rank, end in ends.items():
        if not knows_calls(end, window, last_equal):
            context.request_calls(rank, end, window)
            is_lost |= end.has_answered(window)
    if not is_lost:
        return
    seq = divergence.first_different
    where = describe_lost_calls(describe_position(sending.group, seq), last_equal)
    summary = (
        f"what rank {receiving.peer} sent differs from what rank {sending.peer} received {where}"
    )
    _accuse_callers(context, ends, tuple(sorted(ends)), seq, (), (), summary)


class SplitExchange(NamedTuple):
    """What a rank sends to another one in a call, or to itself, and what that expects, in elements."""

    sender: int
    receiver: int
    sent: float
    expected: float


def _compare_splits(context: DiagnosisContext, members: StreamsByRank) -> None:
    """Compares what the members of a group send in calls with sizes for each member with what their
    receivers expect.
    """
    group = next(iter(members.values())).group
    calls_by_seq: dict[int, dict[int, Call]] = {}  # calls with split sizes
    for rank, stream in members.items():
        if not stream.calls or rank not in group.ranks:
            continue
        for seq, call in stream.calls.items():
            if call.signature.splits is not None and stream.is_counted(seq):
                calls_by_seq.setdefault(seq, {})[rank] = call
    for seq, calls in sorted(calls_by_seq.items()):
        if len({call.signature.op for call in calls.values()}) > 1:
            continue
        exchanges = list(_iter_exchanges(calls, group))
        conflicts = [exchange for exchange in exchanges if exchange.sent != exchange.expected]
        if conflicts:
            _accuse_split_outliers(context, members, seq, calls, exchanges, conflicts)
            return


def _await_other_sizes(context: DiagnosisContext, members: StreamsByRank, seq: int) -> bool:
    """Whether calls that show which of two sizes is that of most members may still be reported."""
    entered = {rank: stream for rank, stream in members.items() if stream.entered >= seq}
    unknown = [rank for rank, stream in entered.items() if seq not in stream.calls]
    if not unknown:
        return False
    for rank in unknown[:_MAX_REQUESTED_SIZES]:
        context.request_calls(rank, members[rank], CallWindow(seq, seq))
    last_entered_at = max(stream.entered_at for stream in entered.values())
    return context.now - last_entered_at <= MAX_EVIDENCE_WAIT_S + MIN_WAIT_S


def _iter_exchanges(calls: Mapping[int, Call], group: Group) -> Iterator[SplitExchange]:
    """What the ranks whose calls are known exchange. With a root, each member does so only with the root."""
    first = next(iter(calls.values())).signature
    spec = OPERATIONS.get(first.op)
    root_index = first.root
    if spec is None or root_index is None:
        for sender, receiver in permutations(calls, 2):
            sent = _get_split_elements(calls[sender], 0, group, receiver)
            expected = _get_split_elements(calls[receiver], 1, group, sender)
            yield SplitExchange(sender, receiver, sent, expected)
        return
    root = group.ranks[root_index] if root_index < len(group.ranks) else -1
    root_splits = calls[root].signature.splits if root in calls else None
    if root_splits is None:
        return
    is_list_sent = spec.list_side is ListSide.INPUTS
    for member, part in zip(group.ranks, root_splits[not is_list_sent], strict=False):
        call = calls.get(member)
        if call is None or call.signature.splits is None or call.signature.root != root_index:
            continue
        own_parts = call.signature.splits[is_list_sent]
        if len(own_parts) != 1:
            continue
        if is_list_sent:
            yield SplitExchange(root, member, part, own_parts[0])
        else:
            yield SplitExchange(member, root, own_parts[0], part)


def _find_split_outliers(
    exchanges: list[SplitExchange], conflicts: list[SplitExchange], *, is_rooted: bool
) -> tuple[int, ...]:
    """The ranks with the most conflicts. With a root, those whose size is not that of most members, and
    both ranks of a conflict if no size is.
    """
    if not is_rooted:
        counts = Counter(rank for conflict in conflicts for rank in conflict[:2])
        most = max(counts.values())
        return tuple(sorted(rank for rank, count in counts.items() if count == most))
    is_list_sent = len({exchange.sender for exchange in exchanges}) == 1
    if is_list_sent:
        own_sizes = Counter(exchange.expected for exchange in exchanges)
    else:
        own_sizes = Counter(exchange.sent for exchange in exchanges)
    usual = {size for size, count in own_sizes.items() if 2 * count > len(exchanges)}
    outliers = set()
    for sender, receiver, sent, expected in conflicts:
        if sent not in usual:
            outliers.add(sender)
        if expected not in usual:
            outliers.add(receiver)
    return tuple(sorted(outliers))


def _accuse_split_outliers(
    context: DiagnosisContext,
    members: StreamsByRank,
    seq: int,
    calls: dict[int, Call],
    exchanges: list[SplitExchange],
    conflicts: list[SplitExchange],
) -> None:
    """Accuses the outliers; the summary has the first of their conflicts with known sizes."""
    is_rooted = next(iter(calls.values())).signature.root is not None
    outliers = _find_split_outliers(exchanges, conflicts, is_rooted=is_rooted)
    if is_rooted and len(outliers) > 1 and _await_other_sizes(context, members, seq):
        return
    exchange = None
    for conflict in conflicts:
        are_sizes_known = min(conflict.sent, conflict.expected) >= 0
        if are_sizes_known and not set(outliers).isdisjoint(conflict[:2]):
            exchange = conflict
            break
    shown_first = outliers[:_MAX_OUTLIERS_FIRST]
    if exchange is not None:
        shown_first += (exchange.sender, exchange.receiver)
    # The ranks with equal sizes together, the outliers separate from the others.
    classes: dict[object, list[int]] = {}
    for rank in dict.fromkeys((*shown_first, *sorted(calls))):
        sizes = rank in outliers, calls[rank].signature.splits
        classes.setdefault(sizes, []).append(rank)
    shown = tuple(
        CallClass(ranks=tuple(sorted(ranks)), call=calls[ranks[0]])
        for ranks in islice(classes.values(), _MAX_CLASSES_SHOWN)
    )
    callers = {rank: members[rank] for rank in sorted(calls)}
    group = next(iter(members.values())).group
    fields = ("shape",) if is_rooted else ("splits",)
    if exchange is None:
        summary = describe_mismatch(outliers, shown, fields, group, seq)
    else:
        position = describe_position(group, seq)
        sender, receiver = f"rank {exchange.sender}", f"rank {exchange.receiver}"
        sent, expected = f"{exchange.sent:.12g}", f"{exchange.expected:.12g}"
        if exchange.receiver in outliers:
            noun = "element" if exchange.expected == 1 else "elements"
            clause = f"{receiver} expects {expected} {noun} from {sender}, which sends {sent}"
        else:
            noun = "element" if exchange.sent == 1 else "elements"
            clause = f"{sender} sends {sent} {noun} to {receiver}, which expects {expected}"
        summary = f"{clause} ({shown[0].call.signature.op}, {position})"
        if not is_rooted and not {exchange.sender, exchange.receiver}.issuperset(outliers):
            summary += f"; the sizes of {describe_ranks(outliers)} have the most conflicts"
    _accuse_callers(context, callers, outliers, seq, fields, shown, summary)


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


def _accuse_callers(
    context: DiagnosisContext,
    callers: StreamsByRank,
    outliers: tuple[int, ...],
    seq: int,
    differing_fields: tuple[str, ...],
    calls: tuple[CallClass, ...],
    summary: str,
    advice: str = _PAIR_MISMATCH_ADVICE,
) -> None:
    """Opens the verdict on calls that do not fit. ``callers`` are all ranks that made them."""
    if context.explained_ranks.issuperset(outliers):
        return
    concerned = context.graph.find_waiters_of(outliers) | callers.keys()
    blocked = concerned & context.graph.get_waiting_ranks()
    waiting = blocked.difference(outliers)
    processes = context.processes
    ended = {r for r in callers if r in processes and not processes[r].is_alive}
    verdict = Verdict(
        kind=VerdictKind.MISMATCH,
        culprits=outliers,
        waiting=tuple(sorted(waiting)),
        group=next(iter(callers.values())).group,
        seq=seq,
        differing_fields=differing_fields,
        calls=calls,
        waits=context.select_waits(waiting),
        began_at=max(stream.entered_at for stream in callers.values()),
        summary=summary,
        advice=advice,
        site=find_site_of(calls, outliers),
    )
    context.accuse(verdict, ended, samples=bool(blocked))
