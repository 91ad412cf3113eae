"""What lets the server of a large job keep up: heartbeats read cheaply, long answers cut, hosts
asked again soon, slow bodies given up.
"""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import json
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import ValidationError
from starlette.requests import Request as Asked

from hangwatch.model.calls import Call, Signature, StreamKind
from hangwatch.protocol import heartbeat
from hangwatch.server.core import event_loop, garbage_collection
from hangwatch.server.core.garbage_collection import Garbage
from hangwatch.server.core.problems import Problem
from hangwatch.server.http.listing import NUMBERS_MAX, part
from hangwatch.server.ingest import connections
from hangwatch.server.ingest.endpoint import decoding
from hangwatch.tracking.call_stream import MAX_URGENT_SUSPECTS
from hangwatch.tracking.fleet import Fleet

BEAT = heartbeat.Heartbeat(
    host="n",
    agent="a",
    number=7,
    sent_s=3.0,
    processes=(
        heartbeat.ProcessUpdate(
            key="1-1",
            identity=heartbeat.ProcessIdentity(job="j", rank=0, world_size=2, pid=1, start_ticks=1),
            sequences=(
                heartbeat.StreamUpdate(
                    uid=1,
                    entered=3,
                    chain=(1 << 64) - 1,
                    checkpoints=((2, 22), (3, 33)),
                    calls=(Call(seq=3, signature=Signature(op="all_reduce", shapes=((4, 4),))),),
                ),
            ),
        ),
    ),
    performance=heartbeat.PerformanceReport(number=1, clock=(0.5, 1.0)),
)


def same(told: Any, expected: Any) -> bool:
    """Equal in all fields, by whatever classes."""
    if dataclasses.is_dataclass(expected):
        return all(
            same(getattr(told, f.name), getattr(expected, f.name))
            for f in dataclasses.fields(expected)
        )
    if isinstance(expected, tuple):
        return len(told) == len(expected) and all(map(same, told, expected))
    return bool(told == expected) and type(told) is type(expected)


class TestHeartbeats:
    def test_read_as_they_were_written(self) -> None:
        body = json.dumps(heartbeat.encode_message(BEAT)).encode()
        assert same(decoding.read(body), BEAT)
        assert same(decoding.Body.model_validate_json(body).root, BEAT), "as pydantic reads it"

    @pytest.mark.parametrize(
        "field", ['"number":7.0', '"number":"7"', '"number":true', '"number":7,"unknown":NaN']
    )
    def test_what_is_written_as_another_type_is_taken_all_the_same(self, field: str) -> None:
        assert type(decoding.read(b'{"host":"n","agent":"a",%s}' % field.encode()).number) is int

    @pytest.mark.parametrize(
        "body",
        [
            b"", b"[", b"[]", b"{}", b'{"host":"n","agent":"a","number":1.5}', b'{"host":"\xff","agent":"a","number":1}',
            b'{"host":"n","agent":"a","number":1,"x":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
            b'{"host":"n","agent":"a","number":1,"processes":[{"key":"k","cpu_s":1e999}]}',
        ],
    )  # fmt: skip
    def test_what_is_none_is_refused(self, body: bytes) -> None:
        with pytest.raises(ValidationError):
            decoding.read(body)


