"""The event loop stays responsive while many clients connect: with real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import socket

from hangwatch.server.core.load import ACCEPTED_PER_PASS, ThrottledListener

CLIENTS = 5 * ACCEPTED_PER_PASS


def test_pass_accepts_few_of_many_connections() -> None:
    async def accept_all() -> list[int]:
        """The number of connections that were made in each pass of the event loop."""
        made = 0
        per_pass: list[int] = []

        class Protocol(asyncio.Protocol):
            def connection_made(self, transport: asyncio.BaseTransport) -> None:
                nonlocal made
                made += 1
                transport.close()

        with contextlib.ExitStack() as stack:
            listener = stack.enter_context(ThrottledListener(socket.AF_INET, socket.SOCK_STREAM))
            listener.bind(("127.0.0.1", 0))
            listener.listen(CLIENTS)
            listener.setblocking(False)
            for _ in range(CLIENTS):
                stack.enter_context(socket.create_connection(listener.getsockname()))
            server = await asyncio.get_running_loop().create_server(
                Protocol, sock=listener, backlog=CLIENTS
            )
            while sum(per_pass) < CLIENTS:
                await asyncio.sleep(0)
                per_pass.append(made - sum(per_pass))
            server.close()
        return per_pass

    per_pass = asyncio.run(asyncio.wait_for(accept_all(), 20.0))
    assert max(per_pass) <= ACCEPTED_PER_PASS
    assert sum(per_pass) == CLIENTS
