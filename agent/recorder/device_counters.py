"""Finds and reads the counters that torch's Flight Recorder keeps of each process group's device.

ProcessGroupNCCL has a Flight Recorder of its own, and its backend object has the number of the
group in it. Other backends are recorded by hooks, from torch 2.15 on: see `recorder_hooks`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from hangwatch.ring.layout import DeviceStatusState

from . import recorder_hooks

OWN_RECORDER = ""  # ProcessGroupNCCL's

Counters = tuple[int, int | None, int]  # enqueued, started (None: not counted), completed


@dataclass(frozen=True, slots=True)
class CounterKey:
    """Where the counters of a group are: in which Flight Recorder, and under which number.

    ``recorder`` is `OWN_RECORDER`, or the name of a backend that is recorded by hooks.
    """

    recorder: str
    number: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FlightRecorderStatus:
    """The counters of all process groups of this process."""

    is_enabled: bool  # the buffer exists, without which nothing is counted
    # The communicators were asked for their state as well, which may block if one of them hangs.
    # Builds with NCCLX do that.
    queried_communicators: bool = False
    # A group is absent until its first collective is enqueued.
    counters: Mapping[CounterKey, Counters] = field(default_factory=dict)


def find_counter_key(group: Any) -> CounterKey | DeviceStatusState:
    """Where the group's counters are; if there are none, why."""
    import torch

    if torch.version.hip is not None:
        # Builds for ROCm may ask the communicators for their state at the same time, and one that
        # hangs may not answer (getNCCLCommDumpMap in ProcessGroupNCCL.cpp).
        return DeviceStatusState.UNSUPPORTED
    try:
        backend = group._get_backend(torch.device("cuda"))
    except RuntimeError:  # it is created with the group's first call on a device
        return DeviceStatusState.UNSUPPORTED
    number = getattr(backend, "uid", None)
    if number is not None:
        return CounterKey(OWN_RECORDER, str(number))
    number = recorder_hooks.find_hook_number(group)
    if number is not None:
        return CounterKey(backend.name(), str(number))
    # torch attaches its hook to each group, unless its buffer is off.
    has_hooks = recorder_hooks.has_recorder_hooks()
    return DeviceStatusState.OFF if has_hooks else DeviceStatusState.UNSUPPORTED


def read_flight_recorders(recorders: Iterable[str]) -> FlightRecorderStatus:
    """Reads the counters without the recorded calls, whose events would have to be queried."""
    counters: dict[CounterKey, Counters] = {}
    is_enabled = queried_communicators = False
    for recorder in recorders:
        data = json.loads(_dump_status(recorder))
        for number, status in data.get("pg_status", {}).items():
            counters[CounterKey(recorder, number)] = _parse_counters(status, recorder)
        # The groups' configuration is recorded when they are created.
        is_enabled |= bool(data.get("pg_config"))
        queried_communicators |= bool(data.get("nccl_comm_state"))
    return FlightRecorderStatus(
        is_enabled=is_enabled, queried_communicators=queried_communicators, counters=counters
    )


def _dump_status(recorder: str) -> bytes:
    from torch._C import _distributed_c10d

    # A type checker does not know these: one is only in builds with NCCL, the other in newer ones.
    if recorder == OWN_RECORDER:
        dump = getattr(_distributed_c10d, "_dump_nccl_trace_json")  # noqa: B009
        return bytes(dump(includeCollectives=False))
    dump = getattr(_distributed_c10d, "_dump_fr_trace_json")  # noqa: B009
    return bytes(dump(includeCollectives=False, backend=recorder))


def _parse_counters(status: Mapping[str, str], recorder: str) -> Counters:
    """Numbers a group's calls from 1 and has -1 for "none", as ProcessGroupNCCL does."""
    enqueued = int(status["last_enqueued_collective"])
    completed = int(status["last_completed_collective"])
    if recorder == OWN_RECORDER:
        return enqueued, int(status["last_started_collective"]), completed
    # Hooks count from 0, and do not see when a collective begins.
    return _number_from_one(enqueued), None, _number_from_one(completed)


def _number_from_one(number: int) -> int:
    return number + 1 if number >= 0 else -1
