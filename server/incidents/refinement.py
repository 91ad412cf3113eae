"""How a later verdict changes an incident's verdict. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from hangwatch.diagnosis.messages import update_waiter_count
from hangwatch.model.kind_spec import Severity
from hangwatch.model.kinds import VerdictKind
from hangwatch.model.verdicts import Verdict
from hangwatch.tracking.attempt import Attempt

from .device_evidence import add_device_advice
from .evidence import strip_verdict
from .matching import Relation
from .records import AlertSummary


def refine_verdict(
    before: Verdict, verdict: Verdict, attempt: Attempt, members: Iterable[int], last_seen_at: float
) -> Verdict:
    """The new verdict, with the evidence of the earlier one that it lacks. An alert stays an alert.

    ``members`` are the ranks of all earlier verdicts, of which the last one was at ``last_seen_at``, monotonic.
    """
    after = strip_verdict(verdict)
    is_alert = Severity.ALERT in (before.severity, after.severity)
    is_same_kind = after.kind is before.kind
    waiting = {*after.waiting, *_list_still_waiting(before, attempt, members, last_seen_at)}
    waiting -= set(after.culprits)
    return replace(
        after,
        summary=update_waiter_count(after.summary, len(after.waiting), len(waiting)),
        advice=add_device_advice(after, attempt),
        severity=Severity.ALERT if is_alert else Severity.WARNING,
        waiting=tuple(sorted(waiting)),
        calls=after.calls or before.calls,
        waits=after.waits or before.waits,
        divergence=after.divergence or (before.divergence if is_same_kind else None),
        site=after.site or (before.site if is_same_kind else None),
    )


def _list_still_waiting(
    before: Verdict, attempt: Attempt, members: Iterable[int], last_seen_at: float
) -> Iterator[int]:
    """The ranks that waited and that the new verdict may lack nevertheless."""
    # A process that has ended no longer waits, but it did. NCCL's watchdog aborts a call before it ends
    # the process, so that the host may have run on for a moment, and its next call may have raised.
    yield from attempt.ended_ranks.intersection(members)
    if attempt.ended_ranks:
        yield from before.waiting
        return
    for rank in before.waiting:
        process = attempt.processes.get(rank)
        # Its host's heartbeat may be late; nothing is known to have changed.
        if process is not None and process.reports.last_seen_at <= last_seen_at:
            yield rank


def summarize_alerts(
    kind: VerdictKind, related: Iterable[tuple[Relation, Verdict]], now: float
) -> AlertSummary | None:
    """Summarizes the alerts among the verdicts that are related to an incident of a kind."""
    alerts = [
        (relation, verdict)
        for relation, verdict in related
        if relation and verdict.severity is Severity.ALERT
    ]
    if not alerts:
        return None
    causes = [
        verdict
        for relation, verdict in alerts
        if relation is not Relation.CONSEQUENCE or verdict.kind is kind
    ]
    return AlertSummary(
        at=now,
        accused=frozenset(rank for verdict in causes for rank in verdict.culprits),
        waiting=frozenset(rank for _, verdict in alerts for rank in verdict.waiting),
    )
