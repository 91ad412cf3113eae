"""What hosts report of their hardware, as evidence of an incident."""

from __future__ import annotations

from dataclasses import replace

from hangwatch.diagnosis.hardware import list_involved_hosts
from hangwatch.model.hardware import (
    HostObservation,
    MissingEvidence,
    Observation,
    UnavailableSource,
    Weight,
)
from hangwatch.model.limits import Limits
from hangwatch.protocol.heartbeat import HardwareReply
from hangwatch.server.incidents.evidence import (
    collect_hardware,
    collect_missing,
)
from tests.simulation.scripted_job import ScriptedJob

ERRORS = Observation(
    source="infiniband", about="mlx5_0/1", what="symbol_error", before=1, now=5, is_counter=True
)
XID = Observation(
    source="kernel log", about="GPU 0", what="xid", now="79", weight=Weight.FAULT, age_s=4.0
)
VERSION = Observation(
    source="versions", about="nccl", what="version", now="2.27", weight=Weight.FACT
)
NO_LOG = UnavailableSource(source="kernel log", reason="refused", remedy="CAP_SYSLOG")
NO_PORT = UnavailableSource(source="infiniband", reason="this host has no adapter")


def make_stalled_job() -> ScriptedJob:
    job = ScriptedJob(2, limits=Limits(stall_after_s=10.0, slow_limit_s=60.0))
    for number, rank in job.ranks.items():
        rank.host = f"node{number}"
    job.make_calls()
    job.make_calls(done=False)
    for _ in range(12):
        job.advance_time(1.0)
        job.send_heartbeats()
    return job


def report(job: ScriptedJob, number: int, *observations: Observation) -> None:
    key = job.latest_attempt.processes[number].key
    reply = HardwareReply(
        key=key, request="r", observations=observations, unavailable=(NO_LOG, NO_PORT)
    )
    job.apply_heartbeat(host=f"node{number}", agent=f"agent-node{number}", hardware=(reply,))


def test_faults_come_first_and_versions_are_left_out() -> None:
    job = make_stalled_job()
    report(job, 0, ERRORS, VERSION)
    report(job, 1, XID)
    (verdict,) = job.list_due_verdicts()
    found = collect_hardware(list_involved_hosts(job.latest_attempt, verdict), ())
    assert found == (
        HostObservation(host="node1", observation=XID),
        HostObservation(host="node0", observation=ERRORS),
    )


def test_readings_from_before_the_hang_are_no_evidence() -> None:
    job = make_stalled_job()
    report(job, 0, ERRORS)
    (verdict,) = job.list_due_verdicts()
    later = replace(verdict, began_at=job.now + 1.0)
    assert collect_hardware(list_involved_hosts(job.latest_attempt, later), ()) == ()
    assert collect_missing(list_involved_hosts(job.latest_attempt, later)) == ()


def test_sources_that_something_can_be_done_about_are_listed_once() -> None:
    job = make_stalled_job()
    report(job, 0)
    report(job, 1)
    (verdict,) = job.list_due_verdicts()
    assert collect_missing(list_involved_hosts(job.latest_attempt, verdict)) == (
        MissingEvidence(
            hosts=("node0", "node1"), source="kernel log", reason="refused", remedy="CAP_SYSLOG"
        ),
    )


def test_what_was_observed_is_kept() -> None:
    """A counter that grows replaces its earlier value; what did not change keeps its age."""
    xid = HostObservation(host="node1", observation=XID)
    errors = HostObservation(host="node1", observation=ERRORS)
    more = HostObservation(host="node1", observation=replace(ERRORS, now=9))
    job = make_stalled_job()
    report(job, 1, replace(XID, age_s=64.0), replace(ERRORS, now=9))
    (verdict,) = job.list_due_verdicts()
    hosts = list_involved_hosts(job.latest_attempt, verdict)
    assert collect_hardware(hosts, (xid, errors)) == (xid, more)
    assert collect_hardware((), (xid, errors)) == (xid, errors)
