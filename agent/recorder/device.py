"""Copies the counters of torch's Flight Recorder into the ring: the progress of the device.

NCCL's calls return before the device has begun them, so the calls of a rank show little of what its
device does. The backend's watchdog counts the collectives of each process group that were enqueued,
started and completed. Reading these counters without the recorded calls takes below a millisecond,
and neither queries the device nor waits for it. They are read rarely while the process makes calls,
and each second while it makes none and something is or may be unfinished: see `ReadingSchedule`.

ProcessGroupNCCL has a Flight Recorder of its own, and its backend object has the number of the
group in it. From 2.15 on, torch records the calls of other backends, such as `nccl2`, the default
for NCCL, by a hook on the process group. A group's counters have the number of its hook: its
position in the order in which this process attached hooks, from 0 (``next_pg_id`` in
torch/csrc/distributed/c10d/hooks/FlightRecorderHook.cpp). Neither the hook nor the backend reports
the number, so hooks are counted here as they are attached.
"""

from __future__ import annotations

import itertools
import json
import os
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from time import monotonic_ns, thread_time_ns
from typing import Any

import torch
from torch._C import _distributed_c10d

from hangwatch.ring.layout import DEVICES, DeviceStatusState, LiveWord
from hangwatch.ring.parts import DeviceEntry

from . import faults
from .groups import GroupTrack
from .recorder import Recorder

OWN_RECORDER = ""  # the name of ProcessGroupNCCL's Flight Recorder
FIRST_TORCH_RELEASE = (2, 15)  # the first one with hooks
BUSY_INTERVAL_S = 2.0  # the interval of readings while the process makes calls
STILL_AFTER_S = 0.3  # a process without a call for so long may wait for its device
STILL_INTERVAL_S = 1.0
MAX_LOAD = 0.0005  # the share of the time that readings may take
_MAX_FAILURES = 3
_TIMING_VARIABLES = ("TORCH_NCCL_ENABLE_TIMING", "TORCH_NCCL_DESYNC_DEBUG")
_TRUE_VALUES = ("1", "y", "yes", "t", "true", "on")  # torch/csrc/distributed/c10d/Utils.hpp

_torch_c10d: Any = _distributed_c10d  # some of its functions are only in some builds and releases
_next_number = itertools.count()
_numbers_by_group: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()

Counters = tuple[int, int | None, int]  # enqueued, started (None: not counted), completed


@dataclass(frozen=True, slots=True)
class CounterKey:
    """The place of a group's counters: the Flight Recorder, and the number in it.

    ``recorder`` is `OWN_RECORDER`, or the name of a backend that is recorded by hooks.
    """

    recorder: str
    number: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FlightRecorderStatus:
    """The counters of all process groups of this process."""

    is_enabled: bool  # the buffer exists, without which nothing is counted
    # Builds with NCCLX query the communicators as well, which may block if one of them hangs.
    queried_communicators: bool = False
    # A group is absent until its first collective is enqueued.
    counters: Mapping[CounterKey, Counters] = field(default_factory=dict)


def find_counter_key(group: Any) -> CounterKey | DeviceStatusState:
    """Finds the place of the group's counters; if there are none, the reason."""
    if torch.version.hip is not None:
        # Builds for ROCm may query the communicators for their state at the same time, and one that
        # hangs may not answer (getNCCLCommDumpMap in ProcessGroupNCCL.cpp).
        return DeviceStatusState.UNSUPPORTED
    try:
        backend = group._get_backend(torch.device("cuda"))
    except RuntimeError:  # the backend is created with the group's first call on a device
        return DeviceStatusState.UNSUPPORTED
    number = getattr(backend, "uid", None)
    if number is not None:
        return CounterKey(OWN_RECORDER, str(number))
    number = _numbers_by_group.get(group)
    if number is not None:
        return CounterKey(backend.name(), str(number))
    # torch attaches its hook to each group, unless its buffer is off.
    hook_class = _find_hook_class()
    has_hooks = hook_class is not None and hasattr(hook_class.attach, "__hangwatch__")
    return DeviceStatusState.OFF if has_hooks else DeviceStatusState.UNSUPPORTED


