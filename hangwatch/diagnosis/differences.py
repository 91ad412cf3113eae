"""Adds to a verdict how the culprits' calls diverge from those of other ranks: since when, and which
calls they skipped, repeated or made in another order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from hangwatch.model.calls import Call
from hangwatch.model.kinds import KINDS, VerdictKind
from hangwatch.model.limits import MIN_WAIT_S
from hangwatch.model.ranks import Lifecycle, Ranks
from hangwatch.model.verdicts import AlignedPair, CallClass, Divergence, Side, Verdict
from hangwatch.tracking.call_stream import CallWindow, StreamsByRank

from .alignment import (
    MAX_WINDOW_CALLS,
    Alignment,
    CallPair,
    Calls,
    align_calls,
    make_call_key,
    select_window,
)
from .context import DiagnosisContext
from .messages import (
    describe_position,
    describe_ranks,
    format_call,
    format_exception,
    format_waiter_count,
    pluralize,
)

# A predicate that follows the culprits' name, empty if nothing is certain, and the first call that only
# one side made, if that is known.
_Explanation = tuple[str, int | None]

_MAX_REQUESTED_RANKS = 16  # ranks ahead of the others whose calls are requested
# A script may repeat this many calls, as when it tries a step again.
_MAX_REPEAT_DISTANCE = 8
_CONTEXT_ROWS = 3  # rows shown on either side of a difference
_MIN_AGREEING_CALLS = 2  # calls that must agree after a shift
_MIN_AGREEING_CALLS_UNANCHORED = 8  # as many if no call before the shift is known
_MAX_ROUND_CALLS = 64  # a round of the training loop has at most this many calls
_SWALLOWED_EXCEPTION_ADVICE = (
    "Look at that exception: code that catches an exception of a collective must bring all ranks"
    " back to the same call."
)


def add_divergence(context: DiagnosisContext, verdict: Verdict) -> Verdict:
    """The verdict with its divergence, if any. Requests the calls that are needed to show it."""
    group, seq = verdict.group, verdict.seq
    # The `seq` of a send or a receive counts the calls of a channel.
    is_point_to_point = any(c.call.peer is not None for c in verdict.calls)
    if group is None or seq is None or is_point_to_point:
        return verdict
    is_due = verdict.is_confirmed or KINDS[verdict.kind].is_call_error
    if not is_due and context.now - verdict.began_at < context.limits.suspicion_delay_s:
        return verdict
    members = context.get_members(group)
    comparison = _Comparison(context, members, seq)
    if verdict.kind is VerdictKind.NO_PROGRESS:
        verdict = comparison.blame_swallowed_exception(verdict)
    sides = comparison.split_sides(verdict)
    spec = KINDS[verdict.kind]
    if not spec.compares_calls or sides is None:
        return verdict
    others, culprits = sides
    left = comparison.get_calls(others)
    right = comparison.get_calls(culprits)
    if not left or not right:
        return verdict
    right_is_short = not spec.is_call_error or _ended_loop_early(left, right, seq)
    alignment = align_calls(left, right, right_is_short)
    lone_exceptions = find_lone_exceptions(alignment.pairs)
    if not lone_exceptions and not has_diverged(alignment.pairs):
        return verdict
    is_tie = not set(others).isdisjoint(verdict.culprits)
    reference = "the others"
    if is_tie or len(group.ranks) == 2:
        reference = describe_ranks(others)
    if lone_exceptions:
        raised_call = lone_exceptions[0][1]
        is_shown = any(call_class.call.raised for call_class in verdict.calls)
        if verdict.kind is VerdictKind.MISMATCH and not is_shown:
            calls = (*verdict.calls, CallClass(ranks=culprits, call=raised_call))
            verdict = replace(verdict, calls=calls, site=raised_call.site)
        distance = _count_calls(len(lone_exceptions))
        behind = f"{pluralize('has been', culprits)} {distance} behind {reference}"
        note, since_seq = comparison.explain_exception(culprits, raised_call, behind)
    else:
        note, since_seq = _explain_alignment(alignment, reference, culprits)
        if not note and verdict.kind is VerdictKind.MISMATCH:
            note, since_seq = _explain_omission(left, right, seq)
    if note:
        subject = describe_ranks(culprits)
        # The summary is about other ranks as well.
        needs_names = is_tie or "splits" in verdict.differing_fields
        short_subject = subject if needs_names else pluralize("it", culprits)
        verdict = replace(verdict, summary=f"{verdict.summary}; {short_subject} {note}")
        note = f"{subject} {note}"
    divergence = Divergence(
        group=group,
        sides=tuple(Side(ranks=ranks) for ranks in sides),
        rows=select_rows(alignment.pairs),
        since_seq=since_seq,
        note=note,
    )
    return replace(verdict, divergence=divergence)


@dataclass(frozen=True, slots=True)
class _Comparison:
    """The calls of a group's members up to call ``seq``, which a verdict is about."""

    context: DiagnosisContext
    members: StreamsByRank
    seq: int

    def split_sides(self, verdict: Verdict) -> tuple[Ranks, Ranks] | None:
        """The others and the culprits; if all are culprits, the first class are the others."""
        culprits = tuple(rank for rank in verdict.culprits if rank in self.members)
        classes = [call_class.ranks for call_class in verdict.calls]
        separate = [ranks for ranks in classes if set(ranks).isdisjoint(culprits)]
        if separate:
            others = separate[0]
        elif len(classes) > 1:
            others, culprits = classes[0], classes[1]
        else:
            return None
        known_others = tuple(rank for rank in others if rank in self.members)
        if not known_others or not culprits:
            return None
        return known_others, culprits

    def get_calls(self, ranks: Ranks) -> Calls:
        """The last calls of one rank for its side: of one whose calls were fetched, otherwise of the
        first one that is alive, whose calls are requested.
        """
        rank = next(filter(self._has_sent_calls, ranks), None)
        if rank is None:
            alive = (process.rank for process in self.context.iter_alive(ranks))
            rank = next(alive, ranks[0])
        stream = self.members[rank]
        last_seq = min(stream.entered, self.seq)
        if not stream.is_counted(last_seq):
            return ()
        if last_seq > 0 and not self._has_sent_calls(rank):
            window = CallWindow(max(1, last_seq - MAX_WINDOW_CALLS + 1), last_seq)
            self.context.request_calls(rank, stream, window)
        return select_window(stream.calls, last_seq)

    def _has_sent_calls(self, rank: int) -> bool:
        last_seq = min(self.members[rank].entered, self.seq)
        return last_seq > 0 and self.members[rank].has_answered(CallWindow(last_seq, last_seq))

    def blame_swallowed_exception(self, verdict: Verdict) -> Verdict:
        """The verdict, or a mismatch if ranks that are ahead of a call that does not complete never took
        part in it, because a call of theirs before it raised an exception.
        """
        members = self.members
        waiting = [rank for rank in verdict.waiting if rank in members]
        ahead = [rank for rank in waiting if members[rank].entered > self.seq]
        inside = tuple(rank for rank in waiting if members[rank].entered == self.seq)
        inside_calls = self.get_calls(inside) if ahead and inside else ()
        if not inside_calls:
            return verdict
        exceptions = {}
        for rank in ahead[:_MAX_REQUESTED_RANKS]:
            alignment = align_calls(inside_calls, self.get_calls((rank,)))
            lone_exceptions = find_lone_exceptions(alignment.pairs)
            if lone_exceptions:
                exceptions[rank] = lone_exceptions[0]
        if not exceptions:
            return verdict
        inside_call, raised_call = next(iter(exceptions.values()))
        culprits = tuple(sorted(exceptions))
        position = describe_position(verdict.group, self.seq)
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
                f"{format_waiter_count(len(inside))} in {inside_call.signature.op} ({position}) for"
                f" {describe_ranks(culprits)}"
            ),
            advice=_SWALLOWED_EXCEPTION_ADVICE,
            site=raised_call.site,
        )

    def explain_exception(self, ranks: Ranks, call: Call, behind: str) -> _Explanation:
        """A call that raised an exception on ``ranks`` only. Unless their scripts are known to have
        continued, the exception may have ended them. ``behind`` is the clause on how many calls they are behind.
        """
        described = f"call {call.seq} ({format_call(call, ', ')})"
        if all(self._continued_after(rank, call) for rank in ranks):
            which = "which raised an exception there, after which its script continued"
            return f"{behind} since {described}, {which}", call.seq
        raised = "an exception"
        exception = self.context.processes[ranks[0]].exception
        if exception is not None and exception.site is not None and call.site is not None:
            raised_at = exception.site.file, exception.site.line
            if raised_at == (call.site.file, call.site.line):
                raised = format_exception(exception)
        return f"failed in {described} with {raised}", call.seq

    def _continued_after(self, rank: int, call: Call) -> bool:
        """Whether the rank made another call after one that raised, or still runs long after it."""
        process, stream = self.context.processes[rank], self.members[rank]
        has_called_elsewhere = process.newest_call_at > stream.entered_at + MIN_WAIT_S
        if stream.entered > call.seq or has_called_elsewhere:
            return True
        is_running = process.is_alive and process.lifecycle < Lifecycle.EXITING
        if not is_running or process.exception is not None:
            return False
        last_call_at = max(stream.entered_at, stream.last_completion_at)
        return process.reports.last_seen_at >= last_call_at + MIN_WAIT_S


