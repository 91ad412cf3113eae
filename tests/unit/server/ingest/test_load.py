"""What a server does that cannot keep up."""

from __future__ import annotations

import asyncio
import gzip
import itertools
import json
import time
from pathlib import Path

import httpx
import pytest

from hangwatch.protocol import heartbeat
from hangwatch.server.app import build
from hangwatch.server.core.limits import (
    DETAILS_EVERY,
    LONGEST_INTERVAL,
    MOST_PER_S,
    OVERLOADED,
    RETRY_AFTER,
    Load,
)
from hangwatch.server.core.settings import Settings
from hangwatch.server.http.stream import READERS_MAX, answer
from hangwatch.server.storage.store import Store


@pytest.mark.parametrize(
    ("late_s", "agents", "expected"),
    [
        (0.0, 10, 0.5),
        (0.0, 500, 1.0),
        (0.1, 10, 1.0),
        (0.1, 500, 2.0),
        (5.0, 10, LONGEST_INTERVAL),
        (0.0, 8192, LONGEST_INTERVAL),
    ],
)
def test_the_later_it_is_and_the_more_there_are_the_less_often_hosts_report(
    late_s: float, agents: int, expected: float
) -> None:
    assert Load(late_s=late_s).interval(0.5, agents) == pytest.approx(expected)


def test_hosts_that_seldom_have_their_turn_are_asked_for_news_before_it() -> None:
    load = Load()
    assert load.news(load.interval(0.5, 500), 500) is None, "they report as often as it takes"
    assert load.news(load.interval(0.5, 2000), 2000) == 1.0
    within = load.news(load.interval(0.5, 12_500), 12_500)
    assert within is not None and 12_500 / within <= MOST_PER_S, (
        "no more than that, even where all have news"
    )


def test_hosts_that_were_answered_together_come_back_one_by_one_each_at_its_turn() -> None:
    load, agents, interval = Load(), [f"agent-{n}" for n in range(6000)], 6.0
    waits = [load.turn(agent, interval, 100.0) for agent in agents]
    assert 0.1 * interval < min(waits) and max(waits) <= 1.1 * interval
    seconds = [sum(int(wait) == second for wait in waits) for second in range(1, 6)]
    assert max(seconds) < 1.3 * min(seconds), "as many in each second"
    for agent, wait in zip(agents, waits, strict=True):
        late = 100.0 + wait + 1.7
        turns = (late + load.turn(agent, interval, late) - 100.0 - wait) / interval
        assert turns == pytest.approx(round(turns), abs=1e-6), "however late its answer was"
    assert load.turn("agent", 0.5, 100.0) == 0.5, "of few hosts each comes as soon as it may"


def test_hosts_that_seldom_have_their_turn_need_not_tell_each_time_where_ranks_are_that_get_on() -> (
    None
):
    load, agents, interval = Load(), [f"agent-{n}" for n in range(2000)], 10.0
    assert load.details("agent", 0.5, 100.0) is None, "few hosts tell it at once"
    told: dict[int, int] = {}  # by round
    for agent in agents:
        at, until, rounds = 100.0, 0.0, []
        for n in range(4 * DETAILS_EVERY):
            if at >= until:
                rounds.append(n)
                told[n] = told.get(n, 0) + 1
            until = at + (load.details(agent, interval, at) or 0.0)
            at += load.turn(agent, interval, at)
        assert (
            len(rounds) >= 4 and max(b - a for a, b in itertools.pairwise(rounds)) <= DETAILS_EVERY
        ), "none is forgotten"
    assert max(told[n] for n in range(1, 4 * DETAILS_EVERY)) < 2 * len(agents) / DETAILS_EVERY, (
        "they do not all do so at once"
    )


def test_a_late_event_loop_is_noticed_and_forgotten_again() -> None:
    async def blocked() -> list[float]:
        load = Load()
        measuring = asyncio.create_task(load.measure())
        await asyncio.sleep(0)
        asyncio.get_running_loop().call_later(0.05, time.sleep, 0.5)
        await asyncio.sleep(0.7)
        seen = [load.late_s]
        await asyncio.sleep(1.0)
        measuring.cancel()
        return [*seen, load.late_s]

    at_once, later = asyncio.run(blocked())
    assert at_once > 0.05
    assert later < at_once / 2


def test_beyond_that_it_takes_nothing_in_and_says_when_to_come_again(tmp_path: Path) -> None:
    app, live = build(
        Settings(data_dir=tmp_path), store=Store(tmp_path), base_url="http://localhost", token=None
    )
    beat = heartbeat.encode_message(heartbeat.Heartbeat(host="n", agent="a", number=1))

    async def post() -> httpx.Response:
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(app), base_url="http://localhost"
        ) as client:
            return await client.post("/api/v1/heartbeats", json=beat)

    live.watch.load.late_s = OVERLOADED + 0.1
    refused = asyncio.run(post())
    assert (refused.status_code, refused.headers["Retry-After"]) == (503, str(RETRY_AFTER))
    assert "overloaded" in refused.json()["detail"]
    assert (live.watch.counters.heartbeats, live.watch.agents) == (0, {})
    live.watch.load.late_s = 0.0
    assert heartbeat.decode_reply(asyncio.run(post()).json()).interval_s == 0.5


def test_who_is_refused_is_not_lost(tmp_path: Path) -> None:
    app, live = build(
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

    async def post(body: bytes, **headers: str) -> int:
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(app), base_url="http://localhost"
        ) as client:
            return (
                await client.post("/api/v1/heartbeats", content=body, headers=headers)
            ).status_code

    told = json.dumps(heartbeat.encode_message(beat)).encode()
    assert asyncio.run(post(told)) == 200
    process = live.watch.fleet.processes["n", "1-1"][0]
    heard_at = process.last_seen_at
    live.watch.load.late_s = OVERLOADED + 0.1
    for body, headers in (
        (b"{}", {}),
        (b"x", {}),
        (told, {}),
        (gzip.compress(told), {"Content-Encoding": "gzip"}),
    ):
        before = process.agent_seen_at
        assert asyncio.run(post(body, **headers)) == 503
        assert (process.agent_seen_at > before) is (len(body) > 2), (
            "only by its own agent's heartbeats"
        )
    assert process.last_seen_at == heard_at, "what it said was not taken in"
    assert live.watch.counters.refused == 4


def test_readers_are_counted_and_beyond_the_limit_turned_away(tmp_path: Path) -> None:
    app, live = build(
        Settings(data_dir=tmp_path), store=Store(tmp_path), base_url="http://localhost", token=None
    )
    readers = live.watch.events.readers

    async def read_one() -> int:
        stream = answer(live, live.watch.events.stream(None)).body_iterator
        await anext(aiter(stream))
        count = len(readers)
        await stream.aclose()  # type: ignore[union-attr]
        return count

    async def get(path: str) -> httpx.Response:
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(app), base_url="http://localhost"
        ) as client:
            return await client.get(path, headers={"Accept": "text/event-stream"})

    assert (asyncio.run(read_one()), readers) == (1, set())
    readers.update(range(READERS_MAX))
    for path in ("/api/v1/events", "/ranks"):
        refused = asyncio.run(get(path))
        assert (refused.status_code, "Retry-After" in refused.headers) == (503, True)
        assert "close some" in refused.text
