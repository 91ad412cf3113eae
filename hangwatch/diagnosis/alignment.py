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

WINDOW = 128  # calls of each side that are looked at
_BAND = 32  # calls that one side may be ahead of the other
_GAP = -2
_EXACT, _ELSEWHERE, _ALTERED = (
    3,
    1,
    1,
)  # the same call at the same line, at another line; another call at the same line, same op
_NEVER = -1_000_000
_AROUND = 3  # rows shown on either side of a difference
_SURE, _SURE_OF_ALL = (
    2,
    8,
)  # calls that must agree behind a shift; where nothing is known from before it
_ROUND = 64  # calls: a round of the loop is no longer than this

Pair = tuple[Call | None, Call | None]
_Key = tuple[str, int, str]  # op, what must agree, line


@dataclass(frozen=True, slots=True, kw_only=True)
class Shift:
    """From some place on, the right side is ``count`` calls behind the left (ahead, where that is
    negative).

    ``first`` and ``last`` are the calls that may be the first that only one side made: the same one
    where that is certain. ``first`` is None where it may lie before all that is known.
    """

    count: int
    first: Call | None
    last: Call


def key(call: Call) -> _Key:
    signature = call.signature
    return (
        signature.op,
        signature.agree,
        f"{call.site.file}:{call.site.line}" if call.site is not None else "",
    )


def window(calls: Mapping[int, Call], seq: int) -> list[Call]:
    """The calls around ``seq`` that are known without a hole, oldest first."""
    last = seq
    while last + 1 in calls and last < seq + _BAND:
        last += 1
    first = seq + 1
    while first - 1 in calls and last - first < WINDOW:
        first -= 1
    return [calls[n] for n in range(first, last + 1)] if seq in calls else []


@dataclass(frozen=True, slots=True, kw_only=True)
class Alignment:
    """Pairs in order. Not ``certain`` where another way to pair them, with another shift at the
    end, is as good.
    """

    pairs: tuple[Pair, ...]
    certain: bool


def align(left: Sequence[Call], right: Sequence[Call], short: bool = False) -> Alignment:
    """Beginning at the first call that is known of both. With ``short``, the right side is known to
    have made too few.
    """
    start = max(left[0].seq, right[0].seq) if left and right else 0
    mine, theirs = [c for c in left if c.seq >= start], [c for c in right if c.seq >= start]
    steps, certain = _steps(tuple(map(key, mine)), tuple(map(key, theirs)), short)
    pairs = tuple(
        (None if i is None else mine[i], None if j is None else theirs[j]) for i, j in steps
    )
    return Alignment(pairs=pairs, certain=certain)


@lru_cache(maxsize=64)  # asked again at every look at a job that stands still
def _steps(
    left: tuple[_Key, ...], right: tuple[_Key, ...], short: bool
) -> tuple[tuple[tuple[int | None, int | None], ...], bool]:
    best = _scores(left, right)
    ends = {
        (i, j): row[j]
        for i, row in enumerate(best)
        for j in row
        if i == len(left) or j == len(right)
    }
    top = [end for end, score in ends.items() if score == max(ends.values())]
    if short:  # where calls come in rounds of two, one too few looks the same as one too many
        top = [(i, j) for i, j in top if i >= j] or top
    i, j = min(top, key=lambda end: (abs(end[0] - end[1]), -end[0]))
    steps: list[tuple[int | None, int | None]] = [
        (k, None) for k in range(len(left) - 1, i - 1, -1)
    ]
    steps += [(None, k) for k in range(len(right) - 1, j - 1, -1)]
    while i or j:
        if j and best[i][j] == best[i].get(j - 1, _NEVER) + _GAP:
            j -= 1
            steps.append((None, j))
        elif i and best[i][j] == best[i - 1].get(j, _NEVER) + _GAP:
            i -= 1
            steps.append((i, None))
        else:
            i, j = i - 1, j - 1
            steps.append((i, j))
    return tuple(reversed(steps)), len(top) == 1


def _scores(left: tuple[_Key, ...], right: tuple[_Key, ...]) -> list[dict[int, int]]:
    """By i and j: the score of the first i and the first j calls, within the band."""
    best: list[dict[int, int]] = [{0: 0}]
    for j in range(1, min(len(right), _BAND) + 1):
        best[0][j] = best[0][j - 1] + _GAP
    for i in range(1, len(left) + 1):
        above, row = best[-1], dict[int, int]()
        for j in range(max(0, i - _BAND), min(len(right), i + _BAND) + 1):
            paired = above[j - 1] + _score(left[i - 1], right[j - 1]) if j - 1 in above else _NEVER
            row[j] = max(paired, above.get(j, _NEVER) + _GAP, row.get(j - 1, _NEVER) + _GAP)
        best.append(row)
    return best


