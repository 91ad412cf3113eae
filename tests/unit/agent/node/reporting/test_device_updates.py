"""What a process update reports of the device, and when."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hangwatch.agent.node.reporting.acked import AckedState, UnackedHistory
from hangwatch.agent.node.reporting.updates import compose_update, find_missing_setting
from hangwatch.model.calls import StreamKind
from hangwatch.model.groups import Group
from hangwatch.protocol.heartbeat import DeviceStatus, ProcessIdentity, ProcessUpdate
from hangwatch.ring.layout import DeviceStatusState
from hangwatch.ring.parts import DeviceEntry
from hangwatch.ring.reader import StreamState
from tests.simulation.rings import ProcessView, make_snapshot

SECOND_NS = 1_000_000_000
NOW_NS = 1000 * SECOND_NS


def make_view(
    *entries: DeviceEntry, status: DeviceStatusState = DeviceStatusState.REPORTED
) -> ProcessView:
    stream = StreamState(
        uid=1, kind=StreamKind.COLLECTIVE, group=Group(name="0", desc="default_pg", ranks=(0, 1)), peer=None, tag=None,
        entered=6, completed=None, chain=6, entered_s=3.0, pending_s=None,
    )  # fmt: skip
    snapshot = make_snapshot(stream, pulse_s=5.0, device_status=status, device_entries=entries)
    identity = ProcessIdentity(
        job="j", rank=0, world_size=2, pid=7, start_ticks=70, torch="2.9.1+cu128"
    )
    process = ProcessUpdate(key="7-70", identity=identity, state="S", idle_s=5.0)
    return ProcessView(process=process, snapshot=snapshot)


def make_entry(*, uid: int = 1, completed: int = 5, age_s: float = 0.5) -> DeviceEntry:
    read_ns = NOW_NS - int(age_s * SECOND_NS)
    return DeviceEntry(uid=uid, enqueued=6, started=None, completed=completed, read_ns=read_ns)


def compose_view(
    view: ProcessView, acked: AckedState | None, after_s: float = 0.0
) -> tuple[ProcessUpdate | None, AckedState]:
    now_ns = NOW_NS + int(after_s * SECOND_NS)
    return compose_update(*view, acked, UnackedHistory(), now_ns, lambda *_: [], {})


def test_counters_are_reported_with_their_age() -> None:
    update, acked = compose_view(make_view(make_entry()), None)
    assert update is not None
    assert update.device == (DeviceStatus(uid=1, enqueued=6, completed=5, read_s=0.5),)
    assert acked.device_entries == {1: make_entry()}


def test_unchanged_counters_are_confirmed_while_device_is_behind() -> None:
    _, acked = compose_view(make_view(make_entry()), None)
    soon, _ = compose_view(make_view(make_entry(age_s=-0.5)), acked, 1.0)
    assert soon is not None and soon.device == ()
    confirmed, _ = compose_view(make_view(make_entry(age_s=-2.0)), acked, 2.1)
    assert confirmed is not None
    assert confirmed.device == (DeviceStatus(uid=1, enqueued=6, completed=5, read_s=0.1),)


def test_unchanged_counters_of_finished_device_are_not_repeated() -> None:
    _, acked = compose_view(make_view(make_entry(completed=6)), None)
    update, _ = compose_view(make_view(make_entry(completed=6, age_s=-60)), acked, 60.5)
    assert update is not None and update.device == ()


def test_changed_counters_are_reported() -> None:
    _, acked = compose_view(make_view(make_entry()), None)
    update, _ = compose_view(make_view(make_entry(completed=6)), acked)
    assert update is not None and update.device[0].completed == 6


def test_counters_of_closed_stream_are_left_out() -> None:
    update, _ = compose_view(make_view(make_entry(uid=2)), None)
    assert update is not None and update.device == ()


def test_missing_setting_is_reported() -> None:
    update, _ = compose_view(make_view(status=DeviceStatusState.OFF), None)
    assert update is not None and update.device_setting == "TORCH_FR_BUFFER_SIZE=2000"


@pytest.mark.parametrize(
    ("state", "version", "setting"),
    [
        (DeviceStatusState.REPORTED, "2.9.1", ""),
        (DeviceStatusState.OFF, "2.6.0+cu124", "TORCH_NCCL_TRACE_BUFFER_SIZE=2000"),
        (DeviceStatusState.OFF, "2.14.1", "TORCH_FR_BUFFER_SIZE=2000"),
        (DeviceStatusState.UNSUPPORTED, "2.15.0", "TORCH_DIST_USE_NCCL2=0"),
        (DeviceStatusState.UNSUPPORTED, "2.14.1", ""),
    ],
)
def test_setting_depends_on_version(state: DeviceStatusState, version: str, setting: str) -> None:
    assert find_missing_setting(state, version) == setting


def test_update_is_reported_after_resync() -> None:
    _, acked = compose_view(make_view(make_entry()), None)
    update, _ = compose_view(make_view(make_entry()), replace(acked, device_entries={}))
    assert update is not None and len(update.device) == 1
