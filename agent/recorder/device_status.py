"""Copies the counters of torch's Flight Recorder into the ring: how far the device has come.

NCCL's calls return before the device has begun them, so what a rank has called says little of what
its device does. The Flight Recorder counts, for each process group, the collectives that were
enqueued, started and completed; the backend's own watchdog keeps the counts. Reading them without
the recorded calls takes below a millisecond and neither queries the device nor waits for it.

They are read rarely while the process makes calls, and each second while it makes none and
something is unfinished, or may be: see `ReadingSchedule`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from time import monotonic_ns, perf_counter_ns
from typing import Any

from hangwatch.ring.devices import DeviceEntry
from hangwatch.ring.layout import DEVICE_SLOTS, DeviceStatusState, LiveWord

from . import faults
from .groups import GroupTrack
from .recorder import Recorder
from .writer import RingWriter

BUSY_INTERVAL_S = 2.0  # between two readings while the process makes calls
STILL_AFTER_S = 1.0  # without a call, the process stands still
STILL_INTERVAL_S = 1.0
MAX_LOAD = 0.0005  # the share of the time that readings may take
_MAX_FAILURES = 3

_TIMING_VARIABLES = ("TORCH_NCCL_ENABLE_TIMING", "TORCH_NCCL_DESYNC_DEBUG")
_TRUE_VALUES = ("1", "y", "yes", "t", "true", "on")  # torch/csrc/distributed/c10d/Utils.hpp


@dataclass(frozen=True, slots=True, kw_only=True)
class FlightRecorderStatus:
    """The Flight Recorder's counters of all process groups of this process."""

    is_enabled: bool  # its buffer exists, without which it counts nothing
    # The communicators were asked for their state as well, which may block if one of them hangs.
    # Builds with NCCLX do that.
    queried_communicators: bool = False
    # (enqueued, started, completed) by the backend's number of the group, in order of creation in
    # this process. A group is absent until its first collective is enqueued.
    counters: Mapping[str, tuple[int, int, int]]


class ReadingSchedule:
    """Decides when to read the counters next. Times are in nanoseconds."""

    def __init__(self) -> None:
        self._last_call_ns = 0  # when a new call was last seen
        self._call_count = 0
        self._call_count_read = 0  # as of the last reading
        self._read_ns = 0
        self._cost_ns = 0
        self._is_unfinished = False

    def is_due(self, call_count: int, now_ns: int) -> bool:
        if call_count != self._call_count:
            self._call_count, self._last_call_ns = call_count, now_ns
        has_new_calls = call_count != self._call_count_read
        if not has_new_calls and not self._is_unfinished:
            return False
        is_still = now_ns - self._last_call_ns >= STILL_AFTER_S * 1e9
        interval_ns = (STILL_INTERVAL_S if is_still else BUSY_INTERVAL_S) * 1e9
        return now_ns - self._read_ns >= max(interval_ns, self._cost_ns / MAX_LOAD)

    def record_reading(self, now_ns: int, cost_ns: int, *, is_unfinished: bool) -> None:
        self._read_ns, self._cost_ns = now_ns, cost_ns
        self._call_count_read = self._call_count
        self._is_unfinished = is_unfinished


