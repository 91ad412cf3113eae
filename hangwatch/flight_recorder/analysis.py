"""The diagnosis from Flight Recorder dumps alone: who called what, and who did not come. Of the processes themselves nothing is known.

Each dump is taken to be of a job that stands still, since nothing in it says when it was written. A rank without a dump is missing
evidence, not a dead rank: nobody is accused for want of evidence, and where none is left who could be, that is said.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from hangwatch.diagnosis import diagnose, messages
from hangwatch.model.calls import SequenceKind
from hangwatch.model.kinds import Kind, Severity
from hangwatch.model.limits import STANDING, Limits
from hangwatch.model.ranks import ranges
from hangwatch.model.verdicts import Verdict
from hangwatch.report.text import age
from hangwatch.tracking.attempt import Attempt

from .attempts import NOW, job_of
from .calls import ARRIVALS
from .collectives import Job
from .dumps import Dump

_APART = 600.0  # seconds between the calls of two dumps


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """``absent`` are ranks of the job without a dump; ``notes`` say what could not be known.

    ``doubtful``: some ranks may be in a call, and nothing tells whether they are held up.
    """

    verdicts: tuple[Verdict, ...]
    absent: tuple[int, ...]
    notes: tuple[str, ...]
    doubtful: bool = False


def analyze(dumps: Sequence[Dump], written: Mapping[int, float] | None = None, name: str = "dump") -> Finding:
    """What is wrong with the job that wrote the dumps, one from each rank.

    ``written`` says when they were, in seconds since the epoch, for those of which it is known.
    """
    by_rank = {dump.rank: dump for dump in dumps}
    job = job_of(by_rank, name)
    absent = tuple(sorted(job.attempt.ranks.keys() - by_rank.keys()))
    due = [verdict for verdict in diagnose(job.attempt, NOW, Limits()).verdicts if verdict.due]
    found = [_told(by_rank, job, verdict) for verdict in due] or list(_undelivered(job.attempt))
    ages = {rank: at - by_rank[rank].made_at[1] for rank, at in (written or {}).items() if by_rank[rank].made_at[1]}
    verdicts = tuple(verdict for verdict in found if not _everyday(verdict, ages))
    unexplained = () if verdicts else tuple(_unexplained(job.attempt, moving=len(found) > 0))
    return Finding(verdicts=verdicts, absent=absent, notes=(*_notes(dumps, absent), *job.notes, *unexplained), doubtful=bool(unexplained))


def _everyday(verdict: Verdict, ages: Mapping[int, float]) -> bool:
    """All that wait had made a call just before the dumps were written, as in a job that runs; unless clocks disagree."""
    known = [ages[rank] for rank in (*verdict.waiting, *verdict.culprits) if rank in ages]
    return verdict.kind is not Kind.MISMATCH and bool(known) and 0.0 <= min(known) <= max(known) < STANDING


def _notes(dumps: Sequence[Dump], absent: Sequence[int]) -> Iterable[str]:
    if absent:
        yield f"no dump of rank{'s' if len(absent) > 1 else ''} {ranges(absent)}: that is missing evidence, not a sign of death"
    if any(ARRIVALS in dump.backends.values() for dump in dumps):
        yield "gloo's recorder notes no point-to-point calls and no end of calls: only who entered which collective is known"
    yield from _earlier(dumps)
    if empty := [dump.rank for dump in dumps if not dump.uses]:
        yield f"the dump{'s' if len(empty) > 1 else ''} of rank{'s' if len(empty) > 1 else ''} {ranges(empty)} hold no calls"


def _earlier(dumps: Sequence[Dump]) -> Iterable[str]:
    """Dumps whose calls were all made long before any of the others': they may have been left over."""
    dated = sorted((dump for dump in dumps if dump.made_at[0]), key=lambda dump: dump.made_at[1])
    since = float("inf")
    for at in range(len(dated) - 1, 0, -1):
        until, since = dated[at - 1].made_at[1], min(since, dated[at].made_at[0])
        if since - until > _APART:
            ranks = tuple(sorted(dump.rank for dump in dated[:at]))
            yield (
                f"all calls in the dump{'s' if at > 1 else ''} of {messages.those(ranks)} were made at least {age(since - until)} before the "
                "others': where that is an earlier run and no wrong clock, leave them out"
            )
            return


def _undelivered(attempt: Attempt) -> Iterable[Verdict]:
    """Messages that both ends are at, and that do not get through: where nothing else explains them, what lies below is to blame."""
    held = [(rank, s) for rank, p in attempt.ranks.items() for s in p.sequences.values() if s.peer is not None and s.pending]
    if not held:
        return
    (rank, first), waiting = held[0], tuple(sorted({rank for rank, _ in held}))
    done = "sent" if first.kind is SequenceKind.RECV else "called recv"
    peer = "another rank" if first.peer == -1 else f"rank {first.peer}"
    more = f", and {len(held) - 1} more such call{'s' if len(held) > 2 else ''}" if len(held) > 1 else ""
    yield Verdict(
        kind=Kind.NO_PROGRESS,
        severity=Severity.ALERT,
        culprits=(),
        waiting=waiting,
        group=first.group,
        seq=first.entered,
        summary=f"rank {rank} does not finish {first.op}, although {peer} has {done} ({messages.where(first.group, first.entered)}){more}",
        advice="The ranks agree, so look below them: network, device, driver.",
    )


