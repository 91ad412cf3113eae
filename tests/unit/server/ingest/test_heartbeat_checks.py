"""Heartbeats as they are decoded and checked."""

from __future__ import annotations

import dataclasses
import json
import time

import pytest

from hangwatch.model.calls import Call, Signature
from hangwatch.protocol import codec, heartbeat
from hangwatch.server.core.problems import Problem
from hangwatch.server.ingest import heartbeat_checks
from hangwatch.server.ingest.heartbeat_checks import parse_heartbeat

HEARTBEAT = heartbeat.Heartbeat(
    host="n",
    agent="a",
    number=7,
    sent_s=3.0,
    processes=(
        heartbeat.ProcessUpdate(
            key="1-1",
            identity=heartbeat.ProcessIdentity(job="j", rank=0, world_size=2, pid=1, start_ticks=1),
            streams=(
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


def test_read_as_they_were_written() -> None:
    body = json.dumps(codec.encode_message(HEARTBEAT)).encode()
    assert heartbeat_checks.decode_heartbeat(body) == HEARTBEAT


def test_decoded_messages_are_the_protocols_own_dataclasses() -> None:
    body = json.dumps(codec.encode_message(HEARTBEAT)).encode()
    update = heartbeat_checks.decode_heartbeat(body).processes[0]
    assert isinstance(update, heartbeat.ProcessUpdate)
    assert dataclasses.replace(update, step=5).step == 5


@pytest.mark.parametrize(
    "field", ['"number":7.0', '"number":"7"', '"number":7,"unknown":{"a":[1e300]}']
)
def test_compatible_types_are_accepted(field: str) -> None:
    assert (
        type(
            heartbeat_checks.decode_heartbeat(
                b'{"host":"n","agent":"a",%s}' % field.encode()
            ).number
        )
        is int
    )


def test_file_name_that_is_not_utf8_is_accepted() -> None:
    body = json.dumps({"host": "n", "agent": "a", "number": 1, "owner": "caf\udce9"}).encode()
    assert heartbeat_checks.decode_heartbeat(body).owner == "caf?"


@pytest.mark.parametrize(
    "body",
    [
        b"", b"[", b"[]", b"{}", b'{"host":"n","agent":"a","number":1.5}', b'{"host":"\xff","agent":"a","number":1}',
        b'{"host":"n","agent":"a","number":1,"x":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"host":"n","agent":"a","number":1,"processes":[{"key":"k","cpu_s":1e999}]}',
    ],
)  # fmt: skip
def test_invalid_body_is_refused(body: bytes) -> None:
    with pytest.raises((ValueError, RecursionError)):
        heartbeat_checks.decode_heartbeat(body)


@pytest.mark.parametrize("fault", [b"", b',"new":NaN', b',"new":"\\ud800"', b',"cost":1'])
def test_large_unknown_members_take_little_time(fault: bytes) -> None:
    """The server handles no other request meanwhile. Looking at each value took 4 to 9 seconds."""
    pairs = b",".join(b'"key%016d":"value"' % number for number in range((1 << 21) - 100))
    body = b'{"host":"n","agent":"a","number":1%s,"extra":{%s}}' % (fault, pairs)
    assert len(body) > 55 << 20
    began_s = time.thread_time()
    try:
        parse_heartbeat(body)
    except Problem:
        assert fault
    else:
        assert not fault
    assert time.thread_time() - began_s < 1.0


def test_invalid_heartbeat_is_refused() -> None:
    stream_identity = {"kind": "collective", "name": "0", "desc": "", "ranks": "0-"}
    stream: list[object] = [1, 1, None, 0.0, "", 0, [], None, [], stream_identity]
    identity = {"job": "j", "rank": -1, "world_size": 4, "pid": 1, "start_ticks": 1}
    for processes in (
        [{"key": "1-1", "streams": [stream]}],
        [{"key": "1-1", "identity": identity}],
        [{"key": "1-1", "idle_s": float("nan")}],
        [{"key": 1}],
    ):
        body = {"host": "n", "agent": "a", "number": 1, "processes": processes}
        with pytest.raises(Problem) as raised:
            parse_heartbeat(json.dumps(body).encode())
        assert raised.value.status == 422


def test_other_protocol_version_is_reported() -> None:
    for rest in (b'"host": "n", "agent": "a", "number": 1}', b'"new": "format"}'):
        with pytest.raises(Problem, match="same release"):
            parse_heartbeat(b'{"version": 3, ' + rest)
