"""The diagnosis from Flight Recorder dumps alone: which rank made which calls, and which rank did
not. Nothing is known about the processes themselves. Pure.

Every dump is assumed to come from a hanging job, because no dump shows when it was written. A
rank without a dump is missing evidence, not a dead rank, and missing evidence accuses no rank. So a
verdict is limited to what the dumps prove. If no culprit remains, the notes give the reason.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from hangwatch.diagnosis import diagnose
from hangwatch.diagnosis.messages import (
    describe_mismatch,
    describe_not_entered,
    describe_position,
    describe_ranks,
    describe_unfinished_message,
    format_lower_layers_advice,
    format_more_calls,
)
from hangwatch.diagnosis.rules.devices import describe_stuck_devices, format_stuck_device_advice
from hangwatch.model.calls import StreamKind
from hangwatch.model.kinds import KINDS, VerdictKind
from hangwatch.model.limits import MIN_WAIT_S, Limits
from hangwatch.model.verdicts import Verdict
from hangwatch.report.text import format_age, name_ranks
from hangwatch.tracking.attempt import Attempt

from .attempts import build_job
from .calls import ARRIVALS_ONLY_BACKEND, FlightDump
from .collectives import NOW_S, OfflineJob

_MAX_LAST_CALLS_SHOWN = 4
_STALE_DUMP_S = 600.0  # the time between the calls of two dumps that cannot be of one hang


@dataclass(frozen=True, slots=True, kw_only=True)
class OfflineDiagnosis:
    """``notes`` list what cannot be known.

    ``inconclusive``: some ranks may be in a call, and the dumps do not show whether they are
    blocked.
    """

    verdicts: tuple[Verdict, ...]
    notes: tuple[str, ...]
    inconclusive: bool = False


def analyze_dumps(
    dumps: Sequence[FlightDump], written_at: Mapping[int, float] | None = None
) -> OfflineDiagnosis:
    """The diagnosis of the job that wrote the dumps, one from each rank.

    ``written_at`` has the time at which each rank's dump was written, in seconds since the epoch;
    ranks may be left out.
    """
    dumps_by_rank = {dump.rank: dump for dump in dumps}
    job = build_job(dumps_by_rank)
    missing_ranks = tuple(sorted(job.attempt.processes.keys() - dumps_by_rank.keys()))
    candidates = []
    for verdict in diagnose(job.attempt, NOW_S, Limits()).verdicts:
        if not verdict.is_confirmed:
            continue
        if verdict.kind is VerdictKind.MISMATCH and verdict.group is not None:
            verdict = _blame_invalid_calls(job, verdict)
        elif verdict.kind is VerdictKind.MISSING_RANK:
            verdict = _limit_to_proof(job, verdict)
        candidates.append(verdict)
    if not candidates:
        candidates = _diagnose_undelivered(job.attempt)
    # The time between each rank's last call and its dump, as far as both are known.
    idle_times_s = {}
    for rank, time in (written_at or {}).items():
        _, last_call_at = dumps_by_rank[rank].call_time_range
        if last_call_at:
            idle_times_s[rank] = time - last_call_at
    verdicts = []
    for verdict in candidates:
        idle_s = [idle_times_s[rank] for rank in verdict.involved_ranks if rank in idle_times_s]
        # As in a job that runs, all ranks that wait made a call just before their dumps were
        # written. Negative times mean that clocks disagree.
        is_normal_wait = bool(idle_s) and min(idle_s) >= 0.0 and max(idle_s) < MIN_WAIT_S
        if KINDS[verdict.kind].is_call_error or not is_normal_wait:
            verdicts.append(verdict)
    unexplained: list[str] = []
    if not verdicts:
        unexplained += _describe_unexplained_calls(job.attempt, may_be_running=bool(candidates))
    return OfflineDiagnosis(
        verdicts=tuple(verdicts),
        notes=(*_describe_gaps(dumps, missing_ranks), *job.notes, *unexplained),
        inconclusive=bool(unexplained),
    )


def _diagnose_undelivered(attempt: Attempt) -> list[Verdict]:
    """One verdict for all sends and receives that are pending, if nothing else explains them: both
    ends have made their calls, so the cause is in the network or the devices.
    """
    pending = []
    for rank, process in attempt.processes.items():
        for stream in process.streams.values():
            if stream.peer is not None and stream.is_pending:
                pending.append((rank, stream))
    if not pending:
        return []
    rank, first = pending[0]
    sentence = describe_unfinished_message(
        rank,
        first.op,
        "another rank" if first.peer == -1 else f"rank {first.peer}",
        is_receive=first.kind is StreamKind.RECV,
    )
    position = describe_position(first.group, first.entered)
    verdict = Verdict(
        kind=VerdictKind.NO_PROGRESS,
        culprits=(),
        waiting=tuple(sorted({rank for rank, _ in pending})),
        group=first.group,
        seq=first.entered,
        summary=f"{sentence} ({position}){format_more_calls(len(pending) - 1)}",
        advice=format_lower_layers_advice(are_equal=False),
    )
    return [verdict]


def _blame_invalid_calls(job: OfflineJob, verdict: Verdict) -> Verdict:
    """A rank whose call is invalid is a culprit, even if the majority made invalid calls."""
    assert verdict.group is not None and verdict.seq is not None
    callers = {rank for call_class in verdict.calls for rank in call_class.ranks}
    invalid_ranks = job.invalid_ranks.get(verdict.group.key, set()) & callers
    involved = set(verdict.involved_ranks)
    culprits = tuple(sorted(invalid_ranks))
    are_all_invalid = involved | callers <= invalid_ranks
    if not invalid_ranks or are_all_invalid or culprits == verdict.culprits:
        return verdict
    invalid_calls = [c.call for c in verdict.calls if invalid_ranks.issuperset(c.ranks)]
    return replace(
        verdict,
        culprits=culprits,
        waiting=tuple(sorted(involved - invalid_ranks)),
        summary=describe_mismatch(
            culprits, verdict.calls, verdict.differing_fields, verdict.group, verdict.seq
        ),
        # The line of the first call that no valid rank made.
        site=invalid_calls[0].site if invalid_calls else None,
        divergence=None,
    )


def _limit_to_proof(job: OfflineJob, verdict: Verdict) -> Verdict:
    """The verdict on missing ranks, without the culprits that may have entered the call."""
    group, seq = verdict.group, verdict.seq
    is_message = any(call_class.call.peer is not None for call_class in verdict.calls)
    unknown_ranks = {rank for rank, dump in job.dumps.items() if dump.pending_messages_lost}
    if is_message:
        unknown_ranks.update(set(verdict.culprits).difference(job.dumps))
    else:
        awaited = {(wait.on_rank, wait.group) for wait in verdict.waits}
        if group is not None:  # the verdict has only some of the waits
            awaited |= {(rank, group.name) for rank in group.ranks}
        proven = {rank for rank, _ in awaited - job.assumed}
        unknown_ranks |= {rank for rank, _ in job.assumed} - proven
    culprits = missing = tuple(rank for rank in verdict.culprits if rank not in unknown_ranks)
    if group is not None and seq is not None and not is_message:
        # The hosts of the others have queued the call: only their devices have not reached it.
        counts = job.queued_counts.get(group.key, {})
        missing = tuple(rank for rank in culprits if counts.get(rank, 0) < seq)
    if missing:
        return _name_proven_culprits(job, verdict, missing)
    if culprits:
        return _blame_devices(job, verdict, culprits)
    waits = "waits" if len(verdict.waiting) == 1 else "wait"
    has_dump = not job.dumps.keys().isdisjoint(verdict.culprits)
    gap = "no record of that time" if has_dump else "no dump"
    return replace(
        verdict,
        culprits=(),
        summary=(
            f"{describe_ranks(verdict.waiting)} {waits} in {_get_op_name(verdict)}"
            f" ({describe_position(group, seq)}) for {describe_ranks(verdict.culprits)} ({gap})"
        ),
        advice=(
            "Without it, whether a rank entered the call, hung elsewhere or exited is unknown:"
            " check its log."
        ),
    )


def _blame_devices(job: OfflineJob, verdict: Verdict, culprits: tuple[int, ...]) -> Verdict:
    assert verdict.group is not None and verdict.seq is not None
    dumps = [job.dumps[rank] for rank in culprits if rank in job.dumps]
    records_starts = all(dump.reports_starts for dump in dumps)
    return replace(
        verdict,
        kind=VerdictKind.DEVICE_STUCK,
        severity=KINDS[VerdictKind.DEVICE_STUCK].severity,
        culprits=culprits,
        summary=describe_stuck_devices(
            culprits,
            _get_op_name(verdict),
            verdict.group,
            verdict.seq,
            len(verdict.waiting),
            is_begun=False if records_starts else None,
            is_behind=False,
        ),
        advice=format_stuck_device_advice(culprits, records_starts=records_starts),
        site=None,
    )


def _name_proven_culprits(job: OfflineJob, verdict: Verdict, culprits: tuple[int, ...]) -> Verdict:
    point_to_point = [c.ranks[0] for c in verdict.calls if c.call.peer is not None]
    last_records = []
    for rank in culprits:
        groups = job.dumps[rank].groups.values() if rank in job.dumps else ()
        records = [record for group in groups for record in group.records]
        if records:
            newest = max(records, key=lambda record: record.record_id)
            last_records.append((rank, newest))
    last_calls = []
    for rank, record in last_records[:_MAX_LAST_CALLS_SHOWN]:
        if record.site:
            op = record.signature.op
            last_calls.append(f"rank {rank} was last seen in {op} at {record.site}")
    advice = "The dump does not show what it did after that."
    if last_calls:
        advice = f"{'; '.join(last_calls)}. {advice}"
    return replace(
        verdict,
        culprits=culprits,
        summary=describe_not_entered(
            culprits,
            _get_op_name(verdict),
            verdict.group,
            verdict.seq,
            len(verdict.waiting),
            point_to_point[0] if point_to_point else None,
            verdict.calls[0].ranks if verdict.calls else (),
        ),
        advice=advice,
        site=None,  # the line where a rank was last seen need not be its current line
    )


def _get_op_name(verdict: Verdict) -> str:
    return verdict.calls[0].call.signature.op if verdict.calls else "a collective"


def _describe_gaps(dumps: Sequence[FlightDump], missing_ranks: Sequence[int]) -> Iterable[str]:
    """What the dumps do not show, and dumps that may be left over from an earlier run: all of their
    calls were made long before those of the others.
    """
    if missing_ranks:
        yield (
            f"no dump of {name_ranks(missing_ranks)}: that is missing evidence, not a sign of death"
        )
    backends = {calls.backend for dump in dumps for calls in dump.groups.values()}
    if ARRIVALS_ONLY_BACKEND in backends:
        yield (
            "gloo's recorder records neither point-to-point calls nor the completion of calls: only"
            " which rank entered which collective is known"
        )
    dated = [dump for dump in dumps if dump.call_time_range[0]]
    dated.sort(key=lambda dump: dump.call_time_range[1])
    newer_begin = float("inf")
    for count in range(len(dated) - 1, 0, -1):
        began_at, _ = dated[count].call_time_range
        _, ended_at = dated[count - 1].call_time_range
        newer_begin = min(newer_begin, began_at)
        gap_s = newer_begin - ended_at
        if gap_s > _STALE_DUMP_S:
            ranks = tuple(sorted(dump.rank for dump in dated[:count]))
            noun = "dumps" if count > 1 else "dump"
            yield (
                f"all calls in the {noun} of {describe_ranks(ranks)} were made at least"
                f" {format_age(gap_s)} before the calls of the other ranks: unless a clock is"
                f" wrong, the {noun} came from an earlier run and should be left out"
            )
            break
    empty = [dump.rank for dump in dumps if not dump.groups]
    if empty:
        noun, verb = ("dumps", "contain") if len(empty) > 1 else ("dump", "contains")
        yield f"the {noun} of {name_ranks(empty)} {verb} no calls"


def _describe_unexplained_calls(attempt: Attempt, *, may_be_running: bool) -> Iterable[str]:
    """Calls that may be unfinished although, as far as is known, no member is missing."""
    ranks_by_call = defaultdict(list)
    for streams in attempt.streams_by_group.values():
        for rank, stream in streams.items():
            if stream.is_pending:
                position = describe_position(stream.group, stream.entered)
                ranks_by_call[f"{stream.op} ({position})"].append(rank)
    if may_be_running:
        reason = (
            "the dumps were written within a second of it, so the job may have been running: write"
            " the dumps while the job hangs"
        )
    else:
        reason = "the dumps do not show why"
    for call, ranks in sorted(ranks_by_call.items()):
        yield f"{describe_ranks(tuple(ranks))} may still be in {call}; {reason}"
