"""How far the device of each member of a group has come, from Flight Recorder dumps. Pure.

Both the status of a group and the states of its entries say what is complete. A host that is
blocked by a full queue has made an entry whose events are not recorded yet, and CUDA calls such an
event complete: so a completed entry behind pending ones proves nothing where there is a status.
"""

from __future__ import annotations

from collections.abc import Sequence

from hangwatch.model.device import DeviceProgress

from .calls import FlightRecord
from .dump_calls import GroupInstance
from .dumps import FlightDump
from .group_tables import GroupStatus
from .streams import count_completed

_NONE = -1  # the number of the last collective, where there is none


def measure_device(
    dump: FlightDump,
    instance: GroupInstance,
    records: Sequence[FlightRecord],
    entered: int,
    *,
    is_counted: bool,
    read_at: float,
) -> DeviceProgress | None:
    """The device's progress in the collectives of one group; None if it is unknown.

    ``records`` are its calls, ordered by number. The host has queued ``entered`` of them.
    ``is_counted``: the recorder's status counts the group's collectives, and nothing else.
    """
    status = dump.statuses.get(instance[0]) if is_counted else None
    if (instance[0], instance[1] + 1) in dump.group_instances:
        status = None  # it is that of a later group of the same name
    if status is not None and status.enqueued <= _NONE:
        status = None
    completed = _get_last_completed(records, entered, status)
    if completed is None:
        return None
    started: int | None = None
    if dump.reports_starts or (status is not None and status.started > _NONE):
        started = max(completed, status.started if status is not None else _NONE)
        for record in records:
            if record.started:
                started = max(started, record.seq)
    return DeviceProgress(
        enqueued=max(entered, completed), started=started, completed=completed, read_at=read_at
    )


def _get_last_completed(
    records: Sequence[FlightRecord], entered: int, status: GroupStatus | None
) -> int | None:
    """None if the ring has lost the calls that would show it."""
    if status is not None and status.completed > _NONE:
        completed = status.completed
        for record in records:
            if not record.completed:
                break
            completed = max(completed, record.seq)
        return completed
    count = count_completed(records)
    if count:
        return records[count - 1].seq
    queued_before = records[0].seq - 1 if records else entered
    return 0 if status is not None or queued_before == 0 else None
