"""Limits a verdict to what Flight Recorder dumps prove: which ranks may be named as culprits, and
what may be said about them. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from hangwatch.diagnosis import messages
from hangwatch.model.calls import Site
from hangwatch.model.kinds import KINDS, VerdictKind
from hangwatch.model.verdicts import Verdict

from .dumps import FlightDump
from .offline_job import OfflineJob

_MAX_LAST_CALLS_SHOWN = 4


def adapt_verdict(dumps: Mapping[int, FlightDump], job: OfflineJob, verdict: Verdict) -> Verdict:
    """The verdict without claims that the dumps do not support."""
    if verdict.kind is VerdictKind.MISMATCH and verdict.group is not None:
        return _blame_invalid_calls(job, verdict)
    if verdict.kind is VerdictKind.MISSING_RANK:
        culprits = _find_proven_culprits(dumps, job, verdict)
        have_queued = _find_queued(job, verdict, culprits)
        if have_queued and len(have_queued) == len(culprits):
            return _blame_devices(dumps, verdict, culprits)
        culprits = tuple(rank for rank in culprits if rank not in have_queued)
        if culprits:
            return _name_proven_culprits(dumps, verdict, culprits)
        return _withdraw_culprits(dumps, verdict)
    return verdict


def _blame_invalid_calls(job: OfflineJob, verdict: Verdict) -> Verdict:
    """A rank whose call is invalid is a culprit, even if the majority made invalid calls."""
    assert verdict.group is not None and verdict.seq is not None
    callers = {rank for call_class in verdict.calls for rank in call_class.ranks}
    invalid_ranks = job.invalid_ranks.get(verdict.group.key, set()) & callers
    involved = {*verdict.culprits, *verdict.waiting}
    culprits = tuple(sorted(invalid_ranks))
    are_all_invalid = not (involved | callers) - invalid_ranks
    if not invalid_ranks or are_all_invalid or culprits == verdict.culprits:
        return verdict
    return replace(
        verdict,
        culprits=culprits,
        waiting=tuple(sorted(involved - invalid_ranks)),
        summary=messages.describe_mismatch(
            culprits, verdict.calls, verdict.differing_fields, verdict.group, verdict.seq
        ),
        site=_find_first_site(verdict, invalid_ranks),
        divergence=None,
    )


def _find_first_site(verdict: Verdict, ranks: set[int]) -> Site | None:
    """The line of the first call that only these ranks made."""
    for call_class in verdict.calls:
        if set(call_class.ranks) <= ranks:
            return call_class.call.site
    return None


def _find_proven_culprits(
    dumps: Mapping[int, FlightDump], job: OfflineJob, verdict: Verdict
) -> tuple[int, ...]:
    """The culprits that are known not to have entered the call. For the others it is only unknown
    whether they did.
    """
    culprits = tuple(
        rank
        for rank in verdict.culprits
        if rank not in dumps or not dumps[rank].pending_messages_lost
    )
    if any(call_class.call.peer is not None for call_class in verdict.calls):
        return tuple(rank for rank in culprits if rank in dumps)
    proven = {
        wait.on_rank
        for wait in verdict.waits
        if wait.group not in job.assumed_groups.get(wait.on_rank, ())
    }
    group = verdict.group
    if group is not None:  # the verdict has only some of the waits
        for rank in group.ranks:
            if group.name not in job.assumed_groups.get(rank, ()):
                proven.add(rank)
    return tuple(rank for rank in culprits if rank in proven or rank not in job.assumed_groups)


def _find_queued(job: OfflineJob, verdict: Verdict, ranks: tuple[int, ...]) -> set[int]:
    """The ranks whose hosts have queued the call, so that only their devices have not reached it."""
    if verdict.group is None or verdict.seq is None:
        return set()
    if any(call_class.call.peer is not None for call_class in verdict.calls):
        return set()
    counts = job.queued_counts.get(verdict.group.key, {})
    return {rank for rank in ranks if counts.get(rank, 0) >= verdict.seq}


def _blame_devices(
    dumps: Mapping[int, FlightDump], verdict: Verdict, culprits: tuple[int, ...]
) -> Verdict:
    assert verdict.group is not None and verdict.seq is not None
    records_starts = all(dumps[rank].reports_starts for rank in culprits if rank in dumps)
    return replace(
        verdict,
        kind=VerdictKind.DEVICE_STUCK,
        severity=KINDS[VerdictKind.DEVICE_STUCK].severity,
        culprits=culprits,
        summary=messages.describe_stuck_devices(
            culprits,
            _get_op_name(verdict),
            verdict.group,
            verdict.seq,
            len(verdict.waiting),
            is_begun=False if records_starts else None,
            is_behind=False,
        ),
        advice=messages.format_stuck_device_advice(culprits, records_starts=records_starts),
        site=None,
    )


def _name_proven_culprits(
    dumps: Mapping[int, FlightDump], verdict: Verdict, culprits: tuple[int, ...]
) -> Verdict:
    assert verdict.group is not None and verdict.seq is not None
    point_to_point = (c.ranks[0] for c in verdict.calls if c.call.peer is not None)
    advice = "The dump does not show what it did after that."
    last_calls = _describe_last_calls(dumps, culprits)
    if last_calls:
        advice = f"{last_calls}. {advice}"
    return replace(
        verdict,
        culprits=culprits,
        summary=messages.describe_not_entered(
            culprits,
            _get_op_name(verdict),
            verdict.group,
            verdict.seq,
            len(verdict.waiting),
            next(point_to_point, None),
            verdict.calls[0].ranks if verdict.calls else (),
        ),
        advice=advice,
        site=None,  # the line where a rank was last seen need not be its current line
    )


def _describe_last_calls(dumps: Mapping[int, FlightDump], ranks: tuple[int, ...]) -> str:
    """Where the first few of the ranks were last seen; empty if that is unknown."""
    last_records = {rank: dumps[rank].last_record for rank in ranks if rank in dumps}
    recorded = [(rank, record) for rank, record in last_records.items() if record is not None]
    return "; ".join(
        f"rank {rank} was last seen in {record.signature.op} at {record.site}"
        for rank, record in recorded[:_MAX_LAST_CALLS_SHOWN]
        if record.site
    )


def _withdraw_culprits(dumps: Mapping[int, FlightDump], verdict: Verdict) -> Verdict:
    """The verdict on ranks that wait for others about which nothing is known."""
    waits = "waits" if len(verdict.waiting) == 1 else "wait"
    has_dump = not dumps.keys().isdisjoint(verdict.culprits)
    gap = "no record of that time" if has_dump else "no dump"
    return replace(
        verdict,
        culprits=(),
        summary=(
            f"{messages.describe_ranks(verdict.waiting)} {waits} in {_get_op_name(verdict)}"
            f" ({messages.describe_position(verdict.group, verdict.seq)}) for"
            f" {messages.describe_ranks(verdict.culprits)} ({gap})"
        ),
        advice=(
            "Without it, whether a rank entered the call, hung elsewhere or exited is unknown:"
            " check its log."
        ),
    )


def _get_op_name(verdict: Verdict) -> str:
    if not verdict.calls:
        return "a collective"
    return verdict.calls[0].call.signature.op
