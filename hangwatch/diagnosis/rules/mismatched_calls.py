"""Verdicts on calls that should agree between ranks and do not.

`mismatch` finds calls that differ within a group, `pairwise` finds those that do not fit between
two ranks. Here it is decided who waits because of them.
"""

from __future__ import annotations

from collections.abc import Iterable

from hangwatch.diagnosis import messages
from hangwatch.diagnosis.context import (
    DiagnosisContext,
    EvidenceRequest,
    get_last_seen_at,
    request_stacks,
    select_waits,
)
from hangwatch.diagnosis.device_view import get_first_unfinished
from hangwatch.diagnosis.graph.awaited import get_new_group_ranks
from hangwatch.model.calls import Site, StreamKind
from hangwatch.model.kinds import KINDS, VerdictKind
from hangwatch.model.limits import MIN_WAIT_S
from hangwatch.model.verdicts import CallClass, Verdict
from hangwatch.tracking.call_stream import CallStream
from hangwatch.tracking.process import Process

from .failures import get_failure_time, has_failed_exit, was_terminated
from .mismatch import CallMismatch, find_call_mismatches
from .pairwise import PairMismatch, find_pair_mismatches

# A rank that fails within this many calls, and this time, after a mismatched call that completed
# is taken to have failed because of it.
_MAX_CALLS_AFTER = 2
_FAILED_SOON_S = 5.0
# The verdict is confirmed without calls that have not arrived this long after the divergence was
# found, or after the ranks were last seen; later if a node agent has not reported since the request.
_MAX_EVIDENCE_WAIT_S = 3.0
_MAX_NARROWING_S, _MAX_REPLY_WAIT_S, _MAX_REPORT_WAIT_S = 4.5, 1.0, 15.0


def diagnose_call_mismatches(context: DiagnosisContext) -> None:
    """One verdict for each group whose members made different calls at the same position."""
    mismatches = find_call_mismatches(context.streams_by_group, context.attempt.diverged_groups)
    for mismatch in mismatches:
        _diagnose_call_mismatch(context, mismatch)


def _diagnose_call_mismatch(context: DiagnosisContext, mismatch: CallMismatch) -> None:
    members = context.streams_by_group[mismatch.group.key]
    for rank, window in mismatch.calls_to_fetch:
        context.requests.append(EvidenceRequest.for_calls(rank, members[rank], window))
    failed = _find_failed_members(context, mismatch, members)
    is_harmless = _is_harmless(context, mismatch, members, failed)
    if mismatch.kind is StreamKind.SETUP:
        if len(mismatch.calls) < len(mismatch.classes):
            if is_harmless:  # as far as can be told without the calls
                return
        elif _creates_separate_groups(mismatch, members):
            return
    outliers = set(mismatch.outliers)
    delayed: set[int] = set()
    waiting: set[int] = set()
    if not is_harmless:
        delayed = _find_delayed_members(context, mismatch, members)
        waiting = (delayed | context.graph.find_waiters_of(delayed | outliers)) - outliers
    verdict = _make_mismatch_verdict(context, mismatch, members, waiting)
    context.verdicts.append(verdict)
    if not is_harmless:
        context.explained_ranks |= outliers | waiting | delayed | failed
    if waiting:
        request_stacks(context, mismatch.outliers, waiting, verdict.began_at)


def _creates_separate_groups(mismatch: CallMismatch, members: dict[int, CallStream]) -> bool:
    """Whether the ranks created different groups that have nothing to do with each other: each was made
    by all of its members, as by ``new_subgroups(1, group=...)``.

    Groups created at the same position have the same name and meet under the same keys of the store,
    so only one of them may have more than one member.
    """
    connected_count = 0
    for call_class in mismatch.calls:
        group_ranks = get_new_group_ranks(members[call_class.ranks[0]], mismatch.seq)
        if group_ranks is None:
            return False
        creators = set(group_ranks).intersection(call_class.ranks)
        if creators and len(creators) < len(group_ranks):
            return False
        connected_count += len(creators) > 1
    return connected_count < 2


def _find_failed_members(
    context: DiagnosisContext, mismatch: CallMismatch, members: dict[int, CallStream]
) -> set[int]:
    processes = context.attempt.processes
    return {
        rank
        for rank in context.attempt.ended_ranks & members.keys()
        if _failed_at_call(processes[rank], members[rank], mismatch.seq)
    }


def _find_first_unfinished(stream: CallStream) -> int:
    """Where hosts run ahead of their devices, those tell which calls are complete."""
    if stream.device is None:
        return stream.first_unfinished
    return get_first_unfinished(stream, stream.device)


