"""Commands for the node agents, sent with the reply to a heartbeat or to a request that waits."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from hangwatch.diagnosis import EvidenceRequest
from hangwatch.protocol.commands import Command, CommandKind, CommandReply
from hangwatch.protocol.heartbeat import Heartbeat, get_family
from hangwatch.tracking.attempt import Attempt
from hangwatch.tracking.process import Process
from hangwatch.tracking.tenants import change_count

from ..core.clock import Clock, ulid
from ..core.events import wait_for_event

R = TypeVar("R", bound=CommandReply)

REQUEST_EXPIRES_S = 10.0  # an unanswered request may be repeated after this time
ACCEPTED_FOR_S = 120.0  # a reply so late is accepted: py-spy may take long on a busy host
MIN_REPEAT_INTERVAL_S = 1.0  # the shortest time between two requests for the same thing
_MAX_CALLS_REQUESTED = 128

# The kind of evidence, the process's key (empty for evidence of its host), and the stream's uid.
_Subject = tuple[CommandKind, str, int]


@dataclass(slots=True)
class _RequestedEvidence:
    command_id: str
    at: float
    request: EvidenceRequest
    is_answered: bool = False


@dataclass(slots=True)
class _AgentCommands:
    family: str = ""  # the family of the first process's job
    # The commands by id, until they are sent, and the time when each was queued.
    unsent: dict[str, tuple[Command, float]] = field(default_factory=dict)
    evidence: dict[_Subject, _RequestedEvidence] = field(default_factory=dict)  # the last request


_NO_COMMANDS = _AgentCommands()  # never filled


def _get_expiry_s(subject: _Subject) -> float:
    """After which time an unanswered request for this evidence may be repeated. A debugger takes long, and
    the ranks of a host take turns.
    """
    return ACCEPTED_FOR_S if subject[0] is CommandKind.KERNELS else REQUEST_EXPIRES_S


@dataclass(slots=True, kw_only=True)
class CommandQueue:
    """Queued and unanswered commands. The same evidence is requested only once at a time."""

    clock: Clock
    # The number of agents that have commands to get or to answer, by family of jobs.
    busy_counts: Counter[str] = field(default_factory=Counter)
    _agents: dict[str, _AgentCommands] = field(default_factory=dict)  # most have none
    # The node agent that may reply to a command, and until when, by the command's id, oldest first.
    _awaited: dict[str, tuple[str, float]] = field(default_factory=dict)
    _arrivals: dict[str, asyncio.Event] = field(default_factory=dict)  # the agents that wait
    _is_closed: bool = False

    def request_evidence(
        self, attempt: Attempt, requests: Iterable[EvidenceRequest], now: float
    ) -> None:
        """Queues the evidence that a diagnosis requests, unless it was requested recently."""
        for request in requests:
            process = attempt.processes.get(request.rank)
            if process is None:
                continue
            # The node agent still has the calls of a process that ended.
            has_ended = process.exit is not None and not request.hardware
            if has_ended and (request.stacks or request.kernels or process.finished_reporting):
                continue
            subject: _Subject
            if request.hardware:
                subject = CommandKind.HARDWARE, "", 0
            elif request.stacks:
                subject = CommandKind.STACKS, process.key, 0
            elif request.kernels:
                subject = CommandKind.KERNELS, process.key, 0
            else:
                subject = CommandKind.CALLS, process.key, request.stream_uid
            commands = self._open_commands(process)
            last = commands.evidence.get(subject)
            if last is not None:
                repeat_after_s = _get_expiry_s(subject)
                if last.is_answered:
                    # Other calls of the same stream are another request.
                    is_repeated = request == last.request
                    repeat_after_s = MIN_REPEAT_INTERVAL_S if is_repeated else 0.0
                if last.command_id in commands.unsent or now - last.at < repeat_after_s:
                    continue
            kind, _, uid = subject
            command_id = self.queue_command(
                process,
                kind,
                now,
                device=request.device,
                whole_job=request.whole_job,
                uid=uid,
                from_seq=request.from_seq,
                to_seq=request.to_seq,
                step=request.step,
                max_calls=_MAX_CALLS_REQUESTED,
                since_s=round(max(0.0, now - request.since), 3) if request.hardware else 0.0,
            )
            commands.evidence[subject] = _RequestedEvidence(command_id, now, request)

    def queue_command(self, process: Process, kind: CommandKind, now: float, **fields: Any) -> str:
        """Queues a command with further ``fields`` for the node agent of a process. Returns its id."""
        command = Command(id=ulid(self.clock.wall()), kind=kind, key=process.key, **fields)
        commands = self._open_commands(process)
        commands.unsent[command.id] = command, now
        self._awaited[command.id] = process.agent, now + ACCEPTED_FOR_S
        if (arrival := self._arrivals.get(process.agent)) is not None:
            arrival.set()
        return command.id

    def _open_commands(self, process: Process) -> _AgentCommands:
        commands = self._agents.get(process.agent)
        if commands is None:
            commands = _AgentCommands(family=get_family(process.attempt.job))
            self._agents[process.agent] = commands
            change_count(self.busy_counts, commands.family, 1)
        return commands

    def _find_commands(self, agent: str) -> _AgentCommands:
        return self._agents.get(agent, _NO_COMMANDS)

    @property
    def unsent_count(self) -> int:
        return sum(len(commands.unsent) for commands in self._agents.values())

    @property
    def waiting_agents(self) -> Collection[str]:
        """The agents that wait for commands."""
        return self._arrivals.keys()

    async def wait_for_commands(self, agent: str, seconds: float) -> None:
        """Waits up to ``seconds`` until there is a command for an agent that was not sent yet."""
        give_up_at = time.monotonic() + seconds
        while not self._is_closed and not self._find_commands(agent).unsent:
            arrival = self._arrivals.setdefault(agent, asyncio.Event())
            try:
                # The reply to a heartbeat may take the command whose arrival ends the waiting.
                if not await wait_for_event(give_up_at - time.monotonic(), arrival):
                    return
            finally:
                if self._arrivals.get(agent) is arrival:
                    del self._arrivals[agent]

    def close(self) -> None:
        """Ends all waiting."""
        self._is_closed = True
        for arrival in self._arrivals.values():
            arrival.set()

    def withdraw_command(self, agent: str, id: str) -> bool:
        """Removes a command that was not sent yet. Returns False if it was sent."""
        return self._find_commands(agent).unsent.pop(id, None) is not None

    def take_unsent(self, agent: str) -> tuple[Command, ...]:
        """The commands that were not sent to a node agent yet; they count as sent from now on."""
        unsent = self._find_commands(agent).unsent
        if not unsent:
            return ()
        commands = tuple([command for command, _ in unsent.values()])
        unsent.clear()
        return commands

    def accept_replies(self, beat: Heartbeat) -> tuple[Heartbeat, int]:
        """The heartbeat without evidence that its node agent was not asked for, and how many replies that
        were. Each command is answered once, and counts as answered from now on.
        """
        reply_count = len(beat.samples) + len(beat.kernels) + len(beat.calls) + len(beat.hardware)
        if not reply_count:
            return beat, 0
        samples = self._select_awaited(beat.agent, beat.samples)
        kernels = self._select_awaited(beat.agent, beat.kernels)
        calls = self._select_awaited(beat.agent, beat.calls)
        hardware = self._select_awaited(beat.agent, beat.hardware)
        unrequested = reply_count - len(samples) - len(kernels) - len(calls) - len(hardware)
        if unrequested:
            beat = replace(beat, samples=samples, kernels=kernels, calls=calls, hardware=hardware)
        answered = {reply.request for reply in (*samples, *kernels, *calls, *hardware)}
        for last in self._find_commands(beat.agent).evidence.values():
            last.is_answered |= last.command_id in answered
        return beat, unrequested

    def _select_awaited(self, agent: str, replies: Iterable[R]) -> tuple[R, ...]:
        """The replies to commands that this node agent may answer, which it may not do again."""
        selected = []
        for reply in replies:
            answerer, _ = self._awaited.get(reply.request, (None, 0.0))
            if answerer == agent:
                del self._awaited[reply.request]
                selected.append(reply)
        return tuple(selected)

    def has_open_request(self, agent: str) -> bool:
        """Whether evidence is requested from an agent, which should therefore report more often."""
        requested = self._find_commands(agent).evidence.values()
        return any(not last.is_answered for last in requested)

    def awaits_stacks(self, process: Process) -> bool:
        """Whether the stacks of a process were requested and have not arrived."""
        evidence = self._find_commands(process.agent).evidence
        last = evidence.get((CommandKind.STACKS, process.key, 0))
        return last is not None and not last.is_answered

    def drop_expired(self, now: float, report_interval_s: float) -> None:
        """Drops commands that are too old. A node agent gets them within ``report_interval_s``."""
        expired = []
        for command_id, (_, accepted_until) in self._awaited.items():
            if accepted_until >= now - report_interval_s:
                break  # the others are newer
            expired.append(command_id)
        for command_id in expired:
            del self._awaited[command_id]
        late_at = now - report_interval_s
        for agent, commands in list(self._agents.items()):
            commands.unsent = {
                command_id: (command, at)
                for command_id, (command, at) in commands.unsent.items()
                if at > late_at - REQUEST_EXPIRES_S
            }
            commands.evidence = {
                subject: last
                for subject, last in commands.evidence.items()
                if last.at > late_at - _get_expiry_s(subject)
            }
            if not commands.unsent and not commands.evidence:
                del self._agents[agent]
                change_count(self.busy_counts, commands.family, -1)
