"""One root cause is one incident, from its opening to its end."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta, timezone

import pytest

from hangwatch.model.calls import Call, Signature, Site, StreamKind
from hangwatch.model.groups import Group
from hangwatch.model.incidents import Resolution
from hangwatch.model.kinds import Severity, VerdictKind
from hangwatch.model.ranks import ExceptionInfo, ExitInfo, Frame, Lifecycle, ThreadStack
from hangwatch.model.verdicts import CallClass, Verdict, Wait
from hangwatch.protocol import heartbeat
from hangwatch.report.documents import build_document
from hangwatch.server.core import limits
from hangwatch.server.core.clock import Clock, ulid
from hangwatch.server.incidents import registry as registry_module
from hangwatch.server.incidents.registry import (
    AFTER_RESTART_ABSENT_S,
    EVIDENCE_WINDOW_S,
    JOB_END_GRACE_S,
    NOT_REPORTING_LIMIT_S,
    VERDICT_ABSENT_S,
    IncidentRecord,
    IncidentRegistry,
)
from hangwatch.tracking.attempt import Attempt
from hangwatch.tracking.fleet import Fleet, FormerAttempt
from hangwatch.tracking.process import StackSample

WORLD = Group(name="0", desc="default_pg", ranks=(0, 1, 2, 3))
START = datetime(2026, 1, 1, tzinfo=timezone.utc)


@dataclass
class IncidentScenario:
    """A job of four ranks on two hosts, and a clock that the test advances."""

    now: float = 1000.0
    fleet: Fleet = field(default_factory=Fleet)

    def __post_init__(self) -> None:
        self.clock = Clock(
            monotonic=lambda: self.now, wall=lambda: START + timedelta(seconds=self.now - 1000.0)
        )
        self.registry = IncidentRegistry(clock=self.clock)
        self.attempt = self.start_attempt(restart=0)

    def start_attempt(self, restart: int, lifecycle: Lifecycle = Lifecycle.INITIALISED) -> Attempt:
        for host in (0, 1):
            processes = tuple(
                heartbeat.ProcessUpdate(
                    key=f"{100 * (restart + 1) + rank}-1",
                    lifecycle=lifecycle,
                    identity=heartbeat.ProcessIdentity(
                        job="run7",
                        rank=rank,
                        world_size=4,
                        pid=100 * (restart + 1) + rank,
                        start_ticks=1,
                        restart=restart,
                    ),
                )
                for rank in (2 * host, 2 * host + 1)
            )
            beat = heartbeat.Heartbeat(
                host=f"node{host}",
                agent=f"a{host}",
                number=1 + restart,
                full=True,
                processes=processes,
            )
            self.fleet.apply_heartbeat(beat, self.now)
        attempt = self.fleet.latest_attempt("run7")
        assert attempt is not None
        return attempt

    def observe_verdicts(
        self, *verdicts: Verdict, after: float = 0.25, reporting: bool = True
    ) -> list[IncidentRecord]:
        self.now += after
        if reporting:
            self.attempt.last_seen_at = self.now
            for process in self.attempt.processes.values():
                process.reports.last_seen_at = self.now
        self.registry.apply_verdicts(self.attempt, verdicts, self.now)
        return self.incident_records

    @property
    def incident_records(self) -> list[IncidentRecord]:
        return sorted(self.registry.records.values(), key=lambda c: c.opened_at)

    def end_ranks(self, *ranks: int, status: int | None = None, signal: int | None = None) -> None:
        for rank in ranks:
            self.attempt.processes[rank].exit = ExitInfo(exit_status=status, signal=signal)
            self.attempt.processes[rank].exited_at = self.now
            self.attempt.update_suspects(self.attempt.processes[rank])


@pytest.fixture
def scene() -> IncidentScenario:
    return IncidentScenario()


MISSING_VERDICT = Verdict(
    kind=VerdictKind.MISSING_RANK,
    severity=Severity.ALERT,
    culprits=(2,),
    waiting=(0, 1, 3),
    group=WORLD,
    seq=7,
    began_at=940.0,
    summary="rank 2 has not entered all_reduce",
    advice="Look at its stack.",
    waits=(Wait(rank=0, on_rank=2, group="0", seq=7),),
)
SLOW_VERDICT = replace(MISSING_VERDICT, kind=VerdictKind.SLOW_RANK, severity=Severity.WARNING)
DEAD_VERDICT = Verdict(
    kind=VerdictKind.DEAD_RANK,
    severity=Severity.ALERT,
    culprits=(1,),
    waiting=(0,),
    group=WORLD,
    seq=8,
    began_at=999.0,
)
SUM_MAX_VERDICT = Verdict(
    kind=VerdictKind.MISMATCH,
    severity=Severity.ALERT,
    culprits=(1,),
    waiting=(),
    group=WORLD,
    seq=3,
    differing_fields=("reduce_op",),
    began_at=990.0,
    calls=(
        CallClass(
            ranks=(0, 2, 3),
            call=Call(
                seq=3, signature=Signature(op="all_reduce", shapes=((64,),), reduce_op="sum")
            ),
        ),
        CallClass(
            ranks=(1,),
            call=Call(
                seq=3,
                signature=Signature(op="all_reduce", shapes=((64,),), reduce_op="max"),
                site=Site(file="t.py", line=4, function="f"),
            ),
        ),
    ),
)


def make_cycle(*culprits: int, waiting: tuple[int, ...] = (), seq: int = 1) -> Verdict:
    """Receives that wait for one another, each the rank's first from the next one."""
    peers = zip(culprits, (*culprits[1:], culprits[0]), strict=True)
    calls = tuple(
        CallClass(ranks=(r,), call=Call(seq=seq, signature=Signature(op="recv"), peer=peer))
        for r, peer in peers
    )
    return Verdict(
        kind=VerdictKind.DEADLOCK,
        severity=Severity.ALERT,
        culprits=culprits,
        waiting=waiting,
        group=WORLD,
        seq=seq,
        began_at=990.0,
        calls=calls,
    )