def _ended_loop_early(left: Calls, right: Calls, seq: int) -> bool:
    """Whether at ``seq`` the right side makes a call that was never made before while the left side
    repeats one: the right side left its loop first.
    """
    left_call, right_call = _find_call(left, seq), _find_call(right, seq)
    if left_call is None or right_call is None:
        return False
    keys_before = {make_call_key(call) for call in left if call.seq < seq}
    is_new = make_call_key(right_call) not in keys_before
    return is_new and make_call_key(left_call) in keys_before


def _explain_alignment(alignment: Alignment, reference: str, ranks: Ranks) -> _Explanation:
    shift = find_shift(alignment)
    if shift is not None:
        is_exact = shift.first is not None and shift.first.seq == shift.last.seq
        return describe_shift(shift, reference, ranks), shift.last.seq if is_exact else None
    swapped = find_swapped_calls(alignment)
    if swapped is None:
        return "", None
    left, right = swapped
    when = "earlier" if right.seq < left.seq else "later"
    note = (
        f"made {left.signature.op} {when} than {reference}: as call {right.seq}"
        f" ({format_call(right, ', ')}) and not {left.seq}"
    )
    return note, min(left.seq, right.seq)


def _explain_omission(left: Calls, right: Calls, seq: int) -> _Explanation:
    """The calls that the right side probably skipped at ``seq``, by the order of earlier rounds. It may
    also have repeated the call that it makes instead, if it had just made that.
    """
    omitted = find_left_out_calls(left, right, seq)
    if not omitted:
        return "", None
    first = omitted[0]
    which = f"call {first.seq}"
    if len(omitted) > 1:
        which = f"{len(omitted)} calls from call {first.seq} on"
    note = f"skipped {which} ({format_call(first, ', ')})"
    made = _find_call(right, seq)
    first_seq = seq - max(_MAX_REPEAT_DISTANCE, len(omitted))
    for call in reversed(right):
        is_recent = first_seq <= call.seq < seq
        if is_recent and made is not None and make_call_key(call) == make_call_key(made):
            return f"{note} or made call {call.seq} again", None
    return note, first.seq


