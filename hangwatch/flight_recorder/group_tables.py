"""The tables of process groups in a Flight Recorder dump: ``pg_config`` with their members, and
``pg_status`` with the recorder's counts of calls. Pure.

Both functions raise TypeError, ValueError, KeyError or AttributeError for malformed data.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
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


def parse_enqueued_counts(
    status: Any,
    groups: Mapping[str, object],
    names_by_pg_id: Mapping[str, str],
    unreliable_counts: set[str],
) -> dict[str, int]:
    """The recorder's counts of collectives from ``pg_status``, by the names of their groups."""
    names = _match_status_to_groups(status, groups, names_by_pg_id)
    counts: dict[str, int] = {}
    for key, fields in status.items():
        name = names.get(parse_text(key))
        if name is not None and name not in unreliable_counts:
            counts[name] = max(parse_int(fields["last_enqueued_collective"]), 0)
    return counts


def _match_status_to_groups(
    status: Any, groups: Mapping[str, object], names_by_pg_id: Mapping[str, str]
) -> dict[str, str]:
    """The groups' names by the recorder's numbers, which ``pg_status`` uses.

    Names and numbers both increase with each group that is made, and a group is in both tables once
    it was used: if the tables have the same length, they correspond in this order.
    """
    numbers = sorted(map(parse_text, status), key=_make_numeric_key)
    names = sorted(map(parse_text, groups), key=_make_numeric_key)
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
