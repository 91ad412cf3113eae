"""The tables of process groups in a Flight Recorder dump: ``pg_config`` with their members, and
``pg_status`` with the recorder's counts of calls. Pure.

The functions raise TypeError, ValueError, KeyError or AttributeError for malformed data.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hangwatch.model.plain_data import parse_int, parse_text

MAX_DUMP_RANKS = 1 << 17


def parse_groups(
    config: Any, call_descriptions: Mapping[str, str]
) -> tuple[dict[str, tuple[int, ...]], dict[str, str]]:
    """The members of the groups in ``pg_config``, and the descriptions of all groups."""
    groups: dict[str, tuple[int, ...]] = {}
    descriptions = dict(call_descriptions)
    for key, fields in config.items():
        name = parse_text(key)
        members = _parse_members(fields["ranks"])
        if not members:
            continue
        if name:
            groups[name] = members
            descriptions.setdefault(name, parse_text(fields.get("desc", "")))
            continue
        # gloo's table has a single entry without a name, for the default group.
        for group_name, description in call_descriptions.items():
            if description == "default_pg":
                groups.setdefault(group_name, members)
    return groups, descriptions


def _parse_members(value: object) -> tuple[int, ...]:
    ranks = json.loads(value) if isinstance(value, str) else value
    if not isinstance(ranks, (list, tuple)) or len(ranks) > MAX_DUMP_RANKS:
        return ()
    members = tuple(map(parse_int, ranks))
    has_duplicates = len(set(members)) < len(members)
    if has_duplicates or any(not 0 <= rank < MAX_DUMP_RANKS for rank in members):
        raise ValueError("the members of a group are not valid ranks")
    return members


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupStatus:
    """The numbers of a group's last collectives, -1 if there is none or it is not recorded."""

    enqueued: int
    started: int
    completed: int


def parse_statuses(
    table: Any,
    groups: Mapping[str, object],
    names_by_pg_id: Mapping[str, str],
    unreliable_names: set[str],
) -> dict[str, GroupStatus]:
    """The statuses in ``pg_status``, by the names of their groups."""
    names = _match_status_to_groups(table, groups, names_by_pg_id)
    statuses: dict[str, GroupStatus] = {}
    for key, fields in table.items():
        name = names.get(parse_text(key))
        if name is not None and name not in unreliable_names:
            statuses[name] = GroupStatus(
                enqueued=parse_int(fields["last_enqueued_collective"]),
                started=parse_int(fields.get("last_started_collective", -1)),
                completed=parse_int(fields.get("last_completed_collective", -1)),
            )
    return statuses


def _match_status_to_groups(
    status: Any, groups: Mapping[str, object], names_by_pg_id: Mapping[str, str]
) -> dict[str, str]:
    """The groups' names by the recorder's numbers, which ``pg_status`` uses.

    Names and numbers both increase with each group that is made, and a group is in both tables once
    it was used: if the tables have the same length, they correspond in this order. The default
    group, number 0 on every rank and named "0", may be in ``pg_config`` before it is used.
    """
    numbers = sorted(map(parse_text, status), key=_make_numeric_key)
    names = sorted(map(parse_text, groups), key=_make_numeric_key)
    if "0" not in numbers and "0" in names:
        names.remove("0")
    can_pair = len(names) == 1 or all(map(str.isdecimal, names))
    if len(numbers) != len(names) or not can_pair:
        return dict(names_by_pg_id)
    paired = dict(zip(numbers, names, strict=True))
    for number, name in names_by_pg_id.items():
        if paired.get(number, name) != name:
            return dict(names_by_pg_id)
    return {**names_by_pg_id, **paired}


def _make_numeric_key(text: str) -> tuple[int, str]:
    """Sorts decimal numbers by value, without their conversion."""
    return len(text), text