@dataclass(frozen=True, slots=True, kw_only=True)
class CallShift:
    """A lasting shift between the sides: the right one is ``count`` calls behind the left one (ahead of
    it if that is negative).

    ``first`` and ``last`` delimit the calls that may be the first that only one side made: they are
    equal if that is certain. ``first`` is None if it may be earlier than all known calls.
    """

    count: int
    first: Call | None
    last: Call


def has_diverged(pairs: Sequence[CallPair]) -> bool:
    """Whether each side has calls that the other lacks, or one side lacks calls in between. If one
    side only has more calls at the end, the other may still make them.
    """
    before_trailing = _strip_trailing(pairs)
    sides_that_end = {left is None for left, _ in pairs[len(before_trailing) :]}
    return bool(_list_unpaired(before_trailing)) or len(sides_that_end) > 1


def _list_unpaired(pairs: Sequence[CallPair]) -> list[int]:
    """The indices of calls that only one side made."""
    return [index for index, pair in enumerate(pairs) if None in pair]


def find_shift(alignment: Alignment) -> CallShift | None:
    """A single run of calls that only one side made, after which both sides agree in all calls and
    lines; None for anything more complex, and where they also agree by number: then one side may
    have made another call instead of one more.
    """
    pairs = _strip_trailing(alignment.pairs)
    unpaired = _list_unpaired(pairs)
    if not alignment.is_certain or not unpaired:
        return None
    start, count = unpaired[0], len(unpaired)
    if _agree_by_number(alignment.pairs, start):
        return None
    side = 1 if pairs[start][0] is None else 0  # the side with the calls that the other one lacks
    run, after = pairs[start : start + count], pairs[start + count :]
    is_single_run = all(pair[1 - side] is None for pair in run)
    if not is_single_run or not all(map(_is_exact_match, after)):
        return None
    longer = _select_side(pairs, side)
    keys = list(map(make_call_key, longer))
    # The run can be moved to these positions without fewer exact matches.
    earliest = latest = start
    while (
        earliest > 0
        and _is_exact_match(pairs[earliest - 1])
        and keys[earliest - 1] == keys[earliest - 1 + count]
    ):
        earliest -= 1
    while latest + count < len(keys) and keys[latest] == keys[latest + count]:
        latest += 1
    is_unanchored = earliest == 0 and longer[0].seq > 1
    agreeing_count = len(after) + start - earliest
    needed_count = _MIN_AGREEING_CALLS_UNANCHORED if is_unanchored else _MIN_AGREEING_CALLS
    if agreeing_count < needed_count:
        return None
    return CallShift(
        count=count if side == 0 else -count,
        first=None if is_unanchored else longer[earliest],
        last=longer[latest],
    )


