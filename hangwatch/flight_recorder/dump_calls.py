"""All calls of one Flight Recorder dump by process group, and what the ring's state means for
them. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .calls import ARRIVALS_ONLY_BACKEND, CallReader, FlightRecord, InternPool
from .entries import FlightEntry

# A process group's name, and an index from 0 among the groups that had this name in the process one
# after another.
GroupInstance = tuple[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedCalls:
    """The calls of a dump: see `hangwatch.flight_recorder.dumps.FlightDump`."""

    calls: dict[GroupInstance, list[FlightRecord]]
    p2p_calls: dict[GroupInstance, list[FlightRecord]]
    descriptions: dict[str, str]
    backends: dict[GroupInstance, str]
    names_by_pg_id: dict[str, str]  # the recorder's number of a group, and the group's name
    unreliable_counts: set[str]  # groups whose status counts more than their collectives
    wrapped: bool
    pending_messages_lost: bool
    reports_starts: bool
    # When the first and the last call were made, in seconds since the epoch; 0 if unknown.
    call_time_range: tuple[float, float]


def collect_calls(entries: Sequence[FlightEntry], pool: InternPool) -> ParsedCalls:
    """Raises what `FlightEntry.parse_entry` raises, for the fields that it does not parse."""
    entries = sorted(entries, key=lambda entry: entry.record_id)
    wrapped = _has_lost_records(entries)
    pg_ids_by_name = _list_pg_ids(entries)
    parts_by_call: dict[tuple[GroupInstance, bool, int], list[FlightEntry]] = {}
    for entry in entries:
        instance = (entry.group, pg_ids_by_name[entry.group].index(entry.pg_id))
        parts_by_call.setdefault((instance, entry.is_p2p, entry.seq), []).append(entry)
    calls: dict[GroupInstance, list[FlightRecord]] = {}
    p2p_calls: dict[GroupInstance, list[FlightRecord]] = {}
    reader = CallReader(pool)
    for (instance, is_p2p, _), parts in parts_by_call.items():
        may_be_truncated = wrapped and parts[0] is entries[0]
        records = reader.read_call(parts, may_be_truncated)
        (p2p_calls if is_p2p else calls).setdefault(instance, []).extend(records)
    for records in calls.values():
        records.sort(key=lambda record: record.seq)
    # A recorder that was reset starts again to number its records, but not the calls.
    for records in (*calls.values(), *p2p_calls.values()):
        if records and min(record.seq for record in records) > 1:
            wrapped = True
    oldest_parts = next(iter(parts_by_call.values()), [])
    times_ns = [entry.created_ns for entry in entries]
    return ParsedCalls(
        calls=calls,
        p2p_calls=p2p_calls,
        descriptions={entry.group: entry.description for entry in entries},
        backends={instance: parts[0].backend for (instance, _, _), parts in parts_by_call.items()},
        names_by_pg_id={
            pg_ids[-1]: name for name, pg_ids in pg_ids_by_name.items() if pg_ids[-1] is not None
        },
        unreliable_counts={
            entry.group
            for entry in entries
            if entry.is_p2p or entry.backend == ARRIVALS_ONLY_BACKEND
        },
        wrapped=wrapped,
        pending_messages_lost=wrapped and any(map(_is_pending_message_end, oldest_parts)),
        reports_starts=any(entry.shows_start for entry in entries),
        call_time_range=(min(times_ns, default=0) / 1e9, max(times_ns, default=0) / 1e9),
    )


def _has_lost_records(entries: Sequence[FlightEntry]) -> bool:
    """Whether records are missing from the dump, by their numbers; also if there are none."""
    if not entries:
        return True
    return entries[0].record_id > 0 or entries[-1].record_id >= len(entries)


def _list_pg_ids(entries: Sequence[FlightEntry]) -> dict[str, list[str | None]]:
    """The recorder's numbers of the groups that had a name one after another, by name."""
    pg_ids_by_name: dict[str, list[str | None]] = {}
    for entry in entries:
        pg_ids = pg_ids_by_name.setdefault(entry.group, [])
        if entry.pg_id not in pg_ids:
            pg_ids.append(entry.pg_id)
    return pg_ids_by_name


def _is_pending_message_end(entry: FlightEntry) -> bool:
    """Whether it ends coalesced sends and receives that are not complete."""
    return entry.is_p2p and entry.is_coalesced_end and entry.fields.get("state") != "completed"
