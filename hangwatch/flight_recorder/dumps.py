"""PyTorch Flight Recorder dumps, from plain data. Every version and backend writes them a little
differently, so the parser is lenient.

The layout is that of ``torch/csrc/distributed/c10d/FlightRecorder.hpp``: ``version``,
``pg_config``, ``pg_status`` and ``entries``, oldest first. Arguments that the recorder does not
record (reduce ops, roots, tags, split sizes) cannot be compared. The data may be malicious: every
type is checked, and no object of it is converted to text before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from hangwatch.model.plain_data import parse_text

from .calls import FlightRecord, InternPool
from .dump_calls import GroupInstance, collect_calls
from .entries import FlightEntry
from .group_tables import GroupStatus, parse_groups, parse_statuses

# Of the layout's version, which is not torch's: torch 2.5 writes 2.4, torch 2.13 writes 2.10.
SUPPORTED_MAJOR = "2"
MAX_ENTRIES = 1 << 20

_PARSE_ERRORS = (
    KeyError,
    TypeError,
    ValueError,
    IndexError,
    AttributeError,
    OverflowError,
    RecursionError,
)


class FlightDumpError(ValueError):
    """The data is not a Flight Recorder dump."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FlightDump:
    """One rank's recorder: its process groups, and the calls that its ring held.

    ``groups`` has the members of process groups by name, as far as they are recorded. ``calls`` are
    the collectives of each group ordered by number, ``p2p_calls`` its sends and receives ordered by
    record.
    """

    rank: int
    version: str
    groups: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    descriptions: Mapping[str, str] = field(default_factory=dict)
    calls: Mapping[GroupInstance, Sequence[FlightRecord]] = field(default_factory=dict)
    p2p_calls: Mapping[GroupInstance, Sequence[FlightRecord]] = field(default_factory=dict)
    backends: Mapping[GroupInstance, str] = field(default_factory=dict)
    # By a group's name, as far as the recorder counts only its collectives.
    statuses: Mapping[str, GroupStatus] = field(default_factory=dict)
    wrapped: bool = False  # older records were overwritten, or left out
    pending_messages_lost: bool = False  # some of its pending messages were overwritten
    # When its first and its last call were made, in seconds since the epoch; 0 if unknown.
    call_time_range: tuple[float, float] = (0.0, 0.0)
    # It records when the device starts a call, so that "scheduled" means not started.
    reports_starts: bool = False

    @property
    def group_instances(self) -> set[GroupInstance]:
        return {*self.calls, *self.p2p_calls}

    @property
    def last_record(self) -> FlightRecord | None:
        """Its newest record."""
        newest = (
            records[-1] for records in (*self.calls.values(), *self.p2p_calls.values()) if records
        )
        return max(newest, key=lambda record: record.record_id, default=None)


def parse_dump(rank: int, data: object, pool: InternPool | None = None) -> FlightDump:
    """A rank's dump from plain data. All dumps of a job can share a ``pool``. Raises
    FlightDumpError with the reason if the data is not a dump.
    """
    if (
        not isinstance(data, Mapping)
        or "version" not in data
        or not isinstance(data.get("pg_config", {}), Mapping)
    ):
        raise FlightDumpError("it has no 'version' and 'pg_config', as Flight Recorder dumps have")
    try:
        return _parse_fields(rank, data, pool or InternPool())
    except FlightDumpError:
        raise
    except _PARSE_ERRORS as error:
        reason = f"{type(error).__name__}: {error}"[:200]
        raise FlightDumpError(
            f"its entries are not those of a Flight Recorder dump: {reason}"
        ) from error


def _parse_fields(rank: int, data: Mapping[str, object], pool: InternPool) -> FlightDump:
    version = parse_text(data["version"])
    if version.split(".")[0] != SUPPORTED_MAJOR:
        raise FlightDumpError(
            f"its layout is version {version}; this reads {SUPPORTED_MAJOR}.x, which torch 2.5 and"
            " later write"
        )
    entries = data.get("entries") or []
    if not isinstance(entries, (list, tuple)) or len(entries) > MAX_ENTRIES:
        raise TypeError("the entries are not a list, or the list is too long")
    parsed = collect_calls(
        [FlightEntry.parse_entry(fields, index) for index, fields in enumerate(entries)], pool
    )
    groups, descriptions = parse_groups(data.get("pg_config") or {}, parsed.descriptions)
    status = data.get("pg_status") or {}
    has_recorded = bool(entries or status)
    return FlightDump(
        rank=rank,
        version=version,
        groups=groups,
        descriptions=descriptions,
        calls=parsed.calls,
        p2p_calls=parsed.p2p_calls,
        backends=parsed.backends,
        statuses=parse_statuses(status, groups, parsed.names_by_pg_id, parsed.unreliable_counts),
        wrapped=parsed.wrapped and has_recorded,
        pending_messages_lost=parsed.pending_messages_lost,
        call_time_range=parsed.call_time_range,
        reports_starts=parsed.reports_starts,
    )