class DeviceStatusReader:
    """Called by the poller's thread. In a job without such a backend it does nothing."""

    def __init__(
        self,
        ring: RingWriter,
        recorder: Recorder,
        read_status: Callable[[], FlightRecorderStatus] | None = None,
        environment: Mapping[str, str] = os.environ,
    ) -> None:
        self._ring, self._recorder = ring, recorder
        self._read_status = read_status or read_flight_recorder
        self._schedule = ReadingSchedule()
        self._slots_by_uid: dict[int, int] = {}
        # By stream uid: the group's local number in the backend.
        self._numbers_by_uid: dict[int, str] = {}
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
        try:
            self._find_numbers(tracks)
            is_unfinished, cost_ns = self._read_groups() if self._numbers_by_uid else (False, 0)
        except Exception as error:  # ours: the job goes on
            self._failure_count += 1
            self._is_stopped = self._failure_count >= _MAX_FAILURES
            faults.record_fault("reading the device's progress", error)
            self._schedule.record_reading(now_ns, 0, is_unfinished=True)
            return
        if not self._numbers_by_uid:
            self._ring.set_word(LiveWord.DEVICE_STATUS, DeviceStatusState.UNSUPPORTED)
        self._schedule.record_reading(now_ns, cost_ns, is_unfinished=is_unfinished)

    def _read_groups(self) -> tuple[bool, int]:
        """Returns whether some group's device is behind, and what the reading cost."""
        began_ns = perf_counter_ns()
        status = self._read_status()
        cost_ns = perf_counter_ns() - began_ns
        now_ns, is_unfinished = monotonic_ns(), False
        for uid, number in self._numbers_by_uid.items():
            if (counts := status.counters.get(number)) is not None:
                entry = self._make_entry(uid, counts, now_ns)
                self._write_entry(entry)
                is_unfinished |= entry.is_behind_host
        self._is_stopped = status.queried_communicators
        state = DeviceStatusState.REPORTED if status.is_enabled else DeviceStatusState.OFF
        if self._is_stopped:
            state = DeviceStatusState.UNSUPPORTED
        self._ring.set_word(LiveWord.DEVICE_STATUS, state)
        return is_unfinished, cost_ns

    def _find_numbers(self, tracks: Iterable[GroupTrack]) -> None:
        for track in tracks:
            stream, group = track.collective_stream, track.group_ref()
            if stream is None or group is None or stream.uid in self._numbers_by_uid:
                continue
            number = find_group_number(group)
            if number is not None:
                self._numbers_by_uid[stream.uid] = number

    def _make_entry(self, uid: int, counts: tuple[int, int, int], now_ns: int) -> DeviceEntry:
        enqueued, started, completed = counts
        self._records_starts |= started >= 0
        return DeviceEntry(
            uid=uid,
            enqueued=enqueued,
            started=started if self._records_starts else None,
            completed=completed,
            read_ns=now_ns,
        )

    def _write_entry(self, entry: DeviceEntry) -> None:
        slot = self._slots_by_uid.setdefault(entry.uid, len(self._slots_by_uid))
        if slot < DEVICE_SLOTS:
            self._ring.write_device_entry(slot, entry)


def find_group_number(group: Any) -> str | None:
    """The number under which the Flight Recorder counts a group; None if the backend has none, as
    `nccl2` of torch 2.15, or if reading the counters may block.
    """
    import torch

    if torch.version.hip is not None:
        # Builds for ROCm may ask the communicators for their state at the same time, and one that
        # hangs may not answer (getNCCLCommDumpMap in ProcessGroupNCCL.cpp).
        return None
    try:
        backend = group._get_backend(torch.device("cuda"))
    except RuntimeError:  # it is created with the group's first call on a device
        return None
    number = getattr(backend, "uid", None)
    return None if number is None else str(number)


def read_flight_recorder() -> FlightRecorderStatus:
    """Reads the counters without the recorded calls, whose events would have to be queried."""
    from torch._C import _distributed_c10d

    # Only in builds with NCCL, so a type checker over a CPU build does not know it.
    dump = getattr(_distributed_c10d, "_dump_nccl_trace_json")  # noqa: B009
    data = json.loads(dump(includeCollectives=False))
    counters = {
        number: (
            int(group["last_enqueued_collective"]),
            int(group["last_started_collective"]),
            int(group["last_completed_collective"]),
        )
        for number, group in data.get("pg_status", {}).items()
    }
    # The groups' configuration is recorded when they are created.
    return FlightRecorderStatus(
        is_enabled=bool(data.get("pg_config")),
        queried_communicators=bool(data.get("nccl_comm_state")),
        counters=counters,
    )