def read_flight_recorders(recorders: Iterable[str]) -> FlightRecorderStatus:
    """Reads the counters without the recorded calls, whose events would have to be queried."""
    counters = {}
    is_enabled = queried_communicators = False
    for recorder in recorders:
        if recorder == OWN_RECORDER:
            raw = _torch_c10d._dump_nccl_trace_json(includeCollectives=False)
        else:
            raw = _torch_c10d._dump_fr_trace_json(includeCollectives=False, backend=recorder)
        data = json.loads(raw)
        for number, status in data.get("pg_status", {}).items():
            counters[CounterKey(recorder, number)] = _parse_counters(status, recorder)
        # The groups' configuration is recorded when they are created.
        is_enabled |= bool(data.get("pg_config"))
        queried_communicators |= bool(data.get("nccl_comm_state"))
    return FlightRecorderStatus(
        is_enabled=is_enabled, queried_communicators=queried_communicators, counters=counters
    )


def _parse_counters(status: Mapping[str, str], recorder: str) -> Counters:
    """The counters as in ProcessGroupNCCL, which counts from 1; -1 means none."""
    enqueued = int(status["last_enqueued_collective"])
    completed = int(status["last_completed_collective"])
    if recorder == OWN_RECORDER:
        return enqueued, int(status["last_started_collective"]), completed
    # Hooks count from 0, and do not see when a collective begins.
    if enqueued >= 0:
        enqueued += 1
    if completed >= 0:
        completed += 1
    return enqueued, None, completed


@dataclass(slots=True)
class ReadingSchedule:
    """Decides when to read the counters next. Times are in nanoseconds."""

    _last_call_ns: int = 0  # the time at which a new call was last seen
    _call_count: int = 0
    _call_count_read: int = 0  # the number of calls at the last reading
    _read_ns: int = 0
    _cost_ns: int = 0
    _is_unfinished: bool = False

    def is_due(self, call_count: int, now_ns: int) -> bool:
        if call_count != self._call_count:
            self._call_count = call_count
            self._last_call_ns = now_ns
        has_new_calls = call_count != self._call_count_read
        if not has_new_calls and not self._is_unfinished:
            return False
        is_still = now_ns - self._last_call_ns >= STILL_AFTER_S * 1e9
        interval_ns = (STILL_INTERVAL_S if is_still else BUSY_INTERVAL_S) * 1e9
        return now_ns - self._read_ns >= max(interval_ns, self._cost_ns / MAX_LOAD)

    def record_reading(self, now_ns: int, cost_ns: int, *, is_unfinished: bool) -> None:
        self._read_ns = now_ns
        self._cost_ns = cost_ns
        self._call_count_read = self._call_count
        self._is_unfinished = is_unfinished