def _may_be_inside(stream: CallStream, seq: int) -> bool:
    """Whether a member may not have got past call ``seq``. Where only devices count what they
    complete, the host must have made another call as well.
    """
    is_newest = stream.completed is None and stream.entered <= seq
    return is_newest or _find_first_unfinished(stream) <= seq


def _is_harmless(
    context: DiagnosisContext,
    mismatch: CallMismatch,
    members: dict[int, CallStream],
    failed: set[int],
) -> bool:
    """Whether all members got past the mismatch: then it delays no rank, and a later hang has its
    own cause.
    """
    if failed or _diverge_again(members):
        return False
    if any(_may_be_inside(stream, mismatch.seq) for stream in members.values()):
        return False
    if mismatch.kind is not StreamKind.SETUP:
        return True
    # A rank that skipped the creation of a group makes its next call where the others make a later
    # one. So ranks that, by count, wait in these calls wait because of the mismatch.
    for rank, stream in members.items():
        blocked_calls = context.graph.blocked_calls.get(rank, ())
        if any(blocked.stream is stream for blocked in blocked_calls):
            return False
    return not _was_group_made_elsewhere(context, mismatch, members)


def _find_delayed_members(
    context: DiagnosisContext, mismatch: CallMismatch, members: dict[int, CallStream]
) -> set[int]:
    """The waiting members at or past the mismatched call."""
    blocked = context.graph.get_waiting_ranks()
    return {
        rank
        for rank in mismatch.group.ranks
        if rank in blocked and (rank not in members or members[rank].entered >= mismatch.seq)
    }


def _make_mismatch_verdict(
    context: DiagnosisContext,
    mismatch: CallMismatch,
    members: dict[int, CallStream],
    waiting: set[int],
) -> Verdict:
    is_setup = mismatch.kind is StreamKind.SETUP
    kind = VerdictKind.GROUP_MISMATCH if is_setup else VerdictKind.MISMATCH
    reported_ranks = [rank for ranks in mismatch.classes for rank in ranks]
    entry_times = [members[rank].entered_at for rank in reported_ranks]
    is_complete = not mismatch.calls_to_fetch and not _is_majority_undecided(
        context, mismatch, members
    )
    return Verdict(
        kind=kind,
        severity=KINDS[kind].severity,
        culprits=mismatch.outliers,
        waiting=tuple(sorted(waiting)),
        group=mismatch.group,
        seq=mismatch.seq,
        differing_fields=mismatch.differing_fields,
        calls=mismatch.calls,
        waits=select_waits(context, waiting),
        began_at=min(entry_times, default=context.now),
        is_confirmed=is_complete or _is_evidence_overdue(context, mismatch, members),
        summary=messages.describe_mismatch(
            mismatch.outliers,
            mismatch.calls,
            mismatch.differing_fields,
            mismatch.group,
            mismatch.seq,
            mismatch.last_equal,
        ),
        advice=messages.GROUP_MISMATCH_ADVICE if is_setup else messages.MISMATCH_ADVICE,
        site=_find_site_of(mismatch.calls, mismatch.outliers),
    )


def _is_evidence_overdue(
    context: DiagnosisContext, mismatch: CallMismatch, members: dict[int, CallStream]
) -> bool:
    """Whether it was waited for long enough for what is missing: then what is certain is reported."""
    reported_ranks = [rank for ranks in mismatch.classes for rank in ranks]
    report_times = [get_last_seen_at(context, rank) for rank in reported_ranks]
    if context.now - max(report_times, default=context.now) > _MAX_EVIDENCE_WAIT_S:
        return True
    state = members[reported_ranks[0]].group_state
    if state is None or not state.diverged:
        return False
    waited_s = context.now - state.diverged_at
    if waited_s <= _MAX_EVIDENCE_WAIT_S or waited_s > _MAX_REPORT_WAIT_S:
        return waited_s > _MAX_EVIDENCE_WAIT_S
    if waited_s <= _MAX_NARROWING_S and context.now - state.narrowed_at <= _MAX_REPLY_WAIT_S:
        return False  # each reply narrows the calls down
    # The node agents of a large job report rarely, and get requests only then.
    return all(
        get_last_seen_at(context, rank) > state.diverged_at + _MAX_REPLY_WAIT_S
        for rank, _ in mismatch.calls_to_fetch
    )


def _find_site_of(calls: Iterable[CallClass], ranks: Iterable[int]) -> Site | None:
    """The call site of the first class of calls that only ``ranks`` made."""
    for call_class in calls:
        if set(call_class.ranks).issubset(ranks):
            return call_class.call.site
    return None


