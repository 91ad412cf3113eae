"""Carries out what `recovery` decides: says it, writes it down, hands the orders to the node
agents, and tells what became of them.

An incident's recovery goes from planned over announced and ordered to done. Nothing is ordered
before the database holds that it will be, so that a server that is killed at any moment has counted
what it did.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import sqlalchemy as sa

from hangwatch.model.kinds import Severity
from hangwatch.model.ranks import AttemptKey
from hangwatch.model.recoveries import RankAbort, Recovery, RecoveryScope
from hangwatch.protocol import heartbeat
from hangwatch.tracking.attempt import Attempt
from hangwatch.tracking.fleet import Fleet
from hangwatch.tracking.process import Process

from ..alerting.events import ABORTED, ABORTING, PLANNED
from ..core.clock import Clock
from ..incidents.records import IncidentRecord
from ..incidents.registry import IncidentRegistry
from ..ingest.command_queue import REQUEST_EXPIRES_S, CommandQueue
from ..storage.persistence import PersistenceWorker
from ..storage.store import Store
from .policy import Decision, Facts, Rules, Step, decide, members

log = logging.getLogger("hangwatch")

# of each order: of a large job the others are ended as well, and told of only where that fails
ENDS_SHOWN = 256
RESTS, LOOK_EVERY = (
    20.0,
    1.0,
)  # times what a look at an incident took, or seconds, until the next one
ANSWERS = (
    1.0  # seconds after a rank's end in which its node agent may still say that it sent the signal
)


@dataclass(slots=True, kw_only=True)
class _Order:
    incident: str
    agent: str
    rank: int
    pid: int
    host: str
    at: float


@dataclass(slots=True, kw_only=True)
class Aborter:
    """``evidence`` says whether all stacks are there that an incident will have. Times are the
    monotonic clock's.
    """

    rules: Rules
    clock: Clock
    store: Store
    incidents: IncidentRegistry
    fleet: Fleet
    commands: CommandQueue
    persistence: PersistenceWorker
    evidence: Callable[[IncidentRecord, Attempt], bool]
    _orders: dict[str, _Order] = field(default_factory=dict)  # on their way, by the command's id
    _aborted_at: dict[AttemptKey, float] = field(default_factory=dict)  # by attempt
    _rests: dict[str, float] = field(
        default_factory=dict
    )  # until when an incident is not looked at again
    _settled: set[str] = field(default_factory=set)  # incidents for which nothing will be ended
    _failing: bool = False

    async def step(self, fresh: float) -> None:
        """One round over the incidents that may call for it. ``fresh`` in seconds: what is older is
        no news.
        """
        for case in [
            c
            for c in self.incidents.records.values()
            if c.is_own and (c.is_open or _state(c) == "ordered")
        ]:
            attempt = self.fleet.attempts.get(case.attempt_key)
            if attempt is None:
                continue
            if _state(case) == "ordered":
                self._collect(case, attempt, self.clock.monotonic())
            if not case.is_open or self.fleet.latest_attempt(attempt.job) is not attempt:
                self._withdraw(case)
            elif case.incident.id not in self._settled:
                try:
                    await self._advance(case, attempt, fresh)
                except sa.exc.SQLAlchemyError as error:
                    self._complain(error)
        self._aborted_at = {
            key: at for key, at in self._aborted_at.items() if key in self.fleet.attempts
        }
        self._settled &= self.incidents.records.keys()
        self._rests = {
            name: until for name, until in self._rests.items() if name in self.incidents.records
        }

    def answered(self, answers: Iterable[heartbeat.AbortReply]) -> None:
        """What node agents say that became of orders."""
        for answer in answers:
            order = self._orders.pop(answer.request, None)
            case = self.incidents.records.get(order.incident) if order is not None else None
            if order is None or case is None:
                continue
            if answer.error is not None:
                self._failed(case, order, answer.error, answer.signal)
            else:
                ended_at = self.clock.date(self.clock.monotonic())
                self._note(
                    case,
                    order.rank,
                    result="ended" if answer.signal else "gone",
                    signal=answer.signal,
                    ended_at=ended_at,
                )

    async def _advance(self, case: IncidentRecord, attempt: Attempt, fresh: float) -> None:
        began, now = time.perf_counter(), self.clock.monotonic()
        if now < self._rests.get(case.incident.id, 0.0) and _state(case) in ("", "planned"):
            return
        found = decide(self._facts(case, attempt, fresh), self.rules, now)
        wait = (
            min(LOOK_EVERY, found.due_at - now)
            if found.step is Step.WAIT and case.incident.recovery is not None
            else 0.0
        )
        self._rests[case.incident.id] = now + max(wait, RESTS * (time.perf_counter() - began))
        undecided = _state(case) == "" and found.step is not Step.NOTHING
        if undecided or (
            _state(case) in ("planned", "withheld") and found.step in (Step.END, Step.WITHHOLD)
        ):
            # Asked only where it matters: it is a look into the database.
            earlier = await asyncio.to_thread(self.store.load_aborted_ids, case.incident.job)
            history = len(earlier - {case.incident.id})
            found = decide(
                self._facts(case, attempt, fresh, history), self.rules, self.clock.monotonic()
            )
            if not case.is_open or found.step is Step.NOTHING:  # things went on meanwhile
                return
            if undecided:
                self._plan(case, found, history)
            if found.step is Step.WITHHOLD:
                self._settled.add(case.incident.id)
                self._update(case, state="withheld", why=found.why)
                return
        if found.step is Step.END and (
            _state(case) in ("announced", "ordered") or not self._another(case)
        ):
            self._end(case, attempt, found)
        elif _state(case) == "ordered":
            self._withdraw(case)

    def _another(self, case: IncidentRecord) -> bool:
        """Ranks of the same attempt are just being ended for another incident: that may be the end
        of this one.
        """
        mine = case.attempt_key
        others = (
            c for c in self.incidents.records.values() if c is not case and c.attempt_key == mine
        )
        return any(
            _state(c) == "ordered" or (_state(c) == "announced" and c.is_open) for c in others
        )

    def _facts(
        self, case: IncidentRecord, attempt: Attempt, fresh: float, history: int = 0
    ) -> Facts:
        recovery, now, wall = case.incident.recovery, self.clock.monotonic(), self.clock.wall()
        told = case.alerted_severity is case.incident.severity
        stored = _state(case) == "ordered" or (
            told and self.evidence(case, attempt) and self.persistence.is_stored(case)
        )
        return Facts(
            incident=case.incident,
            standing=case.alert_summary,
            members=members(attempt),
            stored=stored,
            history=history,
            planned_at=(
                None if recovery is None else now - (wall - recovery.planned_at).total_seconds()
            ),
            aborted_at=self._aborted_at.get(attempt.key, float("-inf")),
            fresh=fresh,
        )

    def _plan(self, case: IncidentRecord, found: Decision, history: int) -> None:
        now = self.clock.monotonic()
        planned = Recovery(
            state="planned",
            scope=_scope(found),
            ranks=found.ranks,
            number=history + 1,
            limit=self.rules.limit,
            planned_at=self.clock.date(now),
            due_at=self.clock.date(max(now, found.due_at)),
        )
        self.incidents.record_recovery(case, planned)
        if (
            found.step is not Step.WITHHOLD and case.alerted_severity is Severity.ALERT
        ):  # else it is part of the alert
            self.persistence.queue_alert(case, PLANNED)

    def _end(self, case: IncidentRecord, attempt: Attempt, found: Decision) -> None:
        """It is due. People are told first; once that is written, the node agents are."""
        known, now = _known(case), self.clock.monotonic()
        aim: dict[str, Any] = {"scope": _scope(found), "ranks": found.ranks}
        if known.state in ("planned", "withheld") or (
            known.state == "done" and found.whole and known.scope == "culprits"
        ):
            self._update(case, state="announced", announced_at=self.clock.date(now), why="", **aim)
            self.persistence.queue_alert(case, _event(ABORTING, _rounds(known) + 1))
        elif known.state == "announced":
            held, ordered_at = (
                [attempt.processes[rank] for rank in found.ranks],
                self.clock.date(now),
            )
            ends = [
                RankAbort(rank=p.rank, host=p.host, pid=p.identity.pid, ordered_at=ordered_at)
                for p in held[:ENDS_SHOWN]
            ]
            self._update(case, state="ordered", ends=(*known.ends, *ends), **aim)
            for process in held:
                self._order(case, process, now)
        elif known.state == "ordered":
            # A server that was killed may have written down what it had no time to order.
            on_their_way = {
                order.rank for order in self._orders.values() if order.incident == case.incident.id
            }
            settled = {end.rank for end in known.ends if end.result != "ordered"}
            for rank in {*found.ranks}.intersection(known.ranks) - on_their_way - settled:
                self._order(case, attempt.processes[rank], now)

    def _order(self, case: IncidentRecord, process: Process, now: float) -> None:
        order = _Order(
            incident=case.incident.id,
            agent=process.agent,
            rank=process.rank,
            pid=process.identity.pid,
            host=process.host,
            at=now,
        )
        self._orders[self.commands.queue_abort(process, now)] = order

    def _withdraw(self, case: IncidentRecord) -> None:
        """Takes back what no node agent has been told yet: the job moves, or is not heard any more."""
        for request, order in list(self._orders.items()):
            if order.incident == case.incident.id and self.commands.withdraw_abort(
                order.agent, request
            ):
                del self._orders[request]
                self._note(case, order.rank, result="left")

    def _collect(self, case: IncidentRecord, attempt: Attempt, now: float) -> None:
        """Whoever has ended without an answer has ended all the same; and no answer for long is
        one, too.
        """
        mine = {
            request: order
            for request, order in self._orders.items()
            if order.incident == case.incident.id
        }
        for request, order in mine.items():
            process = attempt.processes.get(order.rank)
            over = process is None or process.identity.pid != order.pid or process.exit is not None
            if over or now - order.at > REQUEST_EXPIRES_S:
                if not over:
                    self._failed(
                        case, order, f"its node agent has not answered for {REQUEST_EXPIRES_S:g} s"
                    )
                elif now - order.at <= ANSWERS:
                    continue  # the answer may be on its way, too
                del self._orders[request]
        asked = {
            order.rank for order in self._orders.values() if order.incident == case.incident.id
        }
        for end in _known(case).ends:
            process = attempt.processes.get(end.rank)
            if (
                end.result == "ordered"
                and end.rank not in asked
                and process is not None
                and process.exit is not None
            ):
                ours = signal.SIGKILL if process.exit.signal == signal.SIGKILL else None
                ended_at = self.clock.date(process.exited_at or now)
                self._note(
                    case,
                    end.rank,
                    result="ended" if ours else "gone",
                    signal=ours,
                    ended_at=ended_at,
                )
        known = _known(case)
        last = [end.result for end in known.ends if end.ordered_at == known.ends[-1].ordered_at]
        if "ordered" in last:
            return
        if set(last) == {"left"}:
            self._update(case, state="planned")
            return
        self._aborted_at[attempt.key] = now
        self._update(case, state="done", done_at=self.clock.date(now))
        self.persistence.queue_alert(case, _event(ABORTED, _rounds(known)))

    def _failed(
        self, case: IncidentRecord, order: _Order, error: str, signal: int | None = None
    ) -> None:
        known = _known(case)
        if all(
            end.rank != order.rank or end.result != "ordered" for end in known.ends
        ):  # one of those that are not shown
            end = RankAbort(
                rank=order.rank,
                host=order.host,
                pid=order.pid,
                ordered_at=known.ends[-1].ordered_at,
            )
            self._update(case, ends=(*known.ends, end))
        self._note(case, order.rank, result="failed", signal=signal, error=error)

    def _note(self, case: IncidentRecord, rank: int, **told: Any) -> None:
        """What became of the order to end a rank."""
        ends = tuple(
            replace(e, **told) if e.rank == rank and e.result == "ordered" else e
            for e in _known(case).ends
        )
        self._update(case, ends=ends)

    def _update(self, case: IncidentRecord, **told: Any) -> None:
        self.incidents.record_recovery(case, replace(_known(case), **told))

    def _complain(self, error: sa.exc.SQLAlchemyError) -> None:
        if not self._failing:
            log.error(
                "no rank is ended as long as the database cannot be read: %s",
                getattr(error, "orig", error),
            )
        self._failing = True


def _known(case: IncidentRecord) -> Recovery:
    assert case.incident.recovery is not None
    return case.incident.recovery


def _state(case: IncidentRecord) -> str:
    return case.incident.recovery.state if case.incident.recovery is not None else ""


def _rounds(known: Recovery) -> int:
    """How often ranks were ordered to be ended: the culprits, then the rest."""
    return len({end.ordered_at for end in known.ends})


def _event(kind: str, number: int) -> str:
    return kind if number < 2 else f"{kind}-{number}"


def _scope(found: Decision) -> RecoveryScope:
    return "job" if found.whole else "culprits"
