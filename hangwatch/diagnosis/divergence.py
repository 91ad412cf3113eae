"""Where the culprits' calls part from the others', for a verdict that there is: what was left out, added or made in another order."""

from __future__ import annotations

from dataclasses import replace

from hangwatch.state import Sequence
from hangwatch.types import Call, Divergence, Kind, Verdict

from . import words
from .alignment import WINDOW, Alignment, align, key, left_out, parted, shift, shown, swapped, window
from .case import Case, Request, suspicion

_ALIGNED = (Kind.MISMATCH, Kind.GROUP_MISMATCH, Kind.MISSING_RANK, Kind.EXITED_RANK, Kind.SLOW_RANK)


def diverging(case: Case, verdict: Verdict) -> Verdict:
    """The verdict with its divergence, if its group's calls part. Asks for the calls that this takes."""
    definite = verdict.kind in (Kind.MISMATCH, Kind.GROUP_MISMATCH)
    pressing = definite or verdict.due or case.now - verdict.since >= suspicion(case.limits)
    if verdict.kind not in _ALIGNED or not pressing or verdict.group is None or verdict.seq is None:
        return verdict
    members = case.places.get(verdict.group.key, {})
    sides = _sides(verdict, members)
    if sides is None:
        return verdict
    left, right = (_calls(case, members, ranks, verdict.seq) for ranks in sides)
    if not left or not right:
        return verdict
    short = not definite or _left_its_loop(left, right, verdict.seq)
    found = align(left, right, short)
    if not parted(found.pairs):
        return verdict
    tied = not set(sides[0]).isdisjoint(verdict.culprits)
    than = words.those(sides[0]) if tied or len(verdict.group.ranks) == 2 else "the others"
    note, since = _note(found, left, right, verdict, than, len(sides[1]) > 1)
    who = words.those(sides[1])
    if note:
        subject = who if tied else "they" if len(sides[1]) > 1 else "it"
        verdict = replace(verdict, summary=f"{verdict.summary}; {subject} {note}")
    told = Divergence(group=verdict.group, sides=sides, rows=shown(found.pairs), since_seq=since, note=f"{who} {note}" if note else "")
    return replace(verdict, divergence=told)


def _sides(verdict: Verdict, members: dict[int, Sequence]) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """The others and the culprits. Where all are culprits, those of the first class of calls stand for the others."""
    culprits = tuple(r for r in verdict.culprits if r in members)
    classes = [c.ranks for c in verdict.calls if c.call.peer is None]  # a channel's calls are not the group's
    others = next((ranks for ranks in classes if not set(ranks) & set(culprits)), None)
    if others is None and len(classes) > 1:
        others = classes[0]
        culprits = classes[1]
    known = tuple(r for r in others or () if r in members)
    return (known, culprits) if known and culprits else None


def _calls(case: Case, members: dict[int, Sequence], ranks: tuple[int, ...], seq: int) -> list[Call]:
    """The last calls of one rank for its side: the first that can still be asked for them."""
    held = case.attempt.ranks
    rank = next((r for r in ranks if r in held and held[r].alive), ranks[0])
    sequence = members[rank]
    upto = min(sequence.entered, seq)
    if sequence.fetched_to < upto:
        case.requests.append(Request(rank=rank, uid=sequence.uid, from_seq=max(1, upto - WINDOW + 1)))
    return window(sequence.calls, upto)


def _left_its_loop(left: list[Call], right: list[Call], seq: int) -> bool:
    """The right side makes a call that nobody made before, while the left makes one as before: it came to the end of its loop first."""
    here, there = (next((c for c in calls if c.seq == seq), None) for calls in (left, right))
    before = {key(c) for c in left if c.seq < seq}
    return here is not None and there is not None and key(here) in before and key(there) not in before


def _note(
    found: Alignment, left: list[Call], right: list[Call], verdict: Verdict, than: str, many: bool
) -> tuple[str, int | None]:
    """What the alignment says for certain, to go on from the culprits' name, and the first call that only one side made."""
    assert verdict.seq is not None and verdict.group is not None
    if (moved := shift(found)) is not None:
        certain = moved.first is not None and moved.first.seq == moved.last.seq
        said = words.shifted(moved.count, moved.first, moved.last, than, "are" if many else "is")
        return said, moved.last.seq if certain else None
    if (order := swapped(found)) is not None:
        return words.reordered(order[0], order[1], than), min(call.seq for call in order)
    if verdict.kind is Kind.MISMATCH and (missed := left_out(left, right, verdict.seq)):
        return words.left_out(missed), verdict.seq
    return "", None
