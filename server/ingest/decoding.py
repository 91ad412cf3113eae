"""Decodes the JSON of a heartbeat into the messages of `hangwatch.protocol.heartbeat`.

Heartbeats are nearly everything that the server reads, so msgspec decodes them, straight into the
dataclasses of the protocol: the annotations are the schema, and each field is declared once.
Decoding into generated `msgspec.Struct` types would take half the time (25 instead of 47 us for
8 ranks with 4 groups each, 7 instead of 10 us for a brief heartbeat, CPython 3.11), but then the
server would handle objects that only look like the messages: `dataclasses.replace` and
`isinstance` fail on them. It also depends on the messages having no ``slots``, with which msgspec
takes 109 us for the same 8 ranks.

Pydantic validates whatever msgspec refuses. It accepts compatible types, such as a number that is
written as a string, and reports every invalid field.
"""

from __future__ import annotations

import functools

import msgspec
from pydantic import ConfigDict, RootModel

from hangwatch.protocol.heartbeat import Heartbeat


class HeartbeatBody(RootModel[Heartbeat]):
    """What a node agent reports about its host."""  # this text is part of /openapi.json

    model_config = ConfigDict(allow_inf_nan=False)


def decode_heartbeat(body: bytes) -> Heartbeat:
    """Raises pydantic.ValidationError if the body is not a valid heartbeat."""
    try:
        return _heartbeat_decoder().decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return HeartbeatBody.model_validate_json(body).root


@functools.cache
def _heartbeat_decoder() -> msgspec.json.Decoder[Heartbeat]:
    return msgspec.json.Decoder(Heartbeat)


class HeartbeatHead(msgspec.Struct):
    """What is read of a heartbeat that is not decoded as a whole."""

    agent: str | None = None
    version: int = 1


def decode_head(body: bytes) -> HeartbeatHead:
    """Without an agent if the body is not a heartbeat."""
    try:
        return msgspec.json.decode(body, type=HeartbeatHead)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return HeartbeatHead()
