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
from collections.abc import Callable, Iterable
from typing import Any

from .commands import MAX_RECORDING_HZ, MAX_RECORDING_S, Command, CommandKind
from .heartbeat import HeartbeatReply

_PLAIN_TYPES = frozenset((int, float, str, bool, type(None)))
MAX_COMMANDS = (
    1024  # a node agent takes as many from a reply as it remembers, to execute none twice
)


def _parse_number(value: Any) -> float:
    """Raises ValueError for NaN, which no range excludes, and for infinite numbers."""
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"{number} where a number should be")
    return number


# The functions that convert a value to the type of a field, by its annotation.
_CONVERTERS: dict[str, Callable[[Any], Any]] = {
    "bool": bool,
    "int": lambda value: value if type(value) is int else int(_parse_number(value)),
    "float": _parse_number,
    "float | None": _parse_number,
    "str": str,
    "CommandKind": CommandKind,
}


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


def decode_reply(data: dict[str, Any]) -> HeartbeatReply:
    """Decodes the server's reply. Raises TypeError or ValueError if it is malformed."""
    values = _decode_fields(HeartbeatReply, data)
    return HeartbeatReply(**values, commands=decode_commands(data.get("commands", ())))


def decode_commands(items: Iterable[dict[str, Any]]) -> tuple[Command, ...]:
    """The first `MAX_COMMANDS` commands in a reply. Raises TypeError or ValueError if one is malformed."""
    first = itertools.islice(items, MAX_COMMANDS)
    return tuple([Command(**_decode_fields(Command, item)) for item in first])


def _decode_fields(kind: type, data: dict[str, Any]) -> dict[str, Any]:
    """The values of a message's simple fields in ``data``, converted to the fields' types. Others
    are left out, and so have their defaults.
    """
    values: dict[str, Any] = {}
    for field in dataclasses.fields(kind):
        convert = _CONVERTERS.get(str(field.type))
        if convert is None or field.name not in data:
            continue
        value = data[field.name]
        if value is None and field.default is None:
            continue
        value = convert(value)
        if field.name in _RANGES:
            lowest, highest = _RANGES[field.name]
            value = min(highest, max(lowest, value))
        values[field.name] = value
    return values
