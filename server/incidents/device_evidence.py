"""How far the devices have come in an incident's groups, as evidence of the incident. Pure."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence

from hangwatch.model.device import DevicePosition
from hangwatch.model.kinds import VerdictKind
from hangwatch.model.verdicts import Verdict
from hangwatch.tracking.attempt import Attempt

MAX_POSITIONS_SHOWN = 256


def collect_device_positions(attempt: Attempt, verdict: Verdict) -> tuple[DevicePosition, ...]:
    """The positions of the members of the verdict's group, and of the groups that its waits are in.
    Of many members, the culprits and those that have completed least.
    """
    culprits = frozenset(verdict.culprits)
    shown = heapq.nsmallest(
        MAX_POSITIONS_SHOWN,
        _iter_positions(attempt, verdict),
        key=lambda p: (p.rank not in culprits, p.completed, p.rank, p.group),
    )
    return tuple(sorted(shown, key=lambda p: (p.group, p.rank not in culprits, p.rank)))


def _iter_positions(attempt: Attempt, verdict: Verdict) -> Iterator[DevicePosition]:
    names = {wait.group for wait in verdict.waits}
    if verdict.group is not None:
        names.add(verdict.group.name)
    for (_, name, _, _), members in attempt.streams_by_group.items():
        if name not in names:
            continue
        for rank, stream in members.items():
            if (device := stream.device) is not None:
                yield DevicePosition(
                    rank=rank,
                    group=name,
                    enqueued=device.enqueued,
                    started=device.started,
                    completed=device.completed,
                    source=device.source,
                    age_s=round(max(0.0, attempt.last_seen_at - device.read_at), 3),
                )


def keep_known_positions(
    before: Sequence[DevicePosition], now: Iterable[DevicePosition]
) -> tuple[DevicePosition, ...]:
    """``now``, but unchanged positions keep their age; ``before`` if nothing is known any more."""
    earlier = {(p.rank, p.group, p.counters): p for p in before}
    return tuple(earlier.get((p.rank, p.group, p.counters), p) for p in now) or tuple(before)


def add_device_advice(verdict: Verdict, attempt: Attempt) -> str:
    """The verdict's advice. If it is unknown how far the devices have come, and that might name a
    culprit, the advice says how to make it known.
    """
    if verdict.kind is not VerdictKind.NO_PROGRESS:
        return verdict.advice
    ranks = (*verdict.culprits, *verdict.waiting)
    processes = (attempt.processes.get(rank) for rank in ranks)
    setting = next((p.device_setting for p in processes if p is not None and p.device_setting), "")
    if not setting:
        return verdict.advice
    return (
        f"{verdict.advice} torch does not count how far the devices have come: with {setting} in"
        " the job's environment, hangwatch can name a device that lags."
    )