def test_due_verdict_opens_one_incident_with_every_field(scene: IncidentScenario) -> None:
    [record] = scene.observe_verdicts(MISSING_VERDICT)
    document = build_document(record.incident)
    expected = (
        "id job attempt kind severity status onset_at opened_at resolved_at summary advice culprits"
        " waiting group seq fields calls waits processes stacks"
    )
    assert set(expected.split()) <= set(document)
    assert (document["kind"], document["severity"], document["status"], document["culprits"]) == (
        "missing_rank",
        "alert",
        "open",
        [2],
    )
    assert document["opened_at"] == "2026-01-01T00:00:00.250000Z"
    assert document["onset_at"] == "2025-12-31T23:59:00Z"
    assert document["waits"] == [{"rank": 0, "for": 2, "group": "0", "seq": 7}]
    assert document["processes"][0]["pid"] == 102
    assert len(scene.observe_verdicts(MISSING_VERDICT)) == 1


def test_a_suspicion_opens_nothing(scene: IncidentScenario) -> None:
    assert scene.observe_verdicts(replace(MISSING_VERDICT, is_confirmed=False)) == []


def test_calls_show_what_differs(scene: IncidentScenario) -> None:
    [record] = scene.observe_verdicts(SUM_MAX_VERDICT)
    sums, maxes = build_document(record.incident)["calls"]
    assert (sums["ranks"], sums["reduce_op"], sums["shapes"]) == ([0, 2, 3], "sum", [[64]])
    assert sums["site"] is None
    assert (maxes["reduce_op"], maxes["site"]["line"]) == ("max", 4)


def test_more_waiting_ranks_update_same_incident(scene: IncidentScenario) -> None:
    scene.observe_verdicts(replace(MISSING_VERDICT, waiting=(0, 1)))
    [record] = scene.observe_verdicts(MISSING_VERDICT)
    assert record.incident.waiting == (0, 1, 3)


