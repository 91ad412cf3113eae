"""Heartbeats as JSON: what node agents send, and what the server reads."""

from __future__ import annotations

import json
from typing import Any

import pytest

from hangwatch.protocol.codec import MAX_COMMANDS, decode_reply, encode_message
from hangwatch.protocol.commands import MAX_RECORDING_HZ, MAX_RECORDING_S, Command, CommandKind
from hangwatch.protocol.heartbeat import Heartbeat, HeartbeatReply, ProcessUpdate, StreamUpdate
from hangwatch.server.ingest.heartbeat_checks import decode_heartbeat

UPDATES = (
    StreamUpdate(uid=1, entered=2),
    StreamUpdate(uid=3, entered=5, completed=4, entered_s=1.5, op="recv", pending_s=1.5),
    StreamUpdate(uid=4, entered=7, chain=2**63, checkpoints=((4, 11), (6, 2**64 - 1))),
)


def make_heartbeat() -> Heartbeat:
    process = ProcessUpdate(key="1-1", streams=UPDATES)
    return Heartbeat(host="node0", agent="a", number=1, processes=(process,))


def test_stream_updates_are_arrays_without_their_last_defaults() -> None:
    (process,) = encode_message(make_heartbeat())["processes"]
    assert process["streams"] == [
        [1, 2],
        [3, 5, 4, 1.5, "recv", 0, [], 1.5],
        [4, 7, None, 0.0, "", 2**63, [[4, 11], [6, 2**64 - 1]]],
    ]


def test_heartbeat_is_read_as_it_was_sent() -> None:
    document = encode_message(make_heartbeat())
    assert decode_heartbeat(json.dumps(document).encode()) == make_heartbeat()


def test_reply_is_read_as_it_was_sent() -> None:
    commands = (
        Command(id="a", kind=CommandKind.STACKS, key="1-1", native=True),
        Command(id="b", kind=CommandKind.CALLS, key="1-1", uid=3, from_seq=5, to_seq=9, step=4),
        Command(id="c", kind=CommandKind.TRACE, key="1-1", after=-1, op="send", values=True),
        Command(id="d", kind=CommandKind.RECORD, key="1-1", seconds=5, rate=100, gil=True),
        Command(id="e", kind=CommandKind.HARDWARE, key="1-1", since_s=3.5, whole_job=True),
    )
    reply = HeartbeatReply(
        interval_s=2.0, steady_s=4.0, urgent=True, resync=True, clock_s=7.5, commands=commands
    )
    assert decode_reply(json.loads(json.dumps(encode_message(reply)))) == reply
    assert decode_reply({}) == HeartbeatReply()


def test_values_out_of_range_are_replaced() -> None:
    command = {"id": 1, "kind": "calls", "key": "1-1", "step": 0, "since_s": -1, "unknown": 1}
    command |= dict.fromkeys(("max_calls", "seconds", "rate"), 1 << 40)
    reply = decode_reply(
        {"interval_s": 0, "steady_s": 1e9, "poll_s": None, "details_s": -1, "commands": [command]}
    )
    assert (reply.interval_s, reply.steady_s, reply.poll_s, reply.details_s) == (0.2, 60, None, 0)
    (made,) = reply.commands
    assert (made.id, made.step, made.since_s, made.max_calls) == ("1", 1, 0.0, 2048)
    assert (made.seconds, made.rate) == (MAX_RECORDING_S, MAX_RECORDING_HZ)


def test_reply_has_as_many_commands_as_are_remembered() -> None:
    """SECURITY.md: "execute 1,024 commands"."""
    commands = [{"id": str(number), "kind": "stacks", "key": "1-1"} for number in range(60_000)]
    assert len(decode_reply({"commands": commands}).commands) == MAX_COMMANDS


@pytest.mark.parametrize(
    "data",
    [
        {"interval_s": None},
        {"interval_s": "soon"},
        {"interval_s": float("nan")},
        {"clock_s": float("inf")},
        {"clock_s": 10**400},
        {"commands": [{"id": "a", "kind": "calls", "key": "1-1", "from_seq": float("inf")}]},
        {"commands": 1},
        {"commands": [1]},
        {"commands": [{"kind": "calls", "key": "1-1"}]},
        {"commands": [{"id": "a", "key": "1-1"}]},
        {"commands": [{"id": "a", "kind": "unknown", "key": "1-1"}]},
    ],
)
def test_malformed_reply_is_rejected(data: dict[str, Any]) -> None:
    with pytest.raises((KeyError, TypeError, ValueError)):
        decode_reply(data)