def _unexplained(attempt: Attempt, moving: bool) -> Iterable[str]:
    """Calls that are not known to be finished, though nobody is known to be missed in them."""
    inside: dict[str, list[int]] = {}
    for members in attempt.places.values():
        for rank, place in members.items():
            if place.pending:
                inside.setdefault(f"{place.op} ({messages.where(place.group, place.entered)})", []).append(rank)
    for call, ranks in sorted(inside.items()):
        if moving:
            why = "the dumps were written within a second of it, so that the job may have been running: take them while it stands still"
        else:
            why = "the dumps do not tell why"
        yield f"{messages.those(tuple(ranks))} may still be in {call}; {why}"


def _told(dumps: Mapping[int, Dump], job: Job, verdict: Verdict) -> Verdict:
    """A verdict in the words that fit what a dump can tell."""
    if verdict.kind is Kind.MISMATCH and verdict.group is not None:
        return _judged(verdict, job.wrong.get(verdict.group.key, set()) & {rank for told in verdict.calls for rank in told.ranks})
    if verdict.kind is not Kind.MISSING_RANK:
        return verdict
    assert verdict.group is not None and verdict.seq is not None
    count, op = len(verdict.waiting), next((c.call.signature.op for c in verdict.calls), "a collective")
    waiter = next((told.ranks[0] for told in verdict.calls if told.call.peer is not None), None)
    inside = verdict.calls[0].ranks if verdict.calls else ()
    known = _known(dumps, job, verdict)
    if not known:
        evidence = "record of that time" if dumps.keys() & set(verdict.culprits) else "dump"
        return replace(
            verdict,
            culprits=(),
            summary=f"{messages.those(verdict.waiting)} wait{'s' if count == 1 else ''} in {op} ({messages.where(verdict.group, verdict.seq)}) "
            f"for {messages.those(verdict.culprits)}, of which there is no {evidence}",
            advice="Without it nothing tells whether a rank entered the call, hung elsewhere or had ended: look for its log.",
        )
    last = [(rank, record) for rank in known if rank in dumps and (record := dumps[rank].last) is not None]
    seen = "; ".join(f"rank {rank} was last seen in {record.signature.op} at {record.site}" for rank, record in last[:4] if record.site)
    advice = (f"{seen}. " if seen else "") + "What it did after that, a dump does not tell."
    if set(known) <= job.queued.get((verdict.group.key, verdict.seq), set()):
        advice = "It has queued the call, and its device has not begun it: look at what the device does before. " + advice
    return replace(
        verdict,
        culprits=known,
        summary=messages.not_entered(known, op, verdict.group, verdict.seq, count, waiter, inside),
        advice=advice,
        site=None,  # where it was last seen is not where it is
    )


def _known(dumps: Mapping[int, Dump], job: Job, verdict: Verdict) -> tuple[int, ...]:
    """The culprits of whom it is known that they did not come, and not only not known that they did."""
    culprits = tuple(rank for rank in verdict.culprits if rank not in dumps or not dumps[rank].half_lost)
    if any(told.call.peer is not None for told in verdict.calls):
        return tuple(rank for rank in culprits if rank in dumps)
    group = verdict.group
    sure = {wait.on for wait in verdict.waits if wait.group not in job.assumed.get(wait.on, ())}
    if group is not None:  # of the waits only some are told
        sure |= {rank for rank in group.ranks if group.name not in job.assumed.get(rank, ())}
    return tuple(rank for rank in culprits if rank in sure or rank not in job.assumed)


def _judged(verdict: Verdict, wrong: set[int]) -> Verdict:
    """Whoever's call cannot be right is the odd one, were there ever so many."""
    assert verdict.group is not None and verdict.seq is not None
    others = {*verdict.culprits, *verdict.waiting, *(rank for told in verdict.calls for rank in told.ranks)} - wrong
    odd = tuple(sorted(wrong))
    if not wrong or not others or odd == verdict.culprits:
        return verdict
    return replace(
        verdict,
        culprits=odd,
        waiting=tuple(sorted({*verdict.culprits, *verdict.waiting} - wrong)),
        summary=messages.mismatch(odd, verdict.calls, verdict.fields, verdict.group, verdict.seq),
        site=next((told.call.site for told in verdict.calls if set(told.ranks) <= wrong), None),
        divergence=None,
    )
