"""Orders to the node agents to end ranks, and their results as recorded in an incident's recovery."""

from __future__ import annotations

import signal
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from hangwatch.model.recoveries import RankAbort
from hangwatch.protocol import heartbeat
from hangwatch.protocol.commands import CommandKind
from hangwatch.tracking.attempt import Attempt
from hangwatch.tracking.process import Process

from ..core.clock import Clock
from ..incidents.records import IncidentRecord
from ..incidents.registry import IncidentRegistry
from ..ingest.command_queue import REQUEST_EXPIRES_S, CommandQueue

# After a rank's exit, how long to wait for its node agent's report that it sent the signal.
REPLY_DELAY_LIMIT_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _AbortOrder:
    incident: str
    process: Process
    agent: str  # the node agent that has the command
    ordered_at: float

    def is_fulfilled(self, attempt: Attempt) -> bool:
        """The process has exited, or another one has its rank."""
        process = attempt.processes.get(self.process.rank)
        return process is None or process.key != self.process.key or process.exit is not None


@dataclass(slots=True, kw_only=True)
class AbortOrders:
    """The orders that were queued or sent, until their result is known. Times are the monotonic
    clock's.
    """

    clock: Clock
    incidents: IncidentRegistry
    commands: CommandQueue
    _orders: dict[str, _AbortOrder] = field(default_factory=dict)  # by the command's id

    def order_aborts(self, case: IncidentRecord, processes: Iterable[Process], now: float) -> None:
        for process in processes:
            command_id = self.commands.queue_command(process, CommandKind.ABORT, now)
            self._orders[command_id] = _AbortOrder(
                incident=case.incident.id, process=process, agent=process.agent, ordered_at=now
            )

    def list_ordered_ranks(self, case: IncidentRecord) -> set[int]:
        """The ranks whose orders have no result yet."""
        return {order.process.rank for _, order in self._list_orders(case)}

    def withdraw(self, case: IncidentRecord) -> None:
        """Withdraws the orders that were not sent yet: the job makes progress, or is no longer
        reported.
        """
        for command_id, order in self._list_orders(case):
            if self.commands.withdraw_command(order.agent, command_id):
                del self._orders[command_id]
                self._record_result(case, order.process.rank, result="left")

    def apply_replies(self, replies: Iterable[heartbeat.AbortReply]) -> None:
        """Records the results that a node agent reports."""
        for reply in replies:
            order = self._orders.pop(reply.request, None)
            case = self.incidents.records.get(order.incident) if order is not None else None
            if order is None or case is None:
                continue
            if reply.error is not None:
                self._record_failure(case, order, reply.error, reply.signal)
                continue
            self._record_result(
                case,
                order.process.rank,
                result="ended" if reply.signal else "gone",
                signal=reply.signal,
                ended_at=self.clock.date(self.clock.monotonic()),
            )

    def collect_results(self, case: IncidentRecord, attempt: Attempt, now: float) -> None:
        """Records results without a reply: exits of ordered ranks, and orders that expired."""
        for command_id, order in self._list_orders(case):
            is_fulfilled = order.is_fulfilled(attempt)
            # After an exit, the agent's reply may still arrive.
            limit_s = REPLY_DELAY_LIMIT_S if is_fulfilled else REQUEST_EXPIRES_S
            if now - order.ordered_at > limit_s:
                del self._orders[command_id]
                if not is_fulfilled:
                    error = f"its node agent has not answered for {REQUEST_EXPIRES_S:g} s"
                    self._record_failure(case, order, error)
        ordered_ranks = self.list_ordered_ranks(case)
        for end in case.recovery.ends:
            process = attempt.processes.get(end.rank)
            if end.result != "ordered" or end.rank in ordered_ranks:
                continue
            if process is None or process.exit is None:
                continue
            was_killed = process.exit.signal == signal.SIGKILL
            self._record_result(
                case,
                end.rank,
                result="ended" if was_killed else "gone",
                signal=signal.SIGKILL if was_killed else None,
                ended_at=self.clock.date(process.exited_at or now),
            )

    def _list_orders(self, case: IncidentRecord) -> list[tuple[str, _AbortOrder]]:
        """The orders of an incident, with the ids of their commands."""
        return [item for item in self._orders.items() if item[1].incident == case.incident.id]

    def _record_failure(
        self, case: IncidentRecord, order: _AbortOrder, error: str, signal: int | None = None
    ) -> None:
        process, ends = order.process, case.recovery.ends
        if not any(end.rank == process.rank and end.result == "ordered" for end in ends):
            # It is beyond the number of orders that the recovery lists.
            end = RankAbort(
                rank=process.rank,
                host=process.host,
                pid=process.identity.pid,
                ordered_at=ends[-1].ordered_at,
            )
            self.incidents.update_recovery(case, ends=(*ends, end))
        self._record_result(case, process.rank, result="failed", signal=signal, error=error)

    def _record_result(self, case: IncidentRecord, rank: int, **changes: Any) -> None:
        """Sets the result of the open order to end a rank."""
        ends = tuple(
            replace(end, **changes) if end.rank == rank and end.result == "ordered" else end
            for end in case.recovery.ends
        )
        self.incidents.update_recovery(case, ends=ends)
