"""Carries out what `recovery` decides: says it, writes it down, hands the orders to the node agents, and tells what became of them.

An incident's recovery goes from planned over announced and ordered to done. Nothing is ordered before the database holds that it will
be, so that a server that is killed at any moment has counted what it did.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Literal

import sqlalchemy as sa

from hangwatch import wire
from hangwatch.state import Attempt, Fleet, Process

from . import schema
from .alerts import ABORTED, ABORTING
from .clock import Clock
from .commands import EXPIRES, Desk
from .incidents import Book, Case
from .keeper import Keeper
from .recovery import Decision, Facts, Rules, Step, decide, members
from .store import Store

log = logging.getLogger("hangwatch")

ANSWERS = 1.0  # seconds after a rank's end in which its node agent may still say that it sent the signal


@dataclass(slots=True, kw_only=True)
class _Order:
    incident: str
    rank: int
    at: float


@dataclass(slots=True, kw_only=True)
class Aborter:
    """``evidence`` says whether all stacks are there that an incident will have. Times are the monotonic clock's."""

    rules: Rules
    clock: Clock
    store: Store
    book: Book
    fleet: Fleet
    desk: Desk
    keeper: Keeper
    evidence: Callable[[Case, Attempt], bool]
    _orders: dict[str, _Order] = field(default_factory=dict)  # on their way, by the command's id
    _aborted_at: dict[tuple[str, int], float] = field(default_factory=dict)  # by attempt
    _settled: set[str] = field(default_factory=set)  # incidents for which nothing will be ended
    _failing: bool = False

    async def step(self, fresh: float) -> None:
        """One round over the incidents that may call for it. ``fresh`` in seconds: what is older is no news."""
        for case in [c for c in self.book.cases.values() if c.own and (c.open or _state(c) == "ordered")]:
            attempt = self.fleet.attempts.get((case.incident.job, case.incident.attempt))
            if attempt is None:
                continue
            if _state(case) == "ordered":
                self._collect(case, attempt, self.clock.monotonic())
            if not case.open or self.fleet.latest(attempt.job) is not attempt:
                self._withdraw(case)
            elif case.incident.id not in self._settled:
                try:
                    await self._advance(case, attempt, fresh)
                except sa.exc.SQLAlchemyError as error:
                    self._complain(error)
        self._aborted_at = {key: at for key, at in self._aborted_at.items() if key in self.fleet.attempts}
        self._settled &= self.book.cases.keys()

    def answered(self, answers: Iterable[wire.Aborted]) -> None:
        """What node agents say that became of orders."""
        for answer in answers:
            order = self._orders.pop(answer.request, None)
            case = self.book.cases.get(order.incident) if order is not None else None
            if order is None or case is None:
                continue
            if answer.error is not None:
                self._note(case, order.rank, result="failed", signal=answer.signal, error=answer.error)
            else:
                ended_at = self.clock.date(self.clock.monotonic())
                self._note(case, order.rank, result="ended" if answer.signal else "gone", signal=answer.signal, ended_at=ended_at)

    async def _advance(self, case: Case, attempt: Attempt, fresh: float) -> None:
        found = decide(self._facts(case, attempt, fresh), self.rules, self.clock.monotonic())
        undecided = _state(case) == "" and found.step is not Step.NOTHING
        if undecided or (_state(case) in ("planned", "withheld") and found.step is Step.END):
            # Asked only where it matters: it is a look into the database.
            earlier = await asyncio.to_thread(self.store.aborted, case.incident.job)
            history = len(earlier - {case.incident.id})
            found = decide(self._facts(case, attempt, fresh, history), self.rules, self.clock.monotonic())
            if not case.open or found.step is Step.NOTHING:  # things went on meanwhile
                return
            if undecided:
                self._plan(case, found, history)
            if found.step is Step.WITHHOLD:
                self._settled.add(case.incident.id)
                self._update(case, state="withheld", why=found.why)
                return
        if found.step is Step.END:
            self._end(case, attempt, found)
        elif _state(case) == "ordered":
            self._withdraw(case)

    def _facts(self, case: Case, attempt: Attempt, fresh: float, history: int = 0) -> Facts:
        recovery, now, wall = case.incident.recovery, self.clock.monotonic(), self.clock.wall()
        told = case.alerted is case.incident.severity
        stored = _state(case) == "ordered" or (told and self.evidence(case, attempt) and self.keeper.stored(case))
        return Facts(
            incident=case.incident,
            standing=case.standing,
            members=members(attempt),
            stored=stored,
            history=history,
            planned_at=None if recovery is None else now - (wall - recovery.planned_at).total_seconds(),
            aborted_at=self._aborted_at.get((attempt.job, attempt.number), float("-inf")),
            fresh=fresh,
        )

    def _plan(self, case: Case, found: Decision, history: int) -> None:
        now = self.clock.monotonic()
        planned = schema.Recovery(
            state="planned",
            scope=_scope(found),
            ranks=list(found.ranks),
            number=history + 1,
            limit=self.rules.limit,
            planned_at=self.clock.date(now),
            due_at=self.clock.date(max(now, found.due_at)),
        )
        self.book.recover(case, planned)

    def _end(self, case: Case, attempt: Attempt, found: Decision) -> None:
        """It is due. People are told first; once that is written, the node agents are."""
        known, now = _known(case), self.clock.monotonic()
        aim: dict[str, object] = {"scope": _scope(found), "ranks": list(found.ranks)}
        if known.state in ("planned", "withheld") or (known.state == "done" and found.whole and known.scope == "culprits"):
            self._update(case, state="announced", announced_at=self.clock.date(now), why="", **aim)
            self.keeper.tell(case, _event(ABORTING, _rounds(known) + 1))
        elif known.state == "announced":
            held, ordered_at = [attempt.ranks[rank] for rank in found.ranks], self.clock.date(now)
            ends = [schema.End(rank=p.rank, host=p.host, pid=p.identity.pid, ordered_at=ordered_at) for p in held]
            self._update(case, state="ordered", ends=[*known.ends, *ends], **aim)
            for process in held:
                self._order(case, process, now)
        elif known.state == "ordered":
            # A server that was killed may have written down what it had no time to order.
            on_their_way = {order.rank for order in self._orders.values() if order.incident == case.incident.id}
            for end in known.ends:
                if end.result == "ordered" and end.rank in found.ranks and end.rank not in on_their_way:
                    self._order(case, attempt.ranks[end.rank], now)

    def _order(self, case: Case, process: Process, now: float) -> None:
        self._orders[self.desk.abort(process, now)] = _Order(incident=case.incident.id, rank=process.rank, at=now)

    def _withdraw(self, case: Case) -> None:
        """Takes back what no node agent has been told yet: the job moves, or is not heard any more."""
        for request, order in list(self._orders.items()):
            if order.incident == case.incident.id and self.desk.withdraw(request):
                del self._orders[request]
                self._note(case, order.rank, result="left")

    def _collect(self, case: Case, attempt: Attempt, now: float) -> None:
        """Whoever has ended without an answer has ended all the same; and no answer for long is one, too."""
        on_their_way = {order.rank: (request, order) for request, order in self._orders.items() if order.incident == case.incident.id}
        for end in _known(case).ends:
            process = attempt.ranks.get(end.rank)
            request, order = on_their_way.get(end.rank, ("", None))
            if end.result != "ordered" or process is None:
                continue
            if process.ended is not None and (order is None or now - (process.ended_at or now) > ANSWERS):
                self._orders.pop(request, None)
                ours = signal.SIGKILL if process.ended.signal == signal.SIGKILL else None
                ended_at = self.clock.date(process.ended_at or now)
                self._note(case, end.rank, result="ended" if ours else "gone", signal=ours, ended_at=ended_at)
            elif order is not None and now - order.at > EXPIRES:
                self._orders.pop(request)
                self._note(case, end.rank, result="failed", error=f"its node agent has not answered for {EXPIRES:g} s")
        known = _known(case)
        last = [end.result for end in known.ends if end.ordered_at == known.ends[-1].ordered_at]
        if "ordered" in last:
            return
        if set(last) == {"left"}:
            self._update(case, state="planned")
            return
        self._aborted_at[attempt.job, attempt.number] = now
        self._update(case, state="done", done_at=self.clock.date(now))
        self.keeper.tell(case, _event(ABORTED, _rounds(known)))

    def _note(self, case: Case, rank: int, **told: object) -> None:
        """What became of the order to end a rank."""
        ends = [e.model_copy(update=told) if e.rank == rank and e.result == "ordered" else e for e in _known(case).ends]
        self._update(case, ends=ends)

    def _update(self, case: Case, **told: object) -> None:
        self.book.recover(case, _known(case).model_copy(update=told))

    def _complain(self, error: sa.exc.SQLAlchemyError) -> None:
        if not self._failing:
            log.error("no rank is ended as long as the database cannot be read: %s", getattr(error, "orig", error))
        self._failing = True


def _known(case: Case) -> schema.Recovery:
    assert case.incident.recovery is not None
    return case.incident.recovery


def _state(case: Case) -> str:
    return case.incident.recovery.state if case.incident.recovery is not None else ""


def _rounds(known: schema.Recovery) -> int:
    """How often ranks were ordered to be ended: the culprits, then the rest."""
    return len({end.ordered_at for end in known.ends})


def _event(kind: str, number: int) -> str:
    return kind if number < 2 else f"{kind}-{number}"


def _scope(found: Decision) -> Literal["culprits", "job"]:
    return "job" if found.whole else "culprits"
