"""The diagnosis from Flight Recorder dumps alone: who called what, and who did not come. Of the
processes themselves nothing is known.

Each dump is taken to be of a job that stands still, since nothing in it says when it was written. A
rank without a dump is missing evidence, not a dead rank: nobody is accused for want of evidence,
and where none is left who could be, that is said.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from hangwatch.diagnosis import diagnose, messages
from hangwatch.model.calls import StreamKind
from hangwatch.model.kinds import KINDS, Severity, VerdictKind
from hangwatch.model.limits import MIN_WAIT_S, Limits
from hangwatch.model.ranks import format_ranks
from hangwatch.model.verdicts import Verdict
from hangwatch.report.text import format_age
from hangwatch.tracking.attempt import Attempt

from .attempts import NOW_S, build_job
from .calls import ARRIVALS_ONLY_BACKEND
from .collectives import OfflineJob
from .dumps import FlightDump

_STALE_DUMP_S = 600.0  # seconds between the calls of two dumps


@dataclass(frozen=True, slots=True, kw_only=True)
class OfflineDiagnosis:
    """``absent`` are ranks of the job without a dump; ``notes`` say what could not be known.

    ``doubtful``: some ranks may be in a call, and nothing tells whether they are held up.
    """

    verdicts: tuple[Verdict, ...]
    missing_ranks: tuple[int, ...]
    notes: tuple[str, ...]
    inconclusive: bool = False


def analyze_dumps(
    dumps: Sequence[FlightDump], written_at: Mapping[int, float] | None = None, name: str = "dump"
) -> OfflineDiagnosis:
    """What is wrong with the job that wrote the dumps, one from each rank.

    ``written`` says when they were, in seconds since the epoch, for those of which it is known.
    """
    by_rank = {dump.rank: dump for dump in dumps}
    job = build_job(by_rank, name)
    absent = tuple(sorted(job.attempt.processes.keys() - by_rank.keys()))
    due = [
        verdict
        for verdict in diagnose(job.attempt, NOW_S, Limits()).verdicts
        if verdict.is_confirmed
    ]
    found = [_adapt_verdict(by_rank, job, verdict) for verdict in due] or list(
        _diagnose_undelivered(job.attempt)
    )
    ages = {
        rank: at - by_rank[rank].call_time_range[1]
        for rank, at in (written_at or {}).items()
        if by_rank[rank].call_time_range[1]
    }
    verdicts = tuple(verdict for verdict in found if not _is_normal_wait(verdict, ages))
    unexplained = (
        () if verdicts else tuple(_describe_unexplained(job.attempt, may_be_running=len(found) > 0))
    )
    return OfflineDiagnosis(
        verdicts=verdicts,
        missing_ranks=absent,
        notes=(*_describe_gaps(dumps, absent), *job.notes, *unexplained),
        inconclusive=bool(unexplained),
    )


def _is_normal_wait(verdict: Verdict, ages: Mapping[int, float]) -> bool:
    """All that wait had made a call just before the dumps were written, as in a job that runs;
    unless clocks disagree.
    """
    known = [ages[rank] for rank in (*verdict.waiting, *verdict.culprits) if rank in ages]
    return (
        not KINDS[verdict.kind].is_call_error
        and bool(known)
        and 0.0 <= min(known) <= max(known) < MIN_WAIT_S
    )


def _describe_gaps(dumps: Sequence[FlightDump], missing_ranks: Sequence[int]) -> Iterable[str]:
    if missing_ranks:
        yield (
            f"no dump of rank{'s' if len(missing_ranks) > 1 else ''} {format_ranks(missing_ranks)}:"
            " that is missing evidence, not a sign of death"
        )
    if any(ARRIVALS_ONLY_BACKEND in dump.backends.values() for dump in dumps):
        yield (
            "gloo's recorder notes no point-to-point calls and no end of calls: only who entered"
            " which collective is known"
        )
    yield from _describe_stale_dumps(dumps)
    if empty := [dump.rank for dump in dumps if not dump.group_instances]:
        yield (
            f"the dump{'s' if len(empty) > 1 else ''} of rank{'s' if len(empty) > 1 else ''}"
            f" {format_ranks(empty)} hold no calls"
        )


def _describe_stale_dumps(dumps: Sequence[FlightDump]) -> Iterable[str]:
    """Dumps whose calls were all made long before any of the others': they may have been left over."""
    dated = sorted(
        (dump for dump in dumps if dump.call_time_range[0]),
        key=lambda dump: dump.call_time_range[1],
    )
    since = float("inf")
    for at in range(len(dated) - 1, 0, -1):
        until, since = dated[at - 1].call_time_range[1], min(since, dated[at].call_time_range[0])
        if since - until > _STALE_DUMP_S:
            ranks = tuple(sorted(dump.rank for dump in dated[:at]))
            yield (
                f"all calls in the dump{'s' if at > 1 else ''} of {messages.describe_ranks(ranks)}"
                f" were made at least {format_age(since - until)} before the others': where that is"
                " an earlier run and no wrong clock, leave them out"
            )
            return


