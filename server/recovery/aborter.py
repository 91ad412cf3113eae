"""Carries out the decisions of `policy`: plans, announces and orders that ranks are ended.

An incident's recovery goes from planned to announced, ordered and done. A rank is ordered to be
ended only after the database holds that it will be. A server that is killed at any moment has
therefore counted its orders.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any

import sqlalchemy as sa

from hangwatch.model.incidents import RankAbort, Recovery
from hangwatch.model.kinds import Severity
from hangwatch.model.ranks import AttemptKey
from hangwatch.protocol import heartbeat
from hangwatch.protocol.commands import CommandKind
from hangwatch.report.recovery import explain_silence
from hangwatch.tracking.attempt import Attempt
from hangwatch.tracking.process import Process

from ..alerting.alerter import ABORTED, ABORTING, PLANNED
from ..incidents.registry import IncidentRecord
from ..ingest.command_queue import REQUEST_EXPIRES_S
from ..shared_state import SharedState
from ..storage.persistence import PersistenceWorker
from .policy import Decision, Facts, Rules, Step, decide

log = logging.getLogger("hangwatch")

# The orders that a recovery lists. A large job may have as many orders as ranks: beyond this number,
# only those that failed are added.
MAX_ORDERS_LISTED = 256
# The next check of an incident waits this many times as long as the check took, ...
BACKOFF_FACTOR = 20.0
MAX_CHECK_INTERVAL_S = 1.0  # ... or until the plan is due, but not longer than this
MAX_EVIDENCE_DELAY_S = 15.0  # a requested stack is not expected any more after this time
# The wait, after a rank's exit, for its node agent's report that it sent the signal.
REPLY_DELAY_LIMIT_S = 1.0
_UNDECIDED = ("", "planned", "withheld")  # states before it is decided to end ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class _AbortOrder:
    """An order to a node agent whose result is not known yet."""

    incident: str
    process: Process
    agent: str  # the node agent that has the command
    ordered_at: float


@dataclass(slots=True, kw_only=True)
class Aborter:
    """Times are the monotonic clock's."""

    shared: SharedState
    rules: Rules
    persistence: PersistenceWorker
    _orders: dict[str, _AbortOrder] = field(default_factory=dict)  # the keys are commands' ids
    _aborted_at: dict[AttemptKey, float] = field(default_factory=dict)
    _is_failing: bool = False  # the last read of the database failed

    async def advance_recoveries(self, get_recent_s: Callable[[str], float]) -> None:
        """Runs one round over all incidents. Reports of a job that are older than ``get_recent_s`` of
        its name are ignored.
        """
        shared = self.shared
        attempts = shared.fleet.attempts
        incidents = shared.incidents
        for record in incidents.records.values():
            attempt = attempts.get(record.attempt_key)
            is_ordered = _get_state(record) == "ordered"
            if attempt is None or not record.is_own or not (record.is_open or is_ordered):
                continue
            if is_ordered:
                now = shared.now()
                self._collect_results(record, attempt, now)
                aborts = record.recovery.aborts
                last_ordered_at = aborts[-1].ordered_at
                results = {abort.result for abort in aborts if abort.ordered_at == last_ordered_at}
                if results == {"left"}:
                    incidents.update_recovery(record, state="planned")
                elif "ordered" not in results:
                    # All orders have results.
                    self._aborted_at[attempt.key] = now
                    done_at = shared.clock.date(now)
                    incidents.update_recovery(record, state="done", done_at=done_at)
                    self.persistence.queue_alert(record, _number_event(ABORTED, aborts))
            if not record.is_open or shared.fleet.latest_attempt(attempt.job) is not attempt:
                self._withdraw_orders(record)
                continue
            try:
                await self._advance_recovery(record, attempt, get_recent_s(attempt.job))
            except sa.exc.SQLAlchemyError as error:
                if not self._is_failing:
                    log.error(
                        "no rank is ended as long as the database cannot be read: %s",
                        getattr(error, "orig", error),
                    )
                self._is_failing = True
        for key in self._aborted_at.keys() - attempts.keys():
            del self._aborted_at[key]

    async def _advance_recovery(
        self, record: IncidentRecord, attempt: Attempt, recent_s: float
    ) -> None:
        incidents = self.shared.incidents
        began = time.perf_counter()
        now = self.shared.now()
        state = _get_state(record)
        if state in _UNDECIDED and now < record.recovery_check_at:
            return
        decision = decide(self._gather_facts(record, attempt, recent_s), self.rules, now)
        wait_s = 0.0
        if decision.step is Step.WAIT and state:
            wait_s = min(MAX_CHECK_INTERVAL_S, decision.due_at - now)
        backoff_s = BACKOFF_FACTOR * (time.perf_counter() - began)
        record.recovery_check_at = now + max(wait_s, backoff_s)
        is_new = not state and decision.step is not Step.NOTHING
        is_final = state in _UNDECIDED and decision.step in (Step.END, Step.WITHHOLD)
        if is_new or is_final:
            # The history is in the database, and is only read where it can change the decision.
            aborted_ids = await asyncio.to_thread(
                self.persistence.store.load_aborted_ids, record.incident.job
            )
            self._is_failing = False
            history = len(aborted_ids - {record.incident.id})
            facts = self._gather_facts(record, attempt, recent_s, history)
            decision = decide(facts, self.rules, self.shared.now())
            if not record.is_open or decision.step is Step.NOTHING:  # the state changed meanwhile
                return
            if is_new:
                self._plan_recovery(record, decision, history)
            if decision.step is Step.WITHHOLD:
                record.recovery_check_at = float("inf")
                incidents.update_recovery(record, state="withheld", why=decision.why)
                return
        state = _get_state(record)
        if decision.step is Step.END:
            # Ranks may be ended for another incident, which may resolve this one too.
            is_concurrent = False
            for other in incidents.records.values():
                if other is record or other.attempt_key != record.attempt_key:
                    continue
                other_state = _get_state(other)
                is_concurrent |= other_state == "ordered"
                is_concurrent |= other_state == "announced" and other.is_open
            if state in ("announced", "ordered") or not is_concurrent:
                self._end_ranks(record, attempt, decision)
        elif state == "ordered":
            self._withdraw_orders(record)

    def _gather_facts(
        self, record: IncidentRecord, attempt: Attempt, recent_s: float, history: int = 0
    ) -> Facts:
        shared = self.shared
        incident = record.incident
        recovery = incident.recovery
        has_evidence = (
            shared.now() - record.opened_at > MAX_EVIDENCE_DELAY_S
            or not shared.awaits_stacks(record, attempt)
        )
        is_announced = record.alerted_severity is incident.severity
        is_stored = _get_state(record) == "ordered" or (
            is_announced and has_evidence and self.persistence.is_stored(record)
        )
        return Facts(
            incident=incident,
            alerts=record.alert_summary,
            processes=attempt.processes,
            is_stored=is_stored,
            history=history,
            planned_at=None if recovery is None else shared.clock.monotonic_at(recovery.planned_at),
            aborted_at=self._aborted_at.get(attempt.key, float("-inf")),
            recent_s=recent_s,
        )

    def _plan_recovery(self, record: IncidentRecord, decision: Decision, history: int) -> None:
        clock = self.shared.clock
        now = clock.monotonic()
        recovery = Recovery(
            state="planned",
            scope=decision.scope,
            ranks=decision.ranks,
            number=history + 1,
            limit=self.rules.limit,
            planned_at=clock.date(now),
            due_at=clock.date(max(now, decision.due_at)),
        )
        self.shared.incidents.record_recovery(record, recovery)
        # An alert that is not sent yet will contain the plan.
        if decision.step is not Step.WITHHOLD and record.alerted_severity is Severity.ALERT:
            self.persistence.queue_alert(record, PLANNED)

    def _end_ranks(self, record: IncidentRecord, attempt: Attempt, decision: Decision) -> None:
        """Takes the next step of a due recovery. It is ordered once its announcement is written."""
        incidents = self.shared.incidents
        clock = self.shared.clock
        recovery = record.recovery
        now = clock.monotonic()
        extends_to_job = recovery.scope == "culprits" and decision.scope == "job"
        is_extended = recovery.state == "done" and extends_to_job
        if recovery.state in ("planned", "withheld") or is_extended:
            incidents.update_recovery(
                record,
                state="announced",
                scope=decision.scope,
                ranks=decision.ranks,
                announced_at=clock.date(now),
                why="",
            )
            self.persistence.queue_alert(record, _number_event(ABORTING, recovery.aborts, 1))
        elif recovery.state == "announced":
            processes = [attempt.processes[rank] for rank in decision.ranks]
            ordered_at = clock.date(now)
            aborts = [_list_order(p, ordered_at) for p in processes[:MAX_ORDERS_LISTED]]
            incidents.update_recovery(
                record,
                state="ordered",
                scope=decision.scope,
                ranks=decision.ranks,
                aborts=(*recovery.aborts, *aborts),
            )
            self._order_aborts(record, processes, now)
        elif recovery.state == "ordered":
            # A server that was killed may have written orders that it did not send.
            unordered = {*decision.ranks}.intersection(recovery.ranks)
            unordered -= self._list_ordered_ranks(record)
            unordered -= {abort.rank for abort in recovery.aborts if abort.result != "ordered"}
            self._order_aborts(record, [attempt.processes[r] for r in unordered], now)

    def _order_aborts(
        self, record: IncidentRecord, processes: Iterable[Process], now: float
    ) -> None:
        for process in processes:
            command_id = self.shared.commands.queue_command(process, CommandKind.ABORT, now)
            self._orders[command_id] = _AbortOrder(
                incident=record.incident.id, process=process, agent=process.agent, ordered_at=now
            )

    def _list_ordered_ranks(self, record: IncidentRecord) -> set[int]:
        """The ranks whose orders have no result yet."""
        return {order.process.rank for _, order in self._list_orders(record)}

    def _withdraw_orders(self, record: IncidentRecord) -> None:
        """Withdraws the orders that were not sent: the job makes progress, or is not reported."""
        for command_id, order in self._list_orders(record):
            if self.shared.commands.withdraw_command(order.agent, command_id):
                del self._orders[command_id]
                self._record_result(record, order.process.rank, result="left")

    def apply_replies(self, replies: Iterable[heartbeat.AbortReply]) -> None:
        """Records the results that a node agent reports."""
        now = self.shared.now()
        for reply in replies:
            order = self._orders.pop(reply.request, None)
            if order is None:
                continue
            record = self.shared.incidents.records.get(order.incident)
            if record is None:
                continue
            if reply.error is not None:
                self._record_failure(record, order, reply.error, reply.signal)
            else:
                self._record_end(record, order.process.rank, reply.signal, now)

    def _collect_results(self, record: IncidentRecord, attempt: Attempt, now: float) -> None:
        """Records results without a reply: exits of ordered ranks, and orders that expired."""
        for command_id, order in self._list_orders(record):
            process = attempt.processes.get(order.process.rank)
            is_running = (
                process is not None and process.key == order.process.key and process.exit is None
            )
            # The agent's reply may still arrive after an exit.
            if now - order.ordered_at > (REQUEST_EXPIRES_S if is_running else REPLY_DELAY_LIMIT_S):
                del self._orders[command_id]
                if is_running:
                    self._record_failure(record, order, explain_silence(REQUEST_EXPIRES_S))
        ordered_ranks = self._list_ordered_ranks(record)
        for abort in record.recovery.aborts:
            process = attempt.processes.get(abort.rank)
            if abort.result != "ordered" or abort.rank in ordered_ranks:
                continue
            if process is not None and process.exit is not None:
                was_killed = process.exit.signal == signal.SIGKILL
                sent_signal = signal.SIGKILL if was_killed else None
                self._record_end(record, abort.rank, sent_signal, process.exited_at or now)

    def _list_orders(self, record: IncidentRecord) -> list[tuple[str, _AbortOrder]]:
        """The orders of an incident, with the ids of their commands."""
        incident_id = record.incident.id
        return [entry for entry in self._orders.items() if entry[1].incident == incident_id]

    def _record_failure(
        self, record: IncidentRecord, order: _AbortOrder, error: str, signal: int | None = None
    ) -> None:
        process = order.process
        aborts = record.recovery.aborts
        open_ranks = {abort.rank for abort in aborts if abort.result == "ordered"}
        if process.rank not in open_ranks:
            # The order is beyond the number that the recovery lists.
            listed = (*aborts, _list_order(process, aborts[-1].ordered_at))
            self.shared.incidents.update_recovery(record, aborts=listed)
        self._record_result(record, process.rank, result="failed", signal=signal, error=error)

    def _record_end(
        self, record: IncidentRecord, rank: int, sent_signal: int | None, ended_at: float
    ) -> None:
        """Records that a rank has ended, by the signal that it was sent or for another reason."""
        self._record_result(
            record,
            rank,
            result="ended" if sent_signal else "gone",
            signal=sent_signal,
            ended_at=self.shared.clock.date(ended_at),
        )

    def _record_result(self, record: IncidentRecord, rank: int, **changes: Any) -> None:
        """Sets the result of the open order to end a rank."""
        aborts = list(record.recovery.aborts)
        for number, abort in enumerate(aborts):
            if abort.rank == rank and abort.result == "ordered":
                aborts[number] = replace(abort, **changes)
        self.shared.incidents.update_recovery(record, aborts=tuple(aborts))


def _get_state(record: IncidentRecord) -> str:
    recovery = record.incident.recovery
    return recovery.state if recovery is not None else ""


def _number_event(kind: str, aborts: Iterable[RankAbort], further: int = 0) -> str:
    """The event with the number of times that orders were given: for the culprits, then for the
    other ranks.
    """
    number = len({abort.ordered_at for abort in aborts}) + further
    return kind if number < 2 else f"{kind}-{number}"


def _list_order(process: Process, ordered_at: datetime) -> RankAbort:
    """The order to end a process, as a recovery lists it."""
    identity = process.identity
    return RankAbort(rank=process.rank, host=process.host, pid=identity.pid, ordered_at=ordered_at)
