"""How long a large attempt is left alone after a look at it."""

from __future__ import annotations

import pytest

from hangwatch.diagnosis import Diagnosis, Request
from hangwatch.model.kinds import Severity, VerdictKind
from hangwatch.model.verdicts import Verdict
from hangwatch.server.core.limits import LARGE
from hangwatch.server.monitor.backoff import BACKLOG, SAME, STARTING, STATES, USUAL, Rests
from hangwatch.tracking.attempt import Attempt

STALL_AFTER, NOW = 60.0, 1000.0


def verdict(
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


def attempt(ranks: int = LARGE) -> Attempt:
    return Attempt(job="run7", number=0, opened_at=0.0, world_size=ranks)


def rest(
    rests: Rests,
    of: Attempt,
    *verdicts: Verdict,
    now: float = NOW,
    asks: bool = False,
    waited_s: float = 0.0,
) -> float:
    """After a diagnosis that took a second."""
    requests = (Request(rank=7, stacks=True),) if asks else ()
    rests.diagnosed(of, Diagnosis(verdicts=verdicts, requests=requests), 1.0, waited_s, now)
    return next(n / 10 for n in range(1000) if not rests.from_diagnoses(of, now + n / 10))


def test_a_small_one_never_rests() -> None:
    small = attempt(LARGE - 1)
    rests = Rests(STALL_AFTER)
    assert [rest(rests, small, verdict(due=True)) for _ in range(2)] == [0.0, 0.0]
    rests.told_states(small, 1.0, NOW)
    assert not rests.from_states(small, NOW)


def test_it_rests_longer_while_a_diagnosis_comes_to_the_same() -> None:
    rests, large = Rests(STALL_AFTER), attempt()
    assert rest(rests, large, verdict(due=True)) == USUAL
    assert rest(rests, large, verdict(due=True)) == SAME
    assert rest(rests, large, verdict(due=True), asks=True) == USUAL, (
        "what was asked for may change it"
    )
    assert rest(rests, large, verdict(due=True), verdict(VerdictKind.DEADLOCK, due=True)) == USUAL
    assert [rest(rests, large) for _ in range(2)] == [USUAL, USUAL], (
        "nothing is told: any fault would be news"
    )


def test_but_not_beyond_the_moment_at_which_a_verdict_is_due() -> None:
    rests, large = Rests(STALL_AFTER), attempt()
    soon = verdict(since=NOW - STALL_AFTER + 1.0)
    assert [rest(rests, large, soon) for _ in range(2)] == [USUAL, 1.0]
    assert rest(rests, large, soon, waited_s=9 * BACKLOG) == 1.0
    late = verdict(since=NOW - STALL_AFTER - 1.0)
    assert [rest(rests, large, late) for _ in range(2)] == [USUAL, USUAL], (
        "it waits only for somebody's word"
    )


def test_while_ranks_come_the_server_has_better_to_do() -> None:
    rests, large = Rests(STALL_AFTER), attempt()
    large.processes[0] = None  # type: ignore[assignment]  # only how many there are counts
    assert rest(rests, large) == USUAL
    large.processes[1] = None  # type: ignore[assignment]
    assert rest(rests, large, waited_s=9 * BACKLOG) == STARTING
    assert rest(rests, large) == USUAL
    assert rest(rests, large, waited_s=9 * BACKLOG) == STARTING, "never longer"


def test_heartbeats_that_wait_are_taken_in_first_unless_a_verdict_is_due_any_moment() -> None:
    rests, large = Rests(STALL_AFTER), attempt()
    assert rest(rests, large, verdict(), waited_s=BACKLOG) == pytest.approx(2 * USUAL)
    assert rest(rests, large, verdict(VerdictKind.DEADLOCK), waited_s=BACKLOG) == USUAL
    assert rest(
        rests, large, verdict(VerdictKind.DEADLOCK, due=True), waited_s=BACKLOG
    ) == pytest.approx(2 * USUAL)


def test_states_are_told_seldom_and_what_is_forgotten_does_not_rest() -> None:
    rests, large = Rests(STALL_AFTER), attempt()
    rests.told_states(large, 1.0, NOW)
    assert rests.from_states(large, NOW + STATES - 0.1)
    assert not rests.from_states(large, NOW + STATES)
    assert not rests.from_diagnoses(large, NOW)
    rests.forget((large.job, large.number))
    assert not rests.from_states(large, NOW)