def _agree_by_number(pairs: Sequence[CallPair], start: int) -> bool:
    """Whether the calls with equal numbers after the one of ``pairs[start]`` agree."""
    left_keys = {call.seq: make_call_key(call) for call in _select_side(pairs, 0)}
    right_keys = {call.seq: make_call_key(call) for call in _select_side(pairs, 1)}
    first = min(call.seq for call in pairs[start] if call is not None)
    common = [seq for seq in left_keys if seq > first and seq in right_keys]
    differing = [seq for seq in common if left_keys[seq] != right_keys[seq]]
    return bool(common) and not differing


def _select_side(pairs: Sequence[CallPair], side: int) -> list[Call]:
    return [call for pair in pairs if (call := pair[side]) is not None]


def _strip_trailing(pairs: Sequence[CallPair]) -> Sequence[CallPair]:
    """The pairs without the calls at the end that only one side has made so far."""
    end = len(pairs)
    while end and None in pairs[end - 1]:
        end -= 1
    return pairs[:end]


def find_lone_exceptions(pairs: Sequence[CallPair]) -> list[tuple[Call, Call]]:
    """Calls that raised exceptions on the right side only: they matched no other rank's call."""
    return [
        (left, right)
        for left, right in pairs
        if left is not None and right is not None and right.raised and not left.raised
    ]