class DeviceStatusReader:
    """Writes the counters into the ring, in the poller's thread, if a backend has any."""

    def __init__(
        self,
        recorder: Recorder,
        read_status: Callable[[Iterable[str]], FlightRecorderStatus] = read_flight_recorders,
        environment: Mapping[str, str] = os.environ,
    ) -> None:
        self._ring = recorder.ring
        self._recorder = recorder
        self._read_status = read_status
        self._schedule = ReadingSchedule()
        self._free_slots = list(reversed(range(DEVICES.count)))
        # The place of each group's counters, and its slot in the ring if one was free. Keys: uids.
        self._counted_groups: dict[int, tuple[CounterKey, int | None]] = {}
        self._absence = DeviceStatusState.UNSUPPORTED  # the reason why no group has counters
        self._failure_count = 0
        self._is_stopped = False
        self._records_starts = any(
            environment.get(name, "").lower() in _TRUE_VALUES for name in _TIMING_VARIABLES
        )

    def update_ring(self, call_count: int, now_ns: int) -> None:
        """Reads the counters if that is due; ``call_count`` grows with each recorded call."""
        if self._is_stopped or not self._schedule.is_due(call_count, now_ns):
            return
        tracks = [t for t in self._recorder.groups.tracks.values() if t.has_flight_recorder]
        if not tracks:
            self._schedule.record_reading(now_ns, 0, is_unfinished=False)
            return
        is_unfinished = False
        cost_ns = 0
        try:
            self._find_counted_groups(tracks)
            if self._counted_groups:
                is_unfinished, cost_ns = self._read_groups(call_count)
            else:
                self._ring.set_word(LiveWord.DEVICE_STATUS, self._absence)
        except Exception as error:  # our error: the job continues
            self._failure_count += 1
            self._is_stopped = self._failure_count >= _MAX_FAILURES
            faults.record_fault("reading the device's progress", error)
            is_unfinished = True
        self._schedule.record_reading(now_ns, cost_ns, is_unfinished=is_unfinished)

    def _read_groups(self, call_count: int) -> tuple[bool, int]:
        """Returns whether some group's device is behind, and what the reading cost."""
        recorders = {key.recorder for key, _ in self._counted_groups.values()}
        # The cost is CPU time: on an overloaded host, the thread also waits for a CPU, which costs
        # the job nothing and would delay the next reading by seconds.
        began_ns = thread_time_ns()
        status = self._read_status(recorders)
        cost_ns = thread_time_ns() - began_ns
        now_ns = monotonic_ns()
        is_unfinished = False
        for uid, (key, slot) in self._counted_groups.items():
            if key not in status.counters:
                continue
            enqueued, started, completed = status.counters[key]
            self._records_starts |= started is not None and started >= 0
            entry = DeviceEntry(
                uid=uid,
                enqueued=enqueued,
                started=started if self._records_starts else None,
                completed=completed,
                read_ns=now_ns,
            )
            if slot is not None:
                self._ring.write_device_entry(slot, entry)
            is_unfinished |= entry.is_behind_host
        if status.queried_communicators:
            self._is_stopped = True
            self._ring.set_word(LiveWord.DEVICE_STATUS, DeviceStatusState.UNSUPPORTED)
        elif status.is_enabled:
            self._ring.set_word(LiveWord.DEVICE_STATUS, DeviceStatusState.REPORTED)
        elif call_count > 1:  # during its first call, torch has not recorded the group yet
            self._ring.set_word(LiveWord.DEVICE_STATUS, DeviceStatusState.OFF)
        return is_unfinished, cost_ns

    def _find_counted_groups(self, tracks: Iterable[GroupTrack]) -> None:
        open_streams = self._recorder.groups.streams
        for uid in list(self._counted_groups):
            if uid in open_streams:
                continue
            _, slot = self._counted_groups.pop(uid)
            if slot is not None:
                self._free_slots.append(slot)
        for track in tracks:
            stream = track.collective_stream
            group = track.group_ref()
            if stream is None or group is None or stream.uid in self._counted_groups:
                continue
            key = find_counter_key(group)
            if isinstance(key, CounterKey):
                slot = self._free_slots.pop() if self._free_slots else None
                self._counted_groups[stream.uid] = key, slot
            else:
                self._absence = key


def count_attached_hooks() -> None:
    """Counts the hooks that are attached from now on; call it before a group is created."""
    hook_class = _find_hook_class()
    if hook_class is None or hasattr(hook_class.attach, "__hangwatch__"):
        return
    attach = hook_class.attach

    def attach_and_count(pg: Any, *args: Any, **kwargs: Any) -> Any:
        number = next(_next_number)  # torch counts hooks that it fails to attach, too
        hook = attach(pg, *args, **kwargs)
        _numbers_by_group[pg] = number
        return hook

    attach_and_count.__hangwatch__ = True  # type: ignore[attr-defined]
    hook_class.attach = staticmethod(attach_and_count)


def _find_hook_class() -> Any:
    # torch 2.14 attaches no hooks by itself and has one recorder for all backends.
    if tuple(map(int, torch.__version__.split(".")[:2])) < FIRST_TORCH_RELEASE:
        return None
    return getattr(_distributed_c10d, "FlightRecorderHook", None)
