"""The unfinished calls in one Flight Recorder dump, without an analysis of the whole dump. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from hangwatch.model.flight_dumps import UnfinishedCall
from hangwatch.model.plain_data import parse_int, parse_text

from .entries import FlightEntry, read_tensors

_MAX_GROUPS = 16
_MAX_ENTRIES = 1 << 17
_MAX_TENSORS, _MAX_DIMENSIONS = 8, 16
_MAX_TEXT = 200


def find_unfinished_calls(data: object, written_ns: int) -> tuple[UnfinishedCall, ...]:
    """The first unfinished collective of each group, the one that waited longest first.

    ``written_ns`` is when the dump was written, in nanoseconds since the epoch. Raises ValueError,
    TypeError, KeyError, AttributeError or OverflowError if the data is not a dump.
    """
    entries = data.get("entries") if isinstance(data, Mapping) else None
    if not isinstance(entries, (list, tuple)) or len(entries) > _MAX_ENTRIES:
        raise ValueError("it has no list of entries, as Flight Recorder dumps have")
    first_by_group: dict[str, UnfinishedCall] = {}
    for index, fields in enumerate(entries):
        if fields.get("state") == "completed" or fields.get("retired"):
            continue
        entry = FlightEntry.parse_entry(fields, index)
        if not entry.is_p2p and entry.group not in first_by_group:
            first_by_group[entry.group] = _make_call(entry, written_ns)
    calls = sorted(first_by_group.values(), key=lambda call: -call.waited_s)
    return tuple(calls[:_MAX_GROUPS])


def _make_call(entry: FlightEntry, written_ns: int) -> UnfinishedCall:
    timeout_ms = parse_int(entry.fields.get("timeout_ms") or 0)
    waited_ns = max(0, written_ns - entry.created_ns) if entry.created_ns else 0
    shapes = read_tensors(entry.fields)[0][:_MAX_TENSORS]
    return UnfinishedCall(
        group=entry.group[:_MAX_TEXT],
        desc=entry.description[:_MAX_TEXT],
        seq=entry.seq,
        op=entry.name[:_MAX_TEXT],
        shapes=tuple(tuple(map(parse_int, shape[:_MAX_DIMENSIONS])) for shape in shapes),
        state=parse_text(entry.fields.get("state") or "")[:_MAX_TEXT],
        waited_s=round(waited_ns / 1e9, 1),
        timeout_s=timeout_ms / 1e3 if timeout_ms > 0 else None,
    )
