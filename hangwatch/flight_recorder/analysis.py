"""The diagnosis from Flight Recorder dumps alone: which rank made which calls, and which rank did
not. Nothing is known about the processes themselves.

Every dump is assumed to come from a hanging job, because a dump does not say when it was written. A
rank without a dump is missing evidence, not a dead rank, and missing evidence accuses no rank. If
no culprit remains, the notes say why.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hangwatch.diagnosis import diagnose, messages
from hangwatch.model.calls import StreamKind
from hangwatch.model.kinds import KINDS, VerdictKind
from hangwatch.model.limits import MIN_WAIT_S, Limits
from hangwatch.model.verdicts import Verdict
from hangwatch.tracking.attempt import Attempt
from hangwatch.tracking.call_stream import CallStream

from .attempts import build_job
from .dumps import FlightDump
from .evidence_notes import describe_gaps, describe_unexplained_calls
from .offline_job import NOW_S
from .verdict_adaptation import adapt_verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class OfflineDiagnosis:
    """``missing_ranks`` are ranks of the job without a dump; ``notes`` say what cannot be known.

    ``inconclusive``: some ranks may be in a call, and the dumps do not show whether they are
    blocked.
    """

    verdicts: tuple[Verdict, ...]
    missing_ranks: tuple[int, ...]
    notes: tuple[str, ...]
    inconclusive: bool = False


def analyze_dumps(
    dumps: Sequence[FlightDump], written_at: Mapping[int, float] | None = None, name: str = "dump"
) -> OfflineDiagnosis:
    """What is wrong with the job that wrote the dumps, one from each rank.

    ``written_at`` has, by rank, when its dump was written, in seconds since the epoch; ranks may be
    left out.
    """
    dumps_by_rank = {dump.rank: dump for dump in dumps}
    job = build_job(dumps_by_rank, name)
    missing_ranks = tuple(sorted(job.attempt.processes.keys() - dumps_by_rank.keys()))
    candidates = [
        adapt_verdict(dumps_by_rank, job, verdict)
        for verdict in diagnose(job.attempt, NOW_S, Limits()).verdicts
        if verdict.is_confirmed
    ]
    if not candidates:
        candidates = _diagnose_undelivered(job.attempt)
    idle_times_s = _get_idle_times_s(dumps_by_rank, written_at or {})
    verdicts = tuple(v for v in candidates if not _is_normal_wait(v, idle_times_s))
    unexplained: tuple[str, ...] = ()
    if not verdicts:
        may_be_running = len(candidates) > 0
        unexplained = tuple(describe_unexplained_calls(job.attempt, may_be_running))
    return OfflineDiagnosis(
        verdicts=verdicts,
        missing_ranks=missing_ranks,
        notes=(*describe_gaps(dumps, missing_ranks), *job.notes, *unexplained),
        inconclusive=len(unexplained) > 0,
    )


def _get_idle_times_s(
    dumps_by_rank: Mapping[int, FlightDump], written_at: Mapping[int, float]
) -> dict[int, float]:
    """By rank, the time between its last call and its dump, as far as both are known."""
    idle_times_s: dict[int, float] = {}
    for rank, time in written_at.items():
        last_call_at = dumps_by_rank[rank].call_time_range[1]
        if last_call_at:
            idle_times_s[rank] = time - last_call_at
    return idle_times_s


def _is_normal_wait(verdict: Verdict, idle_times_s: Mapping[int, float]) -> bool:
    """Whether all ranks that wait made a call just before their dumps were written, as in a job
    that runs. Negative times mean that clocks disagree.
    """
    if KINDS[verdict.kind].is_call_error:
        return False
    ranks = (*verdict.waiting, *verdict.culprits)
    idle_s = [idle_times_s[rank] for rank in ranks if rank in idle_times_s]
    return bool(idle_s) and 0.0 <= min(idle_s) <= max(idle_s) < MIN_WAIT_S


def _diagnose_undelivered(attempt: Attempt) -> list[Verdict]:
    """One verdict for all sends and receives that are pending, if nothing else explains them: both
    ends have made their calls, so the cause is in the network or the devices.
    """
    pending: list[tuple[int, CallStream]] = []
    for rank, process in attempt.processes.items():
        for stream in process.streams.values():
            if stream.peer is not None and stream.is_pending:
                pending.append((rank, stream))
    if not pending:
        return []
    rank, first = pending[0]
    sentence = messages.describe_unfinished_message(
        rank,
        first.op,
        "another rank" if first.peer == -1 else f"rank {first.peer}",
        is_receive=first.kind is StreamKind.RECV,
    )
    position = messages.describe_position(first.group, first.entered)
    more_calls = messages.format_more_calls(len(pending) - 1)
    verdict = Verdict(
        kind=VerdictKind.NO_PROGRESS,
        severity=KINDS[VerdictKind.NO_PROGRESS].severity,
        culprits=(),
        waiting=tuple(sorted({rank for rank, _ in pending})),
        group=first.group,
        seq=first.entered,
        summary=f"{sentence} ({position}){more_calls}",
        advice=messages.format_lower_layers_advice(are_equal=False),
    )
    return [verdict]
