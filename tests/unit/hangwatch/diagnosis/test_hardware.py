"""What hosts report of their hardware, as evidence for a verdict."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial

import pytest

from hangwatch.diagnosis.hardware import MAX_HOSTS_READ
from hangwatch.model.hardware import (
    JOB_DIAGNOSTICS,
    Observation,
    ObservedValue,
    UnavailableSource,
    Weight,
)
from hangwatch.model.kinds import VerdictKind
from hangwatch.model.limits import REREAD_AFTER_S, Limits
from hangwatch.model.verdicts import Verdict
from hangwatch.protocol.heartbeat import HardwareReply
from tests.simulation.scripted_job import ScriptedJob

STALL_AFTER_S = 10.0
LIMITS = Limits(stall_after_s=STALL_AFTER_S, slow_limit_s=60.0)


def observe(
    what: str,
    about: str = "mlx5_0/1",
    before: ObservedValue = None,
    now: ObservedValue = 1,
    *,
    source: str = "infiniband",
    weight: Weight = Weight.FAULT,
    age_s: float = 0.0,
) -> Observation:
    return Observation(
        source=source,
        about=about,
        what=what,
        before=before,
        now=now,
        weight=weight,
        age_s=age_s,
    )


LINK_DOWN = observe("link_downed", before=2, now=3)
RETRANSMISSIONS = observe("RetransSegs", "TCP", 5, 900, source="network", weight=Weight.HINT)


def make_stalled_job(hosts: int = 4) -> ScriptedJob:
    """Every rank is in the same call, one on each host, and none completes it."""
    job = ScriptedJob(hosts, limits=LIMITS)
    for number, rank in job.ranks.items():
        rank.host = f"node{number}"
    for _ in range(3):
        job.make_calls()
    job.make_calls(done=False)
    return job


def report_hardware(
    job: ScriptedJob, reports: Mapping[int, Iterable[Observation]], taken_s: float = 0.0
) -> None:
    job.send_heartbeats()
    for number, observations in reports.items():
        key = job.latest_attempt.processes[number].key
        reply = HardwareReply(
            key=key, request="r", taken_s=taken_s, observations=tuple(observations)
        )
        host = f"node{number}"
        job.apply_heartbeat(host=host, agent=f"agent-{host}", hardware=(reply,))


def find_verdict(job: ScriptedJob, reports: Mapping[int, Iterable[Observation]]) -> Verdict:
    """The verdict once the hang is due, with these reports of the hosts."""
    for _ in range(int(STALL_AFTER_S) + 2):
        job.advance_time(1.0)
        job.send_heartbeats()
    report_hardware(job, reports)
    (verdict,) = job.list_due_verdicts()
    return verdict


def test_single_host_with_a_fault_is_named_as_an_inference() -> None:
    verdict = find_verdict(
        make_stalled_job(), {0: [RETRANSMISSIONS], 1: [], 2: [LINK_DOWN, RETRANSMISSIONS], 3: []}
    )
    assert (verdict.kind, verdict.culprits) == (VerdictKind.NO_PROGRESS, ())
    assert verdict.advice.endswith(
        "Of 4 hosts, node2 alone reports a fault of its hardware: the link of mlx5_0/1 went down"
        " (2 to 3 times). That this is the cause is inferred. Check the cable, the transceiver and"
        " the switch port of mlx5_0/1."
    )


def test_without_all_readings_no_host_is_alone() -> None:
    verdict = find_verdict(make_stalled_job(), {0: [], 2: [LINK_DOWN]})
    assert "alone" not in verdict.advice
    assert "Faults of their hardware are reported by node2" in verdict.advice


def test_several_hosts_with_faults() -> None:
    reports = {number: [LINK_DOWN] for number in range(8)}
    verdict = find_verdict(make_stalled_job(8), reports)
    assert "reported by node0 (the link of" in verdict.advice
    assert verdict.advice.endswith(" and 5 others.")
    assert "inferred" not in verdict.advice


def test_single_host_with_a_hint() -> None:
    verdict = find_verdict(make_stalled_job(), {0: [], 1: [RETRANSMISSIONS], 2: [], 3: []})
    assert verdict.advice.endswith(
        "Of 4 hosts, node1 alone reports this, which may contribute: RetransSegs of TCP went from 5"
        " to 900."
    )


def test_hints_of_several_hosts_say_nothing() -> None:
    plain = find_verdict(make_stalled_job(), {number: [] for number in range(4)}).advice
    reports = {number: [RETRANSMISSIONS] for number in range(4)}
    assert find_verdict(make_stalled_job(), reports).advice == plain


def test_few_lost_packets_say_nothing() -> None:
    plain = find_verdict(make_stalled_job(), {number: [] for number in range(4)}).advice
    few = replace(RETRANSMISSIONS, now=9, is_counter=True)
    reports: dict[int, list[Observation]] = {0: [], 1: [few], 2: [], 3: []}
    assert find_verdict(make_stalled_job(), reports).advice == plain


def test_hint_on_the_only_host_must_be_abnormal() -> None:
    throttled = observe("throttled", "GPU 3", now="hardware thermal", weight=Weight.HINT)
    for is_abnormal in (False, True):
        job = make_stalled_job()
        for rank in job.ranks.values():
            rank.host = "node0"
        idle = observe("idle", "GPU 0", now="95 W", weight=Weight.HINT)
        hints = [
            RETRANSMISSIONS,
            replace(idle, is_abnormal=True),
            replace(throttled, is_abnormal=is_abnormal),
        ]
        advice = find_verdict(job, {0: hints}).advice
        expected = (
            "node0 reports this, which may contribute: GPU 3 is throttled (hardware thermal)."
        )
        assert advice.endswith(expected) == is_abnormal
        assert "RetransSegs" not in advice and "idle" not in advice


def test_job_on_one_host() -> None:
    job = make_stalled_job()
    for rank in job.ranks.values():
        rank.host = "node0"
    xid = observe("xid", "GPU 0000:3b:00", now="79", source="kernel log")
    verdict = find_verdict(job, {0: [xid]})
    assert (
        "node0 reports a fault of its hardware: GPU 0000:3b:00 reported Xid 79 (the GPU has fallen off"
        " the bus). Take the node out of service" in verdict.advice
    )


def test_xid_of_a_program_is_no_fault_of_the_hardware() -> None:
    """Only of a program of this job: others on the host have their own errors."""
    for about, is_own in (("process 1", True), ("process 999999", False)):  # rank 0 has pid 1
        job = make_stalled_job()
        xid = observe("program_xid", about, now="31 on GPU 0000:3b:00", source="kernel log")
        advice = find_verdict(job, {0: [xid], 1: [], 2: [], 3: []}).advice
        assert ("node0 alone reports a fault of the program" in advice) == is_own
        assert ("caused Xid 31 on GPU 0000:3b:00 (memory page fault" in advice) == is_own
        assert ("compute-sanitizer" in advice) == is_own
        assert "out of service" not in advice


@pytest.mark.parametrize(("age_s", "is_mentioned"), [(1.0, True), (60.0, False)])
def test_xid_after_which_calls_were_completed_is_no_cause(age_s: float, is_mentioned: bool) -> None:
    job = ScriptedJob(4, limits=LIMITS)
    for number, rank in job.ranks.items():
        rank.host = f"node{number}"
    for is_done in (True, True, False):
        job.make_calls(done=is_done)
        job.send_heartbeats()
        job.advance_time(1.0)
    xid = observe("xid", "GPU 0000:3b:00", now="79", source="kernel log", age_s=age_s)
    advice = find_verdict(job, {0: [xid], 1: [], 2: [], 3: []}).advice
    assert ("Xid 79" in advice) == is_mentioned


def test_events_from_long_before_the_hang_are_not_mentioned() -> None:
    old = observe("xid", "GPU 0", now="79", source="kernel log", age_s=800.0)
    verdict = find_verdict(make_stalled_job(), {0: [old], 1: [], 2: [], 3: []})
    assert "Xid" not in verdict.advice


def test_processes_of_other_jobs_are_not_mentioned() -> None:
    job = make_stalled_job()
    foreign = observe("hung_task", "process 999999", now="x, for more than 120 s")
    verdict = find_verdict(job, {0: [foreign], 1: [], 2: [], 3: []})
    assert "999999" not in verdict.advice


def test_hosts_are_read_once_and_again_while_it_lasts() -> None:
    job = make_stalled_job()

    def list_requested() -> list[str]:
        attempt = job.latest_attempt
        return sorted(
            attempt.processes[request.rank].host
            for request in job.run_diagnosis().requests
            if request.hardware
        )

    job.send_heartbeats()
    assert list_requested() == [], "nothing is suspected"
    for _ in range(int(STALL_AFTER_S) + 2):
        job.advance_time(1.0)
        job.send_heartbeats()
    hosts = ["node0", "node1", "node2", "node3"]
    assert list_requested() == hosts
    report_hardware(job, {0: [], 1: []})
    assert list_requested() == ["node2", "node3"]
    report_hardware(job, {2: [], 3: []})
    assert list_requested() == []
    job.advance_time(REREAD_AFTER_S + 1.0)
    job.send_heartbeats()
    assert list_requested() == hosts


def test_one_host_examines_the_whole_job_and_only_once() -> None:
    job = make_stalled_job()
    for _ in range(int(STALL_AFTER_S) + 2):
        job.advance_time(1.0)
        job.send_heartbeats()

    def list_examining() -> list[int]:
        return [request.rank for request in job.run_diagnosis().requests if request.whole_job]

    assert list_examining() == [3], "the last one"
    report_hardware(job, {number: [] for number in range(4)})
    job.advance_time(REREAD_AFTER_S + 1.0)
    job.send_heartbeats()
    assert list_examining() == []


def test_findings_of_nccl_come_first_with_a_remedy() -> None:
    nccl = partial(observe, source=JOB_DIAGNOSTICS)
    found = [
        nccl("differs_between_ranks", "NCCL_ALGO", now="Ring on ranks {0}", weight=Weight.HINT),
        nccl("earlier_xid", "host node7", now="79"),
        nccl("inactive_nvlinks", "ranks {3} of communicator 0x12", now="1 of 4"),
    ]
    verdict = find_verdict(make_stalled_job(), {0: found, 1: [], 2: [LINK_DOWN], 3: []})
    assert (
        "NCCL itself reports: host node7 has reported Xid 79 (the GPU has fallen off the bus) since"
        " NCCL started or was last asked; the GPUs of ranks {3} of communicator 0x12 have inactive"
        " NVLinks (1 of 4 ranks). Take the node out of service and restart it; if the error returns,"
        " the GPU needs a repair. Of 4 hosts, node2 alone reports a fault"
    ) in verdict.advice
    assert "NCCL_ALGO" not in verdict.advice


def test_number_of_hosts_that_are_read_is_bounded() -> None:
    job = make_stalled_job(MAX_HOSTS_READ + 10)
    for _ in range(int(STALL_AFTER_S) + 2):
        job.advance_time(1.0)
        job.send_heartbeats()
    requests = [request for request in job.run_diagnosis().requests if request.hardware]
    assert len(requests) == MAX_HOSTS_READ


def test_killed_for_lack_of_memory() -> None:
    job = make_stalled_job()
    job.send_heartbeats()
    pid = job.latest_attempt.processes[2].identity.pid
    job.end_process(2, signal=9)
    job.advance_time(3.0)
    killed = observe("oom_kill", f"process {pid}", now="python", source="kernel log")
    other = observe("oom_kill", "process 1", now="python", source="kernel log")
    report_hardware(job, {2: [other, killed]})
    (verdict,) = job.list_due_verdicts()
    assert (verdict.kind, verdict.culprits) == (VerdictKind.DEAD_RANK, (2,))
    assert (
        f"node2 reports a fault of its hardware: the kernel killed process {pid} (python) for lack of"
        " memory. Raise the memory limit" in verdict.advice
    )


@pytest.mark.parametrize("kind", [VerdictKind.MISSING_RANK, VerdictKind.NO_PROGRESS])
def test_only_the_hosts_that_matter_are_read(kind: VerdictKind) -> None:
    job = ScriptedJob(3, limits=LIMITS)
    for number, rank in job.ranks.items():
        rank.host = f"node{number}"
    job.make_calls()
    job.make_calls(done=False, except_ranks=(1,) if kind is VerdictKind.MISSING_RANK else ())
    for _ in range(int(STALL_AFTER_S) + 2):
        job.advance_time(1.0)
        job.send_heartbeats()
    ranks = {request.rank for request in job.run_diagnosis().requests if request.hardware}
    assert ranks == ({1} if kind is VerdictKind.MISSING_RANK else {0, 1, 2})


def test_reading_is_limited() -> None:
    job = make_stalled_job()
    job.send_heartbeats()
    key = job.latest_attempt.processes[0].key
    reply = HardwareReply(
        key=key,
        request="r",
        observations=tuple(observe("w" * 1000, now="x" * 1000) for _ in range(1000)),
        unavailable=(UnavailableSource(source="nvml", reason="r" * 1000, remedy="m" * 1000),),
    )
    job.apply_heartbeat(host="node0", agent="agent-node0", hardware=(reply,))
    hardware = job.latest_attempt.hardware["node0"]
    assert len(hardware.observations) == 128
    assert len(str(hardware.observations[0].now)) == 200
    (gap,) = hardware.unavailable
    assert (len(gap.reason), len(gap.remedy)) == (200, 200)