def test_waiting_rank_stays_while_its_host_is_late(scene: IncidentScenario) -> None:
    scene.observe_verdicts(MISSING_VERDICT)
    summary = "rank 2 has not entered all_reduce, for which 1 rank waits"
    fewer = replace(MISSING_VERDICT, waiting=(0,), summary=summary)
    [record] = scene.observe_verdicts(fewer, reporting=False)
    assert record.incident.waiting == (0, 1, 3)
    assert record.incident.summary.endswith("for which 3 ranks wait")
    [record] = scene.observe_verdicts(fewer)
    assert record.incident.waiting == (0,), "its host reported, and it does not wait"


def test_waiting_rank_that_ran_on_before_its_end_has_waited(scene: IncidentScenario) -> None:
    """NCCL's watchdog aborts the call, the host makes another one, and the process is ended."""
    scene.observe_verdicts(MISSING_VERDICT)
    fewer = replace(MISSING_VERDICT, waiting=(1, 3))
    [record] = scene.observe_verdicts(fewer)
    assert record.incident.waiting == (1, 3)
    message = "NCCL communicator was aborted on rank 0."
    failure = ExceptionInfo(type="DistBackendError", message=message)
    scene.attempt.processes[0].exception = failure
    scene.attempt.update_suspects(scene.attempt.processes[0])
    [record] = scene.observe_verdicts(fewer)
    assert record.incident.waiting == (0, 1, 3)
    scene.attempt.processes[0].exception = None
    scene.attempt.ended_ranks.clear()
    scene.end_ranks(0, signal=6)
    [record] = scene.observe_verdicts(fewer)
    assert record.incident.waiting == (0, 1, 3)


def test_slow_rank_escalates_to_alert_permanently(scene: IncidentScenario) -> None:
    [record] = scene.observe_verdicts(SLOW_VERDICT)
    assert record.incident.severity is Severity.WARNING
    [risen] = scene.observe_verdicts(MISSING_VERDICT, after=300.0)
    assert (risen.incident.id, risen.incident.kind, risen.incident.severity) == (
        record.incident.id,
        VerdictKind.MISSING_RANK,
        Severity.ALERT,
    )
    [after] = scene.observe_verdicts(SLOW_VERDICT)
    assert (after.incident.kind, after.incident.severity) == (
        VerdictKind.MISSING_RANK,
        Severity.ALERT,
    )


def test_late_start_escalates_to_alert_in_the_same_incident(scene: IncidentScenario) -> None:
    alert = replace(MISSING_VERDICT, kind=VerdictKind.STARTUP_STALL)
    [record] = scene.observe_verdicts(replace(alert, severity=Severity.WARNING))
    assert record.incident.severity is Severity.WARNING
    [risen] = scene.observe_verdicts(alert, after=240.0)
    assert (risen.incident.id, risen.incident.severity) == (record.incident.id, Severity.ALERT)


@pytest.mark.parametrize("first", [SLOW_VERDICT, MISSING_VERDICT])
def test_remaining_absent_rank_is_same_incident(scene: IncidentScenario, first: Verdict) -> None:
    [record] = scene.observe_verdicts(first)
    stuck = replace(MISSING_VERDICT, culprits=(1,), waiting=(0, 2, 3))
    scene.observe_verdicts(replace(stuck, is_confirmed=False), after=5.0)
    scene.observe_verdicts(replace(stuck, is_confirmed=False), after=5.0)
    [after] = scene.observe_verdicts(stuck, after=5.0)
    assert (after.incident.id, after.incident.status, after.incident.culprits) == (
        record.incident.id,
        "open",
        (1,),
    )
    assert (after.incident.kind, after.incident.severity) == (
        VerdictKind.MISSING_RANK,
        Severity.ALERT,
    )


