"""Two ranks' calls side by side, so that a call that one of them left out, added or made in another
order is seen as such.

The alignment is that of Needleman and Wunsch (1970) with free ends: behind the last calls, either
side may have more to come.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from hangwatch.model.calls import Call
from hangwatch.model.verdicts import AlignedPair

MAX_WINDOW_CALLS = 128  # calls of each side that are looked at
_BAND_CALLS = 32  # calls that one side may be ahead of the other
_GAP_SCORE = -2
_EXACT_SCORE, _OTHER_LINE_SCORE, _OTHER_ARGUMENTS_SCORE = (
    3,
    1,
    1,
)  # the same call at the same line, at another line; another call at the same line, same op
_UNREACHABLE_SCORE = -1_000_000
_CONTEXT_ROWS = 3  # rows shown on either side of a difference
_MIN_AGREEING_CALLS, _MIN_AGREEING_CALLS_UNANCHORED = (
    2,
    8,
)  # calls that must agree behind a shift; where nothing is known from before it
_MAX_ROUND_CALLS = 64  # calls: a round of the loop is no longer than this

CallPair = tuple[Call | None, Call | None]
_CallKey = tuple[str, int, str]  # op, what must agree, line


@dataclass(frozen=True, slots=True, kw_only=True)
class CallShift:
    """From some place on, the right side is ``count`` calls behind the left (ahead, where that is
    negative).

    ``first`` and ``last`` are the calls that may be the first that only one side made: the same one
    where that is certain. ``first`` is None where it may lie before all that is known.
    """

    count: int
    first: Call | None
    last: Call


def make_call_key(call: Call) -> _CallKey:
    signature = call.signature
    return (
        signature.op,
        signature.agree,
        f"{call.site.file}:{call.site.line}" if call.site is not None else "",
    )


def select_window(calls: Mapping[int, Call], seq: int) -> list[Call]:
    """The calls around ``seq`` that are known without a hole, oldest first."""
    last = seq
    while last + 1 in calls and last < seq + _BAND_CALLS:
        last += 1
    first = seq + 1
    while first - 1 in calls and last - first < MAX_WINDOW_CALLS:
        first -= 1
    return [calls[n] for n in range(first, last + 1)] if seq in calls else []


@dataclass(frozen=True, slots=True, kw_only=True)
class Alignment:
    """Pairs in order. Not ``certain`` where another way to pair them, with another shift at the
    end, is as good.
    """

    pairs: tuple[CallPair, ...]
    is_certain: bool


def align_calls(
    left: Sequence[Call], right: Sequence[Call], right_is_short: bool = False
) -> Alignment:
    """Beginning at the first call that is known of both. With ``short``, the right side is known to
    have made too few.
    """
    start = max(left[0].seq, right[0].seq) if left and right else 0
    mine, theirs = [c for c in left if c.seq >= start], [c for c in right if c.seq >= start]
    steps, certain = _trace_alignment(
        tuple(map(make_call_key, mine)), tuple(map(make_call_key, theirs)), right_is_short
    )
    pairs = tuple(
        (None if i is None else mine[i], None if j is None else theirs[j]) for i, j in steps
    )
    return Alignment(pairs=pairs, is_certain=certain)


@lru_cache(maxsize=64)  # asked again at every look at a job that stands still
def _trace_alignment(
    left: tuple[_CallKey, ...], right: tuple[_CallKey, ...], right_is_short: bool
) -> tuple[tuple[tuple[int | None, int | None], ...], bool]:
    best = _compute_scores(left, right)
    ends = {
        (i, j): row[j]
        for i, row in enumerate(best)
        for j in row
        if i == len(left) or j == len(right)
    }
    top = [end for end, score in ends.items() if score == max(ends.values())]
    # where calls come in rounds of two, one too few looks the same as one too many
    if right_is_short:
        top = [(i, j) for i, j in top if i >= j] or top
    i, j = min(top, key=lambda end: (abs(end[0] - end[1]), -end[0]))
    steps: list[tuple[int | None, int | None]] = [
        (k, None) for k in range(len(left) - 1, i - 1, -1)
    ]
    steps += [(None, k) for k in range(len(right) - 1, j - 1, -1)]
    while i or j:
        if j and best[i][j] == best[i].get(j - 1, _UNREACHABLE_SCORE) + _GAP_SCORE:
            j -= 1
            steps.append((None, j))
        elif i and best[i][j] == best[i - 1].get(j, _UNREACHABLE_SCORE) + _GAP_SCORE:
            i -= 1
            steps.append((i, None))
        else:
            i, j = i - 1, j - 1
            steps.append((i, j))
    return tuple(reversed(steps)), len(top) == 1


def _compute_scores(
    left: tuple[_CallKey, ...], right: tuple[_CallKey, ...]
) -> list[dict[int, int]]:
    """By i and j: the score of the first i and the first j calls, within the band."""
    best: list[dict[int, int]] = [{0: 0}]
    for j in range(1, min(len(right), _BAND_CALLS) + 1):
        best[0][j] = best[0][j - 1] + _GAP_SCORE
    for i in range(1, len(left) + 1):
        above, row = best[-1], dict[int, int]()
        for j in range(max(0, i - _BAND_CALLS), min(len(right), i + _BAND_CALLS) + 1):
            paired = (
                above[j - 1] + _score_pair(left[i - 1], right[j - 1])
                if j - 1 in above
                else _UNREACHABLE_SCORE
            )
            row[j] = max(
                paired,
                above.get(j, _UNREACHABLE_SCORE) + _GAP_SCORE,
                row.get(j - 1, _UNREACHABLE_SCORE) + _GAP_SCORE,
            )
        best.append(row)
    return best


def _score_pair(one: _CallKey, other: _CallKey) -> int:
    if one == other:
        return _EXACT_SCORE
    if one[:2] == other[:2]:
        return _OTHER_LINE_SCORE
    return _OTHER_ARGUMENTS_SCORE if one[0] == other[0] and one[2] == other[2] else 3 * _GAP_SCORE


def has_diverged(pairs: Sequence[CallPair]) -> bool:
    """Each side has calls that the other lacks, or one lacks some in between: more than that one is
    not yet as far as the other.
    """
    lone = [i for i, pair in enumerate(pairs) if None in pair]
    trailing = [i for i in lone if all(None in pair for pair in pairs[i:])]
    return len(lone) > len(trailing) or len({pairs[i][0] is None for i in trailing}) > 1


def find_shift(alignment: Alignment) -> CallShift | None:
    """A single run of calls that only one side made, after which all agree to the line; None for
    anything less plain.
    """
    end = len(alignment.pairs)
    while end and None in alignment.pairs[end - 1]:
        end -= 1
    pairs = alignment.pairs[:end]
    lone = [i for i, pair in enumerate(pairs) if None in pair]
    if not alignment.is_certain or not lone:
        return None
    at, count, side = lone[0], len(lone), 1 if pairs[lone[0]][0] is None else 0
    after = pairs[at + count :]
    if any(pair[1 - side] is not None for pair in pairs[at : at + count]) or not all(
        map(_is_exact_match, after)
    ):
        return None
    longer = [call for pair in pairs if (call := pair[side]) is not None]
    # The run may be anywhere to where it can be moved without a call that then agrees less.
    first = last = at
    while (
        first > 0
        and _is_exact_match(pairs[first - 1])
        and make_call_key(longer[first - 1]) == make_call_key(longer[first - 1 + count])
    ):
        first -= 1
    while last + count < len(longer) and make_call_key(longer[last]) == make_call_key(
        longer[last + count]
    ):
        last += 1
    before = first == 0 and longer[0].seq > 1
    if len(after) + at - first < (
        _MIN_AGREEING_CALLS_UNANCHORED if before else _MIN_AGREEING_CALLS
    ):
        return None
    return CallShift(
        count=count if side == 0 else -count,
        first=None if before else longer[first],
        last=longer[last],
    )


def find_lone_exceptions(pairs: Sequence[CallPair]) -> list[CallPair]:
    """Calls that raised on the right side and not on the left: as if never made there, for they met
    nobody's.
    """
    return [
        p
        for p in pairs
        if p[0] is not None and p[1] is not None and p[1].raised and not p[0].raised
    ]


def _is_exact_match(pair: CallPair) -> bool:
    return (
        pair[0] is not None
        and pair[1] is not None
        and make_call_key(pair[0]) == make_call_key(pair[1])
    )


def find_swapped_calls(alignment: Alignment) -> tuple[Call, Call] | None:
    """One call that both sides made at different places, perhaps at other lines, before and behind
    which they agree: (left, right).
    """
    lone = [i for i, pair in enumerate(alignment.pairs) if None in pair]
    if not alignment.is_certain or len(lone) != 2:
        return None
    one, other = alignment.pairs[lone[0]], alignment.pairs[lone[1]]
    left, right = one[0] or other[0], one[1] or other[1]
    behind = alignment.pairs[lone[1] + 1 :]
    if left is None or right is None or not behind or not all(map(_is_exact_match, behind)):
        return None
    return (left, right) if make_call_key(left)[:2] == make_call_key(right)[:2] else None


def find_left_out_calls(left: Sequence[Call], right: Sequence[Call], seq: int) -> list[Call]:
    """Where the sides part at ``seq``: what the right one left out, going by the order in which
    these calls came in earlier rounds.

    Empty where its call was never made before, or did not follow soon on what the others call
    there.
    """
    before = {c.seq: make_call_key(c) for c in left if c.seq < seq}
    here = next((c for c in left if c.seq == seq), None)
    there = next((c for c in right if c.seq == seq), None)
    if here is None or there is None or make_call_key(here) == make_call_key(there):
        return []
    for at in sorted(
        (
            s
            for s, k in before.items()
            if k == make_call_key(here) and before.get(s - 1) == before.get(seq - 1)
        ),
        reverse=True,
    ):
        for ahead in range(1, _MAX_ROUND_CALLS):
            if before.get(at + ahead) == make_call_key(there):
                known = {c.seq: c for c in left}
                return [here, *(known[at + i] for i in range(1, ahead))]
        break
    return []


def find_repeated_call(right: Sequence[Call], seq: int, max_distance: int) -> Call | None:
    """The call that the right side may have gone back to at ``seq``: the last equal one, of
    ``within`` calls before.
    """
    there = next((c for c in right if c.seq == seq), None)
    before = (c for c in reversed(right) if seq - max_distance <= c.seq < seq)
    return next(
        (c for c in before if there is not None and make_call_key(c) == make_call_key(there)), None
    )


def select_rows(pairs: Sequence[CallPair]) -> tuple[AlignedPair, ...]:
    """The rows around every difference, and the last ones."""
    differing = {
        i for i, pair in enumerate(pairs) if None in pair or pair in find_lone_exceptions([pair])
    }
    near = {j for i in differing for j in range(i - _CONTEXT_ROWS, i + _CONTEXT_ROWS + 1)}
    near.update(range(len(pairs) - _CONTEXT_ROWS, len(pairs)))
    rows: list[AlignedPair] = []
    before = -1
    for i, pair in enumerate(pairs):
        if i in near:
            rows.append(AlignedPair(calls=pair, omitted=i - before - 1))
            before = i
    return tuple(rows)
