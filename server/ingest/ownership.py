"""A process is reported by one node agent until that is silent: another sender that claims to report
it, or its rank, is refused. Otherwise one job's agent could hide or invent another job's verdicts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

from hangwatch.protocol import heartbeat
from hangwatch.tracking.fleet import Fleet

# The parts of a heartbeat that name a process by its ``key``.
_KEYED_FIELDS = tuple(
    field.name
    for field in fields(heartbeat.Heartbeat)
    if field.name in {"processes", "samples", "calls", "hardware", "aborts", "traces", "recordings"}
)


def drop_foreign_reports(
    beat: heartbeat.Heartbeat, fleet: Fleet, now: float
) -> tuple[heartbeat.Heartbeat, int]:
    """The heartbeat without what it says of processes that another, active node agent reports; and
    the number of these processes.
    """
    named = {update.key for update in beat.processes}
    named.update(beat.gone)
    for name in _KEYED_FIELDS[1:]:
        named.update(item.key for item in getattr(beat, name))
    if beat.performance is not None:
        named.update(stream.key for stream in beat.performance.sequences)
    foreign = {key for key in named if fleet.has_other_owner((beat.host, key), beat, now)}
    if not foreign:
        return beat, 0

    def keep(items: tuple[Any, ...], get_key: Callable[[Any], str]) -> tuple[Any, ...]:
        return tuple(item for item in items if get_key(item) not in foreign)

    def get_key(item: Any) -> str:
        return str(item.key)

    changes: dict[str, Any] = {name: keep(getattr(beat, name), get_key) for name in _KEYED_FIELDS}
    changes["gone"] = keep(beat.gone, str)
    if beat.performance is not None:
        changes["performance"] = replace(
            beat.performance, sequences=keep(beat.performance.sequences, get_key)
        )
    return replace(beat, **changes), len(foreign)
