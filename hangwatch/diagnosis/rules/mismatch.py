"""Calls that should agree between ranks and do not.

The calls of a group should be equal on every member: their running hashes show the first that is not.
Some arguments may differ between members but must fit between two of them: what one rank sends is what
the other expects.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain, islice, permutations
from typing import NamedTuple

from hangwatch.model.calls import (
    UNKNOWN_OP,
    Call,
    Signature,
    Site,
    StreamKind,
    decode_invalid_peer,
)
from hangwatch.model.groups import Group, GroupKey
from hangwatch.model.kinds import VerdictKind
from hangwatch.model.limits import (
    FAILED_SOON_S,
    MAX_EVIDENCE_WAIT_S,
    MAX_NARROWING_S,
    MAX_REPLY_WAIT_S,
    MAX_REPORT_WAIT_S,
    MIN_WAIT_S,
)
from hangwatch.model.operators import OPERATIONS, ListSide
from hangwatch.model.verdicts import CallClass, Verdict
from hangwatch.tracking.attempt import find_divergence
from hangwatch.tracking.call_stream import CallStream, CallWindow, DivergenceBounds, list_histories
from hangwatch.tracking.process import Process

from ..alignment import MAX_WINDOW_CALLS
from ..call_classes import HashClass, classify_members
from ..context import DiagnosisContext, get_newest_call
from ..graph.devices import get_first_unfinished
from ..graph.edges import get_op_name, has_receives_from_any, read_new_group_ranks
from ..messages import describe_mismatch, describe_position, describe_ranks
from .ended import get_failure_time, has_failed_exit, was_terminated

# A rank that fails within this many calls, and `FAILED_SOON_S`, after a mismatched call that completed
# is taken to have failed because of it.
_MAX_CALLS_AFTER = 2
_MAX_CALLS_TO_FETCH = 64
_MAX_ANSWERS_PER_CLASS = 3  # a class with as many answers gets no further request for these calls
_MAX_PROBES = 64  # calls that are compared at a time to find where a divergence began
# Every member of an all-to-all may have different sizes. The calls of the first outliers are shown
# before those of the other members.
_MAX_CLASSES_SHOWN = 16
_MAX_OUTLIERS_FIRST = 8

_GROUP_MISMATCH_ADVICE = (
    "Process groups must be created in the same order, with the same members, on every rank."
)
_MISMATCH_ADVICE = (
    "Every rank of a group must make the same calls in the same order: compare the two lines."
)
_INVALID_PEER_ADVICE = (
    "Look at how this number is computed. A receive from any source is one without a source"
    " (src=None)."
)
_PAIR_MISMATCH_ADVICE = "What one rank sends is not what the other expects: compare the two lines."

_FIELD_READERS: dict[str, Callable[[Signature], object]] = {
    "dtype": lambda s: s.dtype,
    "shape": lambda s: (s.numel, *map(math.prod, s.shapes)),
    "reduce_op": lambda s: s.reduce_op,
    "root": lambda s: s.root,
}


def diagnose_call_mismatches(context: DiagnosisContext) -> None:
    """One verdict for each group whose members made different calls at the same position."""
    attempt = context.attempt
    for mismatch in find_call_mismatches(attempt.streams_by_group, attempt.diverged_groups):
        _diagnose_call_mismatch(context, mismatch)


def _diagnose_call_mismatch(context: DiagnosisContext, mismatch: CallMismatch) -> None:
    members, seq, outliers = mismatch.members, mismatch.seq, set(mismatch.outliers)
    for rank, window in mismatch.calls_to_fetch:
        context.request_calls(rank, members[rank], window)
    processes = context.processes
    failed = {
        rank
        for rank in context.attempt.ended_ranks & members.keys()
        if _failed_at_call(processes[rank], members[rank], seq)
    }
    is_harmless = not failed and _is_harmless(context, mismatch)
    is_setup = mismatch.is_setup
    if is_setup and len(mismatch.calls) < len(mismatch.classes):
        if is_harmless:  # harmless as far as that is known without the calls
            return
    elif is_setup and _creates_separate_groups(mismatch):
        return
    delayed: set[int] = set()
    waiting: set[int] = set()
    if not is_harmless:
        blocked = context.graph.get_waiting_ranks()
        # The waiting members at or past the mismatched call.
        delayed = {
            rank
            for rank in mismatch.group.ranks
            if rank in blocked and (rank not in members or members[rank].entered >= seq)
        }
        waiting = (delayed | context.graph.find_waiters_of(delayed | outliers)) - outliers
    kind = VerdictKind.GROUP_MISMATCH if is_setup else VerdictKind.MISMATCH
    is_complete = not mismatch.calls_to_fetch and not _is_majority_undecided(context, mismatch)
    verdict = Verdict(
        kind=kind,
        culprits=mismatch.outliers,
        waiting=tuple(sorted(waiting)),
        group=mismatch.group,
        seq=seq,
        differing_fields=mismatch.differing_fields,
        calls=mismatch.calls,
        waits=context.select_waits(waiting),
        began_at=min(members[rank].entered_at for rank in mismatch.reported_ranks),
        is_confirmed=is_complete or _is_evidence_overdue(context, mismatch),
        summary=describe_mismatch(
            mismatch.outliers,
            mismatch.calls,
            mismatch.differing_fields,
            mismatch.group,
            seq,
            mismatch.last_equal,
        ),
        advice=_GROUP_MISMATCH_ADVICE if is_setup else _MISMATCH_ADVICE,
        site=_find_site_of(mismatch.calls, mismatch.outliers),
    )
    explains = None if is_harmless else delayed | failed
    context.accuse(verdict, explains, samples=bool(delayed or waiting))


def _creates_separate_groups(mismatch: CallMismatch) -> bool:
    """Whether the ranks created different groups that have nothing to do with each other: each was made
    by all of its members, as by ``new_subgroups(1, group=...)``.

    Groups created at the same position have the same name and meet under the same keys of the store,
    so only one of them may have more than one member.
    """
    connected_count = 0
    for call_class in mismatch.calls:
        group_ranks = read_new_group_ranks(call_class.call)
        if group_ranks is None:
            return False
        creators = set(group_ranks).intersection(call_class.ranks)
        if creators and len(creators) < len(group_ranks):
            return False
        connected_count += len(creators) > 1
    return connected_count < 2


def _is_harmless(context: DiagnosisContext, mismatch: CallMismatch) -> bool:
    """Whether all members got past the mismatch, so that a later hang has a cause of its own."""
    members = mismatch.members
    for seq in {s.first_unfinished for s in members.values() if s.is_pending}:
        calls = [stream.calls.get(seq) for stream in members.values()]
        if len({call.signature.agree for call in calls if call is not None}) > 1:
            return False  # some members are blocked in a call where others made a different one
    for stream in members.values():  # whether it may not have got past the mismatched call
        # Where only devices count what they complete, the host must have made another call as well.
        if stream.completed is None and stream.entered <= mismatch.seq:
            return False
        device = stream.device
        first = stream.first_unfinished if device is None else get_first_unfinished(stream, device)
        if first <= mismatch.seq:
            return False
    if not mismatch.is_setup:
        return True
    # A rank that skipped the creation of a group makes its next call where the others make a later
    # one. So ranks that, by count, wait in these calls wait because of the mismatch.
    for rank, stream in members.items():
        blocked_calls = context.graph.blocked_calls.get(rank, ())
        if any(blocked.stream is stream for blocked in blocked_calls):
            return False
    # Nor does a member enter the first call of a group that it created at another position.
    creations = {
        call.signature.detail: call
        for rank in mismatch.reported_ranks
        for call in members[rank].calls.values()
        if call.seq >= mismatch.seq
    }
    created_groups = set(map(read_new_group_ranks, creations.values()))
    first_waits = [waiter_group[0] for waiter_group in context.graph.waiter_groups]
    return not any(
        blocked.stream.group.ranks in created_groups and 1 in blocked.awaited.values()
        for blocked in first_waits
    )


def _is_evidence_overdue(context: DiagnosisContext, mismatch: CallMismatch) -> bool:
    """Whether the verdict has waited long enough for what is missing: then what is certain is reported."""
    last_report_at = max(context.get_last_seen_at(rank) for rank in mismatch.reported_ranks)
    if context.now - last_report_at > MAX_EVIDENCE_WAIT_S:
        return True
    state = mismatch.members[mismatch.reported_ranks[0]].group_state
    if state is None or not state.diverged:
        return False
    waited_s = context.now - state.diverged_at
    if waited_s <= MAX_EVIDENCE_WAIT_S or waited_s > MAX_REPORT_WAIT_S:
        return waited_s > MAX_EVIDENCE_WAIT_S
    if waited_s <= MAX_NARROWING_S and context.now - state.narrowed_at <= MAX_REPLY_WAIT_S:
        return False  # each reply narrows the calls down
    # The node agents of a large job report rarely, and get requests only then.
    return all(
        context.get_last_seen_at(rank) > state.diverged_at + MAX_REPLY_WAIT_S
        for rank, _ in mismatch.calls_to_fetch
    )


def _find_site_of(calls: Iterable[CallClass], ranks: Iterable[int]) -> Site | None:
    """The call site of the first class of calls that only ``ranks`` made."""
    return next((c.call.site for c in calls if set(c.ranks).issubset(ranks)), None)


def _failed_at_call(process: Process, stream: CallStream, seq: int) -> bool:
    """Whether the process ended in call ``seq`` or failed soon after it: a wrong result may cause
    an error only where it is used.
    """
    has_failed = has_failed_exit(process)
    if process.is_alive and not has_failed:
        return False
    if any(s.entered_at > stream.entered_at + MIN_WAIT_S for s in process.streams.values()):
        return False  # the rank made calls in other streams since: its end has a later cause
    if stream.entered == seq or stream.first_unfinished <= seq < stream.entered:
        return True
    if not has_failed or was_terminated(process):
        return False
    last_call_at = max(stream.entered_at, stream.last_completion_at)
    failed_soon = get_failure_time(process) - last_call_at <= FAILED_SOON_S
    return failed_soon and seq < stream.entered <= seq + _MAX_CALLS_AFTER


def _is_majority_undecided(context: DiagnosisContext, mismatch: CallMismatch) -> bool:
    """Whether members that may be about to make the call decide which side is the minority."""
    reported_ranks = mismatch.reported_ranks
    group_size = len(mismatch.group.ranks)
    largest_class = max(map(len, mismatch.classes))
    if len(reported_ranks) == group_size or 2 * largest_class > group_size:
        return False
    last_entered_at = max(mismatch.members[rank].entered_at for rank in reported_ranks)
    return context.now - last_entered_at < context.limits.settle_s


def diagnose_pair_mismatches(context: DiagnosisContext) -> None:
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
    """One verdict for each send or receive whose peer is no rank of its group, and that does not
    complete: no backend but MPI knows such a peer, and not each one checks the argument.
    """
    for rank in sorted(context.attempt.misaddressing_ranks):
        for stream in context.processes[rank].unfinished_streams:
            argument, seq = decode_invalid_peer(stream.peer), stream.entered
            if argument is None or context.now - stream.entered_at < MIN_WAIT_S:
                continue
            end = "destination" if stream.kind is StreamKind.SEND else "source"
            summary = (
                f"rank {rank} called {get_op_name(stream)} with {end} {argument}, which is no rank of"
                f" {describe_position(stream.group, None)}"
            )
            calls, advice = get_newest_call(stream, rank), _INVALID_PEER_ADVICE
            _accuse_callers(
                context, {rank: stream}, (rank,), seq, ("peer",), calls, summary, advice
            )


def _accuse_callers(
    context: DiagnosisContext,
    callers: Mapping[int, CallStream],
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
        site=_find_site_of(calls, outliers),
    )
    context.accuse(verdict, ended, samples=bool(blocked))


@dataclass(frozen=True, slots=True, kw_only=True)
class CallMismatch:
    """The first call at which the members of a group made different ones: ``seq``. If that is not exact,
    it is some call after ``last_equal``, up to which all are known to have made equal ones.

    ``classes`` are the ranks with equal calls up to and including ``seq``, the largest class first.
    ``calls`` are empty unless ``seq`` is exact. ``calls_to_fetch`` are the calls without which the
    other fields are uncertain, by rank.
    """

    members: dict[int, CallStream]
    seq: int
    classes: tuple[tuple[int, ...], ...]
    outliers: tuple[int, ...]
    calls: tuple[CallClass, ...]
    differing_fields: tuple[str, ...]
    last_equal: int
    calls_to_fetch: tuple[tuple[int, CallWindow], ...]

    @property
    def group(self) -> Group:
        return next(iter(self.members.values())).group

    @property
    def is_setup(self) -> bool:
        return next(iter(self.members.values())).kind is StreamKind.SETUP

    @property
    def reported_ranks(self) -> list[int]:
        """The members that are known to have made the call, by class."""
        return [rank for ranks in self.classes for rank in ranks]


def find_call_mismatches(
    streams_by_group: dict[GroupKey, dict[int, CallStream]], diverged_groups: Collection[GroupKey]
) -> list[CallMismatch]:
    """The first difference in each group that has one: only ``diverged_groups`` can."""
    mismatches: list[CallMismatch] = []
    for key, members in streams_by_group.items():
        divergence = find_divergence(members) if key in diverged_groups else None
        if divergence is None:
            continue
        seq = divergence.first_different
        classes, unclassified = classify_members(members, seq)
        calls: list[CallClass] = []
        for _, ranks in classes if divergence.is_exact else ():
            known = (members[rank].calls.get(seq) for rank in ranks)
            call = next((c for c in known if c is not None and c.signature.op != UNKNOWN_OP), None)
            if call is not None:
                calls.append(CallClass(ranks=tuple(ranks), call=call))
        mismatch = CallMismatch(
            members=members,
            seq=seq,
            last_equal=divergence.last_equal,
            classes=tuple(tuple(ranks) for _, ranks in classes),
            outliers=_find_outliers(key, seq, classes, streams_by_group),
            calls=tuple(calls),
            differing_fields=_compare_fields([c.call.signature for c in calls]),
            calls_to_fetch=_list_calls_to_fetch(members, divergence, classes, unclassified),
        )
        mismatches.append(mismatch)
    return mismatches


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
        unanswered = [rank for rank in ranks if not members[rank].has_answered(window)]
        if len(ranks) - len(unanswered) < _MAX_ANSWERS_PER_CLASS:
            to_fetch += [(rank, window) for rank in unanswered[:1]]
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
    """Whether a window's calls after ``last_equal`` are known; of a sparse window, their hashes."""
    if window.step > 1:
        first = -(-window.first // window.step) * window.step
        hashes = stream.hashes_by_seq
        return all(seq in hashes for seq in range(first, window.last + 1, window.step))
    calls = stream.calls
    return bool(calls) and all(
        seq in calls and calls[seq].chain for seq in range(last_equal + 1, window.last + 1)
    )


def _find_outliers(
    key: GroupKey,
    seq: int,
    classes: list[HashClass],
    streams_by_group: dict[GroupKey, dict[int, CallStream]],
) -> tuple[int, ...]:
    """All ranks but the majority. On a tie, similar groups decide, such as the other tensor-parallel
    groups: each of them counts for the classes whose hash one of its members has. If they do not, all
    ranks.
    """
    majority_hash: int | None = classes[0][0]
    if len(classes[0][1]) == len(classes[1][1]):
        votes = {running_hash: 0 for running_hash, _ in classes}
        for other_key, members in streams_by_group.items():
            generation, _, ranks, world_size = other_key
            is_same_world = (generation, world_size) == (key[0], key[3])
            if not is_same_world or len(ranks) != len(key[2]) or other_key == key:
                continue
            reported = {dict(history).get(seq) for history in list_histories(members.values())}
            for running_hash in votes.keys() & reported:
                votes[running_hash] += 1
        first, second, *_ = sorted(votes, key=lambda running_hash: -votes[running_hash])
        majority_hash = first if votes[first] > votes[second] else None
    minorities = [class_ranks for value, class_ranks in classes if value != majority_hash]
    return tuple(sorted(chain.from_iterable(minorities)))


def _compare_fields(signatures: list[Signature]) -> tuple[str, ...]:
    """The fields that differ. If the operations differ, no other field is comparable."""
    if len({signature.op for signature in signatures}) > 1:
        return ("op",)
    differing_fields = tuple(
        name for name, read in _FIELD_READERS.items() if len(set(map(read, signatures))) > 1
    )
    if not differing_fields and len({signature.detail for signature in signatures}) > 1:
        return ("detail",)
    return differing_fields


class SplitExchange(NamedTuple):
    """What a rank sends to another one in a call, or to itself, and what that expects, in elements."""

    sender: int
    receiver: int
    sent: float
    expected: float


def _compare_channel(
    context: DiagnosisContext, rank: int, sending: CallStream, receiving: CallStream
) -> None:
    receiver = context.processes.get(sending.peer) if sending.peer is not None else None
    if receiver is not None and has_receives_from_any(receiver, receiving):
        return
    for seq in sorted(sending.calls):
        if not (sending.is_counted(seq) and receiving.is_counted(seq)):
            return
        sent, expected, peer = sending.calls[seq], receiving.calls.get(seq), sending.peer
        if expected is None or peer is None:
            continue
        ours, theirs = sent.signature, expected.signature
        differing_fields: tuple[str, ...] = ("dtype",) if ours.dtype != theirs.dtype else ()
        if ours.numel != theirs.numel:
            differing_fields += ("shape",)
        if not differing_fields or UNKNOWN_OP in (ours.op, theirs.op):
            continue
        callers = {rank: sending, peer: receiving}
        outliers = tuple(sorted(callers))
        calls = (
            CallClass(ranks=(rank,), call=replace(sent, peer=peer)),
            CallClass(ranks=(peer,), call=replace(expected, peer=rank)),
        )
        summary = describe_mismatch(outliers, calls, differing_fields, sending.group, seq)
        _accuse_callers(context, callers, outliers, seq, differing_fields, calls, summary)
        return


def _locate_divergence(context: DiagnosisContext, sending: CallStream) -> None:
    """Requests the calls around the first one in which the ends of a channel differ by their running
    hashes, which `_compare_channel` then compares. If some are lost, a verdict says between which it is.
    """
    receiving = sending.other_end
    if receiving is None or sending.peer is None or receiving.peer is None:
        return
    ends = {receiving.peer: sending, sending.peer: receiving}
    divergence = find_divergence(ends)
    receiver = context.processes.get(sending.peer)
    if divergence is None or receiver is None or has_receives_from_any(receiver, receiving):
        return
    window, last_equal = choose_window(divergence), divergence.last_equal
    is_lost = False
    for rank, end in ends.items():
        if not _knows_calls(end, window, last_equal):
            context.request_calls(rank, end, window)
            is_lost |= end.has_answered(window)
    if not is_lost:
        return
    seq, outliers = divergence.first_different, tuple(sorted(ends))
    summary = (
        f"what rank {receiving.peer} sent differs from what rank {sending.peer} received at or before"
        f" {describe_position(sending.group, seq)}"
    )
    if last_equal:
        summary += f", and after call {last_equal}"
    summary += "; the records of the calls in between could not be fetched"
    _accuse_callers(context, ends, outliers, seq, (), (), summary)


def _compare_splits(context: DiagnosisContext, members: dict[int, CallStream]) -> None:
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
        if any(exchange.sent != exchange.expected for exchange in exchanges):
            _accuse_split_outliers(context, members, seq, calls, exchanges)
            return


def _await_other_sizes(
    context: DiagnosisContext, members: Mapping[int, CallStream], seq: int
) -> bool:
    """Whether calls that show which of two sizes is that of most members may still be reported."""
    unknown = [r for r, s in members.items() if s.entered >= seq and seq not in s.calls]
    for rank in unknown[:_MAX_CALLS_TO_FETCH]:
        context.request_calls(rank, members[rank], CallWindow(seq, seq))
    entered_at = [stream.entered_at for stream in members.values() if stream.entered >= seq]
    return bool(unknown) and context.now - max(entered_at) <= MAX_EVIDENCE_WAIT_S + MIN_WAIT_S


def _iter_exchanges(calls: Mapping[int, Call], group: Group) -> Iterator[SplitExchange]:
    """What the ranks whose calls are known exchange. With a root, each member does so only with the root."""
    first = next(iter(calls.values())).signature
    spec, root_index = OPERATIONS.get(first.op), first.root
    if spec is None or root_index is None:
        for sender, receiver in permutations(calls, 2):
            sent = _get_split_elements(calls[sender], 0, group, receiver)
            expected = _get_split_elements(calls[receiver], 1, group, sender)
            yield SplitExchange(sender, receiver, sent, expected)
        return
    is_list_sent = spec.list_side is ListSide.INPUTS
    root = group.ranks[root_index] if root_index < len(group.ranks) else -1
    root_splits = calls[root].signature.splits if root in calls else None
    parts = root_splits[not is_list_sent] if root_splits is not None else ()
    for member, part in zip(group.ranks, parts, strict=False):
        call = calls.get(member)
        if call is None or call.signature.splits is None or call.signature.root != root_index:
            continue
        own = call.signature.splits[is_list_sent]
        if len(own) == 1 and is_list_sent:
            yield SplitExchange(root, member, part, own[0])
        elif len(own) == 1:
            yield SplitExchange(member, root, own[0], part)


def _find_split_outliers(exchanges: list[SplitExchange], *, is_rooted: bool) -> tuple[int, ...]:
    """The ranks with the most conflicts. With a root, those whose size is not that of most members, and
    both ranks of a conflict if no size is.
    """
    conflicts = [exchange for exchange in exchanges if exchange.sent != exchange.expected]
    if not is_rooted:
        counts = Counter(rank for conflict in conflicts for rank in conflict[:2])
        most = max(counts.values())
        return tuple(sorted(rank for rank, count in counts.items() if count == most))
    is_list_sent = len({exchange.sender for exchange in exchanges}) == 1
    own_sizes = Counter(e.expected if is_list_sent else e.sent for e in exchanges)
    usual = {size for size, count in own_sizes.items() if 2 * count > len(exchanges)}
    outliers: set[int] = set()
    for sender, receiver, sent, expected in conflicts:
        if sent not in usual:
            outliers.add(sender)
        if expected not in usual:
            outliers.add(receiver)
    return tuple(sorted(outliers))


def _accuse_split_outliers(
    context: DiagnosisContext,
    members: dict[int, CallStream],
    seq: int,
    calls: dict[int, Call],
    exchanges: list[SplitExchange],
) -> None:
    """Accuses the outliers; the summary has the first of their conflicts with known sizes."""
    is_rooted = next(iter(calls.values())).signature.root is not None
    outliers = _find_split_outliers(exchanges, is_rooted=is_rooted)
    if is_rooted and len(outliers) > 1 and _await_other_sizes(context, members, seq):
        return
    conflicts = [exchange for exchange in exchanges if exchange.sent != exchange.expected]
    exchange: SplitExchange | None = None
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
