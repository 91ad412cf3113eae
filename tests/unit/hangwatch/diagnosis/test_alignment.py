"""Alignment of two ranks' calls: which call was omitted, added, swapped or raised, since when, and
when that cannot be determined.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from hangwatch.diagnosis.alignment import Calls, align_calls, select_window
from hangwatch.diagnosis.differences import (
    find_left_out_calls,
    find_shift,
    find_swapped_calls,
    has_diverged,
    select_rows,
)
from hangwatch.model.calls import Call, Site
from hangwatch.model.kinds import VerdictKind
from hangwatch.model.ranks import ExceptionInfo
from hangwatch.model.verdicts import Verdict
from tests.simulation.scripted_job import ScriptedJob, make_signature

_OPS = {"a": "all_reduce", "b": "broadcast", "g": "all_gather"}


def parse_calls(text: str, first: int = 1) -> Calls:
    """``a1 b2``: an all_reduce at line 1, then a broadcast at line 2."""
    return tuple(
        Call(
            seq=seq,
            signature=make_signature(_OPS[word[0]]),
            site=Site(file="train.py", line=int(word[1:]), function="step"),
        )
        for seq, word in enumerate(text.split(), first)
    )


def align_rows(left: str, right: str, short: bool = False) -> list[tuple[int | None, int | None]]:
    alignment = align_calls(parse_calls(left), parse_calls(right), short)
    return [
        (None if one is None else one.seq, None if other is None else other.seq)
        for one, other in alignment.pairs
    ]


def describe_shift(
    left: str, right: str, *, first: int = 1, short: bool = False
) -> tuple[int, int | None, int] | None:
    """(count, first, last) of the shift."""
    shift = find_shift(align_calls(parse_calls(left, first), parse_calls(right, first), short))
    if shift is None:
        return None
    return shift.count, None if shift.first is None else shift.first.seq, shift.last.seq


def test_equal_sequences_have_no_divergence() -> None:
    assert not has_diverged(align_calls(parse_calls("a1 b2 a1"), parse_calls("a1 b2 a1")).pairs)
    assert align_calls((), parse_calls("a1")).pairs == ((None, parse_calls("a1")[0]),)


def test_rank_that_is_behind_has_no_divergence() -> None:
    assert not has_diverged(align_calls(parse_calls("a1 b2 a1 b2"), parse_calls("a1 b2")).pairs)
    assert describe_shift("a1 b2 a1 b2", "a1 b2", short=True) is None


def test_lines_that_differ_by_rank_are_no_divergence() -> None:
    alignment = align_calls(parse_calls("a1 a9 a1 a9 a1 a9"), parse_calls("a1 a2 a1 a2 a1"))
    assert not has_diverged(alignment.pairs)
    assert find_shift(alignment) is None


def test_skipped_call_is_found_despite_equal_signatures() -> None:
    assert describe_shift("a1 a2 a3 a1 a2 a3 a1 a2", "a1 a2 a3 a1 a3 a1 a2") == (1, 5, 5)
    assert (5, None) in align_rows("a1 a2 a3 a1 a2 a3 a1 a2", "a1 a2 a3 a1 a3 a1 a2")


def test_several_skipped_calls() -> None:
    assert describe_shift("a1 a2 a3 a4 a1 a2 a3 a4 a1 a2", "a1 a2 a3 a4 a1 a4 a1 a2") == (2, 6, 6)


def test_extra_call_puts_rank_ahead() -> None:
    assert describe_shift("a1 a2 a3 a1 a2 a3", "a1 a2 a9 a3 a1 a2 a3") == (-1, 3, 3)


def test_one_of_several_equal_calls_is_reported_as_range() -> None:
    assert describe_shift("b2 a1 a1 a1 b2 a1 a1 a1 b2 a1", "b2 a1 a1 a1 b2 a1 a1 b2 a1") == (
        1,
        6,
        8,
    )


def test_only_equal_calls_give_no_shift() -> None:
    assert describe_shift("a1 " * 9, "a1 " * 7, short=True) is None


def test_rounds_of_two_leave_shift_direction_ambiguous() -> None:
    left, right = "a1 a2 a1 a2 a1 a2 a1", "a1 a2 a1 a1 a2 a1 a2"
    assert describe_shift(left, right) is None
    assert describe_shift(left, right, short=True) == (1, 4, 4)


def test_shift_before_known_window_is_flagged() -> None:
    assert describe_shift("a1 a2 " * 10, "a2 a1 " * 10, first=50, short=True) == (1, None, 50)
    assert describe_shift("a1 a2 a1", "a2 a1 a2", first=50, short=True) is None, (
        "too few to be sure"
    )


def test_single_matching_call_after_gap_is_no_proof() -> None:
    assert describe_shift("a1 a2 a3 b5", "a1 a2 b5", short=True) is None


def test_another_call_among_equal_ones_is_no_extra_call() -> None:
    assert describe_shift("a1 a1 a1 a1 a1 a1 a1 a1", "a1 a1 a1 b2 a1 a1 a1 a1") is None
    # After an extra call in rounds of two, calls with equal numbers differ.
    assert describe_shift("a1 g3 a1 g3 a1 g3 a1", "a1 g3 b2 a1 g3 a1 g3 a1") == (-1, 3, 3)


def test_two_calls_in_another_order() -> None:
    order = find_swapped_calls(
        align_calls(parse_calls("a1 b2 g3 a1 b2 g3 a1"), parse_calls("a1 b2 g3 b7 a6 g3 a1"))
    )
    assert order is not None
    assert {order[0].signature.op, order[1].signature.op} in ({"all_reduce"}, {"broadcast"})
    assert abs(order[0].seq - order[1].seq) == 1
    assert (
        find_swapped_calls(
            align_calls(parse_calls("a1 b2 a1 b2 a1"), parse_calls("a1 b2 b2 a1 b2"))
        )
        is None
    ), "as well a call left out"


def test_skipped_call_is_inferred_from_earlier_rounds() -> None:
    left, right = parse_calls("a1 b2 a1 b2 a1"), parse_calls("a1 b2 a1 b2 b2")
    assert [c.seq for c in find_left_out_calls(left, right, 5)] == [5]
    left, right = parse_calls("a1 b2 g3 a1 b2 g3 a1 b2"), parse_calls("a1 b2 g3 a1 b2 g3 a1 a1")
    assert [(c.seq, c.signature.op) for c in find_left_out_calls(left, right, 8)] == [
        (8, "broadcast"),
        (6, "all_gather"),
    ]
    assert find_left_out_calls(parse_calls("a1 b2 a1"), parse_calls("a1 b2 g9"), 3) == [], (
        "a call that was never made before says nothing"
    )


def test_window_ends_at_missing_calls() -> None:
    calls = {c.seq: c for c in parse_calls("a1 " * 9) if c.seq != 4}
    assert [c.seq for c in select_window(calls, 6)] == [5, 6, 7, 8, 9]
    assert select_window(calls, 4) == ()


def test_only_rows_near_difference_are_shown() -> None:
    same = "a1 a2 a3 " * 10
    rows = select_rows(
        align_calls(
            parse_calls(same + "a1 a2 a3 a1 a2 a3"), parse_calls(same + "a1 a3 a1 a2 a3")
        ).pairs
    )
    assert rows[0].omitted == 28
    assert [(one and one.seq) for one, _ in (row.calls for row in rows)] == [
        29,
        30,
        31,
        32,
        33,
        34,
        35,
        36,
    ]


def test_long_sequences_are_aligned_within_the_band() -> None:
    left, right = (
        parse_calls("a1 a2 a3 " * 42),
        parse_calls("a1 a2 a3 " * 20 + "a2 a3 " + "a1 a2 a3 " * 20),
    )
    assert find_shift(align_calls(left, right)) is not None


# In the diagnosis.


def diagnose_one(job: ScriptedJob) -> Verdict:
    (verdict,) = job.list_due_verdicts()
    return verdict


def run_loop(job: ScriptedJob, rank: int, steps: int, skips: int | None = None) -> None:
    """Three all-reduces a step, at lines 1 to 3; the second one of step ``skips`` is left out."""
    for step in range(steps):
        for line in (1, 2, 3):
            if not (step == skips and line == 2):
                job.make_call(rank, line=line, done=True)


def job_with_skipped_call(ranks: int = 3) -> ScriptedJob:
    """Rank 1 skipped call 8 of 30, and has gone on to its own code."""
    job = ScriptedJob(ranks)
    for rank in range(ranks):
        run_loop(job, rank, 10, skips=2 if rank == 1 else None)
    for rank in range(ranks):
        if rank != 1:
            job.complete_calls(rank)
            job.ranks[rank].streams["world"].completed -= 1
    job.send_heartbeats()
    return job


def test_missing_rank_behind_since_earlier_call() -> None:
    job = job_with_skipped_call()
    job.advance_time(11)
    verdict = diagnose_one(job)
    assert (verdict.kind, verdict.culprits) == (VerdictKind.MISSING_RANK, (1,))
    assert verdict.summary.endswith(
        "; it has been 1 call behind the others since call 8 (all_reduce, train.py:2), which it never"
        " made"
    )
    assert verdict.divergence is not None
    assert verdict.divergence.since_seq == 8
    assert [side.ranks for side in verdict.divergence.sides] == [(0, 2), (1,)]
    assert verdict.divergence.note.startswith("rank 1 has been 1 call behind")


def test_of_two_ranks_the_peer_is_named() -> None:
    job = job_with_skipped_call(2)
    job.advance_time(11)
    assert "it has been 1 call behind rank 0 since call 8" in diagnose_one(job).summary


def test_calls_are_fetched_only_after_a_long_wait() -> None:
    job = job_with_skipped_call()
    job.advance_time(2)
    job.send_heartbeats()
    # Only the hash of the newest call that all have made is requested before.
    requests = [r for r in job.run_diagnosis().requests if not r.stacks]
    assert [(r.from_seq, r.to_seq) for r in requests] == [(29, 29)]


def test_late_rank_has_no_divergence() -> None:
    job = ScriptedJob(3)
    for rank in range(3):
        run_loop(job, rank, 4)
    job.make_calls(except_ranks=(1,), done=False, line=1)
    job.advance_time(11)
    verdict = diagnose_one(job)
    assert verdict.divergence is None
    assert "behind" not in verdict.summary


def test_mismatch_reports_skipped_call() -> None:
    job = ScriptedJob(4)
    for _ in range(5):
        job.make_calls("all_reduce", line=1)
        job.make_calls("broadcast", line=2)
    job.make_calls("all_reduce", except_ranks=(1,), done=False, line=1)
    job.make_call(1, "broadcast", line=2)
    job.advance_time(2)
    verdict = diagnose_one(job)
    assert verdict.kind is VerdictKind.MISMATCH
    assert verdict.summary.endswith(
        "; it skipped call 11 (all_reduce, train.py:1) or made call 10 again"
    ), "in rounds of two, either"
    assert verdict.divergence is not None
    assert verdict.divergence.since_seq is None
    assert [tuple(c and c.seq for c in row.calls) for row in verdict.divergence.rows][-2:] == [
        (11, None),
        (None, 11),
    ]


def test_call_skipped_in_long_round_is_not_a_repeated_call() -> None:
    job = ScriptedJob(3)
    for _ in range(2):
        for line in range(1, 13):
            job.make_calls(line=line, shape=(line,))
    job.make_calls(except_ranks=(1,), done=False, line=1, shape=(1,))
    job.make_call(1, line=2, shape=(2,))
    job.advance_time(2)
    verdict = diagnose_one(job)
    assert verdict.summary.endswith("; it skipped call 25 (all_reduce, train.py:1)")
    assert verdict.divergence is not None
    assert verdict.divergence.since_seq == 25


@pytest.mark.parametrize(
    "end", ["raised in the call", "raised elsewhere", "raised and called on", "alive"]
)
def test_raised_call_counts_as_swallowed_only_if_script_continued(end: str) -> None:
    """Rank 1's call 6 differs from its peers', and raises there."""
    job = ScriptedJob(3)
    for _ in range(5):
        job.make_calls(line=1)
    for rank in range(3):
        job.make_call(rank, shape=(3 if rank == 1 else 8,), line=1)
    place = job.ranks[1].streams["world"]
    place.calls[5], place.completed = replace(place.calls[5], raised=True), 6
    if end == "raised and called on":
        job.make_call(1, "barrier", line=9)
    if end != "alive":
        site = Site(file="train.py", line=1 if end == "raised in the call" else 30, function="step")
        job.end_process(
            1,
            status=1,
            exception=ExceptionInfo(type="RuntimeError", message="bad size\nat all", site=site),
        )
    job.advance_time(2)
    note = diagnose_one(job).summary.split("; ")[-1]
    if end == "raised in the call":
        assert note == "it failed in call 6 (all_reduce, train.py:1) with RuntimeError: bad size"
    elif end == "raised elsewhere":
        assert note == "it failed in call 6 (all_reduce, train.py:1) with an exception"
    else:
        assert note.startswith(
            "it has been 1 call behind the others since call 6 (all_reduce, train.py:1), which raised"
        )


@pytest.mark.parametrize("swallowed", [True, False])
def test_call_that_raised_on_one_rank(swallowed: bool) -> None:
    """Ranks 0 and 2 are in call 10; rank 1 is a call further, since its call 6 matched no other rank's."""
    job = ScriptedJob(3)
    for _ in range(9):
        job.make_calls(line=1)
    job.make_calls(line=1, done=False)
    job.complete_calls(1)
    job.make_call(1, "barrier", line=9)
    if swallowed:
        place = job.ranks[1].streams["world"]
        place.calls[5] = replace(place.calls[5], raised=True)
    job.advance_time(11)
    verdict = diagnose_one(job)
    if swallowed:
        assert (verdict.kind, verdict.culprits, verdict.waiting) == (
            VerdictKind.MISMATCH,
            (1,),
            (0, 2),
        )
        assert (
            "for rank 1; it has been 1 call behind the others since call 6 (all_reduce, train.py:1),"
            " which raised" in verdict.summary
        )
    else:
        assert (verdict.kind, verdict.culprits) == (VerdictKind.NO_PROGRESS, ())
