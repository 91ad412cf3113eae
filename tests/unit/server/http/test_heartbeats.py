"""Requests of node agents, and the headers of all responses."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from starlette.types import ASGIApp

from hangwatch.protocol import codec, heartbeat
from hangwatch.server.app import build_app
from hangwatch.server.core import limits
from hangwatch.server.core.problems import Problem
from hangwatch.server.http import heartbeats
from hangwatch.server.http.access import AgentGrant
from hangwatch.server.http.app_state import AppState
from hangwatch.server.settings import Settings
from hangwatch.server.storage.store import Store
from hangwatch.tracking.tenants import qualify_agent

TOKEN = "a-token-of-the-test"
BEAT = json.dumps(
    codec.encode_message(heartbeat.Heartbeat(host="n", agent="a", number=1, full=True))
).encode()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[tuple[ASGIApp, AppState]]:
    store = Store(tmp_path)
    settings = Settings(data_dir=tmp_path)
    yield build_app(settings, store=store, base_url="http://localhost", token=TOKEN)
    store.close()


async def send_request(
    app: ASGIApp, method: str, path: str, body: bytes = b"", headers: Mapping[str, str] = {}
) -> httpx.Response:
    transport = httpx.ASGITransport(app)
    headers = {"Authorization": f"Bearer {TOKEN}", **headers}
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        return await client.request(method, path, content=body, headers=headers)


@pytest.mark.parametrize(
    ("body", "headers", "status"),
    [
        (BEAT, {}, 200),
        (gzip.compress(BEAT), {"Content-Encoding": "gzip"}, 200),
        (b"{}", {}, 422),
        (b"no gzip", {"Content-Encoding": "gzip"}, 422),
        (BEAT, {"Content-Encoding": "br"}, 415),
        (BEAT.replace(b'"n"', b'"%s"' % (b"n" * 1000)), {}, 422),
        (BEAT, {"Authorization": "Bearer wrong"}, 401),
    ],
    # Every worker of a parallel run must collect the same ids, and gzip writes the time.
    ids=[
        "plain",
        "gzip",
        "missing fields",
        "not gzip",
        "other coding",
        "long name",
        "wrong token",
    ],
)
def test_answers_to_heartbeats(
    body: bytes, headers: dict[str, str], status: int, server: tuple[ASGIApp, AppState]
) -> None:
    app, state = server
    request = send_request(app, "POST", heartbeat.HEARTBEAT_PATH, body, headers)
    response = asyncio.run(request)
    assert response.status_code == status
    assert ("detail" in response.json()) == (status != 200)
    assert state.shared.counters.malformed == (status in (415, 422))


def test_refused_poll_counts_its_limit_and_is_no_heartbeat(
    server: tuple[ASGIApp, AppState], monkeypatch: pytest.MonkeyPatch
) -> None:
    app, state = server
    monkeypatch.setattr(limits, "WAITING_AGENTS", replace(limits.WAITING_AGENTS, maximum=0))
    poll = send_request(app, "POST", heartbeat.COMMANDS_PATH, b'{"agent": "a"}')
    assert asyncio.run(poll).status_code == 429
    assert state.shared.counters.refusals_by_limit == {limits.WAITING_AGENTS.name: 1}
    assert state.shared.counters.malformed == 0


def test_other_methods_are_refused(server: tuple[ASGIApp, AppState]) -> None:
    app, _ = server
    assert asyncio.run(send_request(app, "GET", heartbeat.HEARTBEAT_PATH)).status_code == 405
    assert asyncio.run(send_request(app, "GET", heartbeat.PROOF_PATH)).json() == {}


def test_every_response_has_the_security_headers(
    server: tuple[ASGIApp, AppState], monkeypatch: pytest.MonkeyPatch
) -> None:
    """SECURITY.md: "Pages load nothing from other hosts"."""
    app, _ = server

    def fail(state: AppState) -> None:
        raise OverflowError("too large")

    monkeypatch.setattr(AppState, "list_down_parts", fail)

    async def get_page(path: str) -> httpx.Response:
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await client.get(path)

    for path, status in (("/login", 200), ("/api/v1/jobs", 401), ("/healthz", 500)):
        response = asyncio.run(get_page(path))
        assert response.status_code == status
        assert "default-src 'self'" in response.headers["content-security-policy"], path
        assert response.headers["cache-control"] == "no-store"


def test_gzip_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    headers = {"content-encoding": "gzip"}
    assert heartbeats.unpack_body(headers, gzip.compress(b"{}")) == b"{}"
    monkeypatch.setattr(limits, "UNPACKED_BODY", replace(limits.UNPACKED_BODY, maximum=1000))
    for body, status in (
        (gzip.compress(b"0" * 2000), 413),
        (b"no gzip", 422),
        (gzip.compress(b"{}")[:-4], 422),
    ):
        with pytest.raises(Problem) as raised:
            heartbeats.unpack_body(headers, body)
        assert raised.value.status == status


@pytest.mark.parametrize("coding", ["identity", "gzip"])
def test_sender_of_a_refused_heartbeat_is_found_in_its_first_kilobytes(coding: str) -> None:
    """What follows is not decoded: the server has no time for it."""
    grant, headers = AgentGrant(uid=7), {"content-encoding": coding}

    def find_agent(start: str) -> str | None:
        body = start.encode() + b'"processes": [' + b" " * 100_000
        body = gzip.compress(body)[:-9] if coding == "gzip" else body
        return heartbeats.find_agent(headers, body, grant)

    assert find_agent('{"host": "a", "agent": "agent \\u00e9 1", ') == qualify_agent(
        grant.tenant, "agent é 1"
    )
    assert find_agent(json.dumps({"host": '"agent": "b"', "agent": "c"})[:-1] + ", ") == (
        qualify_agent(grant.tenant, "c")
    )
    assert find_agent('{"host": "a", ') is None
    assert find_agent('{"agent": "\\x", ') is None


def test_request_for_commands_is_short(server: tuple[ASGIApp, AppState]) -> None:
    app, state = server
    body = json.dumps({"agent": "a", "other": "x" * limits.POLL.maximum}).encode()
    response = asyncio.run(send_request(app, "POST", heartbeat.COMMANDS_PATH, body))
    assert (response.status_code, response.json()["limit"]) == (413, limits.POLL.name)
    assert state.shared.counters.refusals_by_limit == {limits.POLL.name: 1}
