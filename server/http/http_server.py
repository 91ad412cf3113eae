"""uvicorn's server, which also serves the connections that the processes for node agents return."""

from __future__ import annotations

import asyncio
import socket
from types import FrameType

import uvicorn

from .app_state import AppState
from .connections import LimitedHttpProtocol


class HttpServer(uvicorn.Server):
    """Ends the event streams and what waits for commands when a signal arrives."""

    def __init__(
        self, config: uvicorn.Config, live: AppState, protocol_class: type[LimitedHttpProtocol]
    ) -> None:
        super().__init__(config)
        self._live, self._protocol_class = live, protocol_class
        self._tasks: set[asyncio.Task[object]] = set()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._live.agent_worker.serve_connection = self._serve_connection

    def _serve_connection(self, connected: socket.socket, received: bytes) -> None:
        """Serves a connection that a process for node agents returned."""

        def create_protocol() -> LimitedHttpProtocol:
            protocol = self._protocol_class(
                config=self.config, server_state=self.server_state, app_state=self.lifespan.state
            )
            protocol.returned_data = received
            return protocol

        loop = asyncio.get_running_loop()
        task = loop.create_task(loop.connect_accepted_socket(create_protocol, connected))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        super().handle_exit(sig, frame)
        self._live.watch.events.close()
        self._live.watch.commands.close()
