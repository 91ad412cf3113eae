"""Whether a rank makes progress, by what it and what it waits for did between two samples."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from hangwatch.model.kinds import VerdictKind
from hangwatch.model.limits import MIN_TRANSFER_BYTES_PER_S
from hangwatch.model.ranks import Frame, ThreadStack
from hangwatch.model.verdicts import Verdict
from hangwatch.protocol import heartbeat as wire
from tests.simulation.scripted_job import ScriptedJob

from ..expect import diagnose_only, make_frame

PYTHON_LIB = "/usr/lib/python3.11"
PACKAGE = "/venv/lib/python3.11/site-packages/multiprocess"
RECEIVES = (make_frame("download", text="while data := connection.recv(1 << 20):"),)
WAITS_IN_POOL = (
    Frame(function="wait", file=f"{PYTHON_LIB}/threading.py", line=320),
    Frame(function="wait", file=f"{PACKAGE}/pool.py", line=760),
    Frame(function="map", file=f"{PACKAGE}/pool.py", line=360),
    make_frame("tokenize", text="pool.map(tokenize, texts)"),
)
WAITS_FOR_EVENT = (WAITS_IN_POOL[0], make_frame("await_turn", text="event.wait()"))
HANDLER = (Frame(function="recv", file=f"{PACKAGE}/connection.py", line=380),)
MAIN, OTHER, CHILD = 10, 11, 20

MakeThreads = Callable[[float], tuple[ThreadStack, ...]]  # the threads after some seconds


def make_thread(
    tid: int, frames: tuple[Frame, ...], *, moved: float = 0.0, cpu_s: float = 0.0
) -> ThreadStack:
    return ThreadStack(
        thread=str(tid),
        frames=frames,
        main=tid == MAIN,
        tid=tid,
        cpu_s=cpu_s,
        moved_bytes=int(moved),
    )


def make_child(
    *, awaited_by: tuple[int, ...], moved: float = 0.0, cpu_s: float = 0.0
) -> ThreadStack:
    child = make_thread(CHILD, (make_frame("work"),), moved=moved, cpu_s=cpu_s)
    return replace(child, pid=CHILD, awaited_by=awaited_by)


def diagnose_absent_rank(make_threads: MakeThreads) -> Verdict:
    """The verdict on rank 0, of which there are two samples, while rank 1 waits for it."""
    job = ScriptedJob(2)
    job.make_calls()
    job.make_call(1)
    for seconds in (5.0, 8.0):
        job.advance_time(seconds - (job.now - 100.0))
        job.send_heartbeats()
        reply = wire.StackReply(
            key="0-1", request="r", source="py-spy", threads=make_threads(seconds)
        )
        job.apply_heartbeat(host="node0", agent="agent-node0", samples=(reply,))
    job.advance_time(3)
    return diagnose_only(job)


@pytest.mark.parametrize("per_s", [0.0, MIN_TRANSFER_BYTES_PER_S * 0.9])
def test_rank_that_moves_next_to_no_data_is_missing(per_s: float) -> None:
    verdict = diagnose_absent_rank(lambda s: (make_thread(MAIN, RECEIVES, moved=per_s * s),))
    assert (verdict.kind, verdict.culprits) == (VerdictKind.MISSING_RANK, (0,))


def test_rank_that_downloads_is_slow() -> None:
    verdict = diagnose_absent_rank(lambda s: (make_thread(MAIN, RECEIVES, moved=1e6 * s),))
    assert (verdict.kind, verdict.culprits) == (VerdictKind.SLOW_RANK, (0,))
    assert "It moves data, 1.0 MB/s" in verdict.advice
    assert "timeout" not in verdict.advice, "nothing is to be done about the connection"


def test_data_that_another_thread_moves_is_no_progress_of_a_stuck_one() -> None:
    verdict = diagnose_absent_rank(
        lambda s: (make_thread(MAIN, WAITS_FOR_EVENT), make_thread(OTHER, HANDLER, moved=1e6 * s))
    )
    assert verdict.kind is VerdictKind.MISSING_RANK


def test_rank_that_waits_for_its_thread_which_downloads_is_slow() -> None:
    joins = (Frame(function="join", file=f"{PYTHON_LIB}/threading.py", line=9), make_frame("main"))
    verdict = diagnose_absent_rank(
        lambda s: (make_thread(MAIN, joins), make_thread(OTHER, RECEIVES, moved=1e6 * s))
    )
    assert verdict.kind is VerdictKind.SLOW_RANK


@pytest.mark.parametrize("is_writing", [True, False])
def test_rank_in_uninterruptible_sleep_is_slow_while_it_writes(is_writing: bool) -> None:
    job = ScriptedJob(2)
    job.make_calls()
    job.make_call(1)
    job.ranks[0].state = "D"
    job.ranks[0].idle = not is_writing
    for _ in range(11):
        job.advance_time(1)
        job.send_heartbeats()
    verdict = diagnose_only(job)
    assert verdict.kind is (VerdictKind.SLOW_RANK if is_writing else VerdictKind.FROZEN_RANK)


@pytest.mark.parametrize("is_working", [True, False])
def test_rank_that_reads_from_a_child(is_working: bool) -> None:
    reads = (make_frame("main", text="for line in process.stdout:"),)
    verdict = diagnose_absent_rank(
        lambda s: (
            make_thread(MAIN, reads),
            make_child(awaited_by=(MAIN,), cpu_s=s * 0.5 * is_working),
        )
    )
    assert verdict.kind is (VerdictKind.SLOW_RANK if is_working else VerdictKind.MISSING_RANK)


@pytest.mark.parametrize(("moved_per_s", "cpu_share"), [(0.0, 0.9), (1e6, 0.0), (0.0, 0.0)])
def test_pool_of_a_library_whose_thread_waits_for_processes(
    moved_per_s: float, cpu_share: float
) -> None:
    verdict = diagnose_absent_rank(
        lambda s: (
            make_thread(MAIN, WAITS_IN_POOL),
            make_thread(OTHER, HANDLER),
            make_child(awaited_by=(OTHER,), moved=moved_per_s * s, cpu_s=cpu_share * s),
        )
    )
    is_working = bool(moved_per_s or cpu_share)
    assert verdict.kind is (VerdictKind.SLOW_RANK if is_working else VerdictKind.MISSING_RANK)


def test_pool_beside_an_event_that_nobody_sets_does_not_excuse() -> None:
    verdict = diagnose_absent_rank(
        lambda s: (
            make_thread(MAIN, WAITS_FOR_EVENT),
            make_thread(OTHER, HANDLER),
            make_child(awaited_by=(OTHER,), cpu_s=s),
        )
    )
    assert verdict.kind is VerdictKind.MISSING_RANK