def test_deaths_during_a_hang_are_its_consequences(scene: IncidentScenario) -> None:
    [record] = scene.observe_verdicts(MISSING_VERDICT)
    scene.end_ranks(0, 1, 2, 3, signal=9)
    scene.observe_verdicts(DEAD_VERDICT)
    [after] = scene.observe_verdicts(replace(DEAD_VERDICT, culprits=(2,)), after=60.0)
    assert after is record
    assert (after.incident.kind, after.incident.status, after.incident.waiting) == (
        VerdictKind.MISSING_RANK,
        "open",
        (0, 1, 3),
    )


def test_waits_for_dead_rank_follow_from_earliest_death(
    scene: IncidentScenario,
) -> None:
    scene.observe_verdicts(DEAD_VERDICT)
    [record] = scene.observe_verdicts(
        DEAD_VERDICT, replace(MISSING_VERDICT, culprits=(1,), waiting=(0, 2), seq=9)
    )
    assert record.incident.kind is VerdictKind.DEAD_RANK
    [earlier] = scene.observe_verdicts(replace(DEAD_VERDICT, culprits=(3,), seq=5))
    assert earlier.incident.culprits == (3,)


def test_a_mismatch_explains_the_death_that_it_led_to(scene: IncidentScenario) -> None:
    scene.observe_verdicts(DEAD_VERDICT)
    [record] = scene.observe_verdicts(replace(SUM_MAX_VERDICT, differing_fields=("shape",)))
    assert (record.incident.kind, record.incident.differing_fields) == (
        VerdictKind.MISMATCH,
        ("shape",),
    )


def test_causes_without_common_rank_are_two_incidents(scene: IncidentScenario) -> None:
    half = replace(
        MISSING_VERDICT, culprits=(0,), waiting=(1,), group=replace(WORLD, name="1", ranks=(0, 1))
    )
    other = replace(
        MISSING_VERDICT, culprits=(2,), waiting=(3,), group=replace(WORLD, name="2", ranks=(2, 3))
    )
    assert len(scene.observe_verdicts(half, other)) == 2
    assert len(scene.observe_verdicts(other, half)) == 2


def test_overlapping_waits_are_one_incident(scene: IncidentScenario) -> None:
    other = replace(
        MISSING_VERDICT,
        culprits=(3,),
        waiting=(0,),
        group=replace(WORLD, name="2", ranks=(0, 3)),
        seq=2,
    )
    [record] = scene.observe_verdicts(MISSING_VERDICT, other)
    assert record.incident.culprits == (2,)
    assert len(scene.observe_verdicts(other, MISSING_VERDICT)) == 1
    assert record.incident.culprits == (2,)


def make_late_receive(culprit: int, waiting: int) -> Verdict:
    call = Call(seq=7, signature=Signature(op="recv"), peer=culprit)
    return replace(
        MISSING_VERDICT,
        culprits=(culprit,),
        waiting=(waiting,),
        calls=(CallClass(ranks=(waiting,), call=call),),
    )


def test_channels_of_one_group_are_distinguished_by_their_peers(scene: IncidentScenario) -> None:
    for _ in range(3):
        records = scene.observe_verdicts(make_late_receive(0, 1), make_late_receive(2, 3))
        assert [c.incident.culprits for c in records] == [(0,), (2,)]
    first, second = scene.observe_verdicts(make_late_receive(2, 3), after=VERDICT_ABSENT_S)
    assert (first.incident.status, second.incident.status, second.incident.culprits) == (
        "resolved",
        "open",
        (2,),
    )


