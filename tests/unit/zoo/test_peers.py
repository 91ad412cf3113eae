"""The ranks that PyTorch's own tools name, parsed from their output."""

from __future__ import annotations

from tests.zoo.peers import reading

BARRIER_OUTPUT = "RuntimeError: [Rank 0]: Ranks 1, 3 failed to pass monitoredBarrier in 10000 ms\n"
SILENT_OUTPUT = (
    "RuntimeError: Rank 2 successfully reached monitoredBarrier, but received errors while waiting"
    " for send/recv from rank 0. Please\n"
)
LAUNCHER_REPORT = """
Failures:
[1]:
  rank      : 0 (local_rank: 0)
  exitcode  : -15 (pid: 6432)  (SIGTERM)
Root Cause (first observed failure):
[0]:
  time      : 2026-11-21_11:57:34
  rank      : 2 (local_rank: 2)
"""


def make_mismatch_report(rank: int, other: int) -> str:
    fingerprint = "CollectiveFingerPrint(SequenceNumber=6, OpType=ALLREDUCE)"
    return (
        f"Detected mismatch between collectives on ranks. Rank {rank} is running collective:"
        f" {fingerprint}, but Rank {other} is running collective: {fingerprint}\n"
    )


def test_detail_names_all_late_ranks() -> None:
    assert reading.parse_detail(BARRIER_OUTPUT + SILENT_OUTPUT) == (1, 3)


def test_detail_mismatch_names_most_accused_ranks() -> None:
    assert reading.parse_detail(
        "".join(
            [
                make_mismatch_report(0, 2),
                make_mismatch_report(1, 2),
                make_mismatch_report(3, 2),
                make_mismatch_report(2, 0),
            ]
        )
    ) == (2,)
    assert reading.parse_detail(make_mismatch_report(0, 1) + make_mismatch_report(1, 0)) == (0, 1)


def test_detail_barrier_failure_after_mismatch_adds_no_rank() -> None:
    assert reading.parse_detail(make_mismatch_report(0, 2) + BARRIER_OUTPUT) == (2,)


def test_detail_awaited_rank_counts_without_accusation() -> None:
    assert reading.parse_detail(SILENT_OUTPUT) == (0,)
    assert reading.parse_detail(SILENT_OUTPUT + BARRIER_OUTPUT) == (1, 3)
    assert reading.parse_detail("Connection reset by peer") == ()


def test_analyzer_only_the_first_finding_counts() -> None:
    first = (
        "Not all ranks joining collective, sequence number: 6\nmissing ranks: {1, 2}\nexpected"
        " ranks: {0, 1, 2}\n"
    )
    culprits = (
        "error msg: Culprit rank 2; Error type: X, Culprit rank 1; Error type: Expected '[[4]]'\n"
    )
    assert reading.parse_analyzer(first + culprits) == (1, 2)
    assert reading.parse_analyzer(culprits + first) == (1, 2)
    assert reading.parse_analyzer(
        "error msg: Culprit rank 12; Error type: COLLECTIVE_TYPE_MISMATCH, Expected '3'"
    ) == (12,)


def test_analyzer_missing_dumps_name_ranks_and_crash_names_none() -> None:
    assert reading.parse_analyzer("AssertionError: Missing dump files from ranks {3}") == (3,)
    assert reading.parse_analyzer("KeyError: ('0', 3)") == ()


def test_launcher_first_failure_is_named() -> None:
    assert reading.parse_launcher(LAUNCHER_REPORT) == (2,)
    assert reading.parse_launcher("-- Process 1 terminated with the following error:\n") == (1,)
    assert reading.parse_launcher("process 0 terminated with signal SIGKILL") == (0,)
    assert reading.parse_launcher("all is well") == ()
