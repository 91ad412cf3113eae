"""Adds to a verdict how the culprits' calls diverge from those of other ranks: calls that were
skipped, added or made in another order.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from hangwatch.model.calls import Call
from hangwatch.model.groups import Group
from hangwatch.model.kinds import KINDS, VerdictKind
from hangwatch.model.limits import MIN_WAIT_S
from hangwatch.model.ranks import Lifecycle
from hangwatch.model.verdicts import CallClass, Divergence, Verdict
from hangwatch.tracking.call_stream import CallStream, CallWindow
from hangwatch.tracking.process import Process

from . import messages
from .alignment import (
    MAX_WINDOW_CALLS,
    Alignment,
    CallPair,
    align_calls,
    make_call_key,
    select_window,
)
from .call_differences import (
    find_left_out_calls,
    find_lone_exceptions,
    find_repeated_call,
    find_shift,
    find_swapped_calls,
    has_diverged,
    select_rows,
)
from .context import DiagnosisContext, EvidenceRequest, get_suspicion_delay_s

RankSides = tuple[tuple[int, ...], tuple[int, ...]]  # the others, the culprits
_MAX_REQUESTED_RANKS = 16  # of the ranks that are ahead of the others
# A script may repeat this many calls, as when it tries a step again.
_MAX_REPEAT_DISTANCE = 8


@dataclass(frozen=True, slots=True)
class _Explanation:
    """``note`` is a predicate that follows the culprits' name, empty if nothing is certain;
    ``since_seq`` is the first call that only one side made, if that is known.
    """

    note: str = ""
    since_seq: int | None = None


def add_divergence(context: DiagnosisContext, verdict: Verdict) -> Verdict:
    """The verdict with its divergence, if the calls of its group diverge. Requests the calls that
    are needed to show it.
    """
    group, seq = verdict.group, verdict.seq
    # For a send or a receive, `seq` counts the calls of a channel.
    is_point_to_point = any(c.call.peer is not None for c in verdict.calls)
    if group is None or seq is None or is_point_to_point or not _is_due(context, verdict):
        return verdict
    members = context.streams_by_group.get(group.key, {})
    if verdict.kind is VerdictKind.NO_PROGRESS:
        verdict = _blame_swallowed_exception(context, verdict, members, seq)
    sides = _split_sides(verdict, members)
    spec = KINDS[verdict.kind]
    if not spec.compares_calls or sides is None:
        return verdict
    left = _get_side_calls(context, members, sides[0], seq)
    right = _get_side_calls(context, members, sides[1], seq)
    if not left or not right:
        return verdict
    right_is_short = not spec.is_call_error or _ended_loop_early(left, right, seq)
    alignment = align_calls(left, right, right_is_short)
    lone_exceptions = find_lone_exceptions(alignment.pairs)
    if not lone_exceptions and not has_diverged(alignment.pairs):
        return verdict
    is_tie = not set(sides[0]).isdisjoint(verdict.culprits)
    reference = "the others"
    if is_tie or len(group.ranks) == 2:
        reference = messages.describe_ranks(sides[0])
    verb = "have been" if len(sides[1]) > 1 else "has been"
    if lone_exceptions:
        explanation = _explain_exceptions(
            context, members, sides[1], lone_exceptions, reference, verb
        )
        verdict = _add_raised_call(verdict, sides[1], lone_exceptions)
    else:
        explanation = _explain_alignment(alignment, reference, verb)
        if not explanation.note and verdict.kind is VerdictKind.MISMATCH:
            explanation = _explain_omission(left, right, seq)
    return _attach_divergence(verdict, group, alignment, sides, explanation)


def _is_due(context: DiagnosisContext, verdict: Verdict) -> bool:
    if KINDS[verdict.kind].is_call_error or verdict.is_confirmed:
        return True
    return context.now - verdict.began_at >= get_suspicion_delay_s(context.limits)


def _attach_divergence(
    verdict: Verdict,
    group: Group,
    alignment: Alignment,
    sides: RankSides,
    explanation: _Explanation,
) -> Verdict:
    """The verdict with the aligned calls, and with the explanation in its summary."""
    note, culprits = explanation.note, messages.describe_ranks(sides[1])
    if note:
        is_tie = not set(sides[0]).isdisjoint(verdict.culprits)
        if "splits" in verdict.differing_fields or is_tie:
            subject = culprits
        else:  # the summary is about these ranks only
            subject = "they" if len(sides[1]) > 1 else "it"
        verdict = replace(verdict, summary=f"{verdict.summary}; {subject} {note}")
    divergence = Divergence(
        group=group,
        sides=sides,
        rows=select_rows(alignment.pairs),
        since_seq=explanation.since_seq,
        note=f"{culprits} {note}" if note else "",
    )
    return replace(verdict, divergence=divergence)


def _blame_swallowed_exception(
    context: DiagnosisContext, verdict: Verdict, members: dict[int, CallStream], seq: int
) -> Verdict:
    """Ranks that are ahead of a call that does not complete may never have taken part in it, if a
    call of theirs before it raised an exception.
    """
    waiting = [rank for rank in verdict.waiting if rank in members]
    ahead = [rank for rank in waiting if members[rank].entered > seq][:_MAX_REQUESTED_RANKS]
    inside = tuple(rank for rank in waiting if members[rank].entered == seq)
    if not ahead or not inside:
        return verdict
    inside_calls = _get_side_calls(context, members, inside, seq)
    if not inside_calls:
        return verdict
    exceptions: dict[int, CallPair] = {}
    for rank in ahead:
        calls = _get_side_calls(context, members, (rank,), seq)
        lone_exceptions = find_lone_exceptions(align_calls(inside_calls, calls).pairs)
        if lone_exceptions:
            exceptions[rank] = lone_exceptions[0]
    if not exceptions:
        return verdict
    inside_call, raised_call = next(iter(exceptions.values()))
    if inside_call is None or raised_call is None:
        return verdict
    culprits = tuple(sorted(exceptions))
    waiter_count = messages.format_waiter_count(len(inside))
    position = messages.describe_position(verdict.group, seq)
    return replace(
        verdict,
        kind=VerdictKind.MISMATCH,
        culprits=culprits,
        waiting=tuple(rank for rank in verdict.waiting if rank not in exceptions),
        calls=(
            CallClass(ranks=inside, call=inside_call),
            CallClass(ranks=culprits, call=raised_call),
        ),
        summary=(
            f"{waiter_count} in {inside_call.signature.op} ({position}) for"
            f" {messages.describe_ranks(culprits)}"
        ),
        advice=messages.SWALLOWED_EXCEPTION_ADVICE,
        site=raised_call.site,
    )


def _split_sides(verdict: Verdict, members: dict[int, CallStream]) -> RankSides | None:
    """The others and the culprits. If all are culprits, the ranks of the first class of calls take
    the place of the others.
    """
    culprits = tuple(rank for rank in verdict.culprits if rank in members)
    classes = [call_class.ranks for call_class in verdict.calls]
    others = next((ranks for ranks in classes if set(ranks).isdisjoint(culprits)), None)
    if others is None and len(classes) > 1:
        others, culprits = classes[0], classes[1]
    known_others = tuple(rank for rank in others or () if rank in members)
    return (known_others, culprits) if known_others and culprits else None


def _get_side_calls(
    context: DiagnosisContext, members: dict[int, CallStream], ranks: tuple[int, ...], seq: int
) -> list[Call]:
    """The last calls of one rank for its side: of one whose calls were fetched, otherwise of the
    first one that is alive, whose calls are requested.
    """
    rank = _select_representative(context, members, ranks, seq)
    stream = members[rank]
    last_seq = min(stream.entered, seq)
    if not stream.is_counted(last_seq):
        return []
    if last_seq > 0 and not stream.has_answered(CallWindow(last_seq, last_seq)):
        window = CallWindow(max(1, last_seq - MAX_WINDOW_CALLS + 1), last_seq)
        context.requests.append(EvidenceRequest.for_calls(rank, stream, window))
    return select_window(stream.calls, last_seq)


def _select_representative(
    context: DiagnosisContext, members: dict[int, CallStream], ranks: tuple[int, ...], seq: int
) -> int:
    for rank in ranks:
        stream = members[rank]
        last_seq = min(stream.entered, seq)
        if last_seq > 0 and stream.has_answered(CallWindow(last_seq, last_seq)):
            return rank
    for rank in ranks:
        process = context.attempt.processes.get(rank)
        if process is not None and process.is_alive:
            return rank
    return ranks[0]


def _ended_loop_early(left: list[Call], right: list[Call], seq: int) -> bool:
    """Whether at ``seq`` the right side makes a call that was never made before while the left side
    repeats one: the right side left its loop first.
    """
    left_call = next((call for call in left if call.seq == seq), None)
    right_call = next((call for call in right if call.seq == seq), None)
    if left_call is None or right_call is None:
        return False
    keys_before = {make_call_key(call) for call in left if call.seq < seq}
    return make_call_key(left_call) in keys_before and make_call_key(right_call) not in keys_before


def _explain_exceptions(
    context: DiagnosisContext,
    members: dict[int, CallStream],
    ranks: tuple[int, ...],
    lone_exceptions: list[CallPair],
    reference: str,
    verb: str,
) -> _Explanation:
    """Calls that raised exceptions on ``ranks`` only. Unless their scripts are known to have
    continued, the exception may have ended them.
    """
    raised_calls = [right for _, right in lone_exceptions if right is not None]
    first = raised_calls[0]
    processes = context.attempt.processes
    if all(_continued_after(processes.get(rank), members[rank], first) for rank in ranks):
        note = messages.describe_lone_exceptions(raised_calls, reference, verb)
        return _Explanation(note, first.seq)
    process = processes.get(ranks[0])
    exception = process.exception if process is not None else None
    if exception is not None:
        raised_at, called_at = exception.site, first.site
        is_same_line = (
            raised_at is not None
            and called_at is not None
            and (raised_at.file, raised_at.line) == (called_at.file, called_at.line)
        )
        if not is_same_line:
            exception = None
    return _Explanation(messages.describe_failed_call(first, exception), first.seq)


def _continued_after(process: Process | None, stream: CallStream, call: Call) -> bool:
    """Whether the rank made another call after one that raised, or still runs long after it."""
    if stream.entered > call.seq:
        return True
    if process is None:
        return False
    if any(other.entered_at > stream.entered_at + MIN_WAIT_S for other in process.streams.values()):
        return True
    is_running = process.is_alive and process.lifecycle < Lifecycle.EXITING
    if not is_running or process.exception is not None:
        return False
    last_call_at = max(stream.entered_at, stream.last_completion_at)
    return process.reports.last_seen_at >= last_call_at + MIN_WAIT_S


def _add_raised_call(
    verdict: Verdict, ranks: tuple[int, ...], lone_exceptions: list[CallPair]
) -> Verdict:
    """A mismatch with the call behind it, which raised an exception before it communicated."""
    raised_call = lone_exceptions[0][1]
    if verdict.kind is not VerdictKind.MISMATCH or raised_call is None:
        return verdict
    if any(call_class.call.raised for call_class in verdict.calls):
        return verdict
    calls = (*verdict.calls, CallClass(ranks=ranks, call=raised_call))
    return replace(verdict, calls=calls, site=raised_call.site)


def _explain_alignment(alignment: Alignment, reference: str, verb: str) -> _Explanation:
    shift = find_shift(alignment)
    if shift is not None:
        is_exact = shift.first is not None and shift.first.seq == shift.last.seq
        note = messages.describe_shift(shift.count, shift.first, shift.last, reference, verb)
        return _Explanation(note, shift.last.seq if is_exact else None)
    swapped = find_swapped_calls(alignment)
    if swapped is not None:
        left, right = swapped
        note = messages.describe_reordering(left, right, reference)
        return _Explanation(note, min(left.seq, right.seq))
    return _Explanation()


def _explain_omission(left: list[Call], right: list[Call], seq: int) -> _Explanation:
    """The calls that the right side probably skipped at ``seq``, unless it may have repeated calls
    that it had just made.
    """
    omitted = find_left_out_calls(left, right, seq)
    if not omitted:
        return _Explanation()
    max_distance = max(_MAX_REPEAT_DISTANCE, len(omitted))
    repeated = find_repeated_call(right, seq, max_distance)
    note = messages.describe_omission(omitted, repeated)
    return _Explanation(note, omitted[0].seq if repeated is None else None)