@pytest.mark.parametrize("apart", [0.0, 3.0, 60.0])
def test_two_cycles_blocking_same_ranks_are_two_incidents(
    scene: IncidentScenario, apart: float
) -> None:
    one, other = make_cycle(0, 1, waiting=(4, 5)), make_cycle(2, 3, waiting=(4, 5))
    if apart:
        scene.observe_verdicts(one)
    for _ in range(3):
        records = scene.observe_verdicts(one, other, after=apart or 0.25)
        assert [c.incident.culprits for c in records] == [(0, 1), (2, 3)]
    first, second = scene.observe_verdicts(other, after=VERDICT_ABSENT_S)
    assert (first.incident.status, second.incident.status) == ("resolved", "open")
    scene.end_ranks(0, 1, 2, 3, signal=15)
    assert len(scene.observe_verdicts(DEAD_VERDICT)) == 2


def test_gradually_discovered_cycle_is_one_incident(scene: IncidentScenario) -> None:
    for culprits in ((0, 1), (0, 1, 2), (0, 1, 2, 3)):
        [record] = scene.observe_verdicts(
            make_cycle(*culprits, waiting=(5,), seq=len(culprits)), after=EVIDENCE_WINDOW_S
        )
        assert record.incident.culprits == culprits


@pytest.mark.parametrize("seq", [1, 2])
def test_cycle_waiting_for_another_joins_its_incident(scene: IncidentScenario, seq: int) -> None:
    scene.observe_verdicts(make_cycle(0, 1))
    [record] = scene.observe_verdicts(
        make_cycle(2, 3, waiting=(0, 1), seq=seq), after=VERDICT_ABSENT_S + 1
    )
    assert record.incident.status == "open"


def test_wait_that_becomes_a_cycle_is_one_incident(scene: IncidentScenario) -> None:
    scene.observe_verdicts(MISSING_VERDICT)
    [record] = scene.observe_verdicts(make_cycle(1, 2))
    assert (record.incident.kind, record.incident.culprits) == (VerdictKind.DEADLOCK, (1, 2))
    assert len(scene.observe_verdicts(MISSING_VERDICT)) == 1


def test_mismatch_is_refined_when_its_first_call_is_found(scene: IncidentScenario) -> None:
    inexact = replace(SUM_MAX_VERDICT, seq=512, calls=(), differing_fields=())
    scene.observe_verdicts(inexact)
    [record] = scene.observe_verdicts(SUM_MAX_VERDICT)
    assert (record.incident.seq, record.incident.differing_fields) == (3, ("reduce_op",))
    [record] = scene.observe_verdicts(replace(SUM_MAX_VERDICT, seq=2))
    assert record.incident.seq == 3, "another difference"


def test_mismatch_without_hang_stays_open_beside_hang(scene: IncidentScenario) -> None:
    scene.observe_verdicts(SUM_MAX_VERDICT)
    assert [c.incident.kind for c in scene.observe_verdicts(SUM_MAX_VERDICT, MISSING_VERDICT)] == [
        VerdictKind.MISMATCH,
        VerdictKind.MISSING_RANK,
    ]
    later = replace(SUM_MAX_VERDICT, seq=9)
    mismatch, hang = scene.observe_verdicts(later, after=VERDICT_ABSENT_S + 1)
    assert (mismatch.incident.status, mismatch.incident.seq, hang.incident.status) == (
        "open",
        3,
        "resolved",
    )
    scene.observe_verdicts(after=60.0)
    assert mismatch.incident.status == "open"


def test_incident_resolves_on_progress(scene: IncidentScenario) -> None:
    [record] = scene.observe_verdicts(MISSING_VERDICT)
    scene.observe_verdicts(after=VERDICT_ABSENT_S / 2)
    assert record.incident.status == "open"
    scene.observe_verdicts(after=VERDICT_ABSENT_S)
    assert (record.incident.status, record.incident.resolved_at is not None) == ("resolved", True)
    assert len(scene.observe_verdicts(MISSING_VERDICT)) == 2


def test_incident_stays_open_while_no_host_reports(scene: IncidentScenario) -> None:
    [record] = scene.observe_verdicts(MISSING_VERDICT)
    scene.observe_verdicts(after=60.0, reporting=False)
    assert record.incident.status == "open"


