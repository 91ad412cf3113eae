"""When the device's progress is read, and what of it the recorder writes into the ring."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from hangwatch.agent.recorder import faults
from hangwatch.agent.recorder.device import (
    _MAX_FAILURES,
    BUSY_INTERVAL_S,
    OWN_RECORDER,
    CounterKey,
    Counters,
    DeviceStatusReader,
    FlightRecorderStatus,
    ReadingSchedule,
)
from hangwatch.agent.recorder.recorder import Recorder
from hangwatch.agent.recorder.writer import RingWriter
from hangwatch.ring.layout import DeviceStatusState
from hangwatch.ring.reader import RingReader, RingSnapshot

SECOND_NS = 1_000_000_000
POLL_NS = SECOND_NS // 10


class FakeGroup:
    """A process group whose NCCL backend has ``number``; None: a backend that has no number."""

    def __init__(self, number: int | None) -> None:
        self.number = number

    def _get_backend(self, device: object) -> object:
        return SimpleNamespace(uid=self.number) if self.number is not None else object()


class WatchedProcess:
    def __init__(self, folder: Path, environment: Mapping[str, str]) -> None:
        self.ring = RingWriter(folder / "a.ring", pid=1, start_ticks=1)
        self.ring.write_identity({"job": "j", "rank": 0})
        self.registry = SimpleNamespace(tracks={}, streams={})
        self.status = FlightRecorderStatus(is_enabled=True, counters={})
        self.error: Exception | None = None
        self.read_count = 0
        recorder = cast(Recorder, SimpleNamespace(ring=self.ring, groups=self.registry))
        self.reader = DeviceStatusReader(recorder, self.read_status, environment)
        self._groups: list[FakeGroup] = []
        self._now_ns = 1000 * SECOND_NS

    def add_group(self, uid: int, number: int | None, *, has_flight_recorder: bool = True) -> None:
        group = FakeGroup(number)
        self._groups.append(group)
        self.registry.streams[uid] = object()
        track: Any = SimpleNamespace(
            has_flight_recorder=has_flight_recorder,
            collective_stream=SimpleNamespace(uid=uid),
            group_ref=weakref.ref(group),
        )
        self.registry.tracks[id(group)] = track

    def read_status(self, recorders: Iterable[str]) -> FlightRecorderStatus:
        assert list(recorders) == [OWN_RECORDER]
        self.read_count += 1
        if self.error is not None:
            raise self.error
        return self.status

    def poll(self, call_count: int, after_s: float = 20.0) -> RingSnapshot:
        self._now_ns += int(after_s * SECOND_NS)
        self.reader.update_ring(call_count, self._now_ns)
        return RingReader(self.ring.map).read_snapshot(self._now_ns)


@pytest.fixture
def process(tmp_path: Path) -> WatchedProcess:
    return WatchedProcess(tmp_path, {})


def make_status(counters: Mapping[str, Counters]) -> FlightRecorderStatus:
    keyed = {CounterKey(OWN_RECORDER, number): values for number, values in counters.items()}
    return FlightRecorderStatus(is_enabled=True, counters=keyed)


def count_readings(schedule: ReadingSchedule, *, seconds: float, calls_per_s: float) -> int:
    """How often the counters are read if the process makes calls at this rate, and the device is
    never done.
    """
    readings = 0
    for poll in range(int(seconds * 10)):
        now_ns = 1000 * SECOND_NS + poll * POLL_NS
        if schedule.is_due(1 + int(poll * calls_per_s / 10), now_ns):
            readings += 1
            schedule.record_reading(now_ns, 100_000, is_unfinished=True)
    return readings


def test_counters_are_read_rarely_while_calls_are_made() -> None:
    readings = count_readings(ReadingSchedule(), seconds=100, calls_per_s=10)
    assert readings == 100 / BUSY_INTERVAL_S


def test_counters_are_read_each_second_once_no_calls_are_made() -> None:
    assert 98 <= count_readings(ReadingSchedule(), seconds=100, calls_per_s=0) <= 100


def test_expensive_reading_is_repeated_less_often() -> None:
    schedule = ReadingSchedule()
    now_ns = 1000 * SECOND_NS
    assert schedule.is_due(1, now_ns)
    schedule.record_reading(now_ns, 5_000_000, is_unfinished=True)
    assert not schedule.is_due(1, now_ns + 9 * SECOND_NS)
    assert schedule.is_due(1, now_ns + 10 * SECOND_NS)


def test_finished_device_is_not_read_again_without_new_calls() -> None:
    schedule = ReadingSchedule()
    now_ns = 1000 * SECOND_NS
    assert schedule.is_due(1, now_ns)
    schedule.record_reading(now_ns, 0, is_unfinished=False)
    assert not schedule.is_due(1, now_ns + 100 * SECOND_NS)
    assert schedule.is_due(2, now_ns + 101 * SECOND_NS)


def test_counters_go_to_streams_by_the_backends_number(process: WatchedProcess) -> None:
    process.add_group(uid=2, number=0)
    process.add_group(uid=5, number=1)
    process.status = make_status({"0": (6, -1, 5), "1": (3, -1, 3), "7": (1, -1, 1)})
    snapshot = process.poll(call_count=9)
    counters = {entry.uid: entry.counters for entry in snapshot.device_entries}
    assert counters == {2: (6, None, 5), 5: (3, None, 3)}
    assert snapshot.device_status is DeviceStatusState.REPORTED


def test_start_is_unknown_without_timing_and_missing_with_it(tmp_path: Path) -> None:
    process = WatchedProcess(tmp_path, {"TORCH_NCCL_ENABLE_TIMING": "1"})
    process.add_group(uid=2, number=0)
    process.status = make_status({"0": (1, -1, -1)})
    (entry,) = process.poll(call_count=1).device_entries
    assert entry.started == -1


def test_start_is_unknown_where_the_recorder_counts_none(tmp_path: Path) -> None:
    process = WatchedProcess(tmp_path, {"TORCH_NCCL_ENABLE_TIMING": "1"})
    process.add_group(uid=2, number=0)
    process.status = make_status({"0": (2, None, 1)})
    (entry,) = process.poll(call_count=1).device_entries
    assert entry.counters == (2, None, 1)


def test_missing_buffer_is_recorded(process: WatchedProcess) -> None:
    process.add_group(uid=2, number=0)
    process.status = FlightRecorderStatus(is_enabled=False, counters={})
    first = process.poll(call_count=1).device_status
    assert first is DeviceStatusState.UNKNOWN, "its communicator may not exist yet"
    assert process.poll(call_count=2).device_status is DeviceStatusState.OFF


def test_backend_without_counters_is_recorded(process: WatchedProcess) -> None:
    process.add_group(uid=2, number=None)
    assert process.poll(call_count=1).device_status is DeviceStatusState.UNSUPPORTED
    assert process.read_count == 0


def test_job_on_gloo_reads_nothing(process: WatchedProcess) -> None:
    process.add_group(uid=2, number=0, has_flight_recorder=False)
    assert process.poll(call_count=1).device_status is DeviceStatusState.UNKNOWN
    assert process.read_count == 0


def test_reading_that_fails_is_given_up(
    process: WatchedProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded: list[str] = []
    monkeypatch.setattr(faults, "record_fault", lambda where, error: recorded.append(where))
    process.add_group(uid=2, number=0)
    process.error = RuntimeError("no status")
    for call_count in range(1, 20):
        process.poll(call_count)
    assert process.read_count == len(recorded) == _MAX_FAILURES


def test_reading_that_queries_communicators_is_given_up(process: WatchedProcess) -> None:
    process.add_group(uid=2, number=0)
    process.status = FlightRecorderStatus(is_enabled=True, queried_communicators=True)
    for call_count in range(1, 5):
        snapshot = process.poll(call_count)
    assert process.read_count == 1
    assert snapshot.device_status is DeviceStatusState.UNSUPPORTED
