"""The status of a job in which no rank makes calls, or some wait without a verdict."""

from __future__ import annotations

from collections import Counter
from typing import Any

from hangwatch.model.calls import StreamKind
from hangwatch.model.limits import Limits
from hangwatch.model.ranks import Lifecycle
from hangwatch.protocol import heartbeat
from hangwatch.report.job_status import UnexplainedWait
from hangwatch.server.monitor import views
from hangwatch.server.monitor.views import compute_states, describe_job_status
from hangwatch.tracking.fleet import Fleet

STREAM = heartbeat.StreamUpdate(
    uid=1,
    entered=6,
    entered_s=90.0,
    identity=heartbeat.StreamIdentity(
        kind=StreamKind.COLLECTIVE, name="0", desc="default_pg", ranks="0"
    ),
)


def describe_silent_job(
    setting: str, wait: UnexplainedWait | None = None, **recorder: Any
) -> tuple[str, str]:
    """A job of one rank that has made no call for 90 s; ``recorder`` are further fields of the update."""
    fleet = Fleet()
    update = heartbeat.ProcessUpdate(
        key="1-1",
        lifecycle=int(Lifecycle.INITIALISED),
        identity=heartbeat.ProcessIdentity(job="j", rank=0, world_size=1, pid=1, start_ticks=1),
        streams=(STREAM,),
        device_setting=setting,
        **recorder,
    )
    fleet.apply_heartbeat(
        heartbeat.Heartbeat(host="n", agent="a", number=1, processes=(update,)), 100.0
    )
    (attempt,) = fleet.attempts.values()
    job = views.describe_job(
        attempt,
        Counter(compute_states(attempt, [], 100.0, Limits().lost_after_s).values()),
        [],
        100.0,
    )
    return describe_job_status(attempt, job, 60.0, wait, 100.0)


def test_status_of_silent_job_is_unknown_if_devices_are_not_counted() -> None:
    status, advice = describe_silent_job("TORCH_FR_BUFFER_SIZE=2000")
    assert status.startswith("Unknown: no rank has made a call for ")
    assert "TORCH_FR_BUFFER_SIZE=2000" in status and "TORCH_FR_BUFFER_SIZE=2000" in advice


def test_silent_job_is_quiet_if_devices_are_counted() -> None:
    status, advice = describe_silent_job("")
    assert status.startswith("Quiet: no rank has made a call for ")
    assert "known to wait" in status and "dump" in advice


def test_unexplained_wait_is_described() -> None:
    wait = UnexplainedWait(
        began_at=10.0,
        rank_count=3,
        description="rank 0 in all_reduce (call 7 of group default_pg) for rank 2",
        reason="no stack shows yet whether that rank waits or works",
        ranks_to_dump=(2,),
    )
    status, advice = describe_silent_job("", wait)
    assert status == (
        "Unclear: 3 ranks have waited for up to 90 s, rank 0 in all_reduce (call 7 of group"
        " default_pg) for rank 2. Nothing is concluded: no stack shows yet whether that rank waits"
        " or works."
    )
    assert "hangwatch dump 2" in advice


def test_calls_that_are_not_recorded_are_shown() -> None:
    fault = "recording all_reduce: OSError: injected"
    status, _ = describe_silent_job("", losses=((1, 4, 1),), faults=(fault,))
    assert status.endswith(
        " Rank 0's calls of group default_pg are not completely recorded since call 4, because its"
        f" recorder failed to record a call ({fault})."
    )
    status, _ = describe_silent_job("", dropped=1, faults=("too many groups",))
    assert "Not all groups and channels of rank 0 are recorded (too many groups)" in status
    status, _ = describe_silent_job("", opened=2)
    assert "Not all groups and channels of rank 0 are recorded, and a wait" in status
    status, _ = describe_silent_job("", opened=1)
    assert "recorded" not in status
