"""Where the culprits' calls part from the others', for a verdict that there is: what was left out,
added or made in another order.
"""

from __future__ import annotations

from dataclasses import replace

from hangwatch.model.calls import Call
from hangwatch.model.groups import Group
from hangwatch.model.kinds import KINDS, VerdictKind
from hangwatch.model.limits import MIN_WAIT_S
from hangwatch.model.ranks import Lifecycle
from hangwatch.model.verdicts import CallClass, Divergence, Verdict
from hangwatch.tracking.call_stream import CallStream
from hangwatch.tracking.process import Process

from . import messages
from .alignment import (
    MAX_WINDOW_CALLS,
    Alignment,
    align_calls,
    find_left_out_calls,
    find_lone_exceptions,
    find_repeated_call,
    find_shift,
    find_swapped_calls,
    has_diverged,
    make_call_key,
    select_rows,
    select_window,
)
from .context import DiagnosisContext, EvidenceRequest, get_suspicion_delay_s

RankSides = tuple[tuple[int, ...], tuple[int, ...]]  # the others, the culprits
_MAX_REQUESTED_RANKS = 16  # ranks ahead of the others that are asked for their calls
# calls that a script may well make a second time, as where it tries a step again
_MAX_REPEAT_DISTANCE = 8


def add_divergence(context: DiagnosisContext, verdict: Verdict) -> Verdict:
    """The verdict with its divergence, if its group's calls part. Asks for the calls that this
    takes.
    """
    definite = KINDS[verdict.kind].is_call_error
    pressing = (
        definite
        or verdict.is_confirmed
        or context.now - verdict.began_at >= get_suspicion_delay_s(context.limits)
    )
    group, seq = verdict.group, verdict.seq
    to_peer = any(
        c.call.peer is not None for c in verdict.calls
    )  # then `seq` counts the calls of a channel
    if not pressing or group is None or seq is None or to_peer:
        return verdict
    members = context.streams_by_group.get(group.key, {})
    if verdict.kind is VerdictKind.NO_PROGRESS:
        verdict = _blame_swallowed_exception(context, verdict, members, seq)
    sides = _split_sides(verdict, members)
    if not KINDS[verdict.kind].compares_calls or sides is None:
        return verdict
    left, right = (_get_side_calls(context, members, ranks, seq) for ranks in sides)
    short = not definite or _ended_loop_early(left, right, seq)
    found = align_calls(left, right, short)
    if (
        not left
        or not right
        or not (has_diverged(found.pairs) or find_lone_exceptions(found.pairs))
    ):
        return verdict
    tied = not set(sides[0]).isdisjoint(verdict.culprits)
    than = messages.describe_ranks(sides[0]) if tied or len(group.ranks) == 2 else "the others"
    verb = "have been" if len(sides[1]) > 1 else "has been"
    note, since = _describe_alignment(found, than, verb)
    if failed := [mine for _, mine in find_lone_exceptions(found.pairs) if mine is not None]:
        note, since = (
            _describe_failure(context, members, sides[1], failed, than, verb),
            failed[0].seq,
        )
    if not note and verdict.kind is VerdictKind.MISMATCH:
        note, since = _describe_omission(left, right, seq)
    return _attach_divergence(verdict, group, found, sides, note, since)


def _attach_divergence(
    verdict: Verdict,
    group: Group,
    alignment: Alignment,
    sides: RankSides,
    note: str,
    since_seq: int | None,
) -> Verdict:
    """The verdict with the alignment, and with what that says for certain."""
    who = messages.describe_ranks(sides[1])
    if note:
        named = "splits" in verdict.differing_fields or not set(sides[0]).isdisjoint(
            verdict.culprits
        )  # else the sentence is about nobody else
        subject = who if named else "they" if len(sides[1]) > 1 else "it"
        verdict = replace(verdict, summary=f"{verdict.summary}; {subject} {note}")
    told = Divergence(
        group=group,
        sides=sides,
        rows=select_rows(alignment.pairs),
        since_seq=since_seq,
        note=f"{who} {note}" if note else "",
    )
    return replace(verdict, divergence=told)


