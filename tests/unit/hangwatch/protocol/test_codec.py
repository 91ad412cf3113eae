"""Heartbeats as JSON: what node agents send, and what the server reads."""

from __future__ import annotations

import json

from hangwatch.protocol.codec import encode_message
from hangwatch.protocol.heartbeat import Heartbeat, ProcessUpdate, StreamUpdate
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