def test_suspicion_about_same_call_keeps_incident_open(scene: IncidentScenario) -> None:
    [record] = scene.observe_verdicts(MISSING_VERDICT)
    for _ in range(20):
        scene.observe_verdicts(replace(MISSING_VERDICT, is_confirmed=False), after=1.0)
    assert record.incident.status == "open"


def test_hang_stays_open_until_final_reports_of_killed_job(scene: IncidentScenario) -> None:
    [record] = scene.observe_verdicts(MISSING_VERDICT)
    ended = scene.now
    scene.end_ranks(0, 1, 2, 3, signal=15)
    for seconds, status in ((JOB_END_GRACE_S, "open"), (1.0, "resolved")):
        scene.now += seconds
        scene.registry.resolve_finished_jobs(scene.fleet, scene.now)
        assert record.incident.status == status
    assert (record.incident.resolution, record.incident.resolved_at) == (
        Resolution.ENDED,
        scene.clock.date(ended),
    )


@pytest.mark.parametrize(
    ("over", "seconds", "why"),
    [(True, JOB_END_GRACE_S, "ended"), (False, NOT_REPORTING_LIMIT_S, "not_reporting")],
)
def test_open_incident_after_server_restart_closes_with_job(
    scene: IncidentScenario, over: bool, seconds: float, why: str
) -> None:
    [record] = scene.observe_verdicts(MISSING_VERDICT)
    registry = IncidentRegistry(clock=scene.clock)
    registry.load_records([IncidentRecord(incident=record.incident)])
    fleet = Fleet(
        former_attempts={
            "run7": FormerAttempt(number=0, restart=0, last_seen_at=scene.now, is_finished=over)
        }
    )
    registry.resolve_finished_jobs(fleet, scene.now + seconds)
    [kept] = registry.records.values()
    assert kept.incident.status == "open"
    registry.resolve_finished_jobs(fleet, scene.now + seconds + 1)
    assert (kept.incident.status, kept.incident.resolution) == ("resolved", why)


def test_job_that_stops_reporting_keeps_its_hang(scene: IncidentScenario) -> None:
    [record] = scene.observe_verdicts(MISSING_VERDICT)
    scene.registry.resolve_finished_jobs(scene.fleet, scene.now + 3600)
    assert record.incident.status == "open"


def test_a_hang_ends_with_the_next_attempt(scene: IncidentScenario) -> None:
    [record] = scene.observe_verdicts(MISSING_VERDICT)
    scene.end_ranks(0, 1, 2, 3, signal=15)
    scene.observe_verdicts(after=60.0)
    assert record.incident.status == "open"
    scene.registry.resolve_earlier_attempts(
        scene.start_attempt(restart=1, lifecycle=Lifecycle.STARTING), scene.now
    )
    assert record.incident.status == "open"
    newer = scene.start_attempt(restart=1)
    for process in newer.processes.values():
        process.lifecycle = Lifecycle.INITIALISED
    scene.registry.resolve_earlier_attempts(newer, scene.now)
    assert record.incident.status == "resolved"


def test_next_attempt_finished_before_diagnosis_ends_hang(scene: IncidentScenario) -> None:
    [record] = scene.observe_verdicts(MISSING_VERDICT)
    scene.end_ranks(0, 1, 2, 3, signal=9)
    newer = scene.start_attempt(restart=1, lifecycle=Lifecycle.EXITING)
    for process in newer.processes.values():
        process.lifecycle, process.exit, process.exited_at = (
            Lifecycle.EXITING,
            ExitInfo(exit_status=0),
            scene.now,
        )
    scene.registry.resolve_earlier_attempts(newer, scene.now)
    assert record.incident.resolution is Resolution.RESTARTED


def test_successful_job_resolves_incident(scene: IncidentScenario) -> None:
    [record] = scene.observe_verdicts(MISSING_VERDICT)
    scene.end_ranks(0, 1, 2, 3, status=0)
    scene.observe_verdicts(after=0.3)
    assert record.incident.status == "resolved"


