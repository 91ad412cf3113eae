"""Device progress from heartbeats."""

from __future__ import annotations

from hangwatch.model.calls import StreamKind
from hangwatch.model.device import DeviceProgress
from hangwatch.protocol import heartbeat
from hangwatch.tracking.fleet import Fleet
from hangwatch.tracking.process import Process


def make_heartbeat(
    number: int, update: heartbeat.ProcessUpdate, *, brief: bool = False
) -> heartbeat.Heartbeat:
    return heartbeat.Heartbeat(
        host="node1", agent="a", number=number, brief=brief, processes=(update,)
    )


def make_update(*device: heartbeat.DeviceStatus, variable: str = "") -> heartbeat.ProcessUpdate:
    return heartbeat.ProcessUpdate(
        key="1-1",
        identity=heartbeat.ProcessIdentity(job="j", rank=0, world_size=1, pid=1, start_ticks=1),
        sequences=(
            heartbeat.StreamUpdate(
                uid=2,
                entered=6,
                identity=heartbeat.StreamIdentity(
                    kind=StreamKind.COLLECTIVE, name="0", desc="default_pg", ranks="0"
                ),
            ),
        ),
        device=device,
        device_setting=variable,
    )


def get_only_process(fleet: Fleet) -> Process:
    (tracked,) = fleet.processes.values()
    return tracked.process


def test_device_status_becomes_progress_of_its_stream() -> None:
    fleet = Fleet()
    status = heartbeat.DeviceStatus(uid=2, enqueued=6, started=5, completed=4, read_s=0.5)
    fleet.apply_heartbeat(make_heartbeat(1, make_update(status)), 100.0)
    stream = get_only_process(fleet).streams[2]
    assert stream.device == DeviceProgress(enqueued=6, started=5, completed=4, read_at=99.5)
    assert stream.device.is_behind_host


def test_device_status_of_unknown_stream_is_ignored() -> None:
    fleet = Fleet()
    fleet.apply_heartbeat(make_heartbeat(1, make_update(heartbeat.DeviceStatus(uid=9))), 100.0)
    assert get_only_process(fleet).streams[2].device is None


def test_later_heartbeats_without_device_keep_it() -> None:
    fleet = Fleet()
    status = heartbeat.DeviceStatus(uid=2, enqueued=6, completed=4)
    fleet.apply_heartbeat(make_heartbeat(1, make_update(status, variable="X")), 100.0)
    assert get_only_process(fleet).device_setting == "X"
    fleet.apply_heartbeat(make_heartbeat(2, heartbeat.ProcessUpdate(key="1-1")), 101.0)
    process = get_only_process(fleet)
    assert process.streams[2].device is not None
    assert process.device_setting == ""
