"""Devices that lag, diagnosed live from the counters that heartbeats report."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hangwatch.diagnosis import is_quiet
from hangwatch.diagnosis.graph.devices import DeviceGraph, DeviceGroup
from hangwatch.model.kinds import VerdictKind
from hangwatch.model.limits import Limits
from hangwatch.model.ranks import Frame
from hangwatch.model.verdicts import DeviceProgress, Verdict
from tests.simulation.scripted_job import ScriptedJob

STALL_AFTER_S = 10.0
LIMITS = Limits(stall_after_s=STALL_AFTER_S, slow_limit_s=60.0)


def make_job(world_size: int = 4, steps: int = 5, **groups: tuple[int, ...]) -> ScriptedJob:
    """A job on NCCL; every device has completed ``steps`` calls of each group."""
    job = ScriptedJob(world_size, limits=LIMITS)
    for name, ranks in groups.items():
        job.add_group(name, ranks)
    for _ in range(steps):
        make_step(job)
    return job


def make_step(job: ScriptedJob, *except_ranks: int) -> None:
    """Every host makes a call on each of its groups, those of all ranks last."""
    for name, ranks in reversed(job.groups.items()):
        for rank in ranks:
            if rank not in except_ranks:
                job.make_call(rank, group=name, backend="nccl")


def report_devices(job: ScriptedJob, positions: dict[int, tuple[int, int | None]]) -> None:
    """Sets (completed, started) of each rank in the group of all ranks."""
    for rank, (completed, started) in positions.items():
        job.report_device(rank, completed, started)


def advance_seconds(job: ScriptedJob, seconds: float) -> list[Verdict]:
    """The verdicts that are due after ``seconds`` in which nothing changes."""
    verdicts: list[Verdict] = []
    for _ in range(round(seconds)):
        job.advance_time(1.0)
        verdicts = job.list_due_verdicts()
    return verdicts


def test_device_that_has_not_begun_the_call_is_stuck() -> None:
    job = make_job()
    report_devices(job, dict.fromkeys(range(4), (5, 5)))
    assert advance_seconds(job, 3) == []
    make_step(job)
    report_devices(job, {0: (5, 6), 1: (5, 5), 2: (5, 6), 3: (5, 6)})
    assert advance_seconds(job, STALL_AFTER_S - 1) == []
    (verdict,) = advance_seconds(job, 3)
    assert (verdict.kind, verdict.culprits, verdict.waiting, verdict.seq) == (
        VerdictKind.DEVICE_STUCK,
        (1,),
        (0, 2, 3),
        6,
    )
    assert "has queued all_reduce" in verdict.summary


def test_attempt_with_still_devices_is_not_quiet() -> None:
    job = make_job()
    report_devices(job, dict.fromkeys(range(4), (4, 5)))
    advance_seconds(job, 3)
    assert not is_quiet(job.latest_attempt, job.now, job.limits)


def test_hosts_that_run_ahead_do_not_show_progress() -> None:
    job = make_job()
    report_devices(job, {0: (4, 5), 1: (4, 4), 2: (4, 5), 3: (4, 5)})
    verdicts: list[Verdict] = []
    for _ in range(15):
        make_step(job)
        verdicts = advance_seconds(job, 1)
    assert [(v.kind, v.culprits) for v in verdicts] == [(VerdictKind.DEVICE_STUCK, (1,))]
    assert verdicts[0].seq == 5


def test_devices_that_advance_are_healthy_however_far_hosts_are_ahead() -> None:
    job = make_job(steps=100)
    for step in range(30):
        report_devices(
            job, {0: (step, step + 1), 1: (step, step), 2: (step, step), 3: (step, step)}
        )
        assert advance_seconds(job, 1) == []


def test_long_kernel_that_ends_in_time_is_healthy() -> None:
    job = make_job()
    report_devices(job, {0: (4, 5), 1: (4, 4), 2: (4, 5), 3: (4, 5)})
    assert advance_seconds(job, STALL_AFTER_S - 1) == []
    report_devices(job, dict.fromkeys(range(4), (5, 5)))
    assert advance_seconds(job, 30) == []


def test_same_long_kernel_on_all_ranks_is_healthy_with_timing() -> None:
    job = make_job()
    report_devices(job, dict.fromkeys(range(4), (4, 4)))
    assert advance_seconds(job, 40) == []


@pytest.mark.parametrize(("started", "limit_s"), [(5, STALL_AFTER_S), (None, STALL_AFTER_S + 3.65)])
def test_call_that_all_devices_are_in_makes_no_progress(
    started: int | None, limit_s: float
) -> None:
    job = make_job()
    report_devices(job, dict.fromkeys(range(4), (4, started)))
    assert advance_seconds(job, limit_s - 1) == []
    (verdict,) = advance_seconds(job, 3)
    assert (verdict.kind, verdict.culprits) == (VerdictKind.NO_PROGRESS, ())
    assert verdict.waiting == (0, 1, 2, 3)
    assert ("TORCH_NCCL_ENABLE_TIMING=1" in verdict.advice) == (started is None)


def test_member_without_counters_is_missing_evidence() -> None:
    job = make_job()
    report_devices(job, dict.fromkeys(range(3), (4, None)))
    assert advance_seconds(job, 40) == []


def test_counters_that_are_no_longer_read_prove_nothing() -> None:
    job = make_job()
    report_devices(job, {0: (4, 5), 1: (4, 4), 2: (4, 5), 3: (4, 5)})
    advance_seconds(job, 5)
    for rank in range(4):
        stream = job.ranks[rank].streams["world"]
        assert stream.device is not None
        stream.device = replace(stream.device, read_s=60.0)
    job.advance_time(60.0)
    assert job.list_due_verdicts() == []


def test_calls_after_the_last_reading_show_progress() -> None:
    """The host of a device makes calls before its counters are read again."""
    job = make_job()
    report_devices(job, dict.fromkeys(range(4), (4, None)))
    advance_seconds(job, STALL_AFTER_S + 3)
    for rank in range(4):
        stream = job.ranks[rank].streams["world"]
        assert stream.device is not None
        stream.device = replace(stream.device, read_s=2.0)
    make_step(job)
    job.advance_time(2.0)
    assert job.list_due_verdicts() == []


@pytest.mark.parametrize("counters", [(4, 1, -1, 2), (-1, -1, -1, 3), (4, -1, -1, 4), (4, 4, 4, 1)])
def test_counters_of_watchdogs_that_stopped_name_no_rank(counters: tuple[int, ...]) -> None:
    job = make_job()
    report_devices(job, {rank: (completed, None) for rank, completed in enumerate(counters)})
    (verdict,) = advance_seconds(job, STALL_AFTER_S + 7)
    assert (verdict.kind, verdict.culprits) == (VerdictKind.NO_PROGRESS, ())


def test_device_that_lagged_for_long_is_stuck() -> None:
    """The counters of the others advanced while its own did not change: its GPU may be lost."""
    job = make_job(steps=3)
    report_devices(job, dict.fromkeys(range(4), (3, None)))
    for completed in range(4, 10):
        make_step(job)
        report_devices(job, dict.fromkeys((0, 1, 3), (completed, None)))
        report_devices(job, {2: (3, None)})
        assert advance_seconds(job, 1) == []
    make_step(job)
    report_devices(job, {0: (9, None), 1: (9, None), 2: (3, None), 3: (9, None)})
    (verdict,) = advance_seconds(job, STALL_AFTER_S + 7)
    assert (verdict.kind, verdict.culprits) == (VerdictKind.DEVICE_STUCK, (2,))


def test_skipped_call_of_a_host_is_no_stuck_device() -> None:
    job = make_job()
    report_devices(job, dict.fromkeys(range(4), (5, 5)))
    advance_seconds(job, 2)
    make_step(job, 2)
    report_devices(job, {0: (5, 6), 1: (5, 6), 2: (5, 5), 3: (5, 6)})
    (verdict,) = advance_seconds(job, STALL_AFTER_S * 3)
    assert (verdict.kind, verdict.culprits) == (VerdictKind.MISSING_RANK, (2,))


def test_declared_phase_of_culprit_is_respected() -> None:
    job = make_job()
    job.ranks[1].phase = "compile"
    report_devices(job, {0: (4, 5), 1: (4, 4), 2: (4, 5), 3: (4, 5)})
    assert advance_seconds(job, 20) == []


def test_chain_across_groups_names_its_end() -> None:
    """Rank 1's device is stuck before the pair's call; the other pair waits in the call of all."""
    job = make_job(left=(0, 1), right=(2, 3))
    for rank, pair, in_pair, in_world in (
        (0, "left", (4, 5), (4, 4)),
        (1, "left", (4, 4), (4, 4)),
        (2, "right", (5, 5), (4, 5)),
        (3, "right", (5, 5), (4, 5)),
    ):
        job.report_device(rank, *in_pair, group=pair)
        job.report_device(rank, *in_world)
    (verdict,) = advance_seconds(job, STALL_AFTER_S + 3)
    assert (verdict.kind, verdict.culprits, verdict.waiting) == (
        VerdictKind.DEVICE_STUCK,
        (1,),
        (0, 2, 3),
    )
    assert verdict.group is not None and verdict.group.name == "left"


def test_chain_without_timing_names_all_that_may_be_stuck() -> None:
    job = make_job(left=(0, 1), right=(2, 3))
    for rank in range(4):
        job.report_device(rank, 4 if rank < 2 else 5, group="left" if rank < 2 else "right")
        job.report_device(rank, 4)
    (verdict,) = advance_seconds(job, STALL_AFTER_S + 3)
    assert (verdict.kind, verdict.culprits, verdict.waiting) == (
        VerdictKind.DEVICE_STUCK,
        (0, 1),
        (2, 3),
    )


def test_device_behind_its_peers_is_stuck_although_its_host_is_behind_too() -> None:
    """The host waits for its own device, before the call in which the others wait."""
    job = make_job(left=(0, 1), right=(2, 3))
    for rank in (0, 1, 3):
        job.make_call(rank, backend="nccl")
    for rank in range(4):
        pair = "left" if rank < 2 else "right"
        job.report_device(rank, 4 if rank == 2 else 5, 5, group=pair)
        job.report_device(rank, 5, 5 if rank == 2 else 6)
    verdicts = advance_seconds(job, STALL_AFTER_S + 3)
    assert [(v.kind, v.culprits) for v in verdicts] == [(VerdictKind.DEVICE_STUCK, (2,))]


def test_devices_that_wait_for_each_other_are_a_deadlock() -> None:
    """Ranks 0 and 1 queued the calls of two groups in a different order."""
    job = make_job(steps=0, a=(0, 1), b=(0, 1))
    for rank, (first, second) in enumerate([("a", "b"), ("b", "a")]):
        for group in (first, second):
            job.make_call(rank, group=group, backend="nccl")
            job.advance_time(0.01)
        job.report_device(rank, 0, group=first)
        job.report_device(rank, 0, group=second)
    for rank in (2, 3):
        job.make_call(rank, backend="nccl")
        job.report_device(rank, 0)
    for rank in (0, 1):
        job.make_call(rank, backend="nccl")
        job.report_device(rank, 0)
    (verdict,) = advance_seconds(job, STALL_AFTER_S + 3)
    assert (verdict.kind, verdict.culprits, verdict.waiting) == (
        VerdictKind.DEADLOCK,
        (0, 1),
        (2, 3),
    )


@pytest.mark.parametrize("started", [6, None])
def test_rank_is_missing_although_hosts_of_its_peers_run_ahead(started: int | None) -> None:
    job = make_job()
    make_step(job, 1)
    before = None if started is None else 5
    report_devices(job, {0: (5, started), 1: (5, before), 2: (5, started), 3: (5, started)})
    verdicts: list[Verdict] = []
    for second in range(25):
        make_step(job, 1)
        if second % 3 == 0:
            job.report_stack(1, Frame(function="upload", file="/home/me/train.py", line=9))
        verdicts = advance_seconds(job, 1)
    assert [(v.kind, v.culprits, v.waiting) for v in verdicts] == [
        (VerdictKind.MISSING_RANK, (1,), (0, 2, 3))
    ]
    assert verdicts[0].seq == 6


def make_progress(enqueued: int, started: int | None, completed: int) -> DeviceProgress:
    return DeviceProgress(enqueued=enqueued, started=started, completed=completed, read_at=0.0)


def test_devices_in_opposite_order_form_a_cycle() -> None:
    first = DeviceGroup(
        ranks=(0, 1), members={0: make_progress(1, 1, 0), 1: make_progress(1, 0, 0)}
    )
    second = DeviceGroup(
        ranks=(0, 1), members={0: make_progress(1, 0, 0), 1: make_progress(1, 1, 0)}
    )
    graph = DeviceGraph([first, second], {0: [first, second], 1: [second, first]}, {})
    assert (graph.cycle, graph.culprits) == ({0, 1}, set())


def test_end_that_may_wait_for_unknown_device_is_uncertain() -> None:
    pair = DeviceGroup(ranks=(0, 9), members={0: make_progress(5, None, 4)})
    world = DeviceGroup(
        ranks=(0, 1), members={0: make_progress(5, None, 4), 1: make_progress(5, None, 4)}
    )
    graph = DeviceGraph([pair, world], {0: [pair, world], 1: [world]}, {})
    assert (graph.culprits, graph.uncertain_ends) == (set(), {0})


def test_host_that_spins_until_its_device_is_done_waits() -> None:
    job = make_job(2)
    make_step(job, 1)
    report_devices(job, {0: (5, None), 1: (5, None)})
    job.ranks[0].idle = False
    assert advance_seconds(job, STALL_AFTER_S) == []
    assert 0 in {request.rank for request in job.run_diagnosis().requests if request.stacks}
    job.report_stack(
        0, Frame(function="main", file="/home/me/train.py", line=7, text="loss.item()")
    )
    (verdict,) = advance_seconds(job, 2)
    assert (verdict.kind, verdict.culprits, verdict.waiting) == (
        VerdictKind.MISSING_RANK,
        (1,),
        (0,),
    )


def test_host_that_works_does_not_wait_for_its_device() -> None:
    job = make_job(2)
    make_step(job, 1)
    report_devices(job, {0: (5, None), 1: (5, None)})
    job.ranks[0].idle = False
    assert advance_seconds(job, STALL_AFTER_S) == []
    job.report_stack(
        0, Frame(function="main", file="/home/me/train.py", line=7, text="tokens = tokenize(text)")
    )
    assert advance_seconds(job, STALL_AFTER_S) == []


def test_mismatch_that_hosts_ran_past_explains_the_later_wait() -> None:
    job = make_job()
    report_devices(job, dict.fromkeys(range(4), (5, None)))
    job.send_heartbeats()
    for rank in range(4):
        job.make_call(rank, "broadcast" if rank == 1 else "all_reduce", backend="nccl")
    make_step(job)
    make_step(job, 1)
    report_devices(job, dict.fromkeys(range(4), (5, None)))
    (verdict,) = advance_seconds(job, 2 * STALL_AFTER_S + 5)
    assert (verdict.kind, verdict.culprits, verdict.seq) == (VerdictKind.MISMATCH, (1,), 6)


def test_mismatch_counted_as_complete_explains_hosts_that_make_no_further_call() -> None:
    """The device of rank 1 had less to do, so its host continues; the counters show the call as
    complete on the other devices as well, and their hosts wait.
    """
    job = make_job()
    report_devices(job, dict.fromkeys(range(4), (5, None)))
    job.send_heartbeats()
    for rank in range(4):
        job.make_call(rank, "broadcast" if rank == 1 else "all_reduce", backend="nccl")
    make_step(job, 0, 2, 3)
    report_devices(job, {0: (6, None), 1: (6, None), 2: (6, None), 3: (6, None)})
    waiting = Frame(function="main", file="/home/me/train.py", line=7, text="loss.item()")
    job.advance_time(2)
    for rank in range(4):
        job.report_stack(rank, waiting)
    verdicts = advance_seconds(job, 2 * STALL_AFTER_S + 5)
    assert [(v.kind, v.culprits) for v in verdicts] == [(VerdictKind.MISMATCH, (1,))]


IN_CALL = [(), (1,), (0, 2, 3), (0, 1, 2, 3)]


@pytest.mark.parametrize("in_call", IN_CALL)
@pytest.mark.parametrize("has_been_idle", [True, False])
@pytest.mark.parametrize(
    ("positions", "kind"),
    [
        ({0: (5, 6), 1: (5, 5), 2: (5, 6), 3: (5, 6)}, VerdictKind.DEVICE_STUCK),
        ({0: (5, None), 1: (5, None), 2: (5, None), 3: (5, None)}, VerdictKind.NO_PROGRESS),
        ({0: (5, 6), 1: (5, 6), 2: (5, 6), 3: (5, 6)}, VerdictKind.NO_PROGRESS),
    ],
)
def test_numbers_agree_where_hosts_are_inside_a_full_queue(
    positions: dict[int, tuple[int, int | None]],
    kind: VerdictKind,
    has_been_idle: bool,
    in_call: tuple[int, ...],
) -> None:
    """The backend counts a call once it is queued, and the recorder when it is made."""
    if in_call == (0, 1, 2, 3) and not has_been_idle:
        pytest.skip("all counters are one behind, and no reading shows it")
    job = make_job()
    if has_been_idle:
        report_devices(job, dict.fromkeys(range(4), (5, 5)))
        advance_seconds(job, 3)
    for _ in range(10):
        make_step(job)
    report_devices(job, positions)
    for rank in in_call:
        job.ranks[rank].streams["world"].is_in_call = True
    (verdict,) = advance_seconds(job, STALL_AFTER_S + 4)
    assert (verdict.kind, verdict.seq) == (kind, 6)
    assert "call 6 of group" in verdict.summary
    assert {wait.seq for wait in verdict.waits} <= {6}
    assert {call.call.seq for call in verdict.calls} <= {6}


@pytest.mark.parametrize("in_call", [(), (0,), (0, 2), (0, 2, 3)])
def test_waits_for_absent_host_have_the_number_of_the_summary(in_call: tuple[int, ...]) -> None:
    """The hosts of the waiting ranks have run ahead, and wait for their devices."""
    job = make_job()
    report_devices(job, dict.fromkeys(range(4), (5, 5)))
    advance_seconds(job, 3)
    verdicts: list[Verdict] = []
    for rank in in_call:
        job.ranks[rank].streams["world"].is_in_call = True
    for _ in range(15):
        make_step(job, 1)
        report_devices(job, {0: (5, 6), 1: (5, 5), 2: (5, 6), 3: (5, 6)})
        verdicts = advance_seconds(job, 1)
    (verdict,) = verdicts
    assert (verdict.kind, verdict.culprits, verdict.seq) == (VerdictKind.MISSING_RANK, (1,), 6)
    assert "call 6 of group" in verdict.summary
    assert {wait.seq for wait in verdict.waits} == {6}


@pytest.mark.parametrize("in_call", [(), (0,), (0, 1)])
def test_numbers_of_devices_that_wait_for_each_other_agree(in_call: tuple[int, ...]) -> None:
    job = make_job(2, steps=5, other=(0, 1))
    for rank in range(2):
        job.report_device(rank, 5, 5)
        job.report_device(rank, 5, 5, group="other")
    advance_seconds(job, 3)
    for rank, order in enumerate((("world", "other"), ("other", "world"))):
        for group in order:
            job.make_call(rank, group=group, backend="nccl")
        job.report_device(rank, 5, 6, group=order[0])
        job.report_device(rank, 5, 5, group=order[1])
        if rank in in_call:
            job.ranks[rank].streams[order[1]].is_in_call = True
    (verdict,) = advance_seconds(job, STALL_AFTER_S + 4)
    assert (verdict.kind, verdict.culprits, verdict.seq) == (VerdictKind.DEADLOCK, (0, 1), 6)
    assert {wait.seq for wait in verdict.waits} == {6}
    assert {call.call.seq for call in verdict.calls} == {6}