def _diagnose_undelivered(attempt: Attempt) -> Iterable[Verdict]:
    """Messages that both ends are at, and that do not get through: where nothing else explains
    them, what lies below is to blame.
    """
    held = [
        (rank, s)
        for rank, p in attempt.processes.items()
        for s in p.streams.values()
        if s.peer is not None and s.is_pending
    ]
    if not held:
        return
    (rank, first), waiting = held[0], tuple(sorted({rank for rank, _ in held}))
    done = "sent" if first.kind is StreamKind.RECV else "called recv"
    peer = "another rank" if first.peer == -1 else f"rank {first.peer}"
    more = (
        f", and {len(held) - 1} more such call{'s' if len(held) > 2 else ''}"
        if len(held) > 1
        else ""
    )
    yield Verdict(
        kind=VerdictKind.NO_PROGRESS,
        severity=Severity.ALERT,
        culprits=(),
        waiting=waiting,
        group=first.group,
        seq=first.entered,
        summary=(
            f"rank {rank} does not finish {first.op}, although {peer} has {done}"
            f" ({messages.describe_position(first.group, first.entered)}){more}"
        ),
        advice="The ranks agree, so look below them: network, device, driver.",
    )


def _describe_unexplained(attempt: Attempt, may_be_running: bool) -> Iterable[str]:
    """Calls that are not known to be finished, though nobody is known to be missed in them."""
    inside: dict[str, list[int]] = {}
    for members in attempt.streams_by_group.values():
        for rank, place in members.items():
            if place.is_pending:
                inside.setdefault(
                    f"{place.op} ({messages.describe_position(place.group, place.entered)})", []
                ).append(rank)
    for call, ranks in sorted(inside.items()):
        if may_be_running:
            why = (
                "the dumps were written within a second of it, so that the job may have been"
                " running: take them while it stands still"
            )
        else:
            why = "the dumps do not tell why"
        yield f"{messages.describe_ranks(tuple(ranks))} may still be in {call}; {why}"


def _adapt_verdict(dumps: Mapping[int, FlightDump], job: OfflineJob, verdict: Verdict) -> Verdict:
    """A verdict in the words that fit what a dump can tell."""
    if verdict.kind is VerdictKind.MISMATCH and verdict.group is not None:
        return _blame_invalid_calls(
            verdict,
            job.invalid_ranks.get(verdict.group.key, set())
            & {rank for told in verdict.calls for rank in told.ranks},
        )
    if verdict.kind is not VerdictKind.MISSING_RANK:
        return verdict
    assert verdict.group is not None and verdict.seq is not None
    count, op = (
        len(verdict.waiting),
        next((c.call.signature.op for c in verdict.calls), "a collective"),
    )
    waiter = next((told.ranks[0] for told in verdict.calls if told.call.peer is not None), None)
    inside = verdict.calls[0].ranks if verdict.calls else ()
    known = _find_proven_culprits(dumps, job, verdict)
    if not known:
        evidence = "record of that time" if dumps.keys() & set(verdict.culprits) else "dump"
        return replace(
            verdict,
            culprits=(),
            summary=(
                f"{messages.describe_ranks(verdict.waiting)} wait{'s' if count == 1 else ''} in"
                f" {op} ({messages.describe_position(verdict.group, verdict.seq)}) for"
                f" {messages.describe_ranks(verdict.culprits)}, of which there is no {evidence}"
            ),
            advice=(
                "Without it nothing tells whether a rank entered the call, hung elsewhere or had"
                " ended: look for its log."
            ),
        )
    last = [
        (rank, record)
        for rank in known
        if rank in dumps and (record := dumps[rank].last_record) is not None
    ]
    seen = "; ".join(
        f"rank {rank} was last seen in {record.signature.op} at {record.site}"
        for rank, record in last[:4]
        if record.site
    )
    advice = (f"{seen}. " if seen else "") + "What it did after that, a dump does not tell."
    if set(known) <= job.queued_ranks.get((verdict.group.key, verdict.seq), set()):
        advice = (
            "It has queued the call, and its device has not begun it: look at what the device does"
            " before. " + advice
        )
    return replace(
        verdict,
        culprits=known,
        summary=messages.describe_not_entered(
            known, op, verdict.group, verdict.seq, count, waiter, inside
        ),
        advice=advice,
        site=None,  # where it was last seen is not where it is
    )


def _find_proven_culprits(
    dumps: Mapping[int, FlightDump], job: OfflineJob, verdict: Verdict
) -> tuple[int, ...]:
    """The culprits of whom it is known that they did not come, and not only not known that they
    did.
    """
    culprits = tuple(
        rank
        for rank in verdict.culprits
        if rank not in dumps or not dumps[rank].pending_messages_lost
    )
    if any(told.call.peer is not None for told in verdict.calls):
        return tuple(rank for rank in culprits if rank in dumps)
    group = verdict.group
    sure = {
        wait.on_rank
        for wait in verdict.waits
        if wait.group not in job.assumed_groups.get(wait.on_rank, ())
    }
    if group is not None:  # of the waits only some are told
        sure |= {rank for rank in group.ranks if group.name not in job.assumed_groups.get(rank, ())}
    return tuple(rank for rank in culprits if rank in sure or rank not in job.assumed_groups)


def _blame_invalid_calls(verdict: Verdict, invalid_ranks: set[int]) -> Verdict:
    """Whoever's call cannot be right is the odd one, were there ever so many."""
    assert verdict.group is not None and verdict.seq is not None
    others = {
        *verdict.culprits,
        *verdict.waiting,
        *(rank for told in verdict.calls for rank in told.ranks),
    } - invalid_ranks
    odd = tuple(sorted(invalid_ranks))
    if not invalid_ranks or not others or odd == verdict.culprits:
        return verdict
    return replace(
        verdict,
        culprits=odd,
        waiting=tuple(sorted({*verdict.culprits, *verdict.waiting} - invalid_ranks)),
        summary=messages.describe_mismatch(
            odd, verdict.calls, verdict.differing_fields, verdict.group, verdict.seq
        ),
        site=next(
            (told.call.site for told in verdict.calls if set(told.ranks) <= invalid_ranks), None
        ),
        divergence=None,
    )
