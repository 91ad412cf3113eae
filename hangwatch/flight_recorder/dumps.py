"""PyTorch Flight Recorder dumps, as plain data: read leniently, since every version and backend writes them a little differently.

The layout is that of ``torch/csrc/distributed/c10d/FlightRecorder.hpp``: ``version``, ``pg_config``, ``pg_status`` and
``entries``, oldest first. What the recorder does not hold (reduce ops, roots, tags, split sizes) cannot be compared. Whoever wrote
the data may mean harm, so nothing in it is taken for what it should be, and no object of it is turned into text unseen.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from hangwatch.model.plain_data import number, text

from .calls import Entry, Known, Record, records

MAJOR = "2"  # of the layout's version, which is not torch's: torch 2.5 writes 2.4, torch 2.13 writes 2.10
MOST_RANKS = 1 << 17
MOST_ENTRIES = 1 << 20

Use = tuple[str, int]  # a process group's name, and which of those that had it one after another in the process, from 0


class DumpError(ValueError):
    """The data is no Flight Recorder dump."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dump:
    """What one rank's recorder held. ``groups`` has the members of the process groups by name, where they are told.

    ``calls`` are the collectives of each group in the order of their numbers, ``messages`` its sends and receives in that of the records.
    """

    rank: int
    version: str
    groups: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    descriptions: Mapping[str, str] = field(default_factory=dict)
    calls: Mapping[Use, Sequence[Record]] = field(default_factory=dict)
    messages: Mapping[Use, Sequence[Record]] = field(default_factory=dict)
    backends: Mapping[Use, str] = field(default_factory=dict)
    enqueued: Mapping[str, int] = field(default_factory=dict)  # by a group's name: its newest collective, as the recorder counts them
    wrapped: bool = False  # older records were overwritten, or left out
    half_lost: bool = False  # of messages that it is at, some were overwritten
    made_at: tuple[float, float] = (0.0, 0.0)  # when its first and its last call were made, in seconds since the epoch; 0: not told
    timed: bool = False  # it tells when the device begins a call, so that "scheduled" means not begun

    @property
    def uses(self) -> set[Use]:
        return {*self.calls, *self.messages}

    @property
    def last(self) -> Record | None:
        """Its newest record."""
        newest = (records[-1] for records in (*self.calls.values(), *self.messages.values()) if records)
        return max(newest, key=lambda record: record.number, default=None)


def read(rank: int, data: object, known: Known | None = None) -> Dump:
    """A rank's dump from plain data. ``known`` is shared by the dumps of a job. Raises DumpError, which says what is wrong with it."""
    if not isinstance(data, Mapping) or "version" not in data or not isinstance(data.get("pg_config", {}), Mapping):
        raise DumpError("it has no 'version' and 'pg_config', as Flight Recorder dumps have")
    try:
        version = text(data["version"])
        if version.split(".")[0] != MAJOR:
            raise DumpError(f"its layout is version {version}; this reads {MAJOR}.x, which torch 2.5 and later write")
        entries = data.get("entries") or []
        if not isinstance(entries, (list, tuple)) or len(entries) > MOST_ENTRIES:
            raise TypeError("they are no list, or one that is too long")
        made = records([Entry.of(told, at) for at, told in enumerate(entries)], known or Known())
        groups, descriptions = _groups(data.get("pg_config") or {}, made.descriptions)
        return Dump(
            rank=rank,
            version=version,
            groups=groups,
            descriptions=descriptions,
            calls=made.calls,
            messages=made.messages,
            backends=made.backends,
            enqueued=_enqueued(data.get("pg_status") or {}, groups, made.uids, made.miscounted),
            wrapped=made.wrapped and bool(entries or data.get("pg_status")),  # else nothing was ever recorded
            half_lost=made.half_lost,
            made_at=made.made_at,
            timed=made.timed,
        )
    except DumpError:
        raise
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError, RecursionError) as error:
        why = f"{type(error).__name__}: {error}"[:200]
        raise DumpError(f"its entries are not those of a Flight Recorder dump: {why}") from error


def _groups(config: Mapping[object, object], described: Mapping[str, str]) -> tuple[dict[str, tuple[int, ...]], dict[str, str]]:
    """The members of the groups that are told, and all descriptions."""
    groups: dict[str, tuple[int, ...]] = {}
    descriptions = dict(described)
    for key, told in config.items():
        name, members = text(key), _members(told["ranks"])  # type: ignore[index]  # whatever it is, a TypeError says so
        if name and members:  # gloo's table has one entry without a name, whatever the group
            groups[name] = members
            descriptions.setdefault(name, text(told.get("desc", "")))  # type: ignore[attr-defined]  # likewise
        elif members:
            for default in (name for name, described_as in described.items() if described_as == "default_pg"):
                groups.setdefault(default, members)
    return groups, descriptions


def _members(told: object) -> tuple[int, ...]:
    ranks = json.loads(told) if isinstance(told, str) else told
    members = tuple(map(number, ranks)) if isinstance(ranks, (list, tuple)) and len(ranks) <= MOST_RANKS else ()
    if any(not 0 <= rank < MOST_RANKS for rank in members) or len(set(members)) < len(members):
        raise ValueError("the ranks of a group are no ranks")
    return members


def _enqueued(
    status: Mapping[object, Mapping[object, object]], groups: Mapping[str, object], uids: Mapping[str, str], miscounted: set[str]
) -> dict[str, int]:
    """The recorder's counts of collectives, by the names of their groups instead of the numbers that it gave them.

    Both go up with each group that is made, and a group is in both tables once it was used: where there are as many, they correspond.
    """
    named = dict(uids)
    numbers, names = (sorted(map(text, keys), key=lambda key: (len(key), key)) for keys in (status, groups))
    if len(numbers) == len(names) and (len(names) == 1 or all(map(str.isdecimal, names))):
        paired = dict(zip(numbers, names, strict=True))
        if all(paired.get(uid, name) == name for uid, name in uids.items()):
            named.update(paired)
    return {
        named[uid]: max(number(told["last_enqueued_collective"]), 0)
        for key, told in status.items()
        if (uid := text(key)) in named and named[uid] not in miscounted
    }