def test_stacks_list_culprits_first_and_merge_waiting_ranks(scene: IncidentScenario) -> None:
    def make_sample(line: int, error: str | None = None) -> StackSample:
        frames = (Frame(function="step", file="/u/train.py", line=line),)
        threads = (
            ThreadStack(thread="Thread-1", frames=frames),
            ThreadStack(thread="MainThread", frames=frames, main=True),
        )
        return StackSample(
            source="py-spy",
            taken_at=scene.now,
            threads=() if error else threads,
            error=error,
        )

    for rank, line in ((0, 41), (1, 41), (2, 12)):
        scene.attempt.processes[rank].samples += (make_sample(line),)
    failed_sample = make_sample(0, error="Permission denied: give it CAP_SYS_PTRACE")
    scene.attempt.processes[3].samples += (failed_sample,)
    [record] = scene.observe_verdicts(MISSING_VERDICT)
    stack_summaries = [(s.ranks, s.thread, bool(s.error)) for s in record.incident.stacks]
    assert stack_summaries == [
        ((2,), "MainThread", False),
        ((2,), "Thread-1", False),
        ((0, 1), "MainThread", False),
        ((3,), None, True),
    ]
    scene.attempt.processes[2].samples = ()
    scene.observe_verdicts(MISSING_VERDICT)
    assert [s.ranks for s in record.incident.stacks][:2] == [(2,), (2,)]


def test_threads_that_execute_remote_calls_are_shown(scene: IncidentScenario) -> None:
    rpc = "/lib/python3.11/site-packages/torch/distributed/rpc"
    own_frame = Frame(function="main", file="/u/train.py", line=41)
    main = ThreadStack(thread="MainThread", frames=(own_frame,), main=True)
    called = ThreadStack(
        thread="Dummy-1",
        frames=(
            Frame(function="answer", file="/u/train.py", line=13),
            Frame(function="_run_function", file=f"{rpc}/internal.py", line=203),
        ),
    )
    waits = replace(
        main, frames=(Frame(function="rpc_sync", file=f"{rpc}/api.py", line=1), own_frame)
    )
    for rank, threads in ((1, (main, called)), (2, (waits,))):
        sample = StackSample(source="py-spy", taken_at=scene.now, threads=threads)
        scene.attempt.processes[rank].samples += (sample,)
    [record] = scene.observe_verdicts(MISSING_VERDICT)
    assert [(stack.ranks, stack.thread) for stack in record.incident.stacks] == [
        ((2,), "MainThread"),
        ((1,), "MainThread"),
        ((1,), "Dummy-1"),
    ]


def test_stack_is_of_the_thread_that_makes_the_calls_of_the_group(scene: IncidentScenario) -> None:
    identity = heartbeat.StreamIdentity(
        kind=StreamKind.COLLECTIVE, name="0", desc="default_pg", ranks="0-3", world=4
    )
    stream = heartbeat.StreamUpdate(uid=7, entered=6, completed=6, identity=identity)
    update = heartbeat.ProcessUpdate(key="102-1", streams=(stream,))
    beat = heartbeat.Heartbeat(host="node1", agent="a1", number=2, processes=(update,))
    scene.fleet.apply_heartbeat(beat, scene.now)
    process = scene.attempt.processes[2]
    frames = (Frame(function="step", file="/u/train.py", line=41),)
    main = ThreadStack(
        thread="MainThread", frames=frames, main=True, call_recency=0, called_uids=(1,)
    )
    worker = ThreadStack(thread="Thread-1", frames=frames, call_recency=1, called_uids=(7,))
    process.samples = (StackSample(source="py-spy", taken_at=scene.now, threads=(main, worker)),)
    [record] = scene.observe_verdicts(replace(MISSING_VERDICT, group=process.streams[7].group))
    assert [stack.thread for stack in record.incident.stacks] == ["Thread-1", "MainThread"]


