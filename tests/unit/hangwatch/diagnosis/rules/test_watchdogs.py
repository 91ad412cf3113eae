"""Ranks that their own watchdog ended: victims of what their devices waited for."""

from __future__ import annotations

import signal

from hangwatch.model.kinds import VerdictKind
from hangwatch.model.verdicts import Verdict
from tests.simulation.scripted_job import ScriptedJob

from .test_devices import STALL_AFTER_S, advance_seconds, make_job, make_step, report_devices


def abort_ranks(job: ScriptedJob, *ranks: int) -> list[Verdict]:
    for rank in ranks:
        job.end_process(rank, signal=int(signal.SIGABRT))
    return advance_seconds(job, 5)


def test_ranks_ended_after_network_error_blame_none() -> None:
    job = make_job()
    report_devices(job, dict.fromkeys(range(4), (4, 5)))
    advance_seconds(job, 4)
    (verdict,) = abort_ranks(job, 0, 1, 2, 3)
    assert (verdict.kind, verdict.culprits) == (VerdictKind.NO_PROGRESS, ())
    assert verdict.waiting == (0, 1, 2, 3)
    assert "ended by its watchdog" in verdict.summary


def test_end_of_a_long_stall_is_reported_immediately() -> None:
    """The stall itself is reported some seconds later where starts are not recorded."""
    job = make_job()
    report_devices(job, dict.fromkeys(range(4), (4, None)))
    assert advance_seconds(job, STALL_AFTER_S + 2) == []
    for rank in range(4):
        job.end_process(rank, signal=int(signal.SIGABRT))
    (verdict,) = job.list_due_verdicts()
    assert (verdict.kind, verdict.culprits) == (VerdictKind.NO_PROGRESS, ())


def test_rank_ended_by_watchdog_is_victim_of_stuck_device() -> None:
    job = make_job()
    report_devices(job, {0: (4, 5), 1: (4, 4), 2: (4, 5), 3: (4, 5)})
    advance_seconds(job, 5)
    (verdict,) = abort_ranks(job, 0)
    assert (verdict.kind, verdict.culprits) == (VerdictKind.DEVICE_STUCK, (1,))


def test_rank_ended_by_watchdog_is_victim_of_missing_rank() -> None:
    job = make_job()
    report_devices(job, dict.fromkeys(range(4), (5, 5)))
    advance_seconds(job, 2)
    make_step(job, 2)
    report_devices(job, {0: (5, 6), 1: (5, 6), 2: (5, 5), 3: (5, 6)})
    advance_seconds(job, 5)
    (verdict,) = abort_ranks(job, 0, 1, 3)
    assert (verdict.kind, verdict.culprits) == (VerdictKind.MISSING_RANK, (2,))


def test_killed_rank_is_cause_of_its_peers_aborts() -> None:
    job = make_job()
    report_devices(job, dict.fromkeys(range(4), (4, 5)))
    advance_seconds(job, 2)
    job.end_process(1, signal=int(signal.SIGKILL))
    advance_seconds(job, 2)
    (verdict,) = abort_ranks(job, 0, 2, 3)
    assert (verdict.kind, verdict.culprits) == (VerdictKind.DEAD_RANK, (1,))


def test_abort_without_pending_work_is_a_death() -> None:
    job = make_job()
    report_devices(job, dict.fromkeys(range(4), (5, 5)))
    advance_seconds(job, 5)
    (verdict,) = abort_ranks(job, 2)
    assert (verdict.kind, verdict.culprits) == (VerdictKind.DEAD_RANK, (2,))


def test_sudden_abort_of_one_rank_is_a_death() -> None:
    """The rank aborts soon after its last call, as on an error of its own device."""
    job = make_job()
    report_devices(job, dict.fromkeys(range(4), (4, 5)))
    (verdict,) = abort_ranks(job, 2)
    assert (verdict.kind, verdict.culprits) == (VerdictKind.DEAD_RANK, (2,))
