"""Copies the counters of torch's Flight Recorder into the ring: how far the device has come.

NCCL's calls return before the device has begun them, so what a rank has called says little of what
its device does. The Flight Recorder counts, for each process group, the collectives that were
enqueued, started and completed; the backend's own watchdog keeps the counts. Reading them without
the recorded calls takes below a millisecond and neither queries the device nor waits for it.

They are read rarely while the process makes calls, and each second while it makes none and
something is unfinished, or may be: see `ReadingSchedule`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from time import monotonic_ns, thread_time_ns

from hangwatch.ring.devices import DeviceEntry
from hangwatch.ring.layout import DEVICE_SLOTS, DeviceStatusState, LiveWord

from . import faults
from .device_counters import (
    CounterKey,
    Counters,
    FlightRecorderStatus,
    find_counter_key,
    read_flight_recorders,
)
from .groups import GroupTrack
from .recorder import Recorder
from .writer import RingWriter

BUSY_INTERVAL_S = 2.0  # between two readings while the process makes calls
STILL_AFTER_S = 0.3  # without a call, the process may wait for its device
STILL_INTERVAL_S = 1.0
MAX_LOAD = 0.0005  # the share of the time that readings may take
_MAX_FAILURES = 3

_TIMING_VARIABLES = ("TORCH_NCCL_ENABLE_TIMING", "TORCH_NCCL_DESYNC_DEBUG")
_TRUE_VALUES = ("1", "y", "yes", "t", "true", "on")  # torch/csrc/distributed/c10d/Utils.hpp


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
        read_status: Callable[[Iterable[str]], FlightRecorderStatus] = read_flight_recorders,
        environment: Mapping[str, str] = os.environ,
    ) -> None:
        self._ring, self._recorder = ring, recorder
        self._read_status = read_status
        self._schedule = ReadingSchedule()
        self._slots_by_uid: dict[int, int] = {}
        self._free_slots = list(reversed(range(DEVICE_SLOTS)))
        self._keys_by_uid: dict[int, CounterKey] = {}  # by stream uid
        self._absence = DeviceStatusState.UNSUPPORTED  # why no group has counters
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
            self._find_keys(tracks)
            is_unfinished, cost_ns = (
                self._read_groups(call_count) if self._keys_by_uid else (False, 0)
            )
        except Exception as error:  # ours: the job goes on
            self._failure_count += 1
            self._is_stopped = self._failure_count >= _MAX_FAILURES
            faults.record_fault("reading the device's progress", error)
            self._schedule.record_reading(now_ns, 0, is_unfinished=True)
            return
        if not self._keys_by_uid:
            self._ring.set_word(LiveWord.DEVICE_STATUS, self._absence)
        self._schedule.record_reading(now_ns, cost_ns, is_unfinished=is_unfinished)

    def _read_groups(self, call_count: int) -> tuple[bool, int]:
        """Returns whether some group's device is behind, and what the reading cost."""
        recorders = {key.recorder for key in self._keys_by_uid.values()}
        # CPU time: on an overloaded host, the thread also waits for a CPU. That costs the job nothing,
        # and would delay the next reading by seconds.
        began_ns = thread_time_ns()
        status = self._read_status(recorders)
        cost_ns = thread_time_ns() - began_ns
        now_ns, is_unfinished = monotonic_ns(), False
        for uid, key in self._keys_by_uid.items():
            if (counts := status.counters.get(key)) is not None:
                entry = self._make_entry(uid, counts, now_ns)
                self._write_entry(entry)
                is_unfinished |= entry.is_behind_host
        self._is_stopped = status.queried_communicators
        if self._is_stopped:
            self._ring.set_word(LiveWord.DEVICE_STATUS, DeviceStatusState.UNSUPPORTED)
        elif status.is_enabled:
            self._ring.set_word(LiveWord.DEVICE_STATUS, DeviceStatusState.REPORTED)
        elif call_count > 1:  # during its first call, torch has not recorded the group yet
            self._ring.set_word(LiveWord.DEVICE_STATUS, DeviceStatusState.OFF)
        return is_unfinished, cost_ns

    def _find_keys(self, tracks: Iterable[GroupTrack]) -> None:
        open_streams = self._recorder.groups.streams
        for uid in [uid for uid in self._keys_by_uid if uid not in open_streams]:
            del self._keys_by_uid[uid]
            if (slot := self._slots_by_uid.pop(uid, None)) is not None:
                self._free_slots.append(slot)
        for track in tracks:
            stream, group = track.collective_stream, track.group_ref()
            if stream is None or group is None or stream.uid in self._keys_by_uid:
                continue
            key = find_counter_key(group)
            if isinstance(key, CounterKey):
                self._keys_by_uid[stream.uid] = key
            else:
                self._absence = key

    def _make_entry(self, uid: int, counts: Counters, now_ns: int) -> DeviceEntry:
        enqueued, started, completed = counts
        self._records_starts |= started is not None and started >= 0
        return DeviceEntry(
            uid=uid,
            enqueued=enqueued,
            started=started if self._records_starts else None,
            completed=completed,
            read_ns=now_ns,
        )

    def _write_entry(self, entry: DeviceEntry) -> None:
        slot = self._slots_by_uid.get(entry.uid)
        if slot is None:
            if not self._free_slots:
                return
            slot = self._slots_by_uid[entry.uid] = self._free_slots.pop()
        self._ring.write_device_entry(slot, entry)
