"""When the process for node agents' connections counts as one that does not respond."""

from __future__ import annotations

import asyncio
import socket

import pytest

from hangwatch.protocol.heartbeat import HeartbeatReply
from hangwatch.server.core.load import Load
from hangwatch.server.ingest import agent_worker
from hangwatch.server.ingest.agent_worker import AgentWorker
from hangwatch.server.ingest.connection_worker import FrameType, encode_frame
from hangwatch.server.ingest.heartbeat_queue import HeartbeatQueue
from hangwatch.tracking.fleet import AgentRegistry


@pytest.fixture(autouse=True)
def short_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent_worker, "CHECK_INTERVAL_S", 0.02)
    monkeypatch.setattr(agent_worker, "RESPONSE_TIMEOUT_S", 0.3)


def test_process_with_a_backlog_is_not_replaced() -> None:
    """The process passes on one heartbeat after another, and does not reach the mark for long."""

    async def wait_with_backlog() -> None:
        ours, theirs = socket.socketpair()
        worker = AgentWorker(
            request_lines=(),
            agents=AgentRegistry(),
            heartbeat_queue=HeartbeatQueue(lambda beat, is_urgent: HeartbeatReply(), Load()),
            answer_request=lambda request, send: None,
        )
        with theirs:
            loop = asyncio.get_running_loop()
            transport, _ = await loop.create_connection(lambda: worker, sock=ours)
            end = asyncio.create_task(worker._wait_for_end())
            for _ in range(20):
                theirs.send(encode_frame(FrameType.REQUEST, 1))
                await asyncio.sleep(0.05)
            assert not end.done()
            worker.pause_reading()
            await asyncio.sleep(1.0)
            assert not end.done(), "nothing can arrive while reading is paused"
            worker.resume_reading()
            assert await asyncio.wait_for(end, 5.0) == "does not respond"
            transport.close()

    asyncio.run(wait_with_backlog())
