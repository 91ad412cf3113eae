"""Aligns the calls of two ranks, to show a call that one of them skipped, added or made in another
order.

The alignment is that of Needleman and Wunsch (1970) with free ends: after its last known call,
either side may make more.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from operator import itemgetter

from hangwatch.model.calls import Call

MAX_WINDOW_CALLS = 128  # calls that are aligned on each side
_BAND_CALLS = 32  # calls that one side may be ahead of the other
_GAP_SCORE = -2
_EXACT_SCORE = 3  # the same call at the same line
_OTHER_LINE_SCORE = 1  # the same call at another line
_OTHER_ARGUMENTS_SCORE = 1  # the same operation at the same line, with other arguments

Calls = tuple[Call, ...]  # oldest first
CallPair = tuple[Call | None, Call | None]
_CallKey = tuple[str, int, str]  # operation, hash of what must agree, line
_Cell = tuple[int, int]


def make_call_key(call: Call) -> _CallKey:
    signature = call.signature
    line = f"{call.site.file}:{call.site.line}" if call.site is not None else ""
    return signature.op, signature.agree, line


def select_window(calls: Mapping[int, Call], seq: int) -> Calls:
    """The known calls around ``seq`` without a gap, oldest first, each after its `preceded_by`."""
    if seq not in calls:
        return ()
    last = seq
    while last + 1 in calls and last < seq + _BAND_CALLS:
        last += 1
    first = seq + 1
    while first - 1 in calls and last - first < MAX_WINDOW_CALLS:
        first -= 1
    window = []
    for number in range(first, last + 1):
        call = calls[number]
        if call.preceded_by is not None:
            window.append(call.preceded_by)
        window.append(call)
    return tuple(window)


@dataclass(frozen=True, slots=True, kw_only=True)
class Alignment:
    """Pairs in the order of calls; uncertain if one with another shift at the end is as good."""

    pairs: tuple[CallPair, ...]
    is_certain: bool


@lru_cache(maxsize=64)  # every diagnosis of a hanging job aligns the same calls again
def align_calls(left: Calls, right: Calls, right_is_short: bool = False) -> Alignment:
    """Aligns two windows of calls, from the first call that is known of both. With
    ``right_is_short``, the right side is known to have made too few calls.
    """
    if left and right:
        first_seq = max(left[0].seq, right[0].seq)
        left = tuple(call for call in left if call.seq >= first_seq)
        right = tuple(call for call in right if call.seq >= first_seq)
    best, preceding = _score_cells(list(map(make_call_key, left)), list(map(make_call_key, right)))
    # At an end, one side has no more calls.
    ends = [(i, j) for i, j in best if i == len(left) or j == len(right)]
    highest = max(best[end] for end in ends)
    best_ends = [end for end in ends if best[end] == highest]
    # One call too few looks the same as one too many if calls come in rounds of two.
    if right_is_short:
        best_ends = [(i, j) for i, j in best_ends if i >= j] or best_ends
    end = min(best_ends, key=lambda cell: (abs(cell[0] - cell[1]), -cell[0]))
    pairs = []
    cell = end
    while cell in preceding:
        i, j = preceding[cell]
        left_call = left[i] if i < cell[0] else None
        right_call = right[j] if j < cell[1] else None
        pairs.append((left_call, right_call))
        cell = i, j
    pairs.reverse()
    pairs += [(None, call) for call in right[end[1] :]]
    pairs += [(call, None) for call in left[end[0] :]]
    return Alignment(pairs=tuple(pairs), is_certain=len(best_ends) == 1)


def _score_cells(
    left: list[_CallKey], right: list[_CallKey]
) -> tuple[dict[_Cell, int], dict[_Cell, _Cell]]:
    """The best score of the first i left and j right calls, for all i and j within the band, and the
    cell (i, j) that precedes it.
    """
    best: dict[_Cell, int] = {(0, 0): 0}
    preceding: dict[_Cell, _Cell] = {}
    for i in range(len(left) + 1):
        for j in range(max(0, i - _BAND_CALLS), min(len(right), i + _BAND_CALLS) + 1):
            scores = []
            for cell in ((i, j - 1), (i - 1, j)):
                if cell in best:
                    scores.append((best[cell] + _GAP_SCORE, cell))
            if i and j:
                cell = i - 1, j - 1
                pair_score = _score_pair(left[i - 1], right[j - 1])
                scores.append((best[cell] + pair_score, cell))
            if scores:
                best[i, j], preceding[i, j] = max(scores, key=itemgetter(0))
    return best, preceding


def _score_pair(one: _CallKey, other: _CallKey) -> int:
    if one == other:
        return _EXACT_SCORE
    if one[:2] == other[:2]:
        return _OTHER_LINE_SCORE
    if one[0] == other[0] and one[2] == other[2]:
        return _OTHER_ARGUMENTS_SCORE
    return 3 * _GAP_SCORE
