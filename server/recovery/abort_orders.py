"""Orders to the node agents to end ranks, and their results as recorded in an incident's recovery."""

from __future__ import annotations

import signal
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hangwatch.model.recoveries import RankAbort, Recovery
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


@dataclass(slots=True, kw_only=True)
class _AbortOrder:
    incident: str
    agent: str
    rank: int
    pid: int
    host: str
    ordered_at: float


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
                incident=case.incident.id,
                agent=process.agent,
                rank=process.rank,
                pid=process.identity.pid,
                host=process.host,
                ordered_at=now,
            )

    def list_ordered_ranks(self, case: IncidentRecord) -> set[int]:
        """The ranks whose orders have no result yet."""
        return {order.rank for order in self._orders.values() if order.incident == case.incident.id}

    def withdraw(self, case: IncidentRecord) -> None:
        """Withdraws the orders that were not sent yet: the job makes progress, or is no longer
        reported.
        """
        for command_id, order in list(self._orders.items()):
            if order.incident != case.incident.id:
                continue
            if self.commands.withdraw_command(order.agent, command_id):
                del self._orders[command_id]
                self._record_result(case, order.rank, result="left")

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
                order.rank,
                result="ended" if reply.signal else "gone",
                signal=reply.signal,
                ended_at=self.clock.date(self.clock.monotonic()),
            )

    def collect_results(self, case: IncidentRecord, attempt: Attempt, now: float) -> None:
        """Records results without a reply: exits of ordered ranks, and orders that expired."""
        self._close_unanswered_orders(case, attempt, now)
        ordered_ranks = self.list_ordered_ranks(case)
        for end in get_recovery(case).ends:
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

    def _close_unanswered_orders(self, case: IncidentRecord, attempt: Attempt, now: float) -> None:
        for command_id, order in list(self._orders.items()):
            if order.incident != case.incident.id:
                continue
            age_s = now - order.ordered_at
            process = attempt.processes.get(order.rank)
            has_ended = (
                process is None or process.identity.pid != order.pid or process.exit is not None
            )
            if has_ended and age_s <= REPLY_DELAY_LIMIT_S:
                continue  # the agent's reply may still arrive
            if not has_ended and age_s <= REQUEST_EXPIRES_S:
                continue
            if not has_ended:
                error = f"its node agent has not answered for {REQUEST_EXPIRES_S:g} s"
                self._record_failure(case, order, error)
            del self._orders[command_id]

    def _record_failure(
        self, case: IncidentRecord, order: _AbortOrder, error: str, signal: int | None = None
    ) -> None:
        recovery = get_recovery(case)
        is_listed = any(end.rank == order.rank and end.result == "ordered" for end in recovery.ends)
        if not is_listed:  # beyond the number of orders that the recovery lists
            end = RankAbort(
                rank=order.rank,
                host=order.host,
                pid=order.pid,
                ordered_at=recovery.ends[-1].ordered_at,
            )
            update_recovery(self.incidents, case, ends=(*recovery.ends, end))
        self._record_result(case, order.rank, result="failed", signal=signal, error=error)

    def _record_result(self, case: IncidentRecord, rank: int, **changes: Any) -> None:
        """Sets the result of the open order to end a rank."""
        ends = tuple(
            replace(end, **changes) if end.rank == rank and end.result == "ordered" else end
            for end in get_recovery(case).ends
        )
        update_recovery(self.incidents, case, ends=ends)


def get_recovery(case: IncidentRecord) -> Recovery:
    """The recovery of an incident that has one."""
    assert case.incident.recovery is not None
    return case.incident.recovery


def update_recovery(incidents: IncidentRegistry, case: IncidentRecord, **changes: Any) -> None:
    incidents.record_recovery(case, replace(get_recovery(case), **changes))


def get_latest_round(recovery: Recovery) -> Sequence[RankAbort]:
    """The orders that were given last: those to end the culprits, or then the other ranks."""
    ordered_at = recovery.ends[-1].ordered_at
    return [end for end in recovery.ends if end.ordered_at == ordered_at]


def count_rounds(recovery: Recovery) -> int:
    """How many times orders were given: for the culprits, then for the other ranks."""
    return len({end.ordered_at for end in recovery.ends})
