"""Calls of a group that are not equal on every member: their running hashes show the first one."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from itertools import chain

from hangwatch.model.calls import GRAPH_REPLAY, UNKNOWN_OP, Signature, Site, StreamKind
from hangwatch.model.groups import Group, GroupKey
from hangwatch.model.kinds import VerdictKind
from hangwatch.model.limits import (
    BLOCKED_AFTER_S,
    FAILED_SOON_S,
    MAX_EVIDENCE_WAIT_S,
    MAX_NARROWING_S,
    MAX_REPLY_WAIT_S,
    MAX_REPORT_WAIT_S,
    MIN_WAIT_S,
)
from hangwatch.model.ranks import Ranks
from hangwatch.model.verdicts import CallClass, Verdict
from hangwatch.tracking.attempt import find_divergence
from hangwatch.tracking.call_stream import CallStream, CallWindow, DivergenceBounds, list_histories
from hangwatch.tracking.process import Process

from ..alignment import MAX_WINDOW_CALLS
from ..call_classes import HashClass, classify_members
from ..context import DiagnosisContext
from ..graph.devices import get_first_unfinished
from ..graph.edges import read_new_group_ranks
from ..graph.progress import find_blocked_streams
from ..messages import describe_mismatch
from .ended import get_failure_time, has_failed_exit, was_terminated

# A rank that fails within this many calls, and `FAILED_SOON_S`, after a mismatched call that completed
# is taken to have failed because of it.
_MAX_CALLS_AFTER = 2
_MAX_CALLS_TO_FETCH = 64
_MAX_ANSWERS_PER_CLASS = 3  # a class with as many answers gets no further request for these calls
_MAX_PROBES = 64  # calls that are compared at a time to find where a divergence began

_GROUP_MISMATCH_ADVICE = (
    "Process groups must be created in the same order, with the same members, on every rank."
)
_MISMATCH_ADVICE = (
    "Every rank of a group must make the same calls in the same order: compare the two lines."
)


def diagnose_call_mismatches(context: DiagnosisContext) -> None:
    """One verdict for each group whose members made different calls at the same position."""
    attempt = context.attempt
    for mismatch in find_call_mismatches(attempt.streams_by_group, attempt.diverged_groups):
        _diagnose_call_mismatch(context, mismatch)


def _diagnose_call_mismatch(context: DiagnosisContext, mismatch: CallMismatch) -> None:
    members, seq, outliers = mismatch.members, mismatch.seq, mismatch.outliers
    for rank, window in mismatch.calls_to_fetch:
        context.request_calls(rank, members[rank], window)
    if mismatch.mixes_replays:
        return
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
    delayed = set()
    waiting = set()
    if not is_harmless:
        blocked = context.graph.get_waiting_ranks()
        for rank in mismatch.group.ranks:
            if _is_delayed(context, mismatch, rank, blocked):
                delayed.add(rank)
        waiting = delayed | context.graph.find_waiters_of(delayed.union(outliers))
        waiting -= set(outliers)
    kind = VerdictKind.GROUP_MISMATCH if is_setup else VerdictKind.MISMATCH
    verdict = Verdict(
        kind=kind,
        culprits=outliers,
        waiting=tuple(sorted(waiting)),
        group=mismatch.group,
        seq=seq,
        differing_fields=mismatch.differing_fields,
        calls=mismatch.calls,
        waits=context.select_waits(waiting),
        began_at=min(members[rank].entered_at for rank in mismatch.reported_ranks),
        is_confirmed=_has_enough_evidence(context, mismatch),
        summary=describe_mismatch(
            outliers,
            mismatch.calls,
            mismatch.differing_fields,
            mismatch.group,
            seq,
            mismatch.last_equal,
        ),
        advice=_GROUP_MISMATCH_ADVICE if is_setup else _MISMATCH_ADVICE,
        site=find_site_of(mismatch.calls, outliers),
    )
    explains = None if is_harmless else delayed | failed
    context.accuse(verdict, explains, samples=bool(delayed or waiting))


def _is_delayed(
    context: DiagnosisContext, mismatch: CallMismatch, rank: int, blocked: Collection[int]
) -> bool:
    """Whether a member waits at or past the mismatched call: it is one of the ``blocked`` ranks, or has been
    in its newest call of the group for `BLOCKED_AFTER_S`, by its last report.
    """
    stream = mismatch.members.get(rank)
    if stream is not None and stream.entered < mismatch.seq:
        return False
    if stream is None or rank in blocked:
        return rank in blocked
    before = context.get_state_known_until(rank) - BLOCKED_AFTER_S
    return any(s is stream for s in find_blocked_streams(context.processes[rank], before))


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
        if get_first_unfinished(stream) <= mismatch.seq:
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
    creations = {}  # all members that create a group record the same detail
    for rank in mismatch.reported_ranks:
        for call in members[rank].calls.values():
            if call.seq >= mismatch.seq:
                creations[call.signature.detail] = call
    created_groups = set(map(read_new_group_ranks, creations.values()))
    for waiter_group in context.graph.waiter_groups:
        blocked = waiter_group[0]
        if blocked.stream.group.ranks in created_groups and 1 in blocked.awaited.values():
            return False
    return True


def _has_enough_evidence(context: DiagnosisContext, mismatch: CallMismatch) -> bool:
    """Whether nothing is missing that may change the verdict, or it has waited long enough for that: then
    what is certain is reported.
    """
    reported_ranks = mismatch.reported_ranks
    if not mismatch.calls_to_fetch:
        # Members that may be about to make the call may decide which side is the minority.
        group_size = len(mismatch.group.ranks)
        has_majority = 2 * max(map(len, mismatch.classes)) > group_size
        if has_majority or len(reported_ranks) == group_size:
            return True
        last_entered_at = max(mismatch.members[rank].entered_at for rank in reported_ranks)
        if context.now - last_entered_at >= context.limits.settle_s:
            return True
    last_report_at = max(map(context.get_last_seen_at, reported_ranks))
    if context.now - last_report_at > MAX_EVIDENCE_WAIT_S:
        return True
    state = mismatch.members[reported_ranks[0]].group_state
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


def find_site_of(calls: Iterable[CallClass], ranks: Iterable[int]) -> Site | None:
    """The call site of the first class of calls that only ``ranks`` made."""
    return next((c.call.site for c in calls if set(c.ranks).issubset(ranks)), None)


def _failed_at_call(process: Process, stream: CallStream, seq: int) -> bool:
    """Whether the process ended in call ``seq`` or failed soon after it: a wrong result may cause
    an error only where it is used.
    """
    has_failed = has_failed_exit(process)
    if process.is_alive and not has_failed:
        return False
    if process.newest_call_at > stream.entered_at + MIN_WAIT_S:
        return False  # the rank made calls in other streams since: its end has a later cause
    if stream.entered == seq or stream.first_unfinished <= seq < stream.entered:
        return True
    if not has_failed or was_terminated(process):
        return False
    last_call_at = max(stream.entered_at, stream.last_completion_at)
    failed_soon = get_failure_time(process) - last_call_at <= FAILED_SOON_S
    return failed_soon and seq < stream.entered <= seq + _MAX_CALLS_AFTER


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
    classes: tuple[Ranks, ...]
    outliers: Ranks
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
    def mixes_replays(self) -> bool:
        """Whether some members replayed a CUDA graph where others made a call, or may have. That may be one
        of the calls of the graph: a rank may execute or capture them while others replay them already.
        """
        replay_count = sum(c.call.signature.op == GRAPH_REPLAY for c in self.calls)
        return 0 < replay_count < len(self.classes)

    @property
    def reported_ranks(self) -> list[int]:
        """The members that are known to have made the call, by class."""
        return [rank for ranks in self.classes for rank in ranks]


def find_call_mismatches(
    streams_by_group: dict[GroupKey, dict[int, CallStream]], diverged_groups: Collection[GroupKey]
) -> list[CallMismatch]:
    """The first difference in each group that has one: only ``diverged_groups`` can."""
    mismatches = []
    for key, members in streams_by_group.items():
        divergence = find_divergence(members) if key in diverged_groups else None
        if divergence is None:
            continue
        seq = divergence.first_different
        classes, unclassified = classify_members(members, seq)
        calls = []
        for _, ranks in classes if divergence.is_exact else ():
            for rank in ranks:
                call = members[rank].calls.get(seq)
                if call is not None and call.signature.op != UNKNOWN_OP:
                    calls.append(CallClass(ranks=tuple(ranks), call=call))
                    break
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
    to_fetch = []
    for _, ranks in classes:
        # One rank represents its class, since equal hashes mean equal calls; the next one does if the
        # calls of the first are lost.
        if any(knows_calls(members[rank], window, divergence.last_equal) for rank in ranks):
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


def knows_calls(stream: CallStream, window: CallWindow, last_equal: int) -> bool:
    """Whether a window's calls after ``last_equal`` are known; of a sparse window, their hashes."""
    if window.step > 1:
        first = -(-window.first // window.step) * window.step
        hashes = stream.hashes_by_seq
        return all(seq in hashes for seq in range(first, window.last + 1, window.step))
    calls = stream.calls
    return all(seq in calls and calls[seq].chain for seq in range(last_equal + 1, window.last + 1))


def _find_outliers(
    key: GroupKey,
    seq: int,
    classes: list[HashClass],
    streams_by_group: dict[GroupKey, dict[int, CallStream]],
) -> Ranks:
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
    values_by_field: dict[str, set[object]] = {
        "dtype": {signature.dtype for signature in signatures},
        "shape": {(signature.numel, *map(math.prod, signature.shapes)) for signature in signatures},
        "reduce_op": {signature.reduce_op for signature in signatures},
        "root": {signature.root for signature in signatures},
    }
    differing_fields = tuple(name for name, values in values_by_field.items() if len(values) > 1)
    if not differing_fields and len({signature.detail for signature in signatures}) > 1:
        return ("detail",)
    return differing_fields
