"""Which kernels are requested, and whom they name."""

from __future__ import annotations

import pytest

from hangwatch.model.kinds import VerdictKind
from hangwatch.model.ranks import Frame
from hangwatch.model.verdicts import Verdict
from tests.simulation.scripted_job import ScriptedJob

from .test_devices import LIMITS, STALL_AFTER_S, advance_seconds, make_job, report_devices

NCCL = "ncclDevKernel_AllReduce_Sum_f32_RING_LL"
OWN = "hw_stuck_kernel"
SPIN = Frame(function="main", file="/home/me/train.py", line=7, text="loss.item()")


def make_stalled_job(world_size: int = 4, *, allows_debugger: bool = True) -> ScriptedJob:
    """All devices are in one call, as far as their counters show."""
    job = make_job(world_size)
    job.allows_debugger = allows_debugger
    report_devices(job, dict.fromkeys(range(world_size), (4, None)))
    return job


def diagnose_stall(job: ScriptedJob) -> Verdict:
    (verdict,) = advance_seconds(job, STALL_AFTER_S + 6)
    return verdict


def report_stacks(job: ScriptedJob) -> None:
    for rank in job.ranks:
        job.report_stack(rank, SPIN)


def list_requested(job: ScriptedJob) -> list[int]:
    return [request.rank for request in job.run_diagnosis().requests if request.kernels]


def test_kernels_are_requested_once_the_hang_is_confirmed_and_stacks_are_known() -> None:
    job = make_stalled_job()
    assert advance_seconds(job, STALL_AFTER_S + 3) == [] and list_requested(job) == []
    assert advance_seconds(job, 3) and list_requested(job) == [], "stacks are requested first"
    report_stacks(job)
    assert list_requested(job) == [0, 1, 2, 3]
    for rank in (0, 1):
        job.report_kernels(rank, NCCL)
    job.report_kernels(2, error="cuda-gdb is not installed")
    assert list_requested(job) == [3], "a failure is not tried again"


def test_few_ranks_of_a_large_group_are_read() -> None:
    job = make_stalled_job(32)
    diagnose_stall(job)
    report_stacks(job)
    assert list_requested(job) == list(range(8))


def test_no_debugger_without_the_consent_of_the_job() -> None:
    job = make_stalled_job(allows_debugger=False)
    diagnose_stall(job)
    report_stacks(job)
    assert list_requested(job) == []


def test_ranks_on_the_cpu_have_no_kernels() -> None:
    job = ScriptedJob(2, limits=LIMITS)
    job.allows_debugger = True
    for rank in job.ranks:
        job.make_call(rank)
    (verdict,) = advance_seconds(job, STALL_AFTER_S + 6)
    assert verdict.kind is VerdictKind.NO_PROGRESS
    report_stacks(job)
    assert list_requested(job) == []


@pytest.mark.parametrize("world_size", [2, 4, 9])
def test_only_device_outside_of_nccl_is_stuck(world_size: int) -> None:
    job = make_stalled_job(world_size)
    before = diagnose_stall(job)
    assert (before.kind, before.culprits) == (VerdictKind.NO_PROGRESS, ())
    for rank in range(min(world_size, 8)):
        job.report_kernels(rank, OWN if rank == 1 else NCCL)
    (verdict,) = advance_seconds(job, 1)
    others = tuple(rank for rank in range(world_size) if rank != 1)
    assert (verdict.kind, verdict.culprits, verdict.waiting) == (
        VerdictKind.DEVICE_STUCK,
        (1,),
        others,
    )
    assert (verdict.seq, verdict.group) == (before.seq, before.group)
    assert verdict.summary.startswith(
        "rank 1's device runs hw_stuck_kernel (2 x 128 threads), while"
    )
    assert f"{NCCL} (2 x 128 threads) in call 5 of " in verdict.summary
    assert {(wait.rank, wait.on_rank) for wait in verdict.waits} <= {(r, 1) for r in others}
    assert "hw_stuck_kernel" not in verdict.advice, "the summary names it"


@pytest.mark.parametrize(
    "kernels",
    [
        pytest.param([NCCL, NCCL, NCCL, NCCL], id="all in the call"),
        pytest.param([OWN, OWN, NCCL, NCCL], id="no minority"),
        pytest.param([OWN, OWN, OWN, OWN], id="a long kernel on all devices"),
        pytest.param([OWN, NCCL, NCCL, ""], id="an idle device, which may be at fault"),
        pytest.param([OWN, NCCL, NCCL, None], id="too few known"),
    ],
)
def test_no_rank_is_named_where_kernels_leave_it_open(kernels: list[str | None]) -> None:
    job = make_stalled_job()
    diagnose_stall(job)
    for rank, name in enumerate(kernels):
        if name is None:
            job.report_kernels(rank, error="no permission")
        else:
            job.report_kernels(rank, *filter(None, [name]))
    (verdict,) = advance_seconds(job, 1)
    assert (verdict.kind, verdict.culprits) == (VerdictKind.NO_PROGRESS, ())
    assert "run" in verdict.advice and "(2 x 128 threads)" in verdict.advice


def test_kernel_beside_one_of_nccl_does_not_name_its_rank() -> None:
    job = make_stalled_job()
    diagnose_stall(job)
    for rank in range(4):
        job.report_kernels(rank, *[OWN, NCCL][rank != 1 and 1 :])
    (verdict,) = advance_seconds(job, 1)
    assert verdict.kind is VerdictKind.NO_PROGRESS


def test_kernels_from_before_the_hang_show_nothing() -> None:
    job = make_stalled_job()
    job.send_heartbeats()
    for rank in range(4):
        job.report_kernels(rank, OWN if rank == 1 else NCCL)
    job.advance_time(5.0)
    for rank in range(4):
        job.make_call(rank, backend="nccl")
        job.report_device(rank, 5, None)
    verdict = diagnose_stall(job)
    assert (verdict.kind, verdict.culprits) == (VerdictKind.NO_PROGRESS, ())


def test_advice_on_a_stuck_device_names_its_kernel() -> None:
    job = make_job()
    job.allows_debugger = True
    report_devices(job, {0: (4, 5), 1: (4, 4), 2: (4, 5), 3: (4, 5)})
    (verdict,) = advance_seconds(job, STALL_AFTER_S + 3)
    assert (verdict.kind, verdict.culprits) == (VerdictKind.DEVICE_STUCK, (1,))
    report_stacks(job)
    assert list_requested(job) == [1], "only the culprit's is needed"
    job.report_kernels(1, OWN)
    (verdict,) = advance_seconds(job, 1)
    assert verdict.advice.endswith("Rank 1's device runs hw_stuck_kernel (2 x 128 threads).")
