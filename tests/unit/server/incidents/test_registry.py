"""One root cause is one incident, from its opening to its end."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta, timezone

import pytest

from hangwatch.model.calls import Call, Signature, Site
from hangwatch.model.groups import Group
from hangwatch.model.incidents import Resolution
from hangwatch.model.kinds import Severity, VerdictKind
from hangwatch.model.ranks import ExceptionInfo, ExitInfo, Lifecycle
from hangwatch.model.threads import Frame, ThreadStack
from hangwatch.model.verdicts import CallClass, Verdict, Wait
from hangwatch.protocol import heartbeat
from hangwatch.server.core.clock import Clock, ulid
from hangwatch.server.incidents.registry import (
    GATHERING,
    GONE,
    OVER_FOR,
    RETURNING,
    UNHEARD_FOR,
    Book,
    Case,
)
from hangwatch.tracking.attempt import Attempt
from hangwatch.tracking.fleet import Fleet, FormerAttempt
from hangwatch.tracking.process import StackSample

WORLD = Group(name="0", desc="default_pg", ranks=(0, 1, 2, 3))
START = datetime(2026, 1, 1, tzinfo=timezone.utc)


@dataclass
class Scene:
    """A job of four ranks on two hosts, and a clock that moves only when told."""

    now: float = 1000.0
    fleet: Fleet = field(default_factory=Fleet)

    def __post_init__(self) -> None:
        self.clock = Clock(
            monotonic=lambda: self.now, wall=lambda: START + timedelta(seconds=self.now - 1000.0)
        )
        self.book = Book(clock=self.clock)
        self.attempt = self.start(restart=0)

    def start(self, restart: int, lifecycle: Lifecycle = Lifecycle.INITIALISED) -> Attempt:
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
        found = self.fleet.latest_attempt("run7")
        assert found is not None
        return found

    def observe(self, *verdicts: Verdict, after: float = 0.25, heard: bool = True) -> list[Case]:
        self.now += after
        if heard:
            self.attempt.last_seen_at = self.now
            for process in self.attempt.processes.values():
                process.last_seen_at = self.now
        self.book.observe(self.attempt, verdicts, self.now)
        return self.cases

    @property
    def cases(self) -> list[Case]:
        return sorted(self.book.cases.values(), key=lambda c: c.opened)

    def end(self, *ranks: int, status: int | None = None, signal: int | None = None) -> None:
        for rank in ranks:
            self.attempt.processes[rank].exit = ExitInfo(exit_status=status, signal=signal)
            self.attempt.processes[rank].exited_at = self.now


@pytest.fixture
def scene() -> Scene:
    return Scene()


MISSING = Verdict(
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
SLOW = replace(MISSING, kind=VerdictKind.SLOW_RANK, severity=Severity.WARNING)
DEAD = Verdict(
    kind=VerdictKind.DEAD_RANK,
    severity=Severity.ALERT,
    culprits=(1,),
    waiting=(0,),
    group=WORLD,
    seq=8,
    began_at=999.0,
)
SUM_MAX = Verdict(
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


def cycle(*culprits: int, waiting: tuple[int, ...] = (), seq: int = 1) -> Verdict:
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


def test_a_due_verdict_opens_one_incident_with_every_field_of_the_contract(scene: Scene) -> None:
    [case] = scene.observe(MISSING)
    told = case.incident.model_dump(mode="json")
    expected = (
        "id job attempt kind severity status onset_at opened_at resolved_at summary advice culprits waiting group seq fields calls waits "
        "processes stacks"
    )
    assert set(expected.split()) <= set(told)
    assert (told["kind"], told["severity"], told["status"], told["culprits"]) == (
        "missing_rank",
        "alert",
        "open",
        [2],
    )
    assert told["opened_at"] == "2026-01-01T00:00:00.250000Z"
    assert told["onset_at"] == "2025-12-31T23:59:00Z"
    assert told["waits"] == [{"rank": 0, "for": 2, "group": "0", "seq": 7}]
    assert told["processes"][0]["pid"] == 102
    assert len(scene.observe(MISSING)) == 1


def test_a_suspicion_opens_nothing(scene: Scene) -> None:
    assert scene.observe(replace(MISSING, is_confirmed=False)) == []


def test_calls_show_what_differs(scene: Scene) -> None:
    [case] = scene.observe(SUM_MAX)
    sums, maxes = case.incident.calls
    assert (sums.ranks, sums.reduce_op, sums.shapes, sums.site) == ([0, 2, 3], "sum", [[64]], None)
    assert maxes.site is not None
    assert (maxes.reduce_op, maxes.site.line) == ("max", 4)


def test_more_waiting_ranks_refine_the_same_incident(scene: Scene) -> None:
    scene.observe(replace(MISSING, waiting=(0, 1)))
    [case] = scene.observe(MISSING)
    assert case.incident.waiting == [0, 1, 3]


def test_a_slow_rank_rises_to_an_alert_and_never_falls_back(scene: Scene) -> None:
    [case] = scene.observe(SLOW)
    assert case.incident.severity is Severity.WARNING
    [risen] = scene.observe(MISSING, after=300.0)
    assert (risen.incident.id, risen.incident.kind, risen.incident.severity) == (
        case.incident.id,
        VerdictKind.MISSING_RANK,
        Severity.ALERT,
    )
    [after] = scene.observe(SLOW)
    assert (after.incident.kind, after.incident.severity) == (
        VerdictKind.MISSING_RANK,
        Severity.ALERT,
    )


@pytest.mark.parametrize("first", [SLOW, MISSING])
def test_who_stays_away_once_another_has_come_is_the_same_incident(
    scene: Scene, first: Verdict
) -> None:
    [case] = scene.observe(first)
    stuck = replace(MISSING, culprits=(1,), waiting=(0, 2, 3))
    scene.observe(replace(stuck, is_confirmed=False), after=5.0)
    scene.observe(replace(stuck, is_confirmed=False), after=5.0)
    [after] = scene.observe(stuck, after=5.0)
    assert (after.incident.id, after.incident.status, after.incident.culprits) == (
        case.incident.id,
        "open",
        [1],
    )
    assert (after.incident.kind, after.incident.severity) == (
        VerdictKind.MISSING_RANK,
        Severity.ALERT,
    )


def test_deaths_during_a_hang_are_its_consequences(scene: Scene) -> None:
    [case] = scene.observe(MISSING)
    scene.end(0, 1, 2, 3, signal=9)
    scene.observe(DEAD)
    [after] = scene.observe(replace(DEAD, culprits=(2,)), after=60.0)
    assert after is case
    assert (after.incident.kind, after.incident.status, after.incident.waiting) == (
        VerdictKind.MISSING_RANK,
        "open",
        [0, 1, 3],
    )


def test_waits_for_a_dead_rank_are_its_consequences_and_an_earlier_death_is_the_cause(
    scene: Scene,
) -> None:
    scene.observe(DEAD)
    [case] = scene.observe(DEAD, replace(MISSING, culprits=(1,), waiting=(0, 2), seq=9))
    assert case.incident.kind is VerdictKind.DEAD_RANK
    [earlier] = scene.observe(replace(DEAD, culprits=(3,), seq=5))
    assert earlier.incident.culprits == [3]


def test_a_mismatch_explains_the_death_that_it_led_to(scene: Scene) -> None:
    scene.observe(DEAD)
    [case] = scene.observe(replace(SUM_MAX, differing_fields=("shape",)))
    assert (case.incident.kind, case.incident.fields) == (VerdictKind.MISMATCH, ["shape"])


def test_two_causes_that_share_no_rank_are_two_incidents(scene: Scene) -> None:
    half = replace(
        MISSING, culprits=(0,), waiting=(1,), group=replace(WORLD, name="1", ranks=(0, 1))
    )
    other = replace(
        MISSING, culprits=(2,), waiting=(3,), group=replace(WORLD, name="2", ranks=(2, 3))
    )
    assert len(scene.observe(half, other)) == 2
    assert len(scene.observe(other, half)) == 2


def test_overlapping_waits_are_one_incident(scene: Scene) -> None:
    other = replace(
        MISSING, culprits=(3,), waiting=(0,), group=replace(WORLD, name="2", ranks=(0, 3)), seq=2
    )
    [case] = scene.observe(MISSING, other)
    assert case.incident.culprits == [2]
    assert len(scene.observe(other, MISSING)) == 1
    assert case.incident.culprits == [2]


def receives_late(culprit: int, waiting: int) -> Verdict:
    call = Call(seq=7, signature=Signature(op="recv"), peer=culprit)
    return replace(
        MISSING,
        culprits=(culprit,),
        waiting=(waiting,),
        calls=(CallClass(ranks=(waiting,), call=call),),
    )


def test_channels_of_one_group_count_alike_and_are_told_apart_by_their_ends(scene: Scene) -> None:
    for _ in range(3):
        cases = scene.observe(receives_late(0, 1), receives_late(2, 3))
        assert [c.incident.culprits for c in cases] == [[0], [2]]
    first, second = scene.observe(receives_late(2, 3), after=GONE)
    assert (first.incident.status, second.incident.status, second.incident.culprits) == (
        "resolved",
        "open",
        [2],
    )


@pytest.mark.parametrize("apart", [0.0, 3.0, 60.0])
def test_two_cycles_that_hold_up_the_same_ranks_are_two_incidents(
    scene: Scene, apart: float
) -> None:
    one, other = cycle(0, 1, waiting=(4, 5)), cycle(2, 3, waiting=(4, 5))
    if apart:
        scene.observe(one)
    for _ in range(3):
        cases = scene.observe(one, other, after=apart or 0.25)
        assert [c.incident.culprits for c in cases] == [[0, 1], [2, 3]]
    first, second = scene.observe(other, after=GONE)
    assert (first.incident.status, second.incident.status) == ("resolved", "open")
    scene.end(0, 1, 2, 3, signal=15)
    assert len(scene.observe(DEAD)) == 2


def test_a_cycle_whose_ranks_become_known_one_after_the_other_is_one_incident(scene: Scene) -> None:
    for culprits in ((0, 1), (0, 1, 2), (0, 1, 2, 3)):
        [case] = scene.observe(cycle(*culprits, waiting=(5,), seq=len(culprits)), after=GATHERING)
        assert case.incident.culprits == list(culprits)


@pytest.mark.parametrize("seq", [1, 2])
def test_a_cycle_that_proves_to_wait_for_another_one_is_part_of_its_incident(
    scene: Scene, seq: int
) -> None:
    scene.observe(cycle(0, 1))
    [case] = scene.observe(cycle(2, 3, waiting=(0, 1), seq=seq), after=GONE + 1)
    assert case.incident.status == "open"


def test_a_wait_that_proves_to_be_a_cycle_is_one_incident(scene: Scene) -> None:
    scene.observe(MISSING)
    [case] = scene.observe(cycle(1, 2))
    assert (case.incident.kind, case.incident.culprits) == (VerdictKind.DEADLOCK, [1, 2])
    assert len(scene.observe(MISSING)) == 1


def test_a_mismatch_that_hangs_nobody_stays_open_beside_a_hang(scene: Scene) -> None:
    scene.observe(SUM_MAX)
    assert [c.incident.kind for c in scene.observe(SUM_MAX, MISSING)] == [
        VerdictKind.MISMATCH,
        VerdictKind.MISSING_RANK,
    ]
    later = replace(SUM_MAX, seq=9)
    mismatch, hang = scene.observe(later, after=GONE + 1)
    assert (mismatch.incident.status, mismatch.incident.seq, hang.incident.status) == (
        "open",
        3,
        "resolved",
    )
    scene.observe(after=60.0)
    assert mismatch.incident.status == "open"


def test_it_resolves_when_the_job_moves_on(scene: Scene) -> None:
    [case] = scene.observe(MISSING)
    scene.observe(after=GONE / 2)
    assert case.incident.status == "open"
    scene.observe(after=GONE)
    assert (case.incident.status, case.incident.resolved_at is not None) == ("resolved", True)
    assert len(scene.observe(MISSING)) == 2


def test_it_does_not_resolve_while_nobody_is_heard(scene: Scene) -> None:
    [case] = scene.observe(MISSING)
    scene.observe(after=60.0, heard=False)
    assert case.incident.status == "open"


def test_a_suspicion_about_the_same_call_keeps_it_open(scene: Scene) -> None:
    [case] = scene.observe(MISSING)
    for _ in range(20):
        scene.observe(replace(MISSING, is_confirmed=False), after=1.0)
    assert case.incident.status == "open"


def test_a_hang_stays_open_until_the_last_words_of_its_killed_job_are_in(scene: Scene) -> None:
    [case] = scene.observe(MISSING)
    ended = scene.now
    scene.end(0, 1, 2, 3, signal=15)
    for seconds, status in ((OVER_FOR, "open"), (1.0, "resolved")):
        scene.now += seconds
        scene.book.close(scene.fleet, scene.now)
        assert case.incident.status == status
    assert (case.incident.resolution, case.incident.resolved_at) == (
        Resolution.ENDED,
        scene.clock.date(ended),
    )


@pytest.mark.parametrize(
    ("over", "seconds", "why"), [(True, OVER_FOR, "ended"), (False, UNHEARD_FOR, "unheard")]
)
def test_what_a_restarted_server_finds_open_closes_with_its_job(
    scene: Scene, over: bool, seconds: float, why: str
) -> None:
    [case] = scene.observe(MISSING)
    book = Book(clock=scene.clock)
    book.load([Case(incident=case.incident)])
    fleet = Fleet(
        former_attempts={
            "run7": FormerAttempt(number=0, restart=0, last_seen_at=scene.now, is_finished=over)
        }
    )
    book.close(fleet, scene.now + seconds)
    [kept] = book.cases.values()
    assert kept.incident.status == "open"
    book.close(fleet, scene.now + seconds + 1)
    assert (kept.incident.status, kept.incident.resolution) == ("resolved", why)


def test_a_job_that_is_not_heard_for_a_while_keeps_its_hang(scene: Scene) -> None:
    [case] = scene.observe(MISSING)
    scene.book.close(scene.fleet, scene.now + 3600)
    assert case.incident.status == "open"


def test_a_hang_ends_with_the_next_attempt(scene: Scene) -> None:
    [case] = scene.observe(MISSING)
    scene.end(0, 1, 2, 3, signal=15)
    scene.observe(after=60.0)
    assert case.incident.status == "open"
    scene.book.supersede(scene.start(restart=1, lifecycle=Lifecycle.STARTING), scene.now)
    assert case.incident.status == "open"
    newer = scene.start(restart=1)
    for process in newer.processes.values():
        process.lifecycle = Lifecycle.INITIALISED
    scene.book.supersede(newer, scene.now)
    assert case.incident.status == "resolved"


def test_a_next_attempt_that_is_over_before_it_is_looked_at_ends_it_too(scene: Scene) -> None:
    [case] = scene.observe(MISSING)
    scene.end(0, 1, 2, 3, signal=9)
    newer = scene.start(restart=1, lifecycle=Lifecycle.EXITING)
    for process in newer.processes.values():
        process.lifecycle, process.exit, process.exited_at = (
            Lifecycle.EXITING,
            ExitInfo(exit_status=0),
            scene.now,
        )
    scene.book.supersede(newer, scene.now)
    assert case.incident.resolution is Resolution.RESTARTED


def test_a_job_that_ends_well_after_all_resolves_it(scene: Scene) -> None:
    [case] = scene.observe(MISSING)
    scene.end(0, 1, 2, 3, status=0)
    scene.observe(after=0.3)
    assert case.incident.status == "resolved"


def test_stacks_name_culprits_first_and_merge_the_waiting(scene: Scene) -> None:
    def sample(line: int, error: str | None = None) -> StackSample:
        frames = (Frame(function="step", file="/u/train.py", line=line),)
        threads = (
            ThreadStack(thread="Thread-1", frames=frames),
            ThreadStack(thread="MainThread", frames=frames, main=True),
        )
        return StackSample(
            request="r",
            source="py-spy",
            taken_at=scene.now,
            threads=() if error else threads,
            error=error,
        )

    for rank, line in ((0, 41), (1, 41), (2, 12)):
        scene.attempt.processes[rank].samples.append(sample(line))
    scene.attempt.processes[3].samples.append(
        sample(0, error="Permission denied: give it CAP_SYS_PTRACE")
    )
    [case] = scene.observe(MISSING)
    found = [(s.ranks, s.thread, bool(s.error)) for s in case.incident.stacks]
    assert found == [
        ([2], "MainThread", False),
        ([2], "Thread-1", False),
        ([0, 1], "MainThread", False),
        ([3], None, True),
    ]
    del scene.attempt.processes[2].samples[:]
    scene.observe(MISSING)
    assert [s.ranks for s in case.incident.stacks][:2] == [[2], [2]]


def test_the_first_exception_is_carried(scene: Scene) -> None:
    scene.end(1, status=1)
    scene.attempt.processes[1].exception = ExceptionInfo(
        type="RuntimeError", message="boom", site=Site(file="t.py", line=9, function="f")
    )
    [case] = scene.observe(DEAD)
    process = case.incident.processes[0]
    assert process.exception is not None
    assert (process.rank, process.exit_status, process.exception.message) == (1, 1, "boom")


def test_after_a_restart_the_same_run_continues_its_incident_and_a_rerun_does_not(
    scene: Scene,
) -> None:
    [case] = scene.observe(MISSING)
    for same_run in (True, False):
        later = Scene(now=5000.0)
        kept = Case(incident=case.incident, members=dict(case.members), alerted=Severity.ALERT)
        later.book.load([kept])
        if not same_run:
            for process in later.attempt.processes.values():
                process.key = "999-2"
        later.observe(replace(MISSING, began_at=4900.0))
        assert (len(later.cases) == 1) is same_run
        later.book.supersede(later.attempt, later.now + RETURNING + 1)
        assert (kept.incident.status == "open") is same_run


def test_ulids_sort_by_time() -> None:
    made = [ulid(START + timedelta(milliseconds=n)) for n in range(50)]
    assert made == sorted(made)
    assert len(set(made)) == 50
    assert {len(m) for m in made} == {26}
