"""Encodes any message as JSON-ready data, and decodes the server's reply to a heartbeat.

Both run on training nodes too, so they need only the standard library. The server decodes
heartbeats in `server.ingest.heartbeat_checks`, with msgspec.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
from collections.abc import Iterable
from typing import Any

from .commands import MAX_RECORDING_HZ, MAX_RECORDING_S, Command, CommandKind
from .heartbeat import HeartbeatReply

_PLAIN_TYPES = frozenset((int, float, str, bool, type(None)))


def encode_message(message: Any) -> Any:
    """Converts a message to JSON-ready data; fields equal to their default are omitted, of a named
    tuple only the last ones.
    """
    kind = type(message)
    if kind in _PLAIN_TYPES:  # nearly all of a heartbeat
        return message
    if isinstance(message, (tuple, list)):
        if kind is not tuple and kind is not list:
            message = message[: _count_used_fields(message)]
        return [item if type(item) in _PLAIN_TYPES else encode_message(item) for item in message]
    if dataclasses.is_dataclass(kind):
        return {
            name: encode_message(value)
            for name, default in _field_defaults(kind)
            if (value := getattr(message, name)) != default
        }
    return message.value if isinstance(message, enum.Enum) else message


def _count_used_fields(message: Any) -> int:
    """The number of fields of a named tuple without the last ones that have their defaults."""
    count = len(message)
    for name, default in reversed(message._field_defaults.items()):
        if getattr(message, name) != default:
            break
        count -= 1
    return count


@functools.cache
def _field_defaults(kind: type) -> tuple[tuple[str, Any], ...]:
    """(name, default) of each field; `dataclasses.MISSING`, which equals no value, for none."""
    return tuple((f.name, f.default) for f in dataclasses.fields(kind))


def decode_reply(data: dict[str, Any]) -> HeartbeatReply:
    """Decodes the server's reply. Raises KeyError, TypeError or ValueError if it is malformed."""
    return HeartbeatReply(
        interval_s=min(60.0, max(0.05, float(data.get("interval_s", 0.5)))),
        steady_s=_optional_seconds(data.get("steady_s"), 60.0),
        changes_s=_optional_seconds(data.get("changes_s"), 60.0),
        details_s=_optional_seconds(data.get("details_s"), 600.0),
        urgent=bool(data.get("urgent", False)),
        resync=bool(data.get("resync", False)),
        clock_s=float(data["clock_s"]) if data.get("clock_s") is not None else None,
        poll_s=_optional_seconds(data.get("poll_s"), 60.0),
        commands=decode_commands(data.get("commands", ())),
    )


def decode_commands(items: Iterable[dict[str, Any]]) -> tuple[Command, ...]:
    """The commands in a reply. Raises KeyError, TypeError or ValueError if one is malformed."""
    return tuple(
        [
            Command(
                id=str(item["id"]),
                kind=CommandKind(item["kind"]),
                key=str(item["key"]),
                native=bool(item.get("native", False)),
                uid=int(item.get("uid", 0)),
                from_seq=int(item.get("from_seq", 0)),
                to_seq=int(item.get("to_seq", 0)),
                step=max(1, int(item.get("step", 1))),
                max_calls=min(2048, int(item.get("max_calls", 64))),
                after=int(item.get("after", 0)),
                op=str(item.get("op", "")),
                values=bool(item.get("values", False)),
                last=bool(item.get("last", False)),
                seconds=min(MAX_RECORDING_S, int(item.get("seconds", 0))),
                rate=min(MAX_RECORDING_HZ, int(item.get("rate", 0))),
                gil=bool(item.get("gil", False)),
                since_s=max(0.0, float(item.get("since_s", 0.0))),
                stops=str(item.get("stops", "")),
            )
            for item in items
        ]
    )


def _optional_seconds(value: Any, most: float) -> float | None:
    return None if value is None else min(most, max(0.0, float(value)))
