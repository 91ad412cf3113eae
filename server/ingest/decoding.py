"""Decodes the JSON of a heartbeat into the messages of `hangwatch.protocol.heartbeat`.

Heartbeats are nearly everything that the server reads, so msgspec decodes them, straight into the
dataclasses of the protocol: the annotations are the schema, and each field is declared once.
Decoding into generated `msgspec.Struct` types would take half the time (25 instead of 47 us for
8 ranks with 4 groups each, 7 instead of 10 us for a brief heartbeat, CPython 3.11), but then the
server would handle objects that only look like the messages: `dataclasses.replace` and
`isinstance` fail on them. It also depends on the messages having no ``slots``, with which msgspec
takes 109 us for the same 8 ranks.

What msgspec refuses is decoded again by rules that are less strict: they accept compatible types,
such as a number that is written as a string, and the messages of protocol version 1. Either way the
first error ends the decoding: a list of a million invalid items costs no more than one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import operator
import types
import typing
from collections.abc import Iterable, Iterator
from typing import Annotated, Any

import msgspec
from pydantic import RootModel

from hangwatch.model.calls import Hash64
from hangwatch.protocol.heartbeat import Heartbeat, StreamUpdate

# Larger numbers are errors of their sender: a ring has no larger ones, and databases and dates fail
# on them.
MAX_INTEGER = (1 << 63) - 1
MAX_SECONDS = 1e9
_MISSING = object()
_DECODING_ERRORS = (ValueError, RecursionError)  # those of msgspec, json and UTF-8 are ValueErrors


class HeartbeatBody(RootModel[Heartbeat]):
    """What a node agent reports about its host."""  # this text is part of /openapi.json


def decode_heartbeat(body: bytes) -> Heartbeat:
    """Raises ValueError or RecursionError, with the first error, if it is not a valid heartbeat.

    `heartbeat_checks.check_volume` must have accepted the body.
    """
    decoder = _heartbeat_decoder()
    try:
        return decoder.decode(body)
    except _DECODING_ERRORS:
        document = json.loads(body)
        _convert_stream_objects(document)
        return msgspec.convert(document, Heartbeat, strict=False)


@functools.cache
def _heartbeat_decoder() -> msgspec.json.Decoder[Heartbeat]:
    """The decoder, which refuses numbers out of bounds.

    msgspec reads a message's bounds from its annotations when it first sees its class, and keeps
    them. The protocol declares the fields without bounds, since node agents have no msgspec.
    """
    with contextlib.ExitStack() as restored:
        _bound_fields(Heartbeat, restored, set())
        return msgspec.json.Decoder(Heartbeat)


def _bound_fields(message: type, restored: contextlib.ExitStack, seen: set[type]) -> None:
    """Adds bounds to the numbers in the annotations of a message and of those in it, until
    ``restored`` is closed.
    """
    seen.add(message)
    declared = dict(message.__annotations__)
    restored.callback(setattr, message, "__annotations__", declared)
    hints = typing.get_type_hints(message, include_extras=True)
    for inner in _iter_messages(tuple(hints.values())):
        if inner not in seen:
            _bound_fields(inner, restored, seen)
    message.__annotations__ = {name: _bound_type(hint) for name, hint in hints.items()}


def _bound_type(hint: Any) -> Any:
    if hint is int:
        return Annotated[int, msgspec.Meta(ge=-MAX_INTEGER, le=MAX_INTEGER)]
    if hint is float:
        return Annotated[float, msgspec.Meta(ge=-MAX_SECONDS, le=MAX_SECONDS)]
    if hint == Hash64:
        return Annotated[int, msgspec.Meta(ge=0)]  # msgspec knows no larger bound than 2**63 - 1
    arguments = typing.get_args(hint)
    if not arguments:
        return hint
    bounded = tuple(_bound_type(argument) for argument in arguments)
    if isinstance(hint, types.UnionType):
        return functools.reduce(operator.or_, bounded)
    return typing.get_origin(hint)[bounded]


def _iter_messages(hints: Iterable[Any]) -> Iterator[type]:
    for hint in hints:
        if dataclasses.is_dataclass(hint) or hasattr(hint, "_fields"):
            yield hint
        yield from _iter_messages(typing.get_args(hint))


def _convert_stream_objects(document: Any) -> None:
    """Converts the stream updates of protocol version 1, which are objects, to arrays."""
    processes = document.get("processes") if isinstance(document, dict) else None
    for process in processes if isinstance(processes, list) else ():
        updates = process.get("sequences") if isinstance(process, dict) else None
        if isinstance(updates, list):
            process["sequences"] = [
                _list_stream_fields(update) if isinstance(update, dict) else update
                for update in updates
            ]


def _list_stream_fields(update: dict[str, Any]) -> list[Any]:
    """Raises ValueError if a field without a default is missing."""
    try:
        return [
            update.get(name, default)
            if (default := StreamUpdate._field_defaults.get(name, _MISSING)) is not _MISSING
            else update[name]
            for name in StreamUpdate._fields
        ]
    except KeyError as error:
        raise ValueError(f"a stream update lacks {error}") from None


class HeartbeatHead(msgspec.Struct):
    """What is read of a heartbeat that is not decoded as a whole."""

    agent: str | None = None
    version: int = 1


def decode_head(body: bytes) -> HeartbeatHead:
    """Without an agent if the body is not a heartbeat."""
    try:
        return msgspec.json.decode(body, type=HeartbeatHead)
    except _DECODING_ERRORS:
        return HeartbeatHead()
