"""What the server asks of the node agents: each thing once at a time, handed out with the answer to
a heartbeat.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from hangwatch.diagnosis import EvidenceRequest
from hangwatch.protocol import heartbeat
from hangwatch.tracking.attempt import Attempt
from hangwatch.tracking.process import Process

from ..core.clock import Clock, ulid

EXPIRES = 10.0  # seconds after which an unanswered request may be repeated
REPEAT = 1.0  # seconds between two requests for the same thing
CALLS_ASKED = 128

_Subject = tuple[str, str, int]  # host, process, sequence (-1: stacks)


@dataclass(slots=True, kw_only=True)
class _Asked:
    command: heartbeat.Command
    agent: str
    at: float
    sent: bool = False
    answered: bool = False


@dataclass(slots=True, kw_only=True)
class CommandQueue:
    """Requests on their way. Times are the monotonic clock's."""

    clock: Clock
    asked: dict[_Subject, _Asked] = field(default_factory=dict)
    extra: list[_Asked] = field(default_factory=list)  # by people, who wait for theirs
    aborts: dict[str, dict[str, _Asked]] = field(
        default_factory=dict
    )  # by agent and id: there may be as many as a job has ranks
    _agents: set[str] = field(
        default_factory=set
    )  # of whom something may be asked: of most there is nothing

    def want(self, attempt: Attempt, requests: Iterable[EvidenceRequest], now: float) -> None:
        """Queues what the diagnosis would like to have, unless it was asked for just now."""
        for request in requests:
            process = attempt.processes.get(request.rank)
            if process is None or process.exit is not None:
                continue
            subject = (process.host, process.key, -1 if request.stacks else request.stream_uid)
            last = self.asked.get(subject)
            if last is not None and now - last.at < (REPEAT if last.answered else EXPIRES):
                continue
            ask = heartbeat.CommandKind.STACKS if request.stacks else heartbeat.CommandKind.CALLS
            command = heartbeat.Command(
                id=ulid(self.clock.wall()),
                ask=ask,
                key=process.key,
                uid=0 if request.stacks else request.stream_uid,
                from_seq=request.from_seq,
                most=CALLS_ASKED,
            )
            self.asked[subject] = _Asked(command=command, agent=process.agent, at=now)
            self._agents.add(process.agent)

    def stacks(self, process: Process, native: bool, now: float) -> str:
        """Queues a request for one process' stacks, made by a person. Its id."""
        return self.ask(
            process,
            heartbeat.Command(
                id=ulid(self.clock.wall()),
                ask=heartbeat.CommandKind.STACKS,
                key=process.key,
                native=native,
            ),
            now,
        )

    def ask(self, process: Process, command: heartbeat.Command, now: float) -> str:
        """Queues what a person asks of one process. The command's id."""
        self.extra.append(_Asked(command=command, agent=process.agent, at=now))
        self._agents.add(process.agent)
        return command.id

    def abort(self, process: Process, now: float) -> str:
        """Queues the order to end a process. Its id."""
        command = heartbeat.Command(
            id=ulid(self.clock.wall()), ask=heartbeat.CommandKind.ABORT, key=process.key
        )
        self.aborts.setdefault(process.agent, {})[command.id] = _Asked(
            command=command, agent=process.agent, at=now
        )
        self._agents.add(process.agent)
        return command.id

    def withdraw(self, agent: str, id: str) -> bool:
        """Takes back an order that a node agent has not been told yet; False where it has."""
        return self.aborts.get(agent, {}).pop(id, None) is not None

    def hand_out(self, agent: str) -> tuple[heartbeat.Command, ...]:
        """What a node agent has not been told yet."""
        if agent not in self._agents:
            return ()
        fresh = [a for a in (*self.asked.values(), *self.extra) if a.agent == agent and not a.sent]
        for asked in fresh:
            asked.sent = True
        self.extra = [a for a in self.extra if not a.sent]
        return tuple(a.command for a in (*fresh, *self.aborts.pop(agent, {}).values()))

    def answered(self, ids: set[str]) -> None:
        for asked in self.asked.values() if ids else ():
            if asked.command.id in ids:
                asked.answered = True

    def busy(self, agent: str) -> bool:
        """Something is asked of it, or will be soon: let it report more often."""
        return agent in self._agents and any(
            a.agent == agent and not a.answered for a in self.asked.values()
        )

    def outstanding(self, process: Process) -> bool:
        """Its stacks are on their way."""
        asked = self.asked.get((process.host, process.key, -1))
        return asked is not None and not asked.answered

    def expire(self, now: float) -> None:
        """Forgets what is too old to matter."""
        self.asked = {s: a for s, a in self.asked.items() if now - a.at < EXPIRES}
        self.extra = [a for a in self.extra if now - a.at < EXPIRES]
        aborts = {
            agent: {name: a for name, a in orders.items() if now - a.at < EXPIRES}
            for agent, orders in self.aborts.items()
        }
        self.aborts = {agent: orders for agent, orders in aborts.items() if orders}
        self._agents = {a.agent for a in (*self.asked.values(), *self.extra)} | self.aborts.keys()