def _blame_swallowed_exception(
    context: DiagnosisContext, verdict: Verdict, members: dict[int, CallStream], seq: int
) -> Verdict:
    """Ranks that are a call ahead of a call that cannot be finished may never have taken part: a
    call of theirs before it raised.
    """
    there = [r for r in verdict.waiting if r in members]
    ahead = [r for r in there if members[r].entered > seq][:_MAX_REQUESTED_RANKS]
    inside = tuple(r for r in there if members[r].entered == seq)
    if not ahead or not inside:
        return verdict
    left = _get_side_calls(context, members, inside, seq)
    found = {
        r: pairs
        for r in ahead
        if (
            pairs := find_lone_exceptions(
                align_calls(left, _get_side_calls(context, members, (r,), seq)).pairs
            )
        )
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
            f"{messages.format_waiter_count(len(inside))} in {theirs.signature.op}"
            f" ({messages.describe_position(verdict.group, seq)}) for"
            f" {messages.describe_ranks(culprits)}"
        ),
        advice=messages.SWALLOWED_EXCEPTION_ADVICE,
        site=mine.site,
    )


def _split_sides(verdict: Verdict, members: dict[int, CallStream]) -> RankSides | None:
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


def _get_side_calls(
    context: DiagnosisContext, members: dict[int, CallStream], ranks: tuple[int, ...], seq: int
) -> list[Call]:
    """The last calls of one rank for its side: of one that was asked for them, else of the first
    that can still be.
    """
    held = context.attempt.processes
    rank = next(
        (r for r in ranks if members[r].fetched_to >= min(members[r].entered, seq) > 0), None
    )
    if rank is None:
        rank = next((r for r in ranks if r in held and held[r].is_alive), ranks[0])
    sequence = members[rank]
    upto = min(sequence.entered, seq)
    if sequence.fetched_to < upto:
        context.requests.append(
            EvidenceRequest(
                rank=rank, stream_uid=sequence.uid, from_seq=max(1, upto - MAX_WINDOW_CALLS + 1)
            )
        )
    return select_window(sequence.calls, upto)


def _ended_loop_early(left: list[Call], right: list[Call], seq: int) -> bool:
    """The right side makes a call that nobody made before, while the left makes one as before: it
    came to the end of its loop first.
    """
    here, there = (next((c for c in calls if c.seq == seq), None) for calls in (left, right))
    before = {make_call_key(c) for c in left if c.seq < seq}
    return (
        here is not None
        and there is not None
        and make_call_key(here) in before
        and make_call_key(there) not in before
    )


def _describe_failure(
    context: DiagnosisContext,
    members: dict[int, CallStream],
    ranks: tuple[int, ...],
    failed_calls: list[Call],
    reference_name: str,
    verb: str,
) -> str:
    """That calls raised on ``ranks`` alone. Where nothing shows that their script went on after it,
    the exception may be their end.
    """
    if all(
        _continued_after(context.attempt.processes.get(rank), members[rank], failed_calls[0])
        for rank in ranks
    ):
        return messages.describe_lone_exceptions(failed_calls, reference_name, verb)
    process, site = context.attempt.processes.get(ranks[0]), failed_calls[0].site
    end = process.exception if process is not None else None
    there = (
        end is not None
        and end.site is not None
        and site is not None
        and (end.site.file, end.site.line) == (site.file, site.line)
    )
    return messages.describe_failed_call(failed_calls[0], end if there else None)


def _continued_after(process: Process | None, stream: CallStream, call: Call) -> bool:
    """It made another call after one of ``sequence`` that raised, or still runs long after that."""
    if stream.entered > call.seq or process is None:
        return stream.entered > call.seq
    if any(other.entered_at > stream.entered_at + MIN_WAIT_S for other in process.streams.values()):
        return True
    runs = process.is_alive and process.exception is None and process.lifecycle < Lifecycle.EXITING
    return (
        runs
        and process.reports.last_seen_at
        >= max(stream.entered_at, stream.last_completion_at) + MIN_WAIT_S
    )


def _describe_alignment(
    alignment: Alignment, reference_name: str, verb: str
) -> tuple[str, int | None]:
    """What the alignment says for certain, to go on from the culprits' name, and the first call
    that only one side made.
    """
    if (moved := find_shift(alignment)) is not None:
        certain = moved.first is not None and moved.first.seq == moved.last.seq
        return messages.describe_shift(
            moved.count, moved.first, moved.last, reference_name, verb
        ), (moved.last.seq if certain else None)
    if (order := find_swapped_calls(alignment)) is not None:
        return messages.describe_reordering(order[0], order[1], reference_name), min(
            call.seq for call in order
        )
    return "", None


def _describe_omission(left: list[Call], right: list[Call], seq: int) -> tuple[str, int | None]:
    """What the right side seems to have left out at ``seq``, unless it rather made again what it
    had just made.
    """
    missed = find_left_out_calls(left, right, seq)
    if not missed:
        return "", None
    again = find_repeated_call(right, seq, max(_MAX_REPEAT_DISTANCE, len(missed)))
    return messages.describe_omission(missed, again), missed[0].seq if again is None else None
