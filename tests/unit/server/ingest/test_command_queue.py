"""Requests to node agents: in which order, how often, and until when."""

from __future__ import annotations

import asyncio

from hangwatch.diagnosis import EvidenceRequest
from hangwatch.protocol.commands import CommandKind
from hangwatch.protocol.heartbeat import Heartbeat, KernelsReply, StackReply
from hangwatch.server.core.clock import Clock
from hangwatch.server.ingest.command_queue import ACCEPTED_FOR_S, REQUEST_EXPIRES_S, CommandQueue
from tests.unit.server.attempts import make_attempt


def test_requests_are_serialized_and_rate_limited() -> None:
    command_queue, job = CommandQueue(clock=Clock()), make_attempt()
    wants = [
        EvidenceRequest(rank=1, stacks=True),
        EvidenceRequest(rank=1, stream_uid=4, from_seq=2),
        EvidenceRequest(rank=77, stacks=True),
    ]
    command_queue.request_evidence(job, wants, 100.0)
    first = command_queue.take_unsent("a")
    assert [(c.kind.value, c.key, c.uid, c.from_seq) for c in first] == [
        ("stacks", "1-1", 0, 0),
        ("calls", "1-1", 4, 2),
    ]
    command_queue.request_evidence(job, wants, 105.0)
    assert command_queue.take_unsent("a") == ()
    reply = StackReply(key="1-1", request=first[0].id, source="py-spy")
    command_queue.accept_replies(Heartbeat(host="n", agent="a", number=1, samples=(reply,)))
    command_queue.request_evidence(job, wants, 105.0)
    assert [c.kind.value for c in command_queue.take_unsent("a")] == ["stacks"]
    command_queue.request_evidence(job, wants, 100.0 + REQUEST_EXPIRES_S)
    assert [c.kind.value for c in command_queue.take_unsent("a")] == ["calls"]


def test_command_waits_for_an_agent_that_reports_rarely() -> None:
    command_queue, job = CommandQueue(clock=Clock()), make_attempt()
    wants = [EvidenceRequest(rank=1, stacks=True)]
    command_queue.request_evidence(job, wants, 100.0)
    command_queue.drop_expired(115.0, report_interval_s=20.0)
    command_queue.request_evidence(job, wants, 115.0)
    assert len(command_queue.take_unsent("a")) == 1, "and is not repeated before it was sent"
    command_queue.request_evidence(job, wants, 131.0)
    command_queue.drop_expired(131.0, report_interval_s=0.5)
    assert len(command_queue.take_unsent("a")) == 1, "nobody answered the first one"
    command_queue.request_evidence(job, wants, 150.0)
    command_queue.drop_expired(150.0 + REQUEST_EXPIRES_S + 1.0, report_interval_s=0.5)
    assert command_queue.take_unsent("a") == ()


def test_kernels_are_not_requested_again_while_a_debugger_may_read_them() -> None:
    command_queue, job = CommandQueue(clock=Clock()), make_attempt()
    wants = [EvidenceRequest(rank=1, kernels=True)]
    command_queue.request_evidence(job, wants, 100.0)
    (command,) = command_queue.take_unsent("a")
    assert (command.kind, command.key) == (CommandKind.KERNELS, "1-1")
    later = 100.0 + ACCEPTED_FOR_S - 1.0
    command_queue.drop_expired(later, report_interval_s=0.5)
    command_queue.request_evidence(job, wants, later)
    assert command_queue.take_unsent("a") == ()
    reply = KernelsReply(key="1-1", request=command.id, source="cuda-gdb")
    other = KernelsReply(key="1-1", request="another", source="cuda-gdb")
    beat = Heartbeat(host="n", agent="a", number=1, kernels=(reply, other))
    kept, unrequested = command_queue.accept_replies(beat)
    assert (kept.kernels, unrequested) == ((reply,), 1)


def test_only_what_was_requested_is_accepted_once() -> None:
    command_queue, job = CommandQueue(clock=Clock()), make_attempt()
    command_queue.request_evidence(job, [EvidenceRequest(rank=1, stacks=True)], 100.0)
    (command,) = command_queue.take_unsent("a")

    def count_accepted(agent: str, *requests: str) -> int:
        samples = tuple(
            StackReply(key=command.key, request=request, source="py-spy") for request in requests
        )
        beat = Heartbeat(host="n", agent=agent, number=1, samples=samples)
        kept, unrequested = command_queue.accept_replies(beat)
        assert len(kept.samples) + unrequested == len(samples)
        return len(kept.samples)

    assert count_accepted("a", "another", "") == 0
    assert count_accepted("b", command.id) == 0, "it was requested of another node agent"
    command_queue.drop_expired(100.0 + ACCEPTED_FOR_S, report_interval_s=0.5)
    assert count_accepted("a", command.id, command.id) == 1
    command_queue.request_evidence(job, [EvidenceRequest(rank=1, stacks=True)], 300.0)
    (command,) = command_queue.take_unsent("a")
    command_queue.drop_expired(301.0 + ACCEPTED_FOR_S, report_interval_s=0.5)
    assert count_accepted("a", command.id) == 0, "it is too late"


def test_agent_waits_until_there_is_a_command_that_no_heartbeat_took() -> None:
    command_queue, job = CommandQueue(clock=Clock()), make_attempt()

    async def wait_for_command() -> bool:
        waits = [asyncio.create_task(command_queue.wait_for_commands("a", 30.0)) for _ in range(2)]
        await asyncio.sleep(0.01)
        command_queue.queue_command(job.processes[0], CommandKind.TRACE, 100.0)
        assert len(command_queue.take_unsent("a")) == 1
        await asyncio.sleep(0.01)
        is_waiting = not any(wait.done() for wait in waits)
        command_queue.queue_command(job.processes[0], CommandKind.TRACE, 100.0)
        await asyncio.wait_for(asyncio.gather(*waits), 5.0)
        return is_waiting

    assert asyncio.run(wait_for_command())
    assert not command_queue.waiting_agents
    asyncio.run(command_queue.wait_for_commands("b", 0.01))
