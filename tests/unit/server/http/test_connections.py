"""Connections with several requests, and those whose requests never end."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest
import uvicorn
from uvicorn.server import ServerState

from hangwatch.server.core import limits
from hangwatch.server.core.peers import PeerConnections
from hangwatch.server.core.supervision import Counters
from hangwatch.server.http import connections
from hangwatch.server.http.app_state import AppState


class RecordingTransport(asyncio.Transport):
    """A connection that records what is sent."""

    def __init__(self) -> None:
        super().__init__()
        self.sent, self.packets, self.closed = b"", 0, False

    def write(self, data: Any) -> None:
        self.sent += bytes(data)
        self.packets += 1

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return {"peername": ("127.0.0.1", 1), "sockname": ("127.0.0.1", 2)}.get(name, default)

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        self.closed = True

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...


def make_protocol(*args: Any, **kwargs: Any) -> connections.LimitedHttpProtocol:
    counters = Counters()
    peers = PeerConnections(counters.refusals_by_limit)
    state = SimpleNamespace(shared=SimpleNamespace(counters=counters), peers=peers)
    return connections.LimitedHttpProtocol(*args, state=cast(AppState, state), **kwargs)


def make_http_request(name: str, body: bytes) -> bytes:
    return (
        f"POST /{name} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n".encode()
        + body
    )


def test_connection_releases_answered_request() -> None:
    async def application(scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] != "/early":
            await asyncio.sleep(0.02)
            assert (await receive())["body"] == b"body"
        await send(
            {
                "type": "http.response.start",
                "status": 200,
                "headers": [(b"content-length", b"%d" % len(scope["path"]))],
            }
        )
        await send({"type": "http.response.body", "body": scope["path"].encode()})

    async def exchange_requests() -> None:
        config = uvicorn.Config(
            application,
            http=make_protocol,  # type: ignore[arg-type] # it is only called
            log_config=None,
            lifespan="off",
            timeout_keep_alive=1,
        )
        config.load()
        connection, end = make_protocol(config, ServerState(), {}), RecordingTransport()
        connection.connection_made(end)

        async def await_response(names: bytes) -> None:
            await asyncio.sleep(0.2)
            assert (
                b"".join(part.split(b"HTTP/1.1")[0] for part in end.sent.split(b"\r\n\r\n")[1:])
                == names
            ), end.sent
            assert not end.closed
            end.sent = b""

        # All three requests arrive before any answer.
        connection.data_received(
            b"".join(make_http_request(name, b"body") for name in ("one", "two", "three"))
        )
        await await_response(b"/one/two/three")
        assert connection.cycle is None
        connection.data_received(
            make_http_request("early", b"much")[:-2]
        )  # answered before all of it is there
        await await_response(b"/early")
        connection.data_received(b"ch" + make_http_request("four", b"body"))
        await await_response(b"/four")
        assert connection.cycle is None
        connection.shutdown()
        assert end.closed
        connection.connection_lost(None)

    asyncio.run(exchange_requests())


@pytest.mark.parametrize(
    ("sent", "answered"),
    [
        (b"", b""),
        (b"POST / HTTP/1.1\r\nHost: localhost\r\n", b""),
        (b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\nhalf", b"HTTP/1.1 408 "),
    ],
)
def test_incomplete_request_times_out(
    sent: bytes, answered: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "HEAD_S", 0.2)
    monkeypatch.setattr(limits, "BODY_S", 0.2)

    async def application(scope: Any, receive: Any, send: Any) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    async def open_connection() -> RecordingTransport:
        config = uvicorn.Config(
            application,
            http=make_protocol,  # type: ignore[arg-type] # it is only called
            log_config=None,
            lifespan="off",
        )
        config.load()
        connection, end = make_protocol(config, ServerState(), {}), RecordingTransport()
        connection.connection_made(end)
        if sent:
            connection.data_received(sent)
        await asyncio.sleep(0.1)
        assert not end.closed
        await asyncio.sleep(0.4)
        connection.connection_lost(None)
        return end

    end = asyncio.run(open_connection())
    assert end.closed
    assert end.sent.startswith(answered)
    assert bool(end.sent) == bool(answered)