def _was_group_made_elsewhere(
    context: DiagnosisContext, mismatch: CallMismatch, members: dict[int, CallStream]
) -> bool:
    """Whether some rank waits in the first call of a group created since the mismatch: members that
    created it at another position never enter this call.
    """
    created_groups = set()
    for ranks in mismatch.classes:
        for rank in ranks[:1]:
            later = [seq for seq in members[rank].calls if seq >= mismatch.seq]
            created_groups |= {get_new_group_ranks(members[rank], seq) for seq in later}
    for waiter_group in context.graph.iter_waiter_groups():
        blocked = waiter_group[0]
        if blocked.stream.group.ranks in created_groups and 1 in blocked.awaited.values():
            return True
    return False


def _failed_at_call(process: Process, stream: CallStream, seq: int) -> bool:
    """Whether the process ended in call ``seq`` or failed soon after it: a wrong result may cause
    an error only where it is used.
    """
    has_failed = has_failed_exit(process)
    if (process.is_alive and not has_failed) or _made_later_calls(process, stream):
        return False
    if stream.entered == seq or stream.first_unfinished <= seq < stream.entered:
        return True
    if not has_failed or was_terminated(process):
        return False
    last_call_at = max(stream.entered_at, stream.last_completion_at)
    failed_soon = get_failure_time(process) - last_call_at <= _FAILED_SOON_S
    return failed_soon and seq < stream.entered <= seq + _MAX_CALLS_AFTER


def _made_later_calls(process: Process, stream: CallStream) -> bool:
    """Whether it made calls in other streams after the newest one of ``stream``: then its end has a
    later cause.
    """
    return any(s.entered_at > stream.entered_at + MIN_WAIT_S for s in process.streams.values())


def _diverge_again(members: dict[int, CallStream]) -> bool:
    """Whether some members are blocked in a call where others made a different one."""
    for seq in {s.first_unfinished for s in members.values() if s.is_pending}:
        calls = [stream.calls.get(seq) for stream in members.values()]
        agreement_hashes = {call.signature.agree for call in calls if call is not None}
        if len(agreement_hashes) > 1:
            return True
    return False


def _is_majority_undecided(
    context: DiagnosisContext, mismatch: CallMismatch, members: dict[int, CallStream]
) -> bool:
    """Whether members that have not made the call yet, and may be about to, decide which side is
    the minority.
    """
    reported_ranks = [rank for ranks in mismatch.classes for rank in ranks]
    group_size = len(mismatch.group.ranks)
    largest_class = max(map(len, mismatch.classes))
    if len(reported_ranks) == group_size or 2 * largest_class > group_size:
        return False
    last_entered_at = max(members[rank].entered_at for rank in reported_ranks)
    return context.now - last_entered_at < context.limits.settle_s


def diagnose_pair_mismatches(context: DiagnosisContext) -> None:
    """One verdict for each send, receive or all-to-all whose two ends do not fit."""
    for mismatch in find_pair_mismatches(context.attempt):
        if not context.explained_ranks.issuperset(mismatch.outliers):
            _diagnose_pair_mismatch(context, mismatch)


def _diagnose_pair_mismatch(context: DiagnosisContext, mismatch: PairMismatch) -> None:
    outliers = set(mismatch.outliers)
    concerned = context.graph.find_waiters_of(mismatch.outliers) | set(mismatch.ranks)
    waiting = (concerned & context.graph.get_waiting_ranks()) - outliers
    ended = set()
    for rank in mismatch.ranks:
        process = context.attempt.processes.get(rank)
        if process is not None and not process.is_alive:
            ended.add(rank)
    context.verdicts.append(
        Verdict(
            kind=VerdictKind.MISMATCH,
            severity=KINDS[VerdictKind.MISMATCH].severity,
            culprits=mismatch.outliers,
            waiting=tuple(sorted(waiting)),
            group=mismatch.group,
            seq=mismatch.seq,
            differing_fields=mismatch.differing_fields,
            calls=mismatch.calls,
            waits=select_waits(context, waiting),
            began_at=mismatch.began_at,
            summary=_summarize_pair_mismatch(mismatch),
            advice=messages.PAIR_MISMATCH_ADVICE,
            site=_find_site_of(mismatch.calls, mismatch.outliers),
        )
    )
    context.explained_ranks |= outliers | waiting | ended
    if waiting:
        request_stacks(context, mismatch.outliers, waiting, mismatch.began_at)


def _summarize_pair_mismatch(mismatch: PairMismatch) -> str:
    if mismatch.exchange is None:
        return messages.describe_mismatch(
            mismatch.outliers,
            mismatch.calls,
            mismatch.differing_fields,
            mismatch.group,
            mismatch.seq,
        )
    return messages.describe_pair_mismatch(
        mismatch.outliers,
        mismatch.exchange,
        mismatch.calls[0].call.signature.op,
        mismatch.group,
        mismatch.seq,
    )
