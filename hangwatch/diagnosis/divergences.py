"""Where the culprits' calls part from the others', for a verdict that there is: what was left out,
added or made in another order.
"""

from __future__ import annotations

from dataclasses import replace

from hangwatch.model.calls import Call
from hangwatch.model.groups import Group
from hangwatch.model.kinds import VerdictKind, select_kinds
from hangwatch.model.limits import MIN_WAIT_S
from hangwatch.model.ranks import Lifecycle
from hangwatch.model.verdicts import CallClass, Divergence, Verdict
from hangwatch.tracking.call_stream import CallStream
from hangwatch.tracking.process import Process

from . import messages
from .alignment import (
    WINDOW,
    Alignment,
    align,
    key,
    left_out,
    parted,
    raised,
    repeated,
    shift,
    shown,
    swapped,
    window,
)
from .context import Case, Request, suspicion

Sides = tuple[tuple[int, ...], tuple[int, ...]]  # the others, the culprits
_ASKED = 16  # ranks ahead of the others that are asked for their calls
_AGAIN = 8  # calls that a script may well make a second time, as where it tries a step again
_ALIGNED = select_kinds(lambda spec: spec.compares_calls)


def diverging(case: Case, verdict: Verdict) -> Verdict:
    """The verdict with its divergence, if its group's calls part. Asks for the calls that this
    takes.
    """
    definite = verdict.kind in (VerdictKind.MISMATCH, VerdictKind.GROUP_MISMATCH)
    pressing = (
        definite or verdict.is_confirmed or case.now - verdict.began_at >= suspicion(case.limits)
    )
    group, seq = verdict.group, verdict.seq
    to_peer = any(
        c.call.peer is not None for c in verdict.calls
    )  # then `seq` counts the calls of a channel
    if not pressing or group is None or seq is None or to_peer:
        return verdict
    members = case.places.get(group.key, {})
    if verdict.kind is VerdictKind.NO_PROGRESS:
        verdict = _swallowed(case, verdict, members, seq)
    sides = _sides(verdict, members)
    if verdict.kind not in _ALIGNED or sides is None:
        return verdict
    left, right = (_calls(case, members, ranks, seq) for ranks in sides)
    short = not definite or _left_its_loop(left, right, seq)
    found = align(left, right, short)
    if not left or not right or not (parted(found.pairs) or raised(found.pairs)):
        return verdict
    tied = not set(sides[0]).isdisjoint(verdict.culprits)
    than = messages.those(sides[0]) if tied or len(group.ranks) == 2 else "the others"
    verb = "are" if len(sides[1]) > 1 else "is"
    note, since = _note(found, than, verb)
    if failed := [mine for _, mine in raised(found.pairs) if mine is not None]:
        note, since = _failed(case, members, sides[1], failed, than, verb), failed[0].seq
    if not note and verdict.kind is VerdictKind.MISMATCH:
        note, since = _omitted(left, right, seq)
    return _told(verdict, group, found, sides, note, since)


def _told(
    verdict: Verdict, group: Group, found: Alignment, sides: Sides, note: str, since: int | None
) -> Verdict:
    """The verdict with the alignment, and with what that says for certain."""
    who = messages.those(sides[1])
    if note:
        named = "splits" in verdict.differing_fields or not set(sides[0]).isdisjoint(
            verdict.culprits
        )  # else the sentence is about nobody else
        subject = who if named else "they" if len(sides[1]) > 1 else "it"
        verdict = replace(verdict, summary=f"{verdict.summary}; {subject} {note}")
    told = Divergence(
        group=group,
        sides=sides,
        rows=shown(found.pairs),
        since_seq=since,
        note=f"{who} {note}" if note else "",
    )
    return replace(verdict, divergence=told)


def _swallowed(case: Case, verdict: Verdict, members: dict[int, CallStream], seq: int) -> Verdict:
    """Ranks that are a call ahead of a call that cannot be finished may never have taken part: a
    call of theirs before it raised.
    """
    there = [r for r in verdict.waiting if r in members]
    ahead = [r for r in there if members[r].entered > seq][:_ASKED]
    inside = tuple(r for r in there if members[r].entered == seq)
    if not ahead or not inside:
        return verdict
    left = _calls(case, members, inside, seq)
    found = {
        r: pairs
        for r in ahead
        if (pairs := raised(align(left, _calls(case, members, (r,), seq)).pairs))
    }
    if not found:
        return verdict
    theirs, mine = next(iter(found.values()))[0]
    if theirs is None or mine is None:
        return verdict
    culprits = tuple(sorted(found))
    return replace(
        verdict,
        kind=VerdictKind.MISMATCH,
        culprits=culprits,
        waiting=tuple(r for r in verdict.waiting if r not in found),
        calls=(CallClass(ranks=inside, call=theirs), CallClass(ranks=culprits, call=mine)),
        summary=(
            f"{messages.count_wait(len(inside))} in {theirs.signature.op}"
            f" ({messages.where(verdict.group, seq)}) for {messages.those(culprits)}"
        ),
        advice=(
            "Look at that exception: whoever catches one of a collective must bring all ranks to"
            " the same place again."
        ),
        site=mine.site,
    )