class TestPart:
    def asked(self) -> Asked:
        return Asked(
            {
                "type": "http",
                "method": "GET",
                "path": "/list",
                "query_string": b"limit=3",
                "headers": [],
                "server": ("h", 80),
            }
        )

    def whole(self, rows: range, weigh: Any) -> Iterator[list[int]]:
        after = None
        while True:
            page = part(self.asked(), rows, str, lambda row: row, 3, after, weigh)
            yield page.items
            if page.next is None:
                return
            after = page.next.rpartition("after=")[2].partition("&")[0]

    def test_no_part_is_longer_than_asked_for_and_none_is_lost(self) -> None:
        assert list(self.whole(range(7), None)) == [[0, 1, 2], [3, 4, 5], [6]]
        assert list(self.whole(range(3), None)) == [[0, 1, 2]]
        assert list(self.whole(range(0), None)) == [[]]

    def test_heavy_items_come_in_smaller_parts_but_never_in_none(self) -> None:
        assert list(self.whole(range(5), lambda row: NUMBERS_MAX // 2)) == [[0, 1], [2, 3], [4]]
        assert list(self.whole(range(2), lambda row: 2 * NUMBERS_MAX)) == [[0], [1]]

    def test_a_cursor_that_is_gone_is_told(self) -> None:
        with pytest.raises(Problem, match="start again"):
            part(self.asked(), range(3), str, lambda row: row, 3, "9")


class TestPressing:
    """Which hosts are asked again soon."""

    def fleet(self, ranks: int, waiting: int) -> Fleet:
        made = Fleet()
        group = heartbeat.StreamIdentity(
            kind=StreamKind.COLLECTIVE, name="0", desc="", ranks=f"0-{ranks - 1}"
        )
        for rank in range(ranks):
            waits = rank < waiting
            sequence = heartbeat.StreamUpdate(
                uid=1, identity=group, entered=2 if waits else 1, completed=1, entered_s=5.0
            )
            identity = heartbeat.ProcessIdentity(
                job="j", rank=rank, world_size=ranks, pid=1, start_ticks=1
            )
            process = heartbeat.ProcessUpdate(
                key="1-1", lifecycle=3, identity=identity, sequences=(sequence,)
            )
            made.apply_heartbeat(
                heartbeat.Heartbeat(
                    host=f"n{rank}", agent=f"a{rank}", number=1, processes=(process,)
                ),
                100.0,
            )
        return made

    def pressing(self, ranks: int, waiting: int) -> list[int]:
        fleet = self.fleet(ranks, waiting)
        return [rank for rank in range(ranks) if fleet.is_urgent(f"a{rank}")]

    def test_the_first_that_wait(self) -> None:
        assert self.pressing(200, 0) == []
        assert self.pressing(200, 3) == [0, 1, 2]
        assert self.pressing(200, MAX_URGENT_SUSPECTS + 1) == []

    def test_two_that_wait_for_each_other(self) -> None:
        fleet = self.fleet(200, MAX_URGENT_SUSPECTS + 1)
        for number, (rank, peer) in enumerate([(0, 1), (1, 0), (2, 3), (3, 4)], 2):
            told = heartbeat.StreamIdentity(
                kind=StreamKind.RECV, name="pp", desc="", ranks="0-199", tag=0, peer=peer
            )
            receives = heartbeat.StreamUpdate(
                uid=2, identity=told, entered=1, completed=0, entered_s=5.0
            )
            process = heartbeat.ProcessUpdate(key="1-1", lifecycle=3, sequences=(receives,))
            fleet.apply_heartbeat(
                heartbeat.Heartbeat(
                    host=f"n{rank}", agent=f"a{rank}", number=number, processes=(process,)
                ),
                101.0,
            )
        assert [rank for rank in range(200) if fleet.is_urgent(f"a{rank}")] == [0, 1]

    def test_the_last_that_do_not(self) -> None:
        assert self.pressing(200, 199) == [199]


def test_settled_state_is_put_out_of_the_collectors_sight_once() -> None:
    made, before = Garbage(), gc.get_freeze_count()
    try:
        made.look(garbage_collection.FEWEST - 1, 0.0)
        made.look(garbage_collection.FEWEST - 1, 1000.0)
        assert gc.get_freeze_count() == before, "a small job's state is looked at in no time"
        made.look(2 * garbage_collection.FEWEST, 1001.0)
        assert (frozen := gc.get_freeze_count()) > before
        kept = [[] for _ in range(1000)]  # type: ignore[var-annotated] # lists of nothing
        made.look(2 * garbage_collection.FEWEST, 2000.0)
        assert gc.get_freeze_count() <= frozen, "nothing has come"
        made.look(2 * garbage_collection.FEWEST + 1, 2001.0)
        made.look(2 * garbage_collection.FEWEST + 1, 2001.0 + garbage_collection.STEADY_FOR + 1)
        assert gc.get_freeze_count() >= frozen + len(kept), "one more, and steady since"
    finally:
        gc.unfreeze()


class Wire(asyncio.Transport):
    """A connection of which nothing is sent anywhere."""

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


def request(name: str, body: bytes) -> bytes:
    return (
        f"POST /{name} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n".encode()
        + body
    )


def test_what_is_new_is_looked_at_while_as_much_that_is_old_is_freed() -> None:
    before = gc.get_threshold()
    gc.set_threshold(*garbage_collection.THRESHOLDS)
    try:
        old = [[] for _ in range(50_000)]  # type: ignore[var-annotated] # lists of nothing
        gc.collect()
        kept = []
        for n in range(len(old)):
            kept.append([n])
            old.pop()
            if n % 500 == 0:
                garbage_collection.look_at_new()
                assert len(gc.get_objects(0)) < 2_000
        assert len(kept) == 50_000
        with garbage_collection.no_looks():
            more = [[n] for n in range(5_000)]
            garbage_collection.look_at_new()
            assert len(gc.get_objects(0)) >= len(more), "somebody is in the middle of something"
    finally:
        gc.set_threshold(*before)


def test_a_connection_keeps_nothing_of_a_request_that_was_answered() -> None:
    import uvicorn
    from uvicorn.server import ServerState

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

    async def talk() -> None:
        config = uvicorn.Config(
            application,
            http=connections.Impatient,
            log_config=None,
            lifespan="off",
            timeout_keep_alive=1,
        )
        config.load()
        connection, end = connections.Impatient(config, ServerState(), {}), Wire()
        connection.connection_made(end)

        async def answered(names: bytes) -> None:
            await asyncio.sleep(0.2)
            assert (
                b"".join(part.split(b"HTTP/1.1")[0] for part in end.sent.split(b"\r\n\r\n")[1:])
                == names
            ), end.sent
            assert not end.closed
            end.sent = b""

        connection.data_received(
            b"".join(request(name, b"body") for name in ("one", "two", "three"))
        )  # before any answer
        await answered(b"/one/two/three")
        assert connection.cycle is None
        connection.data_received(
            request("early", b"much")[:-2]
        )  # answered before all of it is there
        await answered(b"/early")
        connection.data_received(b"ch" + request("four", b"body"))
        await answered(b"/four")
        assert connection.cycle is None
        connection.shutdown()
        assert end.closed
        connection.connection_lost(None)

    asyncio.run(talk())


def test_an_urgent_heartbeat_is_answered_while_others_are_held_back_however_it_comes() -> None:
    """Its body comes by itself, as httpx sends it, with real sockets."""
    import uvicorn
    from uvicorn.server import ServerState

    async def application(scope: Any, receive: Any, send: Any) -> None:
        while (await receive())["more_body"]:
            pass
        await send(
            {"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]}
        )
        await send({"type": "http.response.body", "body": b"{}"})

    async def talk(loop: event_loop.Loop) -> None:
        config = uvicorn.Config(
            application, http=connections.Impatient, log_config=None, lifespan="off"
        )
        config.load()
        server = await loop.create_server(
            lambda: connections.Impatient(config, ServerState(), {}), "127.0.0.1", 0
        )
        usual, urgent = [
            await asyncio.open_connection(*server.sockets[0].getsockname()) for _ in range(2)
        ]

        async def post(
            connection: tuple[asyncio.StreamReader, asyncio.StreamWriter], priority: str = ""
        ) -> bytes:
            reader, writer = connection
            writer.write(
                f"POST /api/v1/heartbeats HTTP/1.1\r\nHost: localhost\r\n{priority}Content-Length: 4\r\n\r\n".encode()
            )
            await asyncio.sleep(0.1)
            writer.write(b"body")
            return (await reader.readuntil(b"{}"))[:12]

        for connection in (usual, urgent):
            assert await post(connection) == b"HTTP/1.1 200"
        for _ in range(2):
            with event_loop.holding():
                waiting = asyncio.create_task(post(usual))
                assert (
                    await asyncio.wait_for(post(urgent, "Priority: u=1\r\n"), 5.0)
                    == b"HTTP/1.1 200"
                )
                await asyncio.sleep(0.2)
                assert not waiting.done()
            assert await asyncio.wait_for(waiting, 5.0) == b"HTTP/1.1 200"
        with event_loop.holding():
            waiting = asyncio.create_task(post(urgent))
            await asyncio.sleep(0.3)
            assert not waiting.done(), "it has nothing urgent to say any more"
        await waiting
        for _, writer in (usual, urgent):
            writer.close()
        server.close()

    loop = event_loop.Loop()
    try:
        loop.run_until_complete(asyncio.wait_for(talk(loop), 20.0))
    finally:
        loop.close()


@pytest.mark.parametrize(
    ("sent", "answered"),
    [
        (b"", b""),
        (b"POST / HTTP/1.1\r\nHost: localhost\r\n", b""),
        (b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\nhalf", b"HTTP/1.1 408 "),
    ],
)
def test_half_a_request_is_given_up(
    sent: bytes, answered: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    import uvicorn
    from uvicorn.server import ServerState

    monkeypatch.setattr(connections, "HEADERS_WITHIN", 0.2)
    monkeypatch.setattr(connections, "BODY_WITHIN", 0.2)

    async def application(scope: Any, receive: Any, send: Any) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    async def connect() -> Wire:
        config = uvicorn.Config(
            application, http=connections.Impatient, log_config=None, lifespan="off"
        )
        config.load()
        connection, end = connections.Impatient(config, ServerState(), {}), Wire()
        connection.connection_made(end)
        if sent:
            connection.data_received(sent)
        await asyncio.sleep(0.1)
        assert not end.closed
        await asyncio.sleep(0.4)
        connection.connection_lost(None)
        return end

    end = asyncio.run(connect())
    assert end.closed
    assert end.sent.startswith(answered)
    assert bool(end.sent) == bool(answered)


@pytest.mark.parametrize(
    ("size", "pieces", "packets"), [(10, 1, 1), (10, 3, 1), (connections.JOINED_MAX + 1, 3, 3)]
)
def test_what_is_short_is_sent_in_one_packet(size: int, pieces: int, packets: int) -> None:
    async def answer() -> Wire:
        end = Wire()
        joined = connections.Joined(end, asyncio.get_running_loop())
        joined.write(b"head")
        for _ in range(pieces):
            joined.write(size * b".")
        assert end.packets == (0 if size < connections.JOINED_MAX else packets)
        await asyncio.sleep(0)
        return end

    end = asyncio.run(answer())
    assert (end.packets, end.sent) == (packets, b"head" + pieces * size * b".")


def test_an_answer_is_sent_before_its_connection_is_closed() -> None:
    async def answer() -> Wire:
        end = Wire()
        joined = connections.Joined(end, asyncio.get_running_loop())
        joined.write(b"last")
        joined.close()
        assert joined.is_closing()
        await asyncio.sleep(0)
        return end

    end = asyncio.run(answer())
    assert (end.packets, end.sent) == (1, b"last")
