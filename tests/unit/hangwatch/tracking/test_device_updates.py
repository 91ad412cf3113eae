"""Device progress from heartbeats."""

from __future__ import annotations

from dataclasses import replace

from hangwatch.model.calls import StreamKind
from hangwatch.model.verdicts import DeviceProgress
from hangwatch.protocol import heartbeat
from hangwatch.tracking.fleet import Fleet
from hangwatch.tracking.process import MessageMark, Process


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
        streams=(
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
    (process,) = fleet.processes.values()
    return process


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


def make_idle_update(
    *, read_s: float, completed: int, entered_s: float = 1.0
) -> heartbeat.Heartbeat:
    """A group without a call for ``entered_s``, and another one with a new call."""
    status = heartbeat.DeviceStatus(uid=2, enqueued=5, completed=completed, read_s=read_s)
    update = make_update(status)
    newer = heartbeat.StreamUpdate(
        uid=3,
        entered=1,
        entered_s=0.1,
        identity=heartbeat.StreamIdentity(
            kind=StreamKind.COLLECTIVE, name="1", desc="other", ranks="0"
        ),
    )
    older = update.streams[0]._replace(entered_s=entered_s)
    return make_heartbeat(1, replace(update, streams=(older, newer)))


def list_unfinished_uids(beat: heartbeat.Heartbeat) -> list[int]:
    fleet = Fleet()
    fleet.apply_heartbeat(beat, 100.0)
    return [stream.uid for stream in get_only_process(fleet).unfinished_streams]


def test_calls_that_the_device_has_executed_are_finished() -> None:
    assert list_unfinished_uids(make_idle_update(read_s=0.5, completed=5)) == [3]


def test_calls_are_unfinished_until_a_later_reading_shows_otherwise() -> None:
    assert list_unfinished_uids(make_idle_update(read_s=0.5, completed=4)) == [2, 3]
    assert list_unfinished_uids(make_idle_update(read_s=1.5, completed=5)) == [2, 3]


def test_newest_call_is_unfinished_as_its_host_may_be_in_it() -> None:
    assert list_unfinished_uids(make_idle_update(read_s=0.0, completed=5, entered_s=0.05)) == [2, 3]


def test_further_work_is_no_progress_of_a_device_that_is_behind() -> None:
    fleet = Fleet()
    job_update = make_idle_update(read_s=0.0, completed=4).processes[0]
    statuses = (job_update.device[0], heartbeat.DeviceStatus(uid=3, enqueued=0, completed=0))
    fleet.apply_heartbeat(make_heartbeat(1, replace(job_update, device=statuses)), 100.0)
    more = heartbeat.DeviceStatus(uid=3, enqueued=4, completed=0)
    fleet.apply_heartbeat(
        make_heartbeat(2, heartbeat.ProcessUpdate(key="1-1", device=(more,))), 110.0
    )
    assert get_only_process(fleet).streams[3].device_changed_at == 100.0


def test_device_that_has_work_again_has_changed() -> None:
    fleet = Fleet()
    fleet.apply_heartbeat(make_idle_update(read_s=0.0, completed=5), 100.0)
    more = heartbeat.DeviceStatus(uid=2, enqueued=6, completed=5)
    fleet.apply_heartbeat(
        make_heartbeat(2, heartbeat.ProcessUpdate(key="1-1", device=(more,))), 110.0
    )
    assert get_only_process(fleet).streams[2].device_changed_at == 110.0


def make_message_update(
    entered: int, *, entered_s: float, enqueued: int
) -> heartbeat.ProcessUpdate:
    identity = heartbeat.StreamIdentity(
        kind=StreamKind.SEND, name="0", desc="default_pg", ranks="0-1", peer=1, tag=0
    )
    sending = heartbeat.StreamUpdate(uid=4, entered=entered, entered_s=entered_s, identity=identity)
    update = make_update(heartbeat.DeviceStatus(uid=2, enqueued=enqueued, completed=4, read_s=0.5))
    return replace(update, streams=(*update.streams, sending))


def test_mark_is_read_after_the_newest_message_and_kept_until_the_next() -> None:
    fleet = Fleet()
    update = make_message_update(1, entered_s=2.0, enqueued=6)
    fleet.apply_heartbeat(make_heartbeat(1, update), 100.0)
    assert get_only_process(fleet).message_mark == MessageMark(98.0, {2: 6})
    update = make_message_update(1, entered_s=12.0, enqueued=9)
    fleet.apply_heartbeat(make_heartbeat(2, update), 110.0)
    assert get_only_process(fleet).message_mark == MessageMark(98.0, {2: 6})
    update = make_message_update(2, entered_s=0.1, enqueued=12)
    fleet.apply_heartbeat(make_heartbeat(3, update), 120.0)
    assert get_only_process(fleet).message_mark == MessageMark(119.9, {}), "read before it"
