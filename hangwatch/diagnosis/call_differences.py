"""The differences that an alignment of two sides' calls shows: whether and since when they diverged,
and which calls one side skipped, repeated or made in another order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hangwatch.model.calls import Call
from hangwatch.model.verdicts import AlignedPair

from .alignment import Alignment, CallPair, make_call_key

_CONTEXT_ROWS = 3  # rows shown on either side of a difference
_MIN_AGREEING_CALLS = 2  # calls that must agree after a shift
_MIN_AGREEING_CALLS_UNANCHORED = 8  # the same, if no call before the shift is known
_MAX_ROUND_CALLS = 64  # a round of the training loop has at most this many calls


@dataclass(frozen=True, slots=True, kw_only=True)
class CallShift:
    """From some call on, the right side is ``count`` calls behind the left one (ahead of it if that
    is negative).

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
    unpaired = _list_unpaired(pairs)
    trailing: list[int] = []
    for index in reversed(range(len(pairs))):
        if None not in pairs[index]:
            break
        trailing.append(index)
    lacks_calls_before = len(unpaired) > len(trailing)
    lacking_sides = {pairs[index][0] is None for index in trailing}
    return lacks_calls_before or len(lacking_sides) > 1


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
    side = 1 if pairs[start][0] is None else 0  # of the calls that the other side lacks
    run, after = pairs[start : start + count], pairs[start + count :]
    if any(pair[1 - side] is not None for pair in run) or not all(map(_is_exact_match, after)):
        return None
    calls = [pair[side] for pair in pairs]
    longer = [call for call in calls if call is not None]
    earliest = _move_earlier(pairs, longer, start, count)
    latest = _move_later(longer, start, count)
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
    """Whether the calls with equal numbers after the first one of ``pairs[start]`` agree."""
    left, right = ({call.seq: call for pair in pairs if (call := pair[side])} for side in (0, 1))
    first = min(call.seq for call in pairs[start] if call is not None)
    common = [seq for seq in left.keys() & right.keys() if seq > first]
    return bool(common) and all(_is_exact_match((left[seq], right[seq])) for seq in common)


def _strip_trailing(pairs: Sequence[CallPair]) -> Sequence[CallPair]:
    """The pairs without the calls at the end that only one side has made so far."""
    end = len(pairs)
    while end and None in pairs[end - 1]:
        end -= 1
    return pairs[:end]


def _move_earlier(pairs: Sequence[CallPair], longer: Sequence[Call], start: int, count: int) -> int:
    """The earliest position to which a run of calls can be moved without fewer exact matches."""
    while (
        start > 0
        and _is_exact_match(pairs[start - 1])
        and make_call_key(longer[start - 1]) == make_call_key(longer[start - 1 + count])
    ):
        start -= 1
    return start


def _move_later(longer: Sequence[Call], start: int, count: int) -> int:
    """The latest position to which a run of calls can be moved without fewer exact matches."""
    while start + count < len(longer):
        if make_call_key(longer[start]) != make_call_key(longer[start + count]):
            break
        start += 1
    return start


def find_lone_exceptions(pairs: Sequence[CallPair]) -> list[CallPair]:
    """Calls that raised an exception on the right side and not on the left: they matched no call of
    another rank, as if they had not been made.
    """
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
    left, right = earlier[0] or later[0], earlier[1] or later[1]
    after = alignment.pairs[unpaired[1] + 1 :]
    if left is None or right is None or not after or not all(map(_is_exact_match, after)):
        return None
    is_same_call = make_call_key(left)[:2] == make_call_key(right)[:2]
    return (left, right) if is_same_call else None


def find_left_out_calls(left: Sequence[Call], right: Sequence[Call], seq: int) -> list[Call]:
    """The calls that the right side skipped at ``seq``, where the sides diverge, judged by the order
    of these calls in earlier rounds.

    Empty if its call was never made before, or did not soon follow the call of the left side.
    """
    calls_by_seq = {call.seq: call for call in left}
    keys_before = {call.seq: make_call_key(call) for call in left if call.seq < seq}
    right_call = _find_call(right, seq)
    if seq not in calls_by_seq or right_call is None:
        return []
    left_call = calls_by_seq[seq]
    left_key, right_key = make_call_key(left_call), make_call_key(right_call)
    if left_key == right_key:
        return []
    # The last round with the same call as the left side makes now, after the same call as before.
    same_seqs = [
        other
        for other, key in keys_before.items()
        if key == left_key and keys_before.get(other - 1) == keys_before.get(seq - 1)
    ]
    if not same_seqs:
        return []
    last_round = max(same_seqs)
    for distance in range(1, _MAX_ROUND_CALLS):
        if keys_before.get(last_round + distance) == right_key:
            return [left_call, *(calls_by_seq[last_round + i] for i in range(1, distance))]
    return []


def find_repeated_call(right: Sequence[Call], seq: int, max_distance: int) -> Call | None:
    """The call that the right side may have repeated at ``seq``: the last equal one among the
    ``max_distance`` calls before.
    """
    repetition = _find_call(right, seq)
    if repetition is None:
        return None
    key = make_call_key(repetition)
    for call in reversed(right):
        if seq - max_distance <= call.seq < seq and make_call_key(call) == key:
            return call
    return None


def _find_call(calls: Sequence[Call], seq: int) -> Call | None:
    return next((call for call in calls if call.seq == seq), None)


def select_rows(pairs: Sequence[CallPair]) -> tuple[AlignedPair, ...]:
    """The rows around every difference, and the last ones."""
    shown = set(range(len(pairs) - _CONTEXT_ROWS, len(pairs)))
    for index, pair in enumerate(pairs):
        if None in pair or find_lone_exceptions([pair]):
            shown.update(range(index - _CONTEXT_ROWS, index + _CONTEXT_ROWS + 1))
    rows: list[AlignedPair] = []
    previous = -1
    for index, pair in enumerate(pairs):
        if index in shown:
            rows.append(AlignedPair(calls=pair, omitted=index - previous - 1))
            previous = index
    return tuple(rows)
