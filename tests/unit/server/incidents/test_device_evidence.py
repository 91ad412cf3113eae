"""How far the devices have come, as evidence of an incident."""

from __future__ import annotations

from hangwatch.model.calls import StreamKind
from hangwatch.model.groups import Group
from hangwatch.model.kinds import Severity, VerdictKind
from hangwatch.model.verdicts import DevicePosition, DeviceProgress, Verdict, Wait
from hangwatch.protocol import heartbeat
from hangwatch.server.incidents.evidence import (
    MAX_POSITIONS_SHOWN,
    add_device_advice,
    collect_device_positions,
)
from hangwatch.tracking.attempt import Attempt
from hangwatch.tracking.fleet import Fleet

WORLD = Group(name="0", desc="default_pg", ranks=(0, 1))
STREAM = heartbeat.StreamUpdate(
    uid=1,
    entered=6,
    identity=heartbeat.StreamIdentity(
        kind=StreamKind.COLLECTIVE, name="0", desc="default_pg", ranks="0-1"
    ),
)


def make_attempt(*completed: int, setting: str = "", size: int = 2) -> Attempt:
    """An attempt whose ranks have queued 6 collectives, and completed these."""
    fleet = Fleet()
    processes = tuple(
        heartbeat.ProcessUpdate(
            key=f"{rank}-1",
            identity=heartbeat.ProcessIdentity(
                job="j", rank=rank, world_size=size, pid=rank, start_ticks=1
            ),
            streams=(STREAM,),
            device=(heartbeat.DeviceStatus(uid=1, enqueued=6, completed=count, read_s=0.5),),
            device_setting=setting,
        )
        for rank, count in enumerate(completed)
    )
    fleet.apply_heartbeat(heartbeat.Heartbeat(host="n", agent="a", number=1, processes=processes), 100.0)  # fmt: skip
    (attempt,) = fleet.attempts.values()
    return attempt


def make_verdict(
    *culprits: int,
    kind: VerdictKind = VerdictKind.NO_PROGRESS,
    group: Group | None = WORLD,
    waits: tuple[Wait, ...] = (),
) -> Verdict:
    return Verdict(
        kind=kind,
        severity=Severity.ALERT,
        culprits=culprits,
        waiting=(0, 1),
        group=group,
        waits=waits,
        summary="no progress",
        advice="Check the network.",
    )


def make_position(rank: int, completed: int, age_s: float = 0.5) -> DevicePosition:
    return DevicePosition(rank=rank, group="0", enqueued=6, completed=completed, age_s=age_s)


def test_positions_of_the_groups_members_are_collected() -> None:
    positions = collect_device_positions(make_attempt(5, 4), make_verdict(), ())
    assert positions == (make_position(0, 5), make_position(1, 4))


def test_culprits_come_first() -> None:
    positions = collect_device_positions(make_attempt(5, 4), make_verdict(1), ())
    assert [position.rank for position in positions] == [1, 0]


def test_groups_of_waits_are_included() -> None:
    wait = Wait(rank=0, on_rank=1, group="0", seq=6)
    attempt = make_attempt(5, 4)
    assert collect_device_positions(attempt, make_verdict(group=None), ()) == ()
    assert len(collect_device_positions(attempt, make_verdict(group=None, waits=(wait,)), ())) == 2


def test_of_many_members_those_are_shown_that_completed_least() -> None:
    attempt = make_attempt(5)
    (members,) = attempt.streams_by_group.values()
    (stream,) = members.values()
    for rank in range(1, 2 * MAX_POSITIONS_SHOWN):
        members[rank] = stream
    lagging = type(stream)(
        uid=1,
        kind=stream.kind,
        group=stream.group,
        device=DeviceProgress(enqueued=6, started=None, completed=2, read_at=99.0),
    )
    members[300] = lagging
    positions = collect_device_positions(attempt, make_verdict(), ())
    assert len(positions) == MAX_POSITIONS_SHOWN
    assert make_position(300, 2, age_s=1.0) in positions


def test_unchanged_position_keeps_its_age() -> None:
    before = (make_position(0, 5, age_s=0.1), make_position(1, 4, age_s=0.1))
    attempt = make_attempt(5, 5)
    kept = collect_device_positions(attempt, make_verdict(), before)
    assert kept == (make_position(0, 5, age_s=0.1), make_position(1, 5))
    assert collect_device_positions(attempt, make_verdict(group=None), before) == before


def test_advice_names_setting_that_makes_devices_known() -> None:
    attempt = make_attempt(5, 4, setting="TORCH_FR_BUFFER_SIZE=2000")
    advice = add_device_advice(make_verdict(), attempt)
    assert "TORCH_FR_BUFFER_SIZE=2000" in advice
    assert add_device_advice(make_verdict(), make_attempt(5, 4)) == "Check the network."
    missing = make_verdict(1, kind=VerdictKind.MISSING_RANK)
    assert add_device_advice(missing, attempt) == "Check the network."
