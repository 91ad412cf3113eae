"""Ranks whose hosts use the CPU while they wait for their devices."""

from __future__ import annotations

import pytest

from hangwatch.model.kinds import Severity, VerdictKind
from hangwatch.model.ranks import Frame
from hangwatch.model.verdicts import Verdict
from tests.simulation.scripted_job import ScriptedJob

READS_LOSS = Frame(function="read_loss", file="/work/train.py", line=12, text="return x.item()")
MAIN = Frame(function="main", file="/work/train.py", line=30)
RUNTIME = "/usr/lib/libcudart.so.13"
SYNCHRONIZES = (
    Frame(function="0x7f2dfb24524a", file="/usr/lib/libcuda.so.1", line=0),
    Frame(function="cudaStreamSynchronize", file=RUNTIME, line=0),
    Frame(function="at::native::_local_scalar_dense_cuda", file="libtorch_cuda.so", line=0),
)
MULTIPLIES = (Frame(function="mkl_blas_avx2_sgemm", file="libmkl_avx2.so.2", line=0),)
COMPILES = (
    Frame(function="0x7f2dfb24524a", file="/usr/lib/libnvidia-ptxjitcompiler.so.1", line=0),
    Frame(function="cuLaunchKernel", file="/usr/lib/libcuda.so.1", line=0),
)
STALL_AFTER_S = 10


def make_waiting_job() -> ScriptedJob:
    """Rank 1 has not made the call in which the others are, and uses the CPU."""
    job = ScriptedJob(4)
    job.make_calls(backend="nccl")
    for rank in range(4):
        job.report_device(rank, 1)
    job.send_heartbeats()
    job.make_calls(except_ranks=(1,), backend="nccl")
    for rank in (0, 2, 3):
        job.report_device(rank, 1)
        job.report_stack(rank, READS_LOSS, MAIN)
    job.ranks[1].idle = False
    return job


def run_job(
    job: ScriptedJob, native: tuple[Frame, ...], is_still: bool | None, seconds: int
) -> tuple[list[Verdict], list[float]]:
    """The verdicts after some seconds in which stacks are reported as they are requested, and the times at
    which those with native frames were.
    """
    verdicts: list[Verdict] = []
    native_at: list[float] = []
    for second in range(seconds):
        job.advance_time(1.0)
        verdicts = job.list_due_verdicts()
        for request in job.run_diagnosis().requests:
            if request.native:
                native_at.append(second + 1.0)
                frames = (*native, READS_LOSS, MAIN)
                job.report_stacks(request.rank, frames, native=True, is_still=is_still)
            elif request.stacks:
                job.report_stack(request.rank, READS_LOSS, MAIN)
    return verdicts, native_at


def test_rank_that_spins_in_a_wait_for_its_device_is_missing() -> None:
    job = make_waiting_job()
    (verdict,), native_at = run_job(job, SYNCHRONIZES, True, STALL_AFTER_S + 2)
    assert (verdict.kind, verdict.severity) == (VerdictKind.SLOW_RANK, Severity.WARNING)
    assert len(native_at) == 1
    assert native_at[0] >= STALL_AFTER_S - 2
    (verdict,), native_at = run_job(job, SYNCHRONIZES, True, 3)
    assert (verdict.kind, verdict.severity) == (VerdictKind.MISSING_RANK, Severity.ALERT)
    assert (verdict.culprits, verdict.waiting) == ((1,), (0, 2, 3))
    assert verdict.site is not None
    assert verdict.site.line == READS_LOSS.line
    assert verdict.advice.startswith("It waits for its device. Look at what it launched")
    assert native_at == []


@pytest.mark.parametrize(
    ("native", "is_still"),
    [
        (SYNCHRONIZES, False),  # a loop that evaluates reads one result after the other
        (SYNCHRONIZES, None),
        (MULTIPLIES, True),
        (COMPILES, True),
        ((), True),  # native frames could not be read
    ],
)
def test_rank_that_may_work_is_slow(native: tuple[Frame, ...], is_still: bool | None) -> None:
    job = make_waiting_job()
    (verdict,), native_at = run_job(job, native, is_still, STALL_AFTER_S + 20)
    assert (verdict.kind, verdict.culprits) == (VerdictKind.SLOW_RANK, (1,))
    assert len(native_at) == 1


def test_rank_that_continues_after_its_wait_is_slow() -> None:
    job = make_waiting_job()
    run_job(job, SYNCHRONIZES, True, STALL_AFTER_S - 1)
    elsewhere = Frame(function="tokenize", file="/work/train.py", line=20, text="encode(x)")
    job.report_stack(1, elsewhere, MAIN)
    (verdict,), _ = run_job(job, SYNCHRONIZES, True, 1)
    job.advance_time(STALL_AFTER_S)
    (verdict,) = job.list_due_verdicts()
    assert (verdict.kind, verdict.culprits) == (VerdictKind.SLOW_RANK, (1,))


def test_no_native_frames_of_rank_that_waits_or_is_elsewhere() -> None:
    job = make_waiting_job()
    job.ranks[1].idle = True
    verdicts, native_at = run_job(job, SYNCHRONIZES, True, STALL_AFTER_S + 5)
    assert [verdict.kind for verdict in verdicts] == [VerdictKind.MISSING_RANK]
    assert native_at == []
