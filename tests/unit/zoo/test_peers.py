"""Whom PyTorch's own tools are held to have named, from what they print."""

from __future__ import annotations

from tests.zoo.peers import reading

BARRIER = "RuntimeError: [Rank 0]: Ranks 1, 3 failed to pass monitoredBarrier in 10000 ms\n"
SILENT = "RuntimeError: Rank 2 successfully reached monitoredBarrier, but received errors while waiting for send/recv from rank 0. Please\n"
REPORT = """
Failures:
[1]:
  rank      : 0 (local_rank: 0)
  exitcode  : -15 (pid: 6432)  (SIGTERM)
Root Cause (first observed failure):
[0]:
  time      : 2026-11-21_11:57:34
  rank      : 2 (local_rank: 2)
"""


def accuses(rank: int, other: int) -> str:
    fingerprint = "CollectiveFingerPrint(SequenceNumber=6, OpType=ALLREDUCE)"
    return (
        f"Detected mismatch between collectives on ranks. Rank {rank} is running collective: {fingerprint}, "
        f"but Rank {other} is running collective: {fingerprint}\n"
    )


def test_detail_late_ranks_are_all_that_are_listed() -> None:
    assert reading.detail(BARRIER + SILENT) == (1, 3)


def test_detail_of_a_mismatch_the_most_accused_are_named() -> None:
    assert reading.detail(
        "".join([accuses(0, 2), accuses(1, 2), accuses(3, 2), accuses(2, 0)])
    ) == (2,)
    assert reading.detail(accuses(0, 1) + accuses(1, 0)) == (0, 1)


def test_detail_a_barrier_that_fails_after_a_mismatch_adds_nobody() -> None:
    assert reading.detail(accuses(0, 2) + BARRIER) == (2,)


def test_detail_waiting_for_a_rank_counts_where_nobody_is_accused() -> None:
    assert reading.detail(SILENT) == (0,)
    assert reading.detail(SILENT + BARRIER) == (1, 3)
    assert reading.detail("Connection reset by peer") == ()


def test_analyzer_only_the_first_finding_counts() -> None:
    first = "Not all ranks joining collective, sequence number: 6\nmissing ranks: {1, 2}\nexpected ranks: {0, 1, 2}\n"
    culprits = (
        "error msg: Culprit rank 2; Error type: X, Culprit rank 1; Error type: Expected '[[4]]'\n"
    )
    assert reading.analyzer(first + culprits) == (1, 2)
    assert reading.analyzer(culprits + first) == (1, 2)
    assert reading.analyzer(
        "error msg: Culprit rank 12; Error type: COLLECTIVE_TYPE_MISMATCH, Expected '3'"
    ) == (12,)


def test_analyzer_absent_dumps_name_their_ranks_and_a_crash_nobody() -> None:
    assert reading.analyzer("AssertionError: Missing dump files from ranks {3}") == (3,)
    assert reading.analyzer("KeyError: ('0', 3)") == ()


def test_launcher_the_first_failure() -> None:
    assert reading.launcher(REPORT) == (2,)
    assert reading.launcher("-- Process 1 terminated with the following error:\n") == (1,)
    assert reading.launcher("process 0 terminated with signal SIGKILL") == (0,)
    assert reading.launcher("all is well") == ()