def _is_exact_match(pair: CallPair) -> bool:
    left, right = pair
    if left is None or right is None:
        return False
    return make_call_key(left) == make_call_key(right)


def find_swapped_calls(alignment: Alignment) -> tuple[Call, Call] | None:
    """The call that both sides made at different positions, perhaps at other lines, if they agree
    before and after: (left, right).
    """
    unpaired = _list_unpaired(alignment.pairs)
    if not alignment.is_certain or len(unpaired) != 2:
        return None
    earlier, later = (alignment.pairs[index] for index in unpaired)
    left = earlier[0] or later[0]
    right = earlier[1] or later[1]
    after = alignment.pairs[unpaired[1] + 1 :]
    if left is None or right is None or not after:
        return None
    is_same_call = make_call_key(left)[:2] == make_call_key(right)[:2]
    if not is_same_call or not all(map(_is_exact_match, after)):
        return None
    return left, right


def find_left_out_calls(left: Calls, right: Calls, seq: int) -> list[Call]:
    """The calls that the right side skipped at ``seq``, where the sides diverge, judged by the order
    of these calls in earlier rounds.

    Empty if its call was never made before, or did not soon follow the call of the left side.
    """
    calls = {call.seq: call for call in left}
    keys = {call.seq: make_call_key(call) for call in left if call.seq < seq}
    left_call, right_call = calls.get(seq), _find_call(right, seq)
    if left_call is None or right_call is None:
        return []
    left_key, right_key = make_call_key(left_call), make_call_key(right_call)
    if left_key == right_key:
        return []
    # The last round with the same call as the left side makes now, after the same call as before.
    key_before = keys.get(seq - 1)
    rounds = [n for n, key in keys.items() if key == left_key and keys.get(n - 1) == key_before]
    if not rounds:
        return []
    round_seq = max(rounds)
    for distance in range(1, _MAX_ROUND_CALLS):
        if keys.get(round_seq + distance) == right_key:
            return [left_call, *(calls[round_seq + i] for i in range(1, distance))]
    return []


def _find_call(calls: Calls, seq: int) -> Call | None:
    return next((call for call in calls if call.seq == seq), None)


def select_rows(pairs: Sequence[CallPair]) -> tuple[AlignedPair, ...]:
    """The rows around every difference, and the last ones."""
    shown = set(range(len(pairs) - _CONTEXT_ROWS, len(pairs)))
    for index, pair in enumerate(pairs):
        if None in pair or find_lone_exceptions([pair]):
            shown.update(range(index - _CONTEXT_ROWS, index + _CONTEXT_ROWS + 1))
    rows = []
    previous = -1
    for index, pair in enumerate(pairs):
        if index in shown:
            rows.append(AlignedPair(calls=pair, omitted=index - previous - 1))
            previous = index
    return tuple(rows)


def describe_shift(shift: CallShift, reference: str, ranks: Ranks) -> str:
    """How far the ranks are behind or ahead, and since when."""
    count, first, last = shift.count, shift.first, shift.last
    direction = "behind" if count > 0 else "ahead of"
    text = (
        f"{pluralize('has been', ranks)} {_count_calls(abs(count))} {direction} {reference} since"
    )
    if first is None:
        return f"{text} call {last.seq} or earlier"
    if first.seq != last.seq:
        return f"{text} one of calls {first.seq}-{last.seq} ({format_call(first, ', ')})"
    made = pluralize("which it never made", ranks)
    if count > 1:
        made = pluralize("the first that it never made", ranks)
    elif count < 0:
        made = "which the others never made"
    return f"{text} call {first.seq} ({format_call(first, ', ')}), {made}"


def _count_calls(count: int) -> str:
    return "1 call" if count == 1 else f"{count} calls"
