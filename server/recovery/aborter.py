"""Carries out the decisions of `policy`: plans, announces and orders that ranks are ended.

An incident's recovery goes from planned to announced, ordered and done. A rank is ordered to be
ended only after the database holds that it will be. A server that is killed at any moment has
therefore counted its orders.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import sqlalchemy as sa

from hangwatch.model.kind_spec import Severity
from hangwatch.model.ranks import AttemptKey
from hangwatch.model.recoveries import RankAbort, Recovery, RecoveryScope
from hangwatch.protocol import heartbeat
from hangwatch.tracking.attempt import Attempt
from hangwatch.tracking.fleet import Fleet

from ..alerting.events import ABORTED, ABORTING, PLANNED
from ..core.clock import Clock
from ..incidents.records import IncidentRecord
from ..incidents.registry import IncidentRegistry
from ..storage.persistence import PersistenceWorker
from ..storage.store import Store
from .abort_orders import (
    AbortOrders,
    count_rounds,
    get_latest_round,
    get_recovery,
    update_recovery,
)
from .policy import Decision, Facts, Rules, Step, build_members, decide

log = logging.getLogger("hangwatch")

# Orders that a recovery lists. Beyond it, only those that failed are added: a large job may have
# as many orders as ranks.
MAX_ORDERS_LISTED = 256
# The next check of an incident waits this many times as long as the check took, ...
BACKOFF_FACTOR = 20.0
MAX_CHECK_INTERVAL_S = 1.0  # ... or until the plan is due, but not longer than this


@dataclass(slots=True, kw_only=True)
class Aborter:
    """``is_evidence_complete`` says whether an incident has all the stacks that it will get. Times
    are the monotonic clock's.
    """

    rules: Rules
    clock: Clock
    store: Store
    incidents: IncidentRegistry
    fleet: Fleet
    orders: AbortOrders
    persistence: PersistenceWorker
    is_evidence_complete: Callable[[IncidentRecord, Attempt], bool]
    _aborted_at: dict[AttemptKey, float] = field(default_factory=dict)
    _next_check_at: dict[str, float] = field(default_factory=dict)  # by incident
    _settled: set[str] = field(default_factory=set)  # incidents for which no rank will be ended
    _is_failing: bool = False

    async def advance_recoveries(self, recent_s: float) -> None:
        """Runs one round over the incidents that may need a recovery. Reports older than
        ``recent_s`` are ignored.
        """
        cases = [
            case
            for case in self.incidents.records.values()
            if case.is_own and (case.is_open or _get_state(case) == "ordered")
        ]
        for case in cases:
            attempt = self.fleet.attempts.get(case.attempt_key)
            if attempt is None:
                continue
            if _get_state(case) == "ordered":
                self._finish_round(case, attempt, self.clock.monotonic())
            if not case.is_open or self.fleet.latest_attempt(attempt.job) is not attempt:
                self.orders.withdraw(case)
            elif case.incident.id not in self._settled:
                try:
                    await self._advance_recovery(case, attempt, recent_s)
                except sa.exc.SQLAlchemyError as error:
                    self._log_database_error(error)
        self._forget_dropped()

    def apply_replies(self, replies: Iterable[heartbeat.AbortReply]) -> None:
        """Records the results of orders that a node agent reports."""
        self.orders.apply_replies(replies)

    def _forget_dropped(self) -> None:
        attempts, cases = self.fleet.attempts, self.incidents.records
        self._aborted_at = {key: at for key, at in self._aborted_at.items() if key in attempts}
        self._settled &= cases.keys()
        self._next_check_at = {
            incident: at for incident, at in self._next_check_at.items() if incident in cases
        }

    async def _advance_recovery(
        self, case: IncidentRecord, attempt: Attempt, recent_s: float
    ) -> None:
        began, now = time.perf_counter(), self.clock.monotonic()
        next_check_at = self._next_check_at.get(case.incident.id, 0.0)
        if now < next_check_at and _get_state(case) in ("", "planned"):
            return
        decision = decide(self._gather_facts(case, attempt, recent_s), self.rules, now)
        wait_s = 0.0
        if decision.step is Step.WAIT and case.incident.recovery is not None:
            wait_s = min(MAX_CHECK_INTERVAL_S, decision.due_at - now)
        backoff_s = BACKOFF_FACTOR * (time.perf_counter() - began)
        self._next_check_at[case.incident.id] = now + max(wait_s, backoff_s)
        is_new = _get_state(case) == "" and decision.step is not Step.NOTHING
        is_final = _get_state(case) in ("planned", "withheld") and decision.step in (
            Step.END,
            Step.WITHHOLD,
        )
        if is_new or is_final:
            # The history is read from the database, so only where it can change the decision.
            aborted_ids = await asyncio.to_thread(self.store.load_aborted_ids, case.incident.job)
            history = len(aborted_ids - {case.incident.id})
            facts = self._gather_facts(case, attempt, recent_s, history)
            decision = decide(facts, self.rules, self.clock.monotonic())
            if not case.is_open or decision.step is Step.NOTHING:  # the state changed meanwhile
                return
            if is_new:
                self._plan_recovery(case, decision, history)
            if decision.step is Step.WITHHOLD:
                self._settled.add(case.incident.id)
                self._update(case, state="withheld", why=decision.why)
                return
        if decision.step is Step.END and (
            _get_state(case) in ("announced", "ordered") or not self._has_concurrent_recovery(case)
        ):
            self._end_ranks(case, attempt, decision)
        elif _get_state(case) == "ordered":
            self.orders.withdraw(case)

    def _has_concurrent_recovery(self, case: IncidentRecord) -> bool:
        """Whether ranks of the same attempt are being ended for another incident, which may
        resolve this one too.
        """
        for other in self.incidents.records.values():
            if other is case or other.attempt_key != case.attempt_key:
                continue
            state = _get_state(other)
            if state == "ordered" or (state == "announced" and other.is_open):
                return True
        return False

    def _gather_facts(
        self, case: IncidentRecord, attempt: Attempt, recent_s: float, history: int = 0
    ) -> Facts:
        recovery = case.incident.recovery
        planned_at = None
        if recovery is not None:
            planned_age_s = (self.clock.wall() - recovery.planned_at).total_seconds()
            planned_at = self.clock.monotonic() - planned_age_s
        is_announced = case.alerted_severity is case.incident.severity
        is_stored = _get_state(case) == "ordered" or (
            is_announced
            and self.is_evidence_complete(case, attempt)
            and self.persistence.is_stored(case)
        )
        return Facts(
            incident=case.incident,
            standing=case.alert_summary,
            members=build_members(attempt),
            is_stored=is_stored,
            history=history,
            planned_at=planned_at,
            aborted_at=self._aborted_at.get(attempt.key, float("-inf")),
            recent_s=recent_s,
        )

    def _plan_recovery(self, case: IncidentRecord, decision: Decision, history: int) -> None:
        now = self.clock.monotonic()
        recovery = Recovery(
            state="planned",
            scope=_get_scope(decision),
            ranks=decision.ranks,
            number=history + 1,
            limit=self.rules.limit,
            planned_at=self.clock.date(now),
            due_at=self.clock.date(max(now, decision.due_at)),
        )
        self.incidents.record_recovery(case, recovery)
        # An alert that is not sent yet will contain the plan.
        if decision.step is not Step.WITHHOLD and case.alerted_severity is Severity.ALERT:
            self.persistence.queue_alert(case, PLANNED)

    def _end_ranks(self, case: IncidentRecord, attempt: Attempt, decision: Decision) -> None:
        """Takes the next step of a due recovery: it is announced first, and ordered after the
        announcement was written.
        """
        recovery, now = get_recovery(case), self.clock.monotonic()
        target: dict[str, Any] = {"scope": _get_scope(decision), "ranks": decision.ranks}
        extends_to_job = (
            recovery.state == "done" and decision.whole and recovery.scope == "culprits"
        )
        if recovery.state in ("planned", "withheld") or extends_to_job:
            announced_at = self.clock.date(now)
            self._update(case, state="announced", announced_at=announced_at, why="", **target)
            event = _number_event(ABORTING, count_rounds(recovery) + 1)
            self.persistence.queue_alert(case, event)
        elif recovery.state == "announced":
            processes = [attempt.processes[rank] for rank in decision.ranks]
            ordered_at = self.clock.date(now)
            ends = [
                RankAbort(rank=p.rank, host=p.host, pid=p.identity.pid, ordered_at=ordered_at)
                for p in processes[:MAX_ORDERS_LISTED]
            ]
            self._update(case, state="ordered", ends=(*recovery.ends, *ends), **target)
            self.orders.order_aborts(case, processes, now)
        elif recovery.state == "ordered":
            # A server that was killed may have written orders that it did not send.
            unordered = {*decision.ranks}.intersection(recovery.ranks)
            unordered -= self.orders.list_ordered_ranks(case)
            unordered -= {end.rank for end in recovery.ends if end.result != "ordered"}
            self.orders.order_aborts(case, [attempt.processes[r] for r in unordered], now)

    def _finish_round(self, case: IncidentRecord, attempt: Attempt, now: float) -> None:
        """Completes a recovery once all its orders have results."""
        self.orders.collect_results(case, attempt, now)
        recovery = get_recovery(case)
        results = {end.result for end in get_latest_round(recovery)}
        if "ordered" in results:
            return
        if results == {"left"}:
            self._update(case, state="planned")
            return
        self._aborted_at[attempt.key] = now
        self._update(case, state="done", done_at=self.clock.date(now))
        self.persistence.queue_alert(case, _number_event(ABORTED, count_rounds(recovery)))

    def _update(self, case: IncidentRecord, **changes: Any) -> None:
        update_recovery(self.incidents, case, **changes)

    def _log_database_error(self, error: sa.exc.SQLAlchemyError) -> None:
        if not self._is_failing:
            log.error(
                "no rank is ended as long as the database cannot be read: %s",
                getattr(error, "orig", error),
            )
        self._is_failing = True


def _get_state(case: IncidentRecord) -> str:
    recovery = case.incident.recovery
    return recovery.state if recovery is not None else ""


def _number_event(kind: str, number: int) -> str:
    return kind if number < 2 else f"{kind}-{number}"


def _get_scope(decision: Decision) -> RecoveryScope:
    return "job" if decision.whole else "culprits"
