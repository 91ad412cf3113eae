"""Decides which hung ranks are ended, and when, so that their launcher restarts them. Pure; `aborter`
carries it out.

Ending a rank that would have continued by itself is worse than waiting, so anything uncertain means
to wait.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass

from hangwatch.model.incidents import Incident, RecoveryScope
from hangwatch.model.kinds import KINDS, Abort, Role, VerdictKind, select_kinds
from hangwatch.protocol.commands import allows_abort
from hangwatch.report.recovery import explain_limit, explain_refusal
from hangwatch.tracking.process import Process

from ..incidents.registry import AlertSummary

# Ranks are ended by default for kinds that, as far as is known, never resolve by themselves. Others
# may: a stopped rank may be under a debugger or suspended; missing ranks may still start; a silent
# node may report again.
DEFAULT_KINDS = select_kinds(lambda spec: spec.abort is Abort.BY_DEFAULT)
POSSIBLE_KINDS = (*DEFAULT_KINDS, *select_kinds(lambda spec: spec.abort is Abort.ON_REQUEST))


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """The operator's choice. ``after`` is in seconds; ``limit`` counts over all attempts of a job."""

    kinds: frozenset[VerdictKind] = frozenset(DEFAULT_KINDS)
    limit: int = 3
    after: float = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """An open incident, and all else that the decision depends on. Times are monotonic."""

    incident: Incident
    alerts: AlertSummary | None  # the alerts of the last diagnosis
    processes: Mapping[int, Process]  # the ranks that have reported
    is_stored: bool  # the evidence is complete and written, and the alert was sent
    history: int = 0  # earlier incidents of this job for which ranks were ended
    planned_at: float | None = None  # the time at which the recovery was planned
    # The last time that ranks of this attempt were ended: its launcher may be restarting them since.
    aborted_at: float = float("-inf")
    recent_s: float  # reports older than this are ignored


class Step(enum.Enum):
    NOTHING = "nothing"  # the rules do not cover it, or no rank hangs
    WITHHOLD = "withhold"  # a veto: refused by the job, or over the limit
    WAIT = "wait"
    END = "end"


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """``ranks`` are to be ended from ``due_at`` on: all that can be, if ``scope`` is "job"."""

    step: Step
    ranks: tuple[int, ...] = ()
    scope: RecoveryScope = "culprits"
    due_at: float = 0.0
    why: str = ""


_NOTHING = Decision(step=Step.NOTHING)


def decide(facts: Facts, rules: Rules, now: float) -> Decision:
    """Decides what to do about an incident at time ``now``."""
    incident = facts.incident
    alerts = facts.alerts
    if not (incident.is_open and incident.is_alert and incident.kind in rules.kinds):
        return _NOTHING
    if incident.kind is VerdictKind.MISSING_RANK and not incident.culprits:
        return _NOTHING  # the job waits for a process outside of it
    oldest_at = now - facts.recent_s
    if alerts is None or alerts.at < oldest_at:
        return _NOTHING
    spec = KINDS[incident.kind]
    alive = {rank: process for rank, process in facts.processes.items() if process.is_alive}
    waiting = alerts.waiting.intersection(alive)
    # The ranks to end: the culprits that are still accused or, if no culprit is named or can be
    # ended, all ranks of the job that can be ended.
    candidates = set(alive)
    if incident.recovery is not None:
        candidates -= {abort.rank for abort in incident.recovery.aborts if abort.result == "failed"}
    if spec.is_unreachable:
        candidates.difference_update(incident.culprits)
    scope: RecoveryScope = "job"
    culprits = candidates.intersection(incident.culprits)
    if culprits:
        scope = "culprits"
        candidates = culprits & alerts.accused
    if not candidates:
        return _NOTHING
    if not waiting and not spec.blocks_culprits:
        # In a mismatch without a minority, no rank waits but the culprits themselves.
        streams = [alive[rank].streams.values() for rank in candidates]
        are_pending = all(any(stream.is_pending for stream in own) for own in streams)
        if spec.role is not Role.ROOT or not are_pending:
            return _NOTHING
    ranks = tuple(sorted(candidates))
    settings = {rank: process.identity.on_hang for rank, process in alive.items()}
    refusals = [rank for rank, on_hang in settings.items() if not allows_abort(on_hang)]
    why = ""
    if refusals:
        why = explain_refusal(refusals, settings[refusals[0]])
    elif facts.history >= rules.limit:
        why = explain_limit(incident.job, facts.history)
    if why:
        return Decision(step=Step.WITHHOLD, ranks=ranks, scope=scope, why=why)
    involved = [alive[rank] for rank in candidates | waiting]
    since = now if facts.planned_at is None else facts.planned_at
    advances = [process.last_advanced_at for process in involved]
    due_at = max(since, facts.aborted_at, *advances) + rules.after
    all_report = all(process.reports.last_seen_at >= oldest_at for process in involved)
    is_due = facts.planned_at is not None and now >= due_at
    step = Step.END if is_due and all_report and facts.is_stored else Step.WAIT
    return Decision(step=step, ranks=ranks, scope=scope, due_at=due_at)
