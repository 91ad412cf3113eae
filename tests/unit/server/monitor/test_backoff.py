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
    STATES_FACTOR,
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


def make_attempt(ranks: int = LARGE_RANKS) -> Attempt:
    return Attempt(job="run7", number=0, opened_at=0.0, world_size=ranks)


def measure_backoff(
    backoff: DiagnosisBackoff,
    of: Attempt,
    *verdicts: Verdict,
    now: float = NOW,
    waited_s: float = 0.0,
    spent_s: float = 1.0,
) -> float:
    backoff.record_diagnosis(of, Diagnosis(verdicts=verdicts), spent_s, waited_s, now)
    return next(n / 10 for n in range(1000) if not backoff.skips_diagnosis(of, now + n / 10))


def test_small_job_has_no_backoff() -> None:
    small = make_attempt(LARGE_RANKS - 1)
    backoff = DiagnosisBackoff(STALL_AFTER_S)
    assert [measure_backoff(backoff, small, make_verdict(due=True)) for _ in range(2)] == [0.0, 0.0]
    backoff.record_states_report(small, 1.0, NOW)
    assert not backoff.skips_states(small, NOW)


def test_usual_backoff_takes_at_most_a_seventh_of_a_core() -> None:
    backoff, large = DiagnosisBackoff(STALL_AFTER_S), make_attempt()
    for verdicts in ((), (make_verdict(),), (make_verdict(due=True),)):
        assert measure_backoff(backoff, large, *verdicts) == USUAL_FACTOR
        assert measure_backoff(backoff, large, *verdicts, spent_s=0.5) == MAX_PAUSE_S
        assert measure_backoff(backoff, large, *verdicts, spent_s=0.1) == MAX_FACTOR / 10


def test_backoff_is_shorter_while_early_verdict_is_open() -> None:
    backoff, large = DiagnosisBackoff(STALL_AFTER_S), make_attempt()
    deadlock = make_verdict(VerdictKind.DEADLOCK)
    assert measure_backoff(backoff, large, deadlock) == DECIDING_FACTOR
    assert measure_backoff(backoff, large, make_verdict(due=True), deadlock) == DECIDING_FACTOR


def test_backoff_is_shorter_after_urgent_changes() -> None:
    backoff, large = DiagnosisBackoff(STALL_AFTER_S), make_attempt()
    large.has_urgent_changes = True
    assert measure_backoff(backoff, large) == DECIDING_FACTOR


def test_changes_may_decide_verdict_when_they_have_lasted() -> None:
    backoff, large = DiagnosisBackoff(STALL_AFTER_S), make_attempt()
    backoff.record_changes(large, NOW - RECENT_CHANGES_S + 1.0)
    assert measure_backoff(backoff, large) == DECIDING_FACTOR
    deadlock = make_verdict(VerdictKind.DEADLOCK, since=NOW - 3.0, due=True)
    assert measure_backoff(backoff, large, deadlock) == USUAL_FACTOR, "it is decided"
    backoff.record_changes(large, NOW - RECENT_CHANGES_S - 1.0)
    assert measure_backoff(backoff, large) == USUAL_FACTOR


def test_verdict_may_become_more_precise_soon_after_it_is_due() -> None:
    backoff, large = DiagnosisBackoff(STALL_AFTER_S), make_attempt()
    fresh = make_verdict(since=NOW - STALL_AFTER_S - 1.0, due=True)
    assert measure_backoff(backoff, large, fresh) == DECIDING_FACTOR
    old = make_verdict(since=NOW - STALL_AFTER_S - FRESH_VERDICT_S - 1.0, due=True)
    assert measure_backoff(backoff, large, old) == USUAL_FACTOR


def test_backoff_while_other_ranks_make_calls() -> None:
    backoff, large = DiagnosisBackoff(STALL_AFTER_S), make_attempt()
    late = make_verdict(since=NOW - STALL_AFTER_S - 1.0)
    large.newest_call_at = NOW - STILL_AFTER_S + 1.0
    assert measure_backoff(backoff, large, late) == USUAL_FACTOR, "most have only not reported yet"
    large.newest_call_at = NOW - STILL_AFTER_S - 1.0
    assert measure_backoff(backoff, large, late) == DECIDING_FACTOR


def test_backoff_ends_when_verdict_is_due() -> None:
    backoff, large = DiagnosisBackoff(STALL_AFTER_S), make_attempt()
    soon = make_verdict(since=NOW - STALL_AFTER_S + 1.0)
    assert measure_backoff(backoff, large, soon) == 1.0
    assert measure_backoff(backoff, large, soon, waited_s=9 * BACKLOG_STEP_S) == 1.0
    late = make_verdict(since=NOW - STALL_AFTER_S - 1.0)
    assert measure_backoff(backoff, large, late) == DECIDING_FACTOR, "it only waits for a report"


def test_backoff_grows_with_queued_heartbeats_up_to_a_limit() -> None:
    backoff, large = DiagnosisBackoff(STALL_AFTER_S), make_attempt()
    assert measure_backoff(backoff, large, waited_s=BACKLOG_STEP_S / 2) == USUAL_FACTOR * 1.5
    assert measure_backoff(backoff, large, waited_s=9 * BACKLOG_STEP_S) == MAX_FACTOR


def test_queued_heartbeats_go_first_unless_verdict_is_due() -> None:
    backoff, large = DiagnosisBackoff(STALL_AFTER_S), make_attempt()
    late = make_verdict(since=NOW - STALL_AFTER_S - 1.0)
    assert measure_backoff(backoff, large, late, waited_s=BACKLOG_STEP_S) == pytest.approx(
        2 * DECIDING_FACTOR
    )
    deadlock = make_verdict(VerdictKind.DEADLOCK)
    assert measure_backoff(backoff, large, deadlock, waited_s=BACKLOG_STEP_S) == DECIDING_FACTOR


def test_state_updates_are_rare_and_forgotten_jobs_have_no_backoff() -> None:
    backoff, large = DiagnosisBackoff(STALL_AFTER_S), make_attempt()
    backoff.record_states_report(large, 1.0, NOW)
    assert backoff.skips_states(large, NOW + STATES_FACTOR - 0.1)
    assert not backoff.skips_states(large, NOW + STATES_FACTOR)
    assert not backoff.skips_diagnosis(large, NOW)
    backoff.forget_attempt(large.key)
    assert not backoff.skips_states(large, NOW)