def _sides(verdict: Verdict, members: dict[int, CallStream]) -> Sides | None:
    """The others and the culprits. Where all are culprits, those of the first class of calls stand
    for the others.
    """
    culprits = tuple(r for r in verdict.culprits if r in members)
    classes = [c.ranks for c in verdict.calls]
    others = next((ranks for ranks in classes if not set(ranks) & set(culprits)), None)
    if others is None and len(classes) > 1:
        others = classes[0]
        culprits = classes[1]
    known = tuple(r for r in others or () if r in members)
    return (known, culprits) if known and culprits else None


def _calls(
    case: Case, members: dict[int, CallStream], ranks: tuple[int, ...], seq: int
) -> list[Call]:
    """The last calls of one rank for its side: of one that was asked for them, else of the first
    that can still be.
    """
    held = case.attempt.processes
    rank = next(
        (r for r in ranks if members[r].fetched_to >= min(members[r].entered, seq) > 0), None
    )
    if rank is None:
        rank = next((r for r in ranks if r in held and held[r].is_alive), ranks[0])
    sequence = members[rank]
    upto = min(sequence.entered, seq)
    if sequence.fetched_to < upto:
        case.requests.append(
            Request(rank=rank, uid=sequence.uid, from_seq=max(1, upto - WINDOW + 1))
        )
    return window(sequence.calls, upto)


def _left_its_loop(left: list[Call], right: list[Call], seq: int) -> bool:
    """The right side makes a call that nobody made before, while the left makes one as before: it
    came to the end of its loop first.
    """
    here, there = (next((c for c in calls if c.seq == seq), None) for calls in (left, right))
    before = {key(c) for c in left if c.seq < seq}
    return (
        here is not None and there is not None and key(here) in before and key(there) not in before
    )


def _failed(
    case: Case,
    members: dict[int, CallStream],
    ranks: tuple[int, ...],
    failed: list[Call],
    than: str,
    verb: str,
) -> str:
    """That calls raised on ``ranks`` alone. Where nothing shows that their script went on after it,
    the exception may be their end.
    """
    if all(_went_on(case.attempt.processes.get(rank), members[rank], failed[0]) for rank in ranks):
        return messages.raised_alone(failed, than, verb)
    process, site = case.attempt.processes.get(ranks[0]), failed[0].site
    end = process.exception if process is not None else None
    there = (
        end is not None
        and end.site is not None
        and site is not None
        and (end.site.file, end.site.line) == (site.file, site.line)
    )
    return messages.failed_in(failed[0], end if there else None)


def _went_on(process: Process | None, sequence: CallStream, call: Call) -> bool:
    """It made another call after one of ``sequence`` that raised, or still runs long after that."""
    if sequence.entered > call.seq or process is None:
        return sequence.entered > call.seq
    if any(
        other.entered_at > sequence.entered_at + MIN_WAIT_S for other in process.streams.values()
    ):
        return True
    runs = process.is_alive and process.exception is None and process.lifecycle < Lifecycle.EXITING
    return (
        runs
        and process.last_seen_at
        >= max(sequence.entered_at, sequence.last_completion_at) + MIN_WAIT_S
    )


def _note(found: Alignment, than: str, verb: str) -> tuple[str, int | None]:
    """What the alignment says for certain, to go on from the culprits' name, and the first call
    that only one side made.
    """
    if (moved := shift(found)) is not None:
        certain = moved.first is not None and moved.first.seq == moved.last.seq
        return messages.shifted(moved.count, moved.first, moved.last, than, verb), (
            moved.last.seq if certain else None
        )
    if (order := swapped(found)) is not None:
        return messages.reordered(order[0], order[1], than), min(call.seq for call in order)
    return "", None


def _omitted(left: list[Call], right: list[Call], seq: int) -> tuple[str, int | None]:
    """What the right side seems to have left out at ``seq``, unless it rather made again what it
    had just made.
    """
    missed = left_out(left, right, seq)
    if not missed:
        return "", None
    again = repeated(right, seq, max(_AGAIN, len(missed)))
    return messages.left_out(missed, again), missed[0].seq if again is None else None
