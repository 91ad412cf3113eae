"""The processes that serve node agents' connections: one, or more if there are more hosts than files
that a process may open.
"""

from __future__ import annotations

import asyncio
import resource
import socket
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from hangwatch.protocol.heartbeat import URGENT_PRIORITY

from ..core import limits, timeouts
from ..ingest.request_heads import WorkerOptions
from .agent_worker import AgentWorker, AnswerRequest, ServeConnection

# Fewer hosts than this cost little, and then one process is simpler to look after.
MIN_HOSTS = 64
MAX_CONNECTIONS = 16384  # of each process, however many files it may open
RESERVED_FILES = 128  # that a process has open besides connections
FULL_SHARE = 0.9  # of its connections: then another process starts beside it
MAX_BUFFERED_BYTES = 256 << 20  # by each process, of requests that are not complete


@dataclass(frozen=True, slots=True)
class AgentWorkerPool:
    """Each process starts once there are as many hosts as its predecessors can serve."""

    workers: tuple[AgentWorker, ...]
    request_starts: tuple[bytes, ...]  # of the requests that they take

    async def run_workers(self) -> None:
        """Runs until it is cancelled."""
        await asyncio.gather(*[worker.run() for worker in self.workers])

    def set_connection_server(self, serve_connection: ServeConnection) -> None:
        """Sets what serves the connections with requests that are not heartbeats."""
        for worker in self.workers:
            worker.serve_connection = serve_connection

    @property
    def is_running(self) -> bool:
        return any(worker.is_running for worker in self.workers)

    def take_connection(
        self, connected: socket.socket, received: bytes, peer_uid: int | None
    ) -> bool:
        """See `AgentWorker.take_connection`; False if no process can take it now."""
        return any(worker.take_connection(connected, received, peer_uid) for worker in self.workers)

    async def read_arrived(self, within_s: float) -> bool:
        """See `AgentWorker.read_arrived`, of all processes."""
        return all(
            await asyncio.gather(*[worker.read_arrived(within_s) for worker in self.workers])
        )

    def pause_reading(self) -> None:
        for worker in self.workers:
            worker.pause_reading()

    def resume_reading(self) -> None:
        for worker in self.workers:
            worker.resume_reading()


def make_worker_pool(
    heartbeat_paths: Iterable[str], count_hosts: Callable[[], int], answer_request: AnswerRequest
) -> AgentWorkerPool:
    """Makes enough workers for `limits.AGENTS` hosts; most of their processes never start."""
    file_count, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if file_count == resource.RLIM_INFINITY:
        file_count = MAX_CONNECTIONS + RESERVED_FILES
    max_connections = max(MIN_HOSTS, min(MAX_CONNECTIONS, file_count - RESERVED_FILES))
    request_lines = tuple(f"POST {path} HTTP/1.1" for path in heartbeat_paths)
    options = WorkerOptions(
        request_lines=request_lines,
        urgent_priority=URGENT_PRIORITY,
        max_head=limits.HEAD.most,
        max_body=limits.BODY.most,
        max_buffered=MAX_BUFFERED_BYTES,
        head_timeout_s=timeouts.HEAD_S,
        body_timeout_s=timeouts.BODY_S,
        keep_alive_s=timeouts.KEEP_ALIVE_S,
    )
    workers = tuple(
        AgentWorker(
            options=options,
            count_hosts=count_hosts,
            answer_request=answer_request,
            min_hosts=max(MIN_HOSTS, int(FULL_SHARE * served_before)),
            max_connections=max_connections,
        )
        for served_before in range(0, limits.AGENTS.most, max_connections)
    )
    return AgentWorkerPool(workers, tuple(line.encode() for line in request_lines))
