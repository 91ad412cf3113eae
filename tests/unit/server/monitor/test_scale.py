"""How the server keeps up with a large job: heartbeats are decoded fast, long lists are paged, some
hosts report sooner, slow request bodies are given up.
"""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from starlette.datastructures import URL

from hangwatch.model.calls import Call, Signature, StreamKind
from hangwatch.protocol import codec, heartbeat
from hangwatch.server.core import load
from hangwatch.server.core.load import GarbageScheduler
from hangwatch.server.core.problems import Problem
from hangwatch.server.http import connections
from hangwatch.server.http.api import MAX_MEMBERS_PER_PAGE, PageRequest
from hangwatch.server.ingest import heartbeat_checks
from hangwatch.tracking.call_stream import MAX_URGENT_SUSPECTS
from hangwatch.tracking.fleet import Fleet

HEARTBEAT = heartbeat.Heartbeat(
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


class TestHeartbeats:
    def test_read_as_they_were_written(self) -> None:
        body = json.dumps(codec.encode_message(HEARTBEAT)).encode()
        assert heartbeat_checks.decode_heartbeat(body) == HEARTBEAT

    def test_decoded_messages_are_the_protocols_own_dataclasses(self) -> None:
        body = json.dumps(codec.encode_message(HEARTBEAT)).encode()
        update = heartbeat_checks.decode_heartbeat(body).processes[0]
        assert isinstance(update, heartbeat.ProcessUpdate)
        assert dataclasses.replace(update, step=5).step == 5

    @pytest.mark.parametrize("field", ['"number":7.0', '"number":"7"', '"number":7,"unknown":NaN'])
    def test_compatible_types_are_accepted(self, field: str) -> None:
        assert (
            type(
                heartbeat_checks.decode_heartbeat(
                    b'{"host":"n","agent":"a",%s}' % field.encode()
                ).number
            )
            is int
        )

    @pytest.mark.parametrize(
        "body",
        [
            b"", b"[", b"[]", b"{}", b'{"host":"n","agent":"a","number":1.5}', b'{"host":"\xff","agent":"a","number":1}',
            b'{"host":"n","agent":"a","number":1,"x":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
            b'{"host":"n","agent":"a","number":1,"processes":[{"key":"k","cpu_s":1e999}]}',
        ],
    )  # fmt: skip
    def test_invalid_body_is_refused(self, body: bytes) -> None:
        with pytest.raises((ValueError, RecursionError)):
            heartbeat_checks.decode_heartbeat(body)


class TestListPaging:
    url = URL("http://h/list?limit=3")

    def iter_pages(
        self, rows: range, weigh: Callable[[int], int] = lambda row: 0
    ) -> Iterator[list[int]]:
        after = None
        while True:
            request = PageRequest(self.url, 3, after)
            page = json.loads(bytes(request.make_response(rows, str, lambda row: row, weigh).body))
            yield page["items"]
            if page["next"] is None:
                return
            after = page["next"].rpartition("after=")[2].partition("&")[0]

    def test_pages_respect_limit_and_lose_nothing(self) -> None:
        assert list(self.iter_pages(range(7))) == [[0, 1, 2], [3, 4, 5], [6]]
        assert list(self.iter_pages(range(3))) == [[0, 1, 2]]
        assert list(self.iter_pages(range(0))) == [[]]

    def test_heavy_items_come_in_smaller_nonempty_pages(self) -> None:
        assert list(self.iter_pages(range(5), lambda row: MAX_MEMBERS_PER_PAGE // 2)) == [
            [0, 1],
            [2, 3],
            [4],
        ]
        assert list(self.iter_pages(range(2), lambda row: 2 * MAX_MEMBERS_PER_PAGE)) == [[0], [1]]

    def test_unknown_cursor_is_reported(self) -> None:
        with pytest.raises(Problem, match="start again"):
            PageRequest(self.url, 3, "9").make_response(range(3), str, lambda row: row)


class TestUrgentHosts:
    """Which hosts report again soon."""

    def make_fleet(self, ranks: int, waiting: int) -> Fleet:
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

    def list_urgent_ranks(self, ranks: int, waiting: int) -> list[int]:
        fleet = self.make_fleet(ranks, waiting)
        return [rank for rank in range(ranks) if fleet.is_urgent(f"a{rank}")]

    def test_first_waiting_ranks_are_urgent(self) -> None:
        assert self.list_urgent_ranks(200, 0) == []
        assert self.list_urgent_ranks(200, 3) == [0, 1, 2]
        assert self.list_urgent_ranks(200, MAX_URGENT_SUSPECTS + 1) == []

    def test_mutually_waiting_ranks_are_urgent(self) -> None:
        fleet = self.make_fleet(200, MAX_URGENT_SUSPECTS + 1)
        for number, (rank, peer) in enumerate([(0, 1), (1, 0), (2, 3), (3, 4)], 2):
            stream_identity = heartbeat.StreamIdentity(
                kind=StreamKind.RECV, name="pp", desc="", ranks="0-199", tag=0, peer=peer
            )
            receives = heartbeat.StreamUpdate(
                uid=2, identity=stream_identity, entered=1, completed=0, entered_s=5.0
            )
            process = heartbeat.ProcessUpdate(key="1-1", lifecycle=3, sequences=(receives,))
            fleet.apply_heartbeat(
                heartbeat.Heartbeat(
                    host=f"n{rank}", agent=f"a{rank}", number=number, processes=(process,)
                ),
                101.0,
            )
        assert [rank for rank in range(200) if fleet.is_urgent(f"a{rank}")] == [0, 1]

    def test_last_ranks_not_waiting_are_urgent(self) -> None:
        assert self.list_urgent_ranks(200, 199) == [199]


def test_stable_state_is_frozen_for_gc_once() -> None:
    made, before = GarbageScheduler(), gc.get_freeze_count()
    try:
        made.update(load.MIN_PROCESSES - 1, 0.0)
        made.update(load.MIN_PROCESSES - 1, 1000.0)
        assert gc.get_freeze_count() == before, "the state of a small job is collected fast"
        made.update(2 * load.MIN_PROCESSES, 1001.0)
        assert (frozen := gc.get_freeze_count()) > before
        kept = [[] for _ in range(1000)]  # type: ignore[var-annotated] # lists of nothing
        made.update(2 * load.MIN_PROCESSES, 2000.0)
        assert gc.get_freeze_count() <= frozen, "nothing was added"
        made.update(2 * load.MIN_PROCESSES + 1, 2001.0)
        made.update(2 * load.MIN_PROCESSES + 1, 2001.0 + load.STEADY_AFTER_S + 1)
        assert gc.get_freeze_count() >= frozen + len(kept), "one more, and steady since"
    finally:
        gc.unfreeze()


class RecordingTransport(asyncio.Transport):
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


def make_http_request(name: str, body: bytes) -> bytes:
    return (
        f"POST /{name} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n".encode()
        + body
    )


def test_new_objects_are_collected_while_old_ones_are_freed() -> None:
    before = gc.get_threshold()
    gc.set_threshold(*load.THRESHOLDS)
    try:
        old = [[] for _ in range(50_000)]  # type: ignore[var-annotated] # lists of nothing
        gc.collect()
        kept = []
        for n in range(len(old)):
            kept.append([n])
            old.pop()
            if n % 500 == 0:
                load.collect_new_objects()
                assert len(gc.get_objects(0)) < 2_000
        assert len(kept) == 50_000
        with load.paused_collection():
            more = [[n] for n in range(5_000)]
            load.collect_new_objects()
            assert len(gc.get_objects(0)) >= len(more), "some objects are still in use"
    finally:
        gc.set_threshold(*before)


def test_connection_releases_answered_request() -> None:
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

    async def exchange_requests() -> None:
        config = uvicorn.Config(
            application,
            http=connections.LimitedHttpProtocol,
            log_config=None,
            lifespan="off",
            timeout_keep_alive=1,
        )
        config.load()
        connection, end = (
            connections.LimitedHttpProtocol(config, ServerState(), {}),
            RecordingTransport(),
        )
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
    import uvicorn
    from uvicorn.server import ServerState

    monkeypatch.setattr(connections, "HEAD_S", 0.2)
    monkeypatch.setattr(connections, "BODY_S", 0.2)

    async def application(scope: Any, receive: Any, send: Any) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    async def open_connection() -> RecordingTransport:
        config = uvicorn.Config(
            application, http=connections.LimitedHttpProtocol, log_config=None, lifespan="off"
        )
        config.load()
        connection, end = (
            connections.LimitedHttpProtocol(config, ServerState(), {}),
            RecordingTransport(),
        )
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
