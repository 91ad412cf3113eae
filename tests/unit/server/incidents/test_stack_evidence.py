"""Which stacks an incident shows."""

from __future__ import annotations

from hangwatch.model.limits import Limits
from hangwatch.model.ranks import Frame
from hangwatch.server.core.clock import Clock
from hangwatch.server.incidents.evidence import MAX_STACK_BYTES
from hangwatch.server.incidents.registry import IncidentRegistry
from hangwatch.tracking.process import MAX_FRAMES_KEPT, estimate_bytes
from tests.simulation.scripted_job import ScriptedJob


def test_stacks_of_an_incident_are_bounded() -> None:
    """The calling threads of culprits come first, and the ranks that wait are shown as well."""
    job = ScriptedJob(12, limits=Limits(stall_after_s=10.0, slow_limit_s=60.0))
    job.make_calls()
    for number in range(8, 12):
        job.make_call(number)
    for _ in range(12):
        job.advance_time(1.0)
        job.send_heartbeats()
    for rank in job.ranks:
        frames = tuple(
            Frame(function=f"f{rank}", file="/home/me/train.py", line=line)
            for line in range(MAX_FRAMES_KEPT // 2)
        )
        job.report_stacks(rank, *[frames] * 9)
    registry = IncidentRegistry(clock=Clock())
    registry.apply_verdicts(job.latest_attempt, job.list_due_verdicts(), job.now)
    (record,) = registry.records.values()
    stacks = record.incident.stacks
    assert sum(estimate_bytes(stack.frames) for stack in stacks) <= MAX_STACK_BYTES
    assert [stack.ranks for stack in stacks[:8]] == [(rank,) for rank in range(8)]
    shown = {stack.ranks for stack in stacks}
    assert {(8,), (9,), (10,), (11,)} <= shown
    assert len(stacks) > 12, "other threads of culprits are shown as far as there is room"
