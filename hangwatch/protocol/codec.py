"""Encodes any message as JSON-ready data, and decodes the server's reply to a heartbeat.

Both run on training nodes too, so they need only the standard library. The server decodes
heartbeats in `server.ingest.heartbeat_checks`, with msgspec.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import itertools
import math
from collections.abc import Iterable
from typing import Any

from hangwatch.model.calls import JsonObject, decode_fields

from .commands import MAX_RECORDING_HZ, MAX_RECORDING_S, Command, CommandKind
from .heartbeat import HeartbeatReply

_PLAIN_TYPES = frozenset((int, float, str, bool, type(None)))
# A node agent takes as many from a reply as it remembers, to execute none twice.
MAX_COMMANDS = 1024


def encode_message(message: Any) -> Any:
    """Converts a message to JSON-ready data; fields equal to their default are omitted, of a named
    tuple only the last ones.
    """
    kind = type(message)
    if kind in _PLAIN_TYPES:  # nearly all of a heartbeat
        return message
    if isinstance(message, (tuple, list)):
        if kind is not tuple and kind is not list:
            count = len(message)  # trailing fields with their defaults are left out
            for name, default in reversed(kind._field_defaults.items()):
                if getattr(message, name) != default:
                    break
                count -= 1
            message = message[:count]
        return [item if type(item) in _PLAIN_TYPES else encode_message(item) for item in message]
    if dataclasses.is_dataclass(kind):
        return {
            name: encode_message(value)
            for name, default in _field_defaults(kind)
            if (value := getattr(message, name)) != default
        }
    return message.value if isinstance(message, enum.Enum) else message


@functools.cache
def _field_defaults(kind: type) -> tuple[tuple[str, Any], ...]:
    """(name, default) of each field; `dataclasses.MISSING`, which equals no value, for none."""
    return tuple((f.name, f.default) for f in dataclasses.fields(kind))


# The values that a node agent accepts; others are replaced by the nearest of these. Whatever listens
# at the server's address, five reports a second are the most that it gets: they cost CPU time.
MIN_INTERVAL_S = 0.2
_RANGES: dict[str, tuple[float, float]] = {
    "interval_s": (MIN_INTERVAL_S, 60.0),
    "steady_s": (MIN_INTERVAL_S, 60.0),
    "changes_s": (MIN_INTERVAL_S, 60.0),
    "details_s": (0.0, 600.0),
    "poll_s": (1.0, 60.0),
    "step": (1, math.inf),
    "max_calls": (-math.inf, 2048),
    "seconds": (-math.inf, MAX_RECORDING_S),
    "rate": (-math.inf, MAX_RECORDING_HZ),
    "since_s": (0.0, math.inf),
}


def decode_reply(data: JsonObject) -> HeartbeatReply:
    """Decodes the server's reply. Raises KeyError, TypeError or ValueError if it is malformed."""
    values = _decode_fields(HeartbeatReply, data)
    return HeartbeatReply(**values, commands=decode_commands(data.get("commands", ())))


def decode_commands(items: Iterable[JsonObject]) -> tuple[Command, ...]:
    """The first `MAX_COMMANDS` commands in a reply. Raises KeyError, TypeError or ValueError if one is
    malformed.
    """
    commands = []
    for item in itertools.islice(items, MAX_COMMANDS):
        values = _decode_fields(Command, item)
        commands.append(Command(kind=CommandKind(item["kind"]), **values))
    return tuple(commands)


def _decode_fields(kind: type, data: JsonObject) -> JsonObject:
    """The values of a message's simple fields, each within its range."""
    values = decode_fields(kind, data)
    for name in values.keys() & _RANGES.keys():
        lowest, highest = _RANGES[name]
        values[name] = min(highest, max(lowest, values[name]))
    return values