def _score(one: _Key, other: _Key) -> int:
    if one == other:
        return _EXACT
    if one[:2] == other[:2]:
        return _ELSEWHERE
    return _ALTERED if one[0] == other[0] and one[2] == other[2] else 3 * _GAP


def parted(pairs: Sequence[Pair]) -> bool:
    """Each side has calls that the other lacks, or one lacks some in between: more than that one is
    not yet as far as the other.
    """
    lone = [i for i, pair in enumerate(pairs) if None in pair]
    trailing = [i for i in lone if all(None in pair for pair in pairs[i:])]
    return len(lone) > len(trailing) or len({pairs[i][0] is None for i in trailing}) > 1


def shift(found: Alignment) -> Shift | None:
    """A single run of calls that only one side made, after which all agree to the line; None for
    anything less plain.
    """
    end = len(found.pairs)
    while end and None in found.pairs[end - 1]:
        end -= 1
    pairs = found.pairs[:end]
    lone = [i for i, pair in enumerate(pairs) if None in pair]
    if not found.certain or not lone:
        return None
    at, count, side = lone[0], len(lone), 1 if pairs[lone[0]][0] is None else 0
    after = pairs[at + count :]
    if any(pair[1 - side] is not None for pair in pairs[at : at + count]) or not all(
        map(_exact, after)
    ):
        return None
    longer = [call for pair in pairs if (call := pair[side]) is not None]
    # The run may be anywhere to where it can be moved without a call that then agrees less.
    first = last = at
    while (
        first > 0
        and _exact(pairs[first - 1])
        and key(longer[first - 1]) == key(longer[first - 1 + count])
    ):
        first -= 1
    while last + count < len(longer) and key(longer[last]) == key(longer[last + count]):
        last += 1
    before = first == 0 and longer[0].seq > 1
    if len(after) + at - first < (_SURE_OF_ALL if before else _SURE):
        return None
    return Shift(
        count=count if side == 0 else -count,
        first=None if before else longer[first],
        last=longer[last],
    )


def raised(pairs: Sequence[Pair]) -> list[Pair]:
    """Calls that raised on the right side and not on the left: as if never made there, for they met
    nobody's.
    """
    return [
        p
        for p in pairs
        if p[0] is not None and p[1] is not None and p[1].raised and not p[0].raised
    ]


def _exact(pair: Pair) -> bool:
    return pair[0] is not None and pair[1] is not None and key(pair[0]) == key(pair[1])


def swapped(found: Alignment) -> tuple[Call, Call] | None:
    """One call that both sides made at different places, perhaps at other lines, before and behind
    which they agree: (left, right).
    """
    lone = [i for i, pair in enumerate(found.pairs) if None in pair]
    if not found.certain or len(lone) != 2:
        return None
    one, other = found.pairs[lone[0]], found.pairs[lone[1]]
    left, right = one[0] or other[0], one[1] or other[1]
    behind = found.pairs[lone[1] + 1 :]
    if left is None or right is None or not behind or not all(map(_exact, behind)):
        return None
    return (left, right) if key(left)[:2] == key(right)[:2] else None


def left_out(left: Sequence[Call], right: Sequence[Call], seq: int) -> list[Call]:
    """Where the sides part at ``seq``: what the right one left out, going by the order in which
    these calls came in earlier rounds.

    Empty where its call was never made before, or did not follow soon on what the others call
    there.
    """
    before = {c.seq: key(c) for c in left if c.seq < seq}
    here = next((c for c in left if c.seq == seq), None)
    there = next((c for c in right if c.seq == seq), None)
    if here is None or there is None or key(here) == key(there):
        return []
    for at in sorted(
        (
            s
            for s, k in before.items()
            if k == key(here) and before.get(s - 1) == before.get(seq - 1)
        ),
        reverse=True,
    ):
        for ahead in range(1, _ROUND):
            if before.get(at + ahead) == key(there):
                known = {c.seq: c for c in left}
                return [here, *(known[at + i] for i in range(1, ahead))]
        break
    return []


def repeated(right: Sequence[Call], seq: int, within: int) -> Call | None:
    """The call that the right side may have gone back to at ``seq``: the last equal one, of
    ``within`` calls before.
    """
    there = next((c for c in right if c.seq == seq), None)
    before = (c for c in reversed(right) if seq - within <= c.seq < seq)
    return next((c for c in before if there is not None and key(c) == key(there)), None)


def shown(pairs: Sequence[Pair]) -> tuple[AlignedPair, ...]:
    """The rows around every difference, and the last ones."""
    differing = {i for i, pair in enumerate(pairs) if None in pair or pair in raised([pair])}
    near = {j for i in differing for j in range(i - _AROUND, i + _AROUND + 1)}
    near.update(range(len(pairs) - _AROUND, len(pairs)))
    rows: list[AlignedPair] = []
    before = -1
    for i, pair in enumerate(pairs):
        if i in near:
            rows.append(AlignedPair(calls=pair, omitted=i - before - 1))
            before = i
    return tuple(rows)
