"""What an overloaded server does."""

from __future__ import annotations

import asyncio
import gzip
import json
import time
from pathlib import Path
from typing import Any

import httpx

from hangwatch.protocol import codec, heartbeat
from hangwatch.server.app import build_app
from hangwatch.server.core.events import MAX_READERS
from hangwatch.server.core.load import OVERLOAD_LATE_S, RETRY_AFTER_S, Load
from hangwatch.server.settings import Settings
from hangwatch.server.storage.store import Store
from tests.harness.own_user import serve_own_user


def test_event_loop_lag_is_detected_and_decays() -> None:
    async def block_loop() -> list[float]:
        load = Load()
        measuring = asyncio.create_task(load.measure_lateness())
        await asyncio.sleep(0)
        asyncio.get_running_loop().call_later(0.05, time.sleep, 0.5)
        await asyncio.sleep(0.7)
        seen = [load.late_s]
        await asyncio.sleep(1.0)
        measuring.cancel()
        return [*seen, load.late_s]

    immediately, later = asyncio.run(block_loop())
    assert immediately > 0.05
    assert later < immediately / 2


def test_overloaded_server_refuses_with_retry_after(tmp_path: Path) -> None:
    app, state = build_app(
        Settings(data_dir=tmp_path), store=Store(tmp_path), base_url="http://localhost", token=None
    )
    beat = codec.encode_message(heartbeat.Heartbeat(host="n", agent="a", number=1))

    async def post_heartbeat() -> httpx.Response:
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(serve_own_user(app)), base_url="http://localhost"
        ) as client:
            return await client.post("/api/v1/heartbeats", json=beat)

    state.shared.load.late_s = OVERLOAD_LATE_S + 0.1
    refused = asyncio.run(post_heartbeat())
    assert (refused.status_code, refused.headers["Retry-After"]) == (503, str(RETRY_AFTER_S))
    assert "overloaded" in refused.json()["detail"]
    assert (state.shared.counters.heartbeats, len(state.shared.agents)) == (0, 0)
    state.shared.load.late_s = 0.0
    assert codec.decode_reply(asyncio.run(post_heartbeat()).json()).interval_s == 0.5


def test_refused_host_is_not_lost(tmp_path: Path) -> None:
    app, state = build_app(
        Settings(data_dir=tmp_path), store=Store(tmp_path), base_url="http://localhost", token=None
    )
    identity = heartbeat.ProcessIdentity(job="run7", rank=0, world_size=1, pid=1, start_ticks=1)
    beat = heartbeat.Heartbeat(
        host="n",
        agent="a",
        number=1,
        full=True,
        processes=(heartbeat.ProcessUpdate(key="1-1", identity=identity),),
    )

    async def post_heartbeat(body: bytes, **headers: str) -> int:
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(serve_own_user(app)), base_url="http://localhost"
        ) as client:
            return (
                await client.post("/api/v1/heartbeats", content=body, headers=headers)
            ).status_code

    encoded_beat = json.dumps(codec.encode_message(beat)).encode()
    assert asyncio.run(post_heartbeat(encoded_beat)) == 200
    process = state.shared.fleet.processes["run7", "n", "1-1"]
    last_seen_at = process.reports.last_seen_at
    state.shared.load.late_s = OVERLOAD_LATE_S + 0.1
    for body, headers in (
        (b"{}", {}),
        (b"x", {}),
        (encoded_beat, {}),
        (gzip.compress(encoded_beat), {"Content-Encoding": "gzip"}),
    ):
        before = process.reports.agent_seen_at
        assert asyncio.run(post_heartbeat(body, **headers)) == 503
        assert (process.reports.agent_seen_at > before) is (len(body) > 2), (
            "only by its own agent's heartbeats"
        )
    assert process.reports.last_seen_at == last_seen_at, "the refused heartbeat was not applied"
    assert state.shared.counters.refused == 4


def test_readers_beyond_limit_are_refused(tmp_path: Path) -> None:
    app, state = build_app(
        Settings(data_dir=tmp_path), store=Store(tmp_path), base_url="http://localhost", token=None
    )
    events = state.shared.events

    async def read_one() -> int:
        stream: Any = events.make_response(events.stream_events(None)).body_iterator
        await anext(aiter(stream))
        count = events.reader_count
        await stream.aclose()
        return count

    async def get_page(path: str) -> httpx.Response:
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(serve_own_user(app)), base_url="http://localhost"
        ) as client:
            return await client.get(path, headers={"Accept": "text/event-stream"})

    assert (asyncio.run(read_one()), events.reader_count) == (1, 0)
    events.reader_count = MAX_READERS
    for path in ("/api/v1/events", "/ranks"):
        refused = asyncio.run(get_page(path))
        assert (refused.status_code, "Retry-After" in refused.headers) == (503, True)
        assert "close some" in refused.text
