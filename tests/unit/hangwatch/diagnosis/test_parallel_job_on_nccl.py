"""A job of tensor, pipeline and data parallelism on NCCL, whose hosts run ahead of their devices and use
the CPU while they wait for them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from hangwatch.diagnosis import Diagnosis, EvidenceRequest, diagnose
from hangwatch.model.kinds import VerdictKind
from hangwatch.model.limits import Limits
from hangwatch.model.verdicts import Verdict
from hangwatch.protocol.codec import encode_message
from hangwatch.protocol.commands import Command, CommandKind
from hangwatch.protocol.heartbeat import HeartbeatReply
from hangwatch.server.ingest.heartbeat_checks import decode_heartbeat
from hangwatch.tracking.fleet import Fleet
from tests.simulation.parallel_job import (
    TENSOR_PARALLEL_SIZE,
    JobRun,
    JobShape,
    SimulatedFault,
)
from tests.simulation.queued_streams import get_wait_began_at
from tests.simulation.simulated_host import SimulatedHost

STALL_AFTER_S, INTERVAL_S = 20.0, 1.0
FAULT_AFTER_S = 40.5  # early in a step: the hosts have queued little of it
SHAPE = JobShape(pipeline=4, data=3, backend="nccl")
CULPRIT = 41  # a rank of the second stage of the second replica
REPLICA = set(range(32, 64))  # the ranks of its replica


class _Job:
    """Each second it is diagnosed. Its hosts report every ``interval_s`` seconds at different times,
    with the replies to all requests of the last diagnosis.
    """

    def __init__(self, kind: VerdictKind | None, interval_s: float = INTERVAL_S) -> None:
        self.run = JobRun(shape=SHAPE, number=0, started_at=1000.0)
        self._interval_s = interval_s
        self.fault_at = self.run.started_at + FAULT_AFTER_S
        if kind is not None:
            fault = SimulatedFault(kind=kind, rank=CULPRIT, starts_at=self.fault_at)
            self.run.faults.append(fault)
        self._hosts = [SimulatedHost(number, lambda: self.run) for number in range(SHAPE.hosts)]
        self._fleet = Fleet()
        self._requests: tuple[EvidenceRequest, ...] = ()
        self.stacks_requested = 0

    def iter_diagnoses(self, until_s: float) -> Iterator[tuple[float, Diagnosis]]:
        """Seconds since the fault and the diagnosis, from a few seconds before it."""
        now = self.fault_at - 5.0
        while now < self.fault_at + until_s:
            for host in self._hosts:
                if (now + host.number) % self._interval_s < 1.0:
                    self._report(host, now)
            attempt = self._fleet.latest_attempt(self.run.name)
            assert attempt is not None
            limits = Limits(stall_after_s=STALL_AFTER_S, report_interval_s=self._interval_s)
            diagnosis = diagnose(attempt, now, limits)
            self._requests = diagnosis.requests
            self.stacks_requested += sum(request.stacks for request in diagnosis.requests)
            yield now - self.fault_at, diagnosis
            now += 1.0

    def _report(self, host: SimulatedHost, now: float) -> None:
        fault = self.run.active_fault(now)
        if fault is not None and fault.kind is VerdictKind.LOST_NODE and fault.host == host.number:
            return
        for number, request in enumerate(self._requests):
            if request.rank in host.ranks:
                host.execute_command(self._make_command(request, number), now)
        composed = host.compose_heartbeat(now)
        body = json.dumps(encode_message(composed)).encode()
        self._fleet.apply_heartbeat(decode_heartbeat(body), now)
        host.apply_reply(composed, HeartbeatReply(), now)

    def _make_command(self, request: EvidenceRequest, number: int) -> Command:
        attempt = self._fleet.latest_attempt(self.run.name)
        assert attempt is not None
        kind = CommandKind.CALLS
        if request.hardware or request.stacks:
            kind = CommandKind.HARDWARE if request.hardware else CommandKind.STACKS
        return Command(
            id=str(number),
            kind=kind,
            key=attempt.processes[request.rank].key,
            uid=request.stream_uid,
            from_seq=request.from_seq,
            to_seq=request.to_seq,
            step=request.step,
        )


def _find_verdicts(job: _Job, until_s: float) -> dict[tuple[VerdictKind, tuple[int, ...]], float]:
    """When each verdict was first confirmed, in seconds since the fault."""
    confirmed: dict[tuple[VerdictKind, tuple[int, ...]], float] = {}
    for seconds, diagnosis in job.iter_diagnoses(until_s):
        for verdict in diagnosis.verdicts:
            if verdict.is_confirmed:
                confirmed.setdefault((verdict.kind, verdict.culprits), seconds)
    return confirmed


def _get_last_verdict(job: _Job, until_s: float) -> Verdict:
    last = None
    for _, diagnosis in job.iter_diagnoses(until_s):
        last = diagnosis.verdicts
    assert last is not None and len(last) == 1, last
    return last[0]


@pytest.mark.parametrize("kind", [VerdictKind.MISSING_RANK, VerdictKind.SLOW_RANK])
def test_absent_rank_is_the_only_culprit(kind: VerdictKind) -> None:
    """Not the devices of the other stages, which wait in receives that their counters leave out."""
    job = _Job(kind)
    verdicts = _find_verdicts(job, 40.0)
    assert verdicts.keys() == {(kind, (CULPRIT,))}
    waiting_at = get_wait_began_at(job.run, job.run.faults[0]) - job.fault_at
    assert (
        waiting_at + STALL_AFTER_S <= verdicts[kind, (CULPRIT,)] < waiting_at + STALL_AFTER_S + 3.0
    )


def test_absent_rank_misses_the_first_call_that_devices_wait_in() -> None:
    """Hosts have gone on to the calls of another group."""
    verdict = _get_last_verdict(_Job(VerdictKind.MISSING_RANK), 40.0)
    assert verdict.group is not None and verdict.group.desc == "tp"
    assert "all_reduce" in verdict.summary
    neighbours = {rank for rank in range(40, 48) if rank != CULPRIT}
    assert neighbours <= set(verdict.waiting)


@pytest.mark.parametrize("kind", [VerdictKind.EXITED_RANK, VerdictKind.FROZEN_RANK])
def test_unable_rank_is_named_soon(kind: VerdictKind) -> None:
    """Hosts that use the CPU are sampled immediately, as they may wait for a rank that cannot come."""
    job = _Job(kind)
    verdicts = _find_verdicts(job, 40.0)
    assert verdicts.keys() == {(kind, (CULPRIT,))}
    waiting_at = get_wait_began_at(job.run, job.run.faults[0]) - job.fault_at
    assert verdicts[kind, (CULPRIT,)] < waiting_at + 5.0


def test_lost_node_is_the_only_culprit() -> None:
    host_ranks = tuple(range(40, 48))
    assert _find_verdicts(_Job(VerdictKind.LOST_NODE), 40.0).keys() == {
        (VerdictKind.LOST_NODE, host_ranks)
    }


def test_dead_rank_has_no_second_verdict() -> None:
    assert _find_verdicts(_Job(VerdictKind.DEAD_RANK), 40.0).keys() == {
        (VerdictKind.DEAD_RANK, (CULPRIT,))
    }


def test_device_behind_its_group_is_stuck() -> None:
    """Others have completed an all_reduce, so that its device is in it, and in no receive."""
    verdict = _get_last_verdict(_Job(VerdictKind.DEVICE_STUCK), 40.0)
    assert (verdict.kind, verdict.culprits) == (VerdictKind.DEVICE_STUCK, (CULPRIT,))


def test_call_that_no_device_completes_names_no_rank() -> None:
    """Any device of the replica may be stuck, or a message between them."""
    verdict = _get_last_verdict(_Job(VerdictKind.NO_PROGRESS), 40.0)
    assert (verdict.kind, verdict.culprits) == (VerdictKind.NO_PROGRESS, ())
    assert set(verdict.waiting) == set(range(SHAPE.ranks))
    assert f"the others wait for ranks {min(REPLICA)}-{max(REPLICA)}" in verdict.summary


def test_mismatch_is_immediate() -> None:
    verdicts = _find_verdicts(_Job(VerdictKind.MISMATCH), 40.0)
    assert verdicts.keys() == {(VerdictKind.MISMATCH, (CULPRIT,))}
    assert verdicts[VerdictKind.MISMATCH, (CULPRIT,)] < 10.0


@pytest.mark.parametrize("interval_s", [INTERVAL_S, 20.0])
def test_healthy_job_needs_no_evidence(interval_s: float) -> None:
    """Nor do ranks that seem to be behind, because others have reported since."""
    job = _Job(None, interval_s)
    for _, diagnosis in job.iter_diagnoses(60.0):
        assert not diagnosis.verdicts
        assert diagnosis.unexplained_wait is None
    assert not job.stacks_requested


def test_explained_ranks_are_sampled_a_few_times_only() -> None:
    """py-spy stops the process that it samples."""
    job = _Job(VerdictKind.EXITED_RANK)
    for _ in job.iter_diagnoses(60.0):
        pass
    assert job.stacks_requested < 4 * TENSOR_PARALLEL_SIZE
