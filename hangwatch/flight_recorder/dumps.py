"""PyTorch Flight Recorder dumps, as plain data: read leniently, since every version and backend
writes them a little differently.

The layout is that of ``torch/csrc/distributed/c10d/FlightRecorder.hpp``: ``version``,
``pg_config``, ``pg_status`` and ``entries``, oldest first. What the recorder does not hold (reduce
ops, roots, tags, split sizes) cannot be compared. Whoever wrote the data may mean harm, so nothing
in it is taken for what it should be, and no object of it is turned into text unseen.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from hangwatch.model.plain_data import parse_int, parse_text

from .calls import FlightEntry, FlightRecord, InternPool, collect_calls

# of the layout's version, which is not torch's: torch 2.5 writes 2.4, torch 2.13 writes 2.10
SUPPORTED_MAJOR = "2"
MAX_DUMP_RANKS = 1 << 17
MAX_ENTRIES = 1 << 20

GroupInstance = tuple[
    str, int
]  # a process group's name, and which of those that had it one after another in the process, from 0


class FlightDumpError(ValueError):
    """The data is no Flight Recorder dump."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FlightDump:
    """What one rank's recorder held. ``groups`` has the members of the process groups by name,
    where they are told.

    ``calls`` are the collectives of each group in the order of their numbers, ``messages`` its
    sends and receives in that of the records.
    """

    rank: int
    version: str
    groups: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    descriptions: Mapping[str, str] = field(default_factory=dict)
    calls: Mapping[GroupInstance, Sequence[FlightRecord]] = field(default_factory=dict)
    p2p_calls: Mapping[GroupInstance, Sequence[FlightRecord]] = field(default_factory=dict)
    backends: Mapping[GroupInstance, str] = field(default_factory=dict)
    enqueued_counts: Mapping[str, int] = field(
        default_factory=dict
    )  # by a group's name: its newest collective, as the recorder counts them
    wrapped: bool = False  # older records were overwritten, or left out
    pending_messages_lost: bool = False  # of messages that it is at, some were overwritten
    call_time_range: tuple[float, float] = (
        0.0,
        0.0,
    )  # when its first and its last call were made, in seconds since the epoch; 0: not told
    reports_starts: bool = (
        False  # it tells when the device begins a call, so that "scheduled" means not begun
    )

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
    """A rank's dump from plain data. ``known`` is shared by the dumps of a job. Raises DumpError,
    which says what is wrong with it.
    """
    if (
        not isinstance(data, Mapping)
        or "version" not in data
        or not isinstance(data.get("pg_config", {}), Mapping)
    ):
        raise FlightDumpError("it has no 'version' and 'pg_config', as Flight Recorder dumps have")
    try:
        version = parse_text(data["version"])
        if version.split(".")[0] != SUPPORTED_MAJOR:
            raise FlightDumpError(
                f"its layout is version {version}; this reads {SUPPORTED_MAJOR}.x, which torch 2.5"
                " and later write"
            )
        entries = data.get("entries") or []
        if not isinstance(entries, (list, tuple)) or len(entries) > MAX_ENTRIES:
            raise TypeError("they are no list, or one that is too long")
        made = collect_calls(
            [FlightEntry.parse_entry(told, at) for at, told in enumerate(entries)],
            pool or InternPool(),
        )
        groups, descriptions = _parse_groups(data.get("pg_config") or {}, made.descriptions)
        return FlightDump(
            rank=rank,
            version=version,
            groups=groups,
            descriptions=descriptions,
            calls=made.calls,
            p2p_calls=made.p2p_calls,
            backends=made.backends,
            enqueued_counts=_parse_enqueued_counts(
                data.get("pg_status") or {}, groups, made.names_by_pg_id, made.unreliable_counts
            ),
            wrapped=made.wrapped
            and bool(entries or data.get("pg_status")),  # else nothing was ever recorded
            pending_messages_lost=made.pending_messages_lost,
            call_time_range=made.call_time_range,
            reports_starts=made.reports_starts,
        )
    except FlightDumpError:
        raise
    except (
        KeyError,
        TypeError,
        ValueError,
        IndexError,
        AttributeError,
        OverflowError,
        RecursionError,
    ) as error:
        why = f"{type(error).__name__}: {error}"[:200]
        raise FlightDumpError(
            f"its entries are not those of a Flight Recorder dump: {why}"
        ) from error


def _parse_groups(
    config: Mapping[object, object], call_descriptions: Mapping[str, str]
) -> tuple[dict[str, tuple[int, ...]], dict[str, str]]:
    """The members of the groups that are told, and all descriptions."""
    groups: dict[str, tuple[int, ...]] = {}
    descriptions = dict(call_descriptions)
    for key, told in config.items():
        name, members = parse_text(key), _parse_members(told["ranks"])  # type: ignore[index]  # whatever it is, a TypeError says so
        if name and members:  # gloo's table has one entry without a name, whatever the group
            groups[name] = members
            descriptions.setdefault(name, parse_text(told.get("desc", "")))  # type: ignore[attr-defined]  # likewise
        elif members:
            for default in (
                name
                for name, described_as in call_descriptions.items()
                if described_as == "default_pg"
            ):
                groups.setdefault(default, members)
    return groups, descriptions


def _parse_members(value: object) -> tuple[int, ...]:
    ranks = json.loads(value) if isinstance(value, str) else value
    members = (
        tuple(map(parse_int, ranks))
        if isinstance(ranks, (list, tuple)) and len(ranks) <= MAX_DUMP_RANKS
        else ()
    )
    if any(not 0 <= rank < MAX_DUMP_RANKS for rank in members) or len(set(members)) < len(members):
        raise ValueError("the ranks of a group are no ranks")
    return members


def _parse_enqueued_counts(
    status: Mapping[object, Mapping[object, object]],
    groups: Mapping[str, object],
    names_by_pg_id: Mapping[str, str],
    unreliable_counts: set[str],
) -> dict[str, int]:
    """The recorder's counts of collectives, by the names of their groups instead of the numbers
    that it gave them.

    Both go up with each group that is made, and a group is in both tables once it was used: where
    there are as many, they correspond.
    """
    named = dict(names_by_pg_id)
    numbers, names = (
        sorted(map(parse_text, keys), key=lambda key: (len(key), key)) for keys in (status, groups)
    )
    if len(numbers) == len(names) and (len(names) == 1 or all(map(str.isdecimal, names))):
        paired = dict(zip(numbers, names, strict=True))
        if all(paired.get(uid, name) == name for uid, name in names_by_pg_id.items()):
            named.update(paired)
    return {
        named[uid]: max(parse_int(told["last_enqueued_collective"]), 0)
        for key, told in status.items()
        if (uid := parse_text(key)) in named and named[uid] not in unreliable_counts
    }
