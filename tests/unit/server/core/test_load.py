"""What an overloaded server does."""

from __future__ import annotations

import asyncio
import gzip
import itertools
import json
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from hangwatch.protocol import codec, heartbeat
from hangwatch.server.app import build_app
from hangwatch.server.core.load import (
    FULL_UPDATE_INTERVALS,
    MAX_CHANGES_PER_S,
    MAX_USUAL_INTERVAL_S,
    OVERLOAD_LATE_S,
    RETRY_AFTER_S,
    Load,
)
from hangwatch.server.http.stream import MAX_READERS, make_stream_response
from hangwatch.server.settings import Settings
from hangwatch.server.storage.store import Store
from tests.harness.own_user import serve_own_user


@pytest.mark.parametrize(
    ("late_s", "agents", "expected"),
    [
        (0.0, 10, 0.5),
        (0.0, 500, 1.0),
        (0.1, 10, 1.0),
        (0.1, 500, 2.0),
        (5.0, 10, MAX_USUAL_INTERVAL_S),
        (0.0, 12_500, MAX_USUAL_INTERVAL_S),
        (5.0, 12_500, MAX_USUAL_INTERVAL_S),
        (0.0, 30_000, 40.0),
    ],
)
def test_report_interval_grows_with_lag_and_hosts(
    late_s: float, agents: int, expected: float
) -> None:
    assert Load(late_s=late_s).report_interval_s(0.5, agents) == pytest.approx(expected)


def test_rarely_reporting_hosts_may_report_changes_early() -> None:
    load = Load()
    assert load.changes_within_s(load.report_interval_s(0.5, 500), 500) is None, (
        "they report often enough"
    )
    assert load.changes_within_s(load.report_interval_s(0.5, 2000), 2000) == 1.0
    within = load.changes_within_s(load.report_interval_s(0.5, 12_500), 12_500)
    assert within is not None and 12_500 / within <= MAX_CHANGES_PER_S, (
        "not more, even if all report changes"
    )


def test_hosts_answered_together_return_spread_out() -> None:
    load, agents, interval = Load(), [f"agent-{n}" for n in range(6000)], 6.0
    waits = [load.until_slot_s(agent, interval, 100.0) for agent in agents]
    assert 0.1 * interval < min(waits) and max(waits) <= 1.1 * interval
    seconds = [sum(int(wait) == second for wait in waits) for second in range(1, 6)]
    assert max(seconds) < 1.3 * min(seconds), "about equally many in each second"
    for agent, wait in zip(agents, waits, strict=True):
        late = 100.0 + wait + 1.7
        turns = (late + load.until_slot_s(agent, interval, late) - 100.0 - wait) / interval
        assert turns == pytest.approx(round(turns), abs=1e-6), "even if its reply was late"
    assert load.until_slot_s("agent", 0.5, 100.0) == 0.5, "few hosts have no slots"


def test_rarely_reporting_hosts_may_send_terse_updates() -> None:
    load, agents, interval = Load(), [f"agent-{n}" for n in range(2000)], 10.0
    assert load.terse_for_s("agent", 0.5, 100.0) is None, "few hosts always send all positions"
    full_updates: dict[int, int] = {}  # the number in each round
    for agent in agents:
        at, until, rounds = 100.0, 0.0, []
        for n in range(4 * FULL_UPDATE_INTERVALS):
            if at >= until:
                rounds.append(n)
                full_updates[n] = full_updates.get(n, 0) + 1
            until = at + (load.terse_for_s(agent, interval, at) or 0.0)
            at += load.until_slot_s(agent, interval, at)
        assert (
            len(rounds) >= 4  # the first of them is before its host's first slot
            and max(b - a for a, b in itertools.pairwise(rounds[1:])) <= FULL_UPDATE_INTERVALS
        ), "every host sends its positions"
    assert (
        max(full_updates[n] for n in range(1, 4 * FULL_UPDATE_INTERVALS))
        < 2 * len(agents) / FULL_UPDATE_INTERVALS
    ), "not all at the same time"


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
    app, live = build_app(
        Settings(data_dir=tmp_path), store=Store(tmp_path), base_url="http://localhost", token=None
    )
    beat = codec.encode_message(heartbeat.Heartbeat(host="n", agent="a", number=1))

    async def post_heartbeat() -> httpx.Response:
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(serve_own_user(app)), base_url="http://localhost"
        ) as client:
            return await client.post("/api/v1/heartbeats", json=beat)

    live.shared.load.late_s = OVERLOAD_LATE_S + 0.1
    refused = asyncio.run(post_heartbeat())
    assert (refused.status_code, refused.headers["Retry-After"]) == (503, str(RETRY_AFTER_S))
    assert "overloaded" in refused.json()["detail"]
    assert (live.shared.counters.heartbeats, len(live.shared.agents)) == (0, 0)
    live.shared.load.late_s = 0.0
    assert codec.decode_reply(asyncio.run(post_heartbeat()).json()).interval_s == 0.5


def test_refused_host_is_not_lost(tmp_path: Path) -> None:
    app, live = build_app(
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
    process = live.shared.fleet.processes["n", "1-1"].process
    heard_at = process.reports.last_seen_at
    live.shared.load.late_s = OVERLOAD_LATE_S + 0.1
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
    assert process.reports.last_seen_at == heard_at, "what it said was not taken in"
    assert live.shared.counters.refused == 4


def test_readers_beyond_limit_are_refused(tmp_path: Path) -> None:
    app, live = build_app(
        Settings(data_dir=tmp_path), store=Store(tmp_path), base_url="http://localhost", token=None
    )
    readers = live.shared.events.readers

    async def read_one() -> int:
        stream: Any = make_stream_response(
            live, live.shared.events.stream_events(None)
        ).body_iterator
        await anext(aiter(stream))
        count = len(readers)
        await stream.aclose()
        return count

    async def get_page(path: str) -> httpx.Response:
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(serve_own_user(app)), base_url="http://localhost"
        ) as client:
            return await client.get(path, headers={"Accept": "text/event-stream"})

    assert (asyncio.run(read_one()), readers) == (1, set())
    readers.update(range(MAX_READERS))
    for path in ("/api/v1/events", "/ranks"):
        refused = asyncio.run(get_page(path))
        assert (refused.status_code, "Retry-After" in refused.headers) == (503, True)
        assert "close some" in refused.text
