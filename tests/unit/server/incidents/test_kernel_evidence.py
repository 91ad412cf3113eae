"""The kernels on devices as evidence of an incident, and the kind that they correct."""

from __future__ import annotations

import json

from hangwatch.model.incidents import Incident
from hangwatch.model.kernels import MAX_KERNELS, Kernel
from hangwatch.model.kinds import VerdictKind
from hangwatch.protocol.codec import encode_message
from hangwatch.protocol.heartbeat import Heartbeat, KernelsReply
from hangwatch.server.core.clock import Clock
from hangwatch.server.incidents.registry import EVIDENCE_WINDOW_S, IncidentRegistry
from hangwatch.server.ingest.heartbeat_checks import parse_heartbeat
from hangwatch.tracking.process import KernelSample
from tests.simulation.scripted_job import ScriptedJob
from tests.unit.hangwatch.diagnosis.rules.test_devices import STALL_AFTER_S, advance_seconds
from tests.unit.hangwatch.diagnosis.rules.test_kernels import NCCL, OWN, make_stalled_job


class Scene:
    """A job whose devices are stuck, and its incident."""

    def __init__(self) -> None:
        self.job: ScriptedJob = make_stalled_job()
        self.registry = IncidentRegistry(clock=Clock(monotonic=lambda: self.job.now))
        advance_seconds(self.job, STALL_AFTER_S + 5)
        self.advance_seconds(1)

    def advance_seconds(self, seconds: float) -> Incident:
        """The only incident, after so many diagnoses."""
        for _ in range(round(seconds)):
            self.job.advance_time(1.0)
            verdicts = self.job.list_due_verdicts()
            self.registry.apply_verdicts(self.job.latest_attempt, verdicts, self.job.now)
        (record,) = self.registry.records.values()
        return record.incident


def test_kernels_that_arrive_late_correct_the_kind() -> None:
    scene = Scene()
    incident = scene.advance_seconds(3 * EVIDENCE_WINDOW_S)
    assert (incident.kind, incident.kernels) == (VerdictKind.NO_PROGRESS, ())
    for rank in (0, 1, 2):
        scene.job.report_kernels(rank, NCCL)
        incident = scene.advance_seconds(EVIDENCE_WINDOW_S)
    scene.job.report_kernels(3, OWN)
    incident = scene.advance_seconds(1)
    assert (incident.kind, incident.culprits) == (VerdictKind.DEVICE_STUCK, (3,))
    assert [entry.rank for entry in incident.kernels] == [3, 0, 1, 2], "the culprit is first"
    assert [kernel.name for kernel in incident.kernels[0].kernels] == [OWN]
    assert incident.is_open


def test_kernels_stay_although_a_process_is_replaced() -> None:
    scene = Scene()
    scene.job.report_kernels(0, NCCL)
    scene.job.report_kernels(1, error="no permission")
    before = scene.advance_seconds(1)
    assert [(entry.rank, entry.error) for entry in before.kernels] == [
        (0, None),
        (1, "no permission"),
    ]
    scene.job.latest_attempt.processes[0].kernels = None
    assert scene.advance_seconds(2).kernels == before.kernels


def test_kernels_of_a_process_are_limited() -> None:
    kernels = tuple([Kernel(name="k" * 5000)] * 100)
    reply = KernelsReply(key="1-1", request="k", source="s" * 5000, kernels=kernels, taken_s=2.0)
    sample = KernelSample.from_reply(reply, 10.0)
    assert sample.taken_at == 8.0
    assert [len(kernel.name) for kernel in sample.kernels] == [256] * MAX_KERNELS
    assert len(sample.source) == 256


def test_kernels_arrive_as_they_were_sent() -> None:
    kernel = Kernel(name="spin", device=3, grid=(2, 1, 1), block=(128, 1, 1))
    reply = KernelsReply(key="1-1", request="k", source="cuda-gdb", kernels=(kernel,))
    beat = Heartbeat(host="n", agent="a", number=1, kernels=(reply,))
    assert parse_heartbeat(json.dumps(encode_message(beat)).encode()) == beat