def test_first_exception_is_included(scene: IncidentScenario) -> None:
    scene.end_ranks(1, status=1)
    scene.attempt.processes[1].exception = ExceptionInfo(
        type="RuntimeError", message="boom", site=Site(file="t.py", line=9, function="f")
    )
    [record] = scene.observe_verdicts(DEAD_VERDICT)
    process = record.incident.processes[0]
    assert process.exception is not None
    assert (process.rank, process.exit_status, process.exception.message) == (1, 1, "boom")


def test_same_run_continues_incident_after_restart_but_rerun_does_not(
    scene: IncidentScenario,
) -> None:
    [record] = scene.observe_verdicts(MISSING_VERDICT)
    for same_run in (True, False):
        later = IncidentScenario(now=5000.0)
        kept = IncidentRecord(
            incident=record.incident, members=dict(record.members), alerted_severity=Severity.ALERT
        )
        later.registry.load_records([kept])
        if not same_run:
            for process in later.attempt.processes.values():
                process.key = "999-2"
        later.observe_verdicts(replace(MISSING_VERDICT, began_at=4900.0))
        assert (len(later.incident_records) == 1) is same_run
        later.registry.resolve_earlier_attempts(
            later.attempt, later.now + AFTER_RESTART_ABSENT_S + 1
        )
        assert (kept.incident.status == "open") is same_run


def test_ulids_sort_by_time() -> None:
    made = [ulid(START + timedelta(milliseconds=n)) for n in range(50)]
    assert made == sorted(made)
    assert len(set(made)) == 50
    assert {len(m) for m in made} == {26}


def make_separate_verdicts(count: int, severity: Severity = Severity.ALERT) -> list[Verdict]:
    """Verdicts that are an incident each."""
    first = 10 if severity is Severity.ALERT else 0
    return [
        Verdict(
            kind=VerdictKind.NONFINITE,
            severity=severity,
            culprits=(n,),
            waiting=(),
            group=replace(WORLD, name=f"{severity.value} {n}"),
        )
        for n in range(first, first + count)
    ]


def test_open_incidents_of_a_job_are_limited(
    scene: IncidentScenario, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "OPEN_INCIDENTS", replace(limits.OPEN_INCIDENTS, maximum=6))
    scene.observe_verdicts(*make_separate_verdicts(5, Severity.WARNING))
    assert len(scene.registry.list_open(scene.attempt)) == 3, "half of them are for alerts"
    scene.observe_verdicts(*make_separate_verdicts(5))
    opened = scene.registry.list_open(scene.attempt)
    assert [record.incident.is_alert for record in opened] == [False] * 3 + [True] * 3
    assert scene.registry.refusals == {limits.OPEN_INCIDENTS.name: 4}
    scene.registry.resolve_incident(opened[0], Resolution.PROGRESS, scene.now)
    scene.observe_verdicts(*make_separate_verdicts(5))
    assert scene.registry.list_open(scene.attempt)[:2] == opened[1:3]
    assert len(scene.registry.list_open(scene.attempt)) == 6, "a resolved one makes room"


def test_closed_incidents_of_one_job_displace_no_others(
    scene: IncidentScenario, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry_module, "MAX_RECORDS_KEPT", 4)
    records = []
    for number, job in enumerate(["run7", *(f"evil/{n}" for n in range(8))]):
        [first] = scene.observe_verdicts(MISSING_VERDICT)[-1:]
        incident = replace(first.incident, id=f"{number}", job=job, status="resolved")
        records.append(replace(first, incident=incident, opened_at=scene.now + number))
    scene.registry.drop_incidents(set(scene.registry.records))
    scene.registry.load_records(records)
    scene.registry.take_changed()
    kept = {record.incident.job for record in scene.registry.records.values()}
    assert kept == {"run7", "evil/5", "evil/6", "evil/7"}
