"""When ranks are ended that hang, and which: the pure policy, and what the server makes of it over
time and over restarts.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from hangwatch.model.calls import Call, Signature, StreamKind
from hangwatch.model.groups import Group
from hangwatch.model.incidents import Incident, RankAbort, Recovery, Resolution
from hangwatch.model.kinds import Severity, VerdictKind
from hangwatch.model.ranks import ExitInfo
from hangwatch.protocol import heartbeat
from hangwatch.protocol.commands import Command, CommandKind
from hangwatch.report.documents import build_document
from hangwatch.report.recovery import format_recovery, iter_recovery_events
from hangwatch.server.app import build_app
from hangwatch.server.core.clock import Clock
from hangwatch.server.incidents.registry import AlertSummary, IncidentRecord
from hangwatch.server.recovery.policy import (
    Decision,
    Facts,
    Rules,
    Step,
    decide,
)
from hangwatch.server.settings import Settings
from hangwatch.server.storage.store import Store
from hangwatch.tracking.attempt import Attempt
from hangwatch.tracking.call_stream import CallStream
from hangwatch.tracking.process import Process, ReportTimes
from tests.simulation.scripted_job import ScriptedJob
from tests.unit.incident_documents import make_incident as build_incident

NOW = 1000.0
MOMENT = datetime(2026, 1, 1, tzinfo=timezone.utc)
RULES = Rules(after=30.0)


def make_incident(
    kind: VerdictKind = VerdictKind.MISSING_RANK, culprits: tuple[int, ...] = (2,), **more: Any
) -> Incident:
    recovery = more.pop("recovery", None)
    fields = {"id": "i", "kind": kind, "culprits": culprits, "waiting": (0, 1, 3), **more}
    return replace(build_incident(**fields), recovery=recovery)


def make_process(
    rank: int,
    *,
    is_alive: bool = True,
    last_seen_at: float = NOW - 0.3,
    last_advanced_at: float = NOW - 100.0,
    is_in_call: bool = False,
    on_hang: str = "abort",
) -> Process:
    world = Group(name="0", desc="default_pg", ranks=(0, 1, 2, 3))
    stream = CallStream(
        uid=1, kind=StreamKind.COLLECTIVE, group=world, entered=1, completed=0 if is_in_call else 1
    )
    return Process(
        attempt=Attempt(job="run7", number=0, opened_at=0.0),
        key=f"{rank}-1",
        host="n",
        identity=heartbeat.ProcessIdentity(
            job="run7", rank=rank, world_size=4, pid=rank, start_ticks=1, on_hang=on_hang
        ),
        started_at=0.0,
        reports=ReportTimes(last_seen_at=last_seen_at, last_progress_at=last_advanced_at),
        exit=None if is_alive else ExitInfo(signal=9),
        streams={stream.uid: stream},
    )


def make_facts(
    incident: Incident | None = None, *, waiting: tuple[int, ...] = (0, 1, 3), **more: Any
) -> Facts:
    """A hang of four ranks that has been open for a long time, with all evidence stored, as of `NOW`."""
    incident = incident or make_incident()
    alerts = AlertSummary(at=NOW, accused=frozenset(incident.culprits), waiting=frozenset(waiting))
    given = {
        "alerts": alerts,
        "processes": {rank: make_process(rank) for rank in range(4)},
        "is_stored": True,
        "planned_at": NOW - 31.0,
        "recent_s": 2.0,
    }
    return Facts(incident=incident, **{**given, **more})


def change_rank(rank: int, base: Facts | None = None, **more: Any) -> Facts:
    base = base or make_facts()
    return replace(base, processes={**base.processes, rank: make_process(rank, **more)})


def decide_step(given: Facts, rules: Rules = RULES) -> tuple[Step, tuple[int, ...]]:
    decision = decide(given, rules, NOW)
    return decision.step, decision.ranks


def test_culprits_are_ended_after_grace_period() -> None:
    assert decide(make_facts(), RULES, NOW) == Decision(step=Step.END, ranks=(2,), due_at=NOW - 1.0)
    assert decide_step(make_facts(planned_at=NOW - 29.0)) == (Step.WAIT, (2,))
    assert decide_step(make_facts(planned_at=None)) == (Step.WAIT, (2,)), "first it is announced"


@pytest.mark.parametrize("kind", list(VerdictKind))
def test_warnings_and_resolved_incidents_end_no_rank(kind: VerdictKind) -> None:
    every = replace(RULES, kinds=frozenset(VerdictKind))
    assert decide_step(make_facts(make_incident(kind)), every)[0] is Step.END, (
        "else this proves nothing"
    )
    for incident in (
        make_incident(kind, severity=Severity.WARNING),
        make_incident(kind, status="resolved"),
    ):
        for stored, planned_at in itertools.product((True, False), (None, 0.0)):
            assert decide_step(
                make_facts(incident, is_stored=stored, planned_at=planned_at), every
            ) == (
                Step.NOTHING,
                (),
            )


def test_only_chosen_kinds() -> None:
    ended = {
        kind for kind in VerdictKind if decide_step(make_facts(make_incident(kind)))[0] is Step.END
    }
    assert ended == {
        VerdictKind.MISMATCH, VerdictKind.GROUP_MISMATCH, VerdictKind.DEADLOCK, VerdictKind.DEAD_RANK, VerdictKind.EXITED_RANK, VerdictKind.MISSING_RANK, VerdictKind.NO_PROGRESS,
        VerdictKind.DEVICE_STUCK,
    }  # fmt: skip


def test_no_rank_of_progressing_job_is_ended() -> None:
    assert decide_step(make_facts(alerts=None))[0] is Step.NOTHING, (
        "no alert names its cause any more"
    )
    old = AlertSummary(at=NOW - 3.0, accused=frozenset({2}), waiting=frozenset({0}))
    assert decide_step(make_facts(alerts=old))[0] is Step.NOTHING, "the diagnosis is old"
    for rank in (2, 0):
        decision = decide(change_rank(rank, last_advanced_at=NOW - 5.0), RULES, NOW)
        assert (decision.step, decision.due_at) == (
            Step.WAIT,
            NOW + 25.0,
        ), "a rank that makes progress gets the whole grace period again"
    assert (
        decide_step(change_rank(3, make_facts(waiting=(0, 1)), last_advanced_at=NOW - 5.0))[0]
        is Step.END
    ), "rank 3 is not concerned"
    assert decide_step(make_facts(waiting=()))[0] is Step.NOTHING, "no rank waits"


def test_ranks_named_beside_another_cause_are_not_ended() -> None:
    beside = AlertSummary(at=NOW, accused=frozenset(), waiting=frozenset({0}))
    assert decide_step(make_facts(alerts=beside)) == (Step.NOTHING, ())


def test_no_rank_is_ended_on_stale_heartbeats_or_unsaved_evidence() -> None:
    for rank in (2, 0):
        assert decide_step(change_rank(rank, last_seen_at=NOW - 2.5)) == (Step.WAIT, (2,))
    assert (
        decide_step(change_rank(3, make_facts(waiting=(0, 1)), last_seen_at=NOW - 2.5))[0]
        is Step.END
    )
    assert decide_step(make_facts(is_stored=False)) == (Step.WAIT, (2,))


def test_whole_job_is_ended_without_live_culprit() -> None:
    whole = decide(
        make_facts(make_incident(VerdictKind.NO_PROGRESS, ()), waiting=(0, 1, 2, 3)), RULES, NOW
    )
    assert (whole.step, whole.ranks, whole.scope) == (Step.END, (0, 1, 2, 3), "job")
    dead = change_rank(2, make_facts(make_incident(VerdictKind.DEAD_RANK)), is_alive=False)
    assert decide_step(dead) == (Step.END, (0, 1, 3))
    assert decide_step(change_rank(3, dead, last_advanced_at=NOW - 1.0))[0] is Step.WAIT, (
        "a rank that is to be ended makes progress"
    )
    gone = replace(
        dead, processes={rank: make_process(rank, is_alive=False) for rank in dead.processes}
    )
    assert decide_step(gone) == (Step.NOTHING, ()), "the launcher has done it"
    one_left = change_rank(2, make_facts(make_incident(culprits=(1, 2))), is_alive=False)
    assert decide_step(one_left) == (Step.END, (1,))


def test_ranks_on_a_cycle() -> None:
    assert decide_step(make_facts(make_incident(VerdictKind.DEADLOCK, (0, 1)), waiting=())) == (
        Step.END,
        (0, 1),
    )


def test_mismatch_without_outlier() -> None:
    tie = make_facts(make_incident(VerdictKind.MISMATCH, (0, 1)), waiting=())
    assert decide_step(tie)[0] is Step.NOTHING, "it may block no rank, and the ranks compute"
    one = change_rank(0, tie, is_in_call=True)
    assert decide_step(one)[0] is Step.NOTHING
    assert decide_step(change_rank(1, one, is_in_call=True)) == (Step.END, (0, 1))


def test_two_ranks_that_make_different_calls_and_hang_are_both_ended() -> None:
    job = ScriptedJob(2)
    job.make_calls()
    job.make_call(0, "all_reduce")
    job.make_call(1, "broadcast")
    job.advance_time(40)
    (verdict,) = job.list_due_verdicts()
    assert (verdict.kind, verdict.culprits, verdict.waiting) == (VerdictKind.MISMATCH, (0, 1), ())
    alerts = AlertSummary(
        at=job.now, accused=frozenset(verdict.culprits), waiting=frozenset(verdict.waiting)
    )
    hung = make_facts(
        make_incident(VerdictKind.MISMATCH, (0, 1), waiting=[]),
        alerts=alerts,
        processes={
            rank: replace(process, identity=replace(process.identity, on_hang="abort"))
            for rank, process in job.latest_attempt.processes.items()
        },
        planned_at=job.now - 35.0,
    )
    assert decide(hung, RULES, job.now).ranks == (0, 1)
    assert decide(hung, RULES, job.now).step is Step.END


def test_unreachable_ranks_are_never_ended() -> None:
    lost = change_rank(2, make_facts(make_incident(VerdictKind.LOST_NODE)), last_seen_at=NOW - 60.0)
    assert decide_step(lost) == (Step.NOTHING, ())
    assert decide_step(lost, replace(RULES, kinds=frozenset({VerdictKind.LOST_NODE}))) == (
        Step.END,
        (0, 1, 3),
    )


def test_failed_abort_is_not_retried() -> None:
    abort = RankAbort(rank=2, host="n", pid=2, ordered_at=MOMENT, result="failed", error="state D")
    recovery = Recovery(
        state="done",
        scope="culprits",
        ranks=(2,),
        number=1,
        limit=3,
        planned_at=MOMENT,
        due_at=MOMENT,
        announced_at=MOMENT,
        aborts=(abort,),
    )
    assert decide_step(make_facts(make_incident(recovery=recovery), aborted_at=NOW - 31.0)) == (
        Step.END,
        (0, 1, 3),
    )
    assert (
        decide_step(make_facts(make_incident(recovery=recovery), aborted_at=NOW - 5.0))[0]
        is Step.WAIT
    ), "the launcher may be at work"


@pytest.mark.parametrize("word", ["", "report", "never", "0"])
def test_only_the_job_owner_may_allow_it(word: str) -> None:
    """SECURITY.md: "A job decides whether its processes may be ended.", "ends a rank only if the
    rank's own environment has".
    """
    decision = decide(change_rank(3, on_hang=word), RULES, NOW)
    given = f"HANGWATCH_ON_HANG={word}" if word else "no HANGWATCH_ON_HANG"
    assert (decision.step, f"{given} in the environment of rank 3" in decision.why) == (
        Step.WITHHOLD,
        True,
    )
    assert decide_step(change_rank(3, on_hang="Abort "))[0] is Step.END


def test_aborts_beyond_limit_are_withheld() -> None:
    assert decide_step(make_facts(history=2))[0] is Step.END
    decision = decide(make_facts(history=3), RULES, NOW)
    assert (decision.step, "--abort-limit" in decision.why, "HANGWATCH_JOB" in decision.why) == (
        Step.WITHHOLD,
        True,
        True,
    )


@dataclass
class InProcessServer:
    """A server with a clock of the test, and a job of two ranks; rank 1 does not make its second call."""

    folder: Path
    now: float = NOW
    output: list[str] = field(default_factory=list)
    heartbeat_number: int = 0

    def __post_init__(self) -> None:
        self.start_server()

    def start_server(self) -> None:
        self.clock = Clock(
            monotonic=lambda: self.now, wall=lambda: MOMENT + timedelta(seconds=self.now)
        )
        self.store = Store(self.folder)
        settings = Settings(
            data_dir=self.folder, stall_after=4, on_hang="abort", abort_after=5, abort_limit=2
        )
        self.state = build_app(
            settings, store=self.store, base_url="http://here", token=None, clock=self.clock
        )[1]
        self.state.watch.persistence.alerter.print_line = self.output.append  # type: ignore[assignment, method-assign]

    def restart_server(self) -> None:
        """Only what is in the database is kept."""
        self.store.close()
        self.start_server()

    def send_heartbeat(
        self,
        restart: int = 0,
        *,
        ended: ExitInfo | None = None,
        aborts: tuple[heartbeat.AbortReply, ...] = (),
    ) -> heartbeat.HeartbeatReply:
        self.heartbeat_number += 1
        return self.state.watch.apply_heartbeat(
            heartbeat.Heartbeat(
                host="n", agent=f"a{restart}", number=self.heartbeat_number, full=True, aborts=aborts,
                processes=tuple(self.make_process_update(rank, restart, ended if rank == 1 else None) for rank in (0, 1)),
            )
        )  # fmt: skip

    def make_process_update(
        self, rank: int, restart: int, ended: ExitInfo | None
    ) -> heartbeat.ProcessUpdate:
        since = max(0.0, self.now - NOW - 100.0 * restart)
        call = Call(
            seq=2, signature=Signature(op="all_reduce", agree=7), blocking=True, entered_s=since
        )
        return heartbeat.ProcessUpdate(
            key=f"{10 * restart + rank}-1", lifecycle=3, pulse_s=0.1, idle_s=since, ended=ended,
            identity=heartbeat.ProcessIdentity(job="run7", rank=rank, world_size=2, pid=10 * restart + rank, start_ticks=1, restart=restart, on_hang="abort"),
            streams=(
                heartbeat.StreamUpdate(
                    uid=1, identity=heartbeat.StreamIdentity(kind=StreamKind.COLLECTIVE, name="0", desc="default_pg", ranks="0-1"),
                    entered=2 - rank, completed=1, op="all_reduce", entered_s=since, pending_s=since if rank == 0 else None,
                    calls=(call,) if rank == 0 else (),
                ),
            ),
        )  # fmt: skip

    def run_round(self, restart: int = 0, **heartbeat_fields: Any) -> list[Command]:
        """Simulates half a second; returns the commands to end ranks."""
        self.now += 0.5
        reply = self.send_heartbeat(restart, **heartbeat_fields)
        asyncio.run(self._run_tick())
        return [c for c in reply.commands if c.kind is CommandKind.ABORT]

    def end_all_ranks(self, restart: int, how: ExitInfo) -> None:
        """Both ranks end as ``how`` describes."""
        for _ in range(3):
            self.now += 0.5
            self.heartbeat_number += 1
            done = tuple(
                replace(self.make_process_update(rank, restart, None), ended=how, lifecycle=5)
                for rank in (0, 1)
            )
            self.state.watch.apply_heartbeat(
                heartbeat.Heartbeat(
                    host="n",
                    agent=f"a{restart}",
                    number=self.heartbeat_number,
                    full=True,
                    processes=done,
                )
            )
            asyncio.run(self._run_tick())

    async def _run_tick(self) -> None:
        await self.state.watch.loop.run_round()
        await self.state.watch.persistence.save_changes()

    def run_until_ordered(self, restart: int = 0, rounds: int = 60) -> list[Command]:
        return next((orders for _ in range(rounds) if (orders := self.run_round(restart))), [])

    @property
    def incident_records(self) -> list[IncidentRecord]:
        return sorted(
            self.state.shared.incidents.records.values(), key=lambda record: record.incident.id
        )

    @property
    def latest_recovery(self) -> Recovery:
        recovery = self.incident_records[-1].incident.recovery
        assert recovery is not None
        return recovery


@pytest.fixture
def server(tmp_path: Path) -> Iterator[InProcessServer]:
    made = InProcessServer(tmp_path)
    yield made
    made.store.close()


def test_from_alert_to_culprit_exit(server: InProcessServer) -> None:
    (order,) = server.run_until_ordered()
    assert order.key == "1-1", "of rank 1, which others wait for"
    assert (
        server.latest_recovery.state,
        [abort.result for abort in server.latest_recovery.aborts],
    ) == (
        "ordered",
        ["ordered"],
    )
    killed = ExitInfo(signal=9)
    server.run_round(
        ended=killed,
        aborts=(heartbeat.AbortReply(key="1-1", request=order.id, signal=9, ended=killed),),
    )
    (record,) = server.incident_records
    assert (server.latest_recovery.state, record.incident.kind) == (
        "done",
        VerdictKind.MISSING_RANK,
    )
    document = build_document(record.incident)
    assert (
        format_recovery(document)
        == "Rank 1 was ended by SIGKILL (1 of at most 2 such incidents of this job)."
    )
    texts = [text for _, text in iter_recovery_events(document)]
    assert [texts[0].startswith("hangwatch was to end rank 1"), *texts[1:]] == [
        True, "hangwatch announced that it ends rank 1", "rank 1 was ended by SIGKILL (pid 1 on n)"
    ]  # fmt: skip
    alert, aborting, aborted = server.output
    assert "Unless the job moves, rank 1 is to be ended at" in alert
    assert aborting.startswith("ABORTING rank 1: job run7: ") and aborted.startswith(
        "ABORTED rank 1: job run7: "
    )


def test_remaining_ranks_are_ended_if_launcher_does_nothing(server: InProcessServer) -> None:
    (order,) = server.run_until_ordered()
    killed = ExitInfo(signal=9)
    server.run_round(
        ended=killed,
        aborts=(heartbeat.AbortReply(key=order.key, request=order.id, signal=9, ended=killed),),
    )
    done = server.now
    (other,) = next(orders for _ in range(60) if (orders := server.run_round(ended=killed)))
    assert (other.key, server.now - done >= 5.0, server.latest_recovery.scope) == (
        "0-1",
        True,
        "job",
    )
    (record,) = server.incident_records
    assert (record.incident.kind, record.incident.culprits) == (
        VerdictKind.MISSING_RANK,
        (1,),
    ), "an exit caused by hangwatch opens no incident"
    assert server.store.load_aborted_ids("run7") == {record.incident.id}, "and counts once"
    assert [line.split(":")[0] for line in server.output[1:]] == [
        "ABORTING rank 1",
        "ABORTED rank 1",
        "ABORTING rank 0",
    ]
    server.run_round(
        ended=killed,
        aborts=(
            heartbeat.AbortReply(key=other.key, request=other.id, error="still there, in state D"),
        ),
    )
    assert "rank 0 could not be ended: still there" in format_recovery(
        build_document(server.incident_records[0].incident)
    )
    assert [server.run_round(ended=killed) for _ in range(30)] == [[]] * 30, (
        "no rank is left to try"
    )


def test_the_limit_holds_over_attempts_and_restarts_of_the_server(server: InProcessServer) -> None:
    for restart in (0, 1):
        server.now = max(server.now, NOW + 100.0 * restart)
        (order,) = server.run_until_ordered(restart)
        killed = ExitInfo(signal=9)
        server.run_round(
            restart,
            ended=killed,
            aborts=(heartbeat.AbortReply(key=order.key, request=order.id, signal=9, ended=killed),),
        )
        server.restart_server()
    server.now = NOW + 200.0
    assert server.run_until_ordered(2) == []
    assert (server.latest_recovery.state, "ended 2 times" in server.latest_recovery.why) == (
        "withheld",
        True,
    )


def test_killed_server_repeats_unacknowledged_orders(server: InProcessServer) -> None:
    first = server.run_until_ordered()
    server.restart_server()
    server.heartbeat_number = 0
    again = server.run_until_ordered()
    assert [order.key for order in again] == [order.key for order in first] == ["1-1"]
    assert server.latest_recovery.number == 1


def test_orders_are_withdrawn_when_job_stops_reporting(server: InProcessServer) -> None:
    for _ in range(60):
        server.run_round()
        if (
            server.incident_records
            and (recovery := server.incident_records[0].incident.recovery) is not None
            and recovery.state == "ordered"
        ):
            break
    assert server.latest_recovery.state == "ordered"
    server.now += 3.0
    asyncio.run(server._run_tick())
    assert server.latest_recovery.aborts[0].result == "left"
    assert not [c for c in server.send_heartbeat().commands if c.kind is CommandKind.ABORT], (
        "it comes too late"
    )


def test_successful_attempt_clears_abort_count(server: InProcessServer) -> None:
    (order,) = server.run_until_ordered()
    killed = ExitInfo(signal=9)
    server.run_round(
        ended=killed,
        aborts=(heartbeat.AbortReply(key=order.key, request=order.id, signal=9, ended=killed),),
    )
    assert len(server.store.load_aborted_ids("run7")) == 1
    server.now = NOW + 100.0
    server.end_all_ranks(1, ExitInfo(exit_status=0))
    assert server.store.load_aborted_ids("run7") == set()


def test_a_job_that_does_not_come_back_was_ended_by_hangwatch(server: InProcessServer) -> None:
    server.run_until_ordered()
    server.end_all_ranks(0, ExitInfo(signal=9))
    server.now += 31.0
    asyncio.run(server._run_tick())
    (record,) = server.incident_records
    assert (record.incident.status, record.incident.resolution) == ("resolved", Resolution.ABORTED)
    assert server.output[-1].startswith("ENDED BY HANGWATCH after ")
    assert server.latest_recovery.aborts[0].result == "ended"


def test_recovery_messages() -> None:
    def make_document(**more: Any) -> dict[str, Any]:
        return {
            "status": "open",
            "recovery": {"state": "planned", "ranks": [2], "number": 1, "limit": 3, **more},
        }

    assert format_recovery({"recovery": None}) == ""
    assert (
        format_recovery(make_document(state="withheld", why="the owner refuses"))
        == "No rank is ended: the owner refuses."
    )
    assert (
        format_recovery({**make_document(), "status": "resolved", "resolution": "progress"})
        == "No rank was ended: the job made progress before."
    )
    aborts = [
        {"rank": 1, "result": "gone"}, {"rank": 2, "result": "failed", "error": "state D"}, {"rank": 3, "result": "left"},
        {"rank": 4, "result": "ended", "signal": 9}, {"rank": 5, "result": "ended", "signal": 9},
    ]  # fmt: skip
    assert format_recovery(make_document(state="done", aborts=aborts)).startswith(
        "Rank 1 had ended before; rank 2 could not be ended: state D; rank 3 was not ended, as the"
        " job moved or did not report; ranks 4-5 were ended by SIGKILL (1 of"
    )


def test_plan_after_alert_is_announced_separately(server: InProcessServer) -> None:
    server.state.watch.loop.aborter, aborter = None, server.state.watch.loop.aborter
    while not server.output:
        server.run_round()
    server.state.watch.loop.aborter = aborter
    server.run_round()
    alert, planned = server.output
    assert "is to be ended" not in alert
    assert (
        planned.startswith("ABORT PLANNED of rank 1: job run7: ")
        and "Unless the job moves, rank 1 is to be ended at" in planned
    )


def test_each_outage_of_the_database_is_logged_once(
    server: InProcessServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(job: str) -> set[str]:
        raise sa.exc.OperationalError("SELECT 1", {}, Exception("disk I/O error"))

    def run_without_database(rounds: int) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(server.store, "load_aborted_ids", fail)
            for _ in range(rounds):
                assert server.run_round() == []

    run_without_database(30)
    (logged,) = caplog.messages
    assert logged.endswith("cannot be read: disk I/O error")
    assert server.incident_records[-1].incident.recovery is None, "nothing is planned meanwhile"
    while server.incident_records[-1].incident.recovery is None:
        server.run_round()
    run_without_database(30)
    assert caplog.messages == [logged, logged]
    assert server.run_until_ordered()
