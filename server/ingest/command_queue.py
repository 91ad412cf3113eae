"""Commands for the node agents, sent with the reply to a heartbeat or to a request that waits for them.
The same evidence is requested only once at a time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field

from hangwatch.diagnosis import EvidenceRequest
from hangwatch.protocol.commands import Command, CommandKind
from hangwatch.tracking.attempt import Attempt
from hangwatch.tracking.process import Process

from ..core.clock import Clock, ulid
from ..core.waiting import wait_for_event

REQUEST_EXPIRES_S = 10.0  # seconds after which an unanswered request may be repeated
MIN_REPEAT_INTERVAL_S = 1.0  # seconds between two requests for the same thing
MAX_CALLS_REQUESTED = 128

_STACKS, _HARDWARE = -1, -2  # instead of a stream
_Subject = tuple[
    str, str, int
]  # host, process key (empty: the host itself), stream uid or the above


@dataclass(slots=True, kw_only=True)
class _QueuedCommand:
    command: Command
    agent: str
    at: float
    sent: bool = False
    answered: bool = False


@dataclass(slots=True, kw_only=True)
class CommandQueue:
    """Queued and unanswered commands. Times are the monotonic clock's."""

    clock: Clock
    evidence_requests: dict[_Subject, _QueuedCommand] = field(default_factory=dict)
    user_requests: list[_QueuedCommand] = field(default_factory=list)
    # By agent and id: there may be as many as a job has ranks.
    aborts: dict[str, dict[str, _QueuedCommand]] = field(default_factory=dict)
    # Those that may have commands; most have none.
    _agents: set[str] = field(default_factory=set)
    _arrivals: dict[str, asyncio.Event] = field(default_factory=dict)  # of agents that wait
    _is_closed: bool = False

    def request_evidence(
        self, attempt: Attempt, requests: Iterable[EvidenceRequest], now: float
    ) -> None:
        """Queues the evidence that a diagnosis requests, unless it was requested recently."""
        for request in requests:
            process = attempt.processes.get(request.rank)
            if process is None or (process.exit is not None and not request.hardware):
                continue
            subject = _choose_subject(process, request)
            last = self.evidence_requests.get(subject)
            if last is not None:
                repeat_after_s = MIN_REPEAT_INTERVAL_S if last.answered else REQUEST_EXPIRES_S
                if not last.sent or now - last.at < repeat_after_s:
                    continue
            command = Command(
                id=ulid(self.clock.wall()),
                ask=_choose_kind(request),
                key=process.key,
                uid=0 if request.stacks else request.stream_uid,
                from_seq=request.from_seq,
                most=MAX_CALLS_REQUESTED,
                since_s=round(max(0.0, now - request.since), 3) if request.hardware else 0.0,
            )
            self.evidence_requests[subject] = _QueuedCommand(
                command=command, agent=process.agent, at=now
            )
            self._announce(process.agent)

    def request_stacks(self, process: Process, native: bool, now: float) -> str:
        """Queues a user's request for the stacks of a process. Returns the command's id."""
        return self.queue_command(
            process,
            Command(
                id=ulid(self.clock.wall()),
                ask=CommandKind.STACKS,
                key=process.key,
                native=native,
            ),
            now,
        )

    def queue_command(self, process: Process, command: Command, now: float) -> str:
        """Queues a user's command for a process. Returns the command's id."""
        self.user_requests.append(_QueuedCommand(command=command, agent=process.agent, at=now))
        self._announce(process.agent)
        return command.id

    def queue_abort(self, process: Process, now: float) -> str:
        """Queues a command to end a process. Returns the command's id."""
        command = Command(id=ulid(self.clock.wall()), ask=CommandKind.ABORT, key=process.key)
        self.aborts.setdefault(process.agent, {})[command.id] = _QueuedCommand(
            command=command, agent=process.agent, at=now
        )
        self._announce(process.agent)
        return command.id

    def _announce(self, agent: str) -> None:
        self._agents.add(agent)
        if (arrival := self._arrivals.get(agent)) is not None:
            arrival.set()

    @property
    def waiting_count(self) -> int:
        """The number of agents that wait for commands."""
        return len(self._arrivals)

    async def wait_for_commands(self, agent: str, seconds: float) -> None:
        """Waits up to ``seconds`` until there is a command for an agent that was not sent yet."""
        if self._is_closed or self._list_unsent(agent) or agent in self.aborts:
            return
        arrival = self._arrivals.setdefault(agent, asyncio.Event())
        try:
            await wait_for_event(seconds, arrival)
        finally:
            if self._arrivals.get(agent) is arrival:
                del self._arrivals[agent]

    def close(self) -> None:
        """Ends all waiting."""
        self._is_closed = True
        for arrival in self._arrivals.values():
            arrival.set()

    def withdraw_abort(self, agent: str, id: str) -> bool:
        """Removes an abort command that was not sent yet. Returns False if it was sent."""
        return self.aborts.get(agent, {}).pop(id, None) is not None

    def take_unsent(self, agent: str) -> tuple[Command, ...]:
        """The commands that were not sent to a node agent yet; they count as sent from now on."""
        unsent = self._list_unsent(agent)
        for queued in unsent:
            queued.sent = True
        if unsent:
            self.user_requests = [queued for queued in self.user_requests if not queued.sent]
        unsent += self.aborts.pop(agent, {}).values()
        return tuple(queued.command for queued in unsent)

    def _list_unsent(self, agent: str) -> list[_QueuedCommand]:
        """Without aborts."""
        if agent not in self._agents:
            return []
        requests = (*self.evidence_requests.values(), *self.user_requests)
        return [queued for queued in requests if queued.agent == agent and not queued.sent]

    def mark_answered(self, ids: set[str]) -> None:
        if not ids:
            return
        for queued in self.evidence_requests.values():
            if queued.command.id in ids:
                queued.answered = True

    def has_open_request(self, agent: str) -> bool:
        """Whether evidence is requested from an agent, so that it should report more often."""
        return agent in self._agents and any(
            queued.agent == agent and not queued.answered
            for queued in self.evidence_requests.values()
        )

    def awaits_stacks(self, process: Process) -> bool:
        """Whether the stacks of a process were requested and have not arrived."""
        queued = self.evidence_requests.get((process.host, process.key, _STACKS))
        return queued is not None and not queued.answered

    def drop_expired(self, now: float, report_interval_s: float) -> None:
        """Drops commands that are too old. A node agent gets them within ``report_interval_s``."""
        oldest_at = now - REQUEST_EXPIRES_S - report_interval_s
        self.evidence_requests = {
            subject: queued
            for subject, queued in self.evidence_requests.items()
            if queued.at > oldest_at
        }
        self.user_requests = [queued for queued in self.user_requests if queued.at > oldest_at]
        for agent, aborts in list(self.aborts.items()):
            recent = {
                command_id: queued for command_id, queued in aborts.items() if queued.at > oldest_at
            }
            if recent:
                self.aborts[agent] = recent
            else:
                del self.aborts[agent]
        requests = (*self.evidence_requests.values(), *self.user_requests)
        self._agents = {queued.agent for queued in requests} | self.aborts.keys()


def _choose_subject(process: Process, request: EvidenceRequest) -> _Subject:
    if request.hardware:
        return (process.host, "", _HARDWARE)
    return (process.host, process.key, _STACKS if request.stacks else request.stream_uid)


def _choose_kind(request: EvidenceRequest) -> CommandKind:
    if request.hardware:
        return CommandKind.HARDWARE
    return CommandKind.STACKS if request.stacks else CommandKind.CALLS
