"""The backoff between diagnoses of a large attempt."""

from __future__ import annotations

import pytest

from hangwatch.diagnosis import Diagnosis
from hangwatch.model.kinds import Severity, VerdictKind
from hangwatch.model.verdicts import Verdict
from hangwatch.server.core.limits import LARGE_RANKS
from hangwatch.server.monitor.cadence import (
    BACKLOG_STEP_S,
    DECIDING_FACTOR,
    FRESH_VERDICT_S,
    MAX_FACTOR,
    MAX_PAUSE_S,
    RECENT_CHANGES_S,
    STILL_AFTER_S,
    USUAL_FACTOR,
    DiagnosisBackoff,
)
from hangwatch.tracking.attempt import Attempt

STALL_AFTER_S, NOW = 60.0, 1000.0


def make_verdict(
    kind: VerdictKind = VerdictKind.MISSING_RANK, *, since: float = NOW - 10.0, due: bool = False
) -> Verdict:
    return Verdict(
        kind=kind,
        severity=Severity.ALERT,
        culprits=(7,),
        waiting=(1, 2),
        began_at=since,
        is_confirmed=due,
        summary="",
    )


def make_backoff(ranks: int = LARGE_RANKS) -> DiagnosisBackoff:
    attempt = Attempt(job="run7", number=0, opened_at=0.0, world_size=ranks)
    return DiagnosisBackoff(attempt, STALL_AFTER_S)


def measure_backoff(
    backoff: DiagnosisBackoff,
    *verdicts: Verdict,
    now: float = NOW,
    waited_s: float = 0.0,
    spent_s: float = 1.0,
) -> float:
    backoff.record_diagnosis(Diagnosis(verdicts=verdicts), spent_s, waited_s, now)
    return next(n / 10 for n in range(1000) if not backoff.skips_diagnosis(now + n / 10))


def test_small_job_has_no_backoff() -> None:
    backoff = make_backoff(LARGE_RANKS - 1)
    assert [measure_backoff(backoff, make_verdict(due=True)) for _ in range(2)] == [0.0, 0.0]


def test_usual_backoff_takes_at_most_a_seventh_of_a_core() -> None:
    backoff = make_backoff()
    for verdicts in ((), (make_verdict(),), (make_verdict(due=True),)):
        assert measure_backoff(backoff, *verdicts) == USUAL_FACTOR
        assert measure_backoff(backoff, *verdicts, spent_s=0.5) == MAX_PAUSE_S
        assert measure_backoff(backoff, *verdicts, spent_s=0.1) == MAX_FACTOR / 10


def test_backoff_is_shorter_while_early_verdict_is_open() -> None:
    backoff = make_backoff()
    deadlock = make_verdict(VerdictKind.DEADLOCK)
    assert measure_backoff(backoff, deadlock) == DECIDING_FACTOR
    assert measure_backoff(backoff, make_verdict(due=True), deadlock) == DECIDING_FACTOR


def test_backoff_is_shorter_after_urgent_changes() -> None:
    backoff = make_backoff()
    backoff.attempt.has_urgent_changes = True
    assert measure_backoff(backoff) == DECIDING_FACTOR


def test_changes_may_decide_verdict_when_they_have_lasted() -> None:
    backoff = make_backoff()
    backoff.changed_at = NOW - RECENT_CHANGES_S + 1.0
    assert measure_backoff(backoff) == DECIDING_FACTOR
    deadlock = make_verdict(VerdictKind.DEADLOCK, since=NOW - 3.0, due=True)
    assert measure_backoff(backoff, deadlock) == USUAL_FACTOR, "it is decided"
    backoff.changed_at = NOW - RECENT_CHANGES_S - 1.0
    assert measure_backoff(backoff) == USUAL_FACTOR


def test_verdict_may_become_more_precise_soon_after_it_is_due() -> None:
    backoff = make_backoff()
    fresh = make_verdict(since=NOW - STALL_AFTER_S - 1.0, due=True)
    assert measure_backoff(backoff, fresh) == DECIDING_FACTOR
    old = make_verdict(since=NOW - STALL_AFTER_S - FRESH_VERDICT_S - 1.0, due=True)
    assert measure_backoff(backoff, old) == USUAL_FACTOR


def test_backoff_while_other_ranks_make_calls() -> None:
    backoff = make_backoff()
    late = make_verdict(since=NOW - STALL_AFTER_S - 1.0)
    backoff.attempt.newest_call_at = NOW - STILL_AFTER_S + 1.0
    assert measure_backoff(backoff, late) == USUAL_FACTOR, "most have only not reported yet"
    backoff.attempt.newest_call_at = NOW - STILL_AFTER_S - 1.0
    assert measure_backoff(backoff, late) == DECIDING_FACTOR


def test_backoff_ends_when_verdict_is_due() -> None:
    backoff = make_backoff()
    soon = make_verdict(since=NOW - STALL_AFTER_S + 1.0)
    assert measure_backoff(backoff, soon) == 1.0
    assert measure_backoff(backoff, soon, waited_s=9 * BACKLOG_STEP_S) == 1.0
    late = make_verdict(since=NOW - STALL_AFTER_S - 1.0)
    assert measure_backoff(backoff, late) == DECIDING_FACTOR, "it only waits for a report"


def test_backoff_grows_with_queued_heartbeats_up_to_a_limit() -> None:
    backoff = make_backoff()
    assert measure_backoff(backoff, waited_s=BACKLOG_STEP_S / 2) == USUAL_FACTOR * 1.5
    assert measure_backoff(backoff, waited_s=9 * BACKLOG_STEP_S) == MAX_FACTOR


def test_queued_heartbeats_go_first_unless_verdict_is_due() -> None:
    backoff = make_backoff()
    late = make_verdict(since=NOW - STALL_AFTER_S - 1.0)
    assert measure_backoff(backoff, late, waited_s=BACKLOG_STEP_S) == pytest.approx(
        2 * DECIDING_FACTOR
    )
    deadlock = make_verdict(VerdictKind.DEADLOCK)
    assert measure_backoff(backoff, deadlock, waited_s=BACKLOG_STEP_S) == DECIDING_FACTOR
