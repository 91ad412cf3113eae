"""Two ranks' calls aligned: which call was left out, added, swapped or raised, since when, and when
that cannot be told.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from hangwatch.diagnosis.alignment import align, left_out, parted, shift, shown, swapped, window
from hangwatch.model.calls import Call, Site
from hangwatch.model.kinds import VerdictKind
from hangwatch.model.ranks import ExceptionInfo
from hangwatch.model.verdicts import Verdict
from tests.unit.jobs import Job, signature

_OPS = {"a": "all_reduce", "b": "broadcast", "g": "all_gather"}


def calls(text: str, first: int = 1) -> list[Call]:
    """``a1 b2``: an all_reduce at line 1, then a broadcast at line 2."""
    return [
        Call(
            seq=seq,
            signature=signature(_OPS[word[0]]),
            site=Site(file="train.py", line=int(word[1:]), function="step"),
        )
        for seq, word in enumerate(text.split(), first)
    ]


def rows(left: str, right: str, short: bool = False) -> list[tuple[int | None, int | None]]:
    found = align(calls(left), calls(right), short)
    return [(one and one.seq, other and other.seq) for one, other in found.pairs]


def told(
    left: str, right: str, *, first: int = 1, short: bool = False
) -> tuple[int, int | None, int] | None:
    """(count, first, last) of the shift."""
    found = shift(align(calls(left, first), calls(right, first), short))
    return found and (found.count, found.first and found.first.seq, found.last.seq)


def test_equal_sequences_do_not_part() -> None:
    assert not parted(align(calls("a1 b2 a1"), calls("a1 b2 a1")).pairs)
    assert align([], calls("a1")).pairs == ((None, calls("a1")[0]),)


def test_a_rank_that_is_not_yet_as_far_does_not_part() -> None:
    assert not parted(align(calls("a1 b2 a1 b2"), calls("a1 b2")).pairs)
    assert told("a1 b2 a1 b2", "a1 b2", short=True) is None


def test_lines_that_differ_by_rank_are_no_divergence() -> None:
    found = align(calls("a1 a9 a1 a9 a1 a9"), calls("a1 a2 a1 a2 a1"))
    assert not parted(found.pairs)
    assert shift(found) is None


def test_a_call_left_out_is_found_though_all_signatures_are_equal() -> None:
    assert told("a1 a2 a3 a1 a2 a3 a1 a2", "a1 a2 a3 a1 a3 a1 a2") == (1, 5, 5)
    assert (5, None) in rows("a1 a2 a3 a1 a2 a3 a1 a2", "a1 a2 a3 a1 a3 a1 a2")


def test_several_calls_left_out_at_once() -> None:
    assert told("a1 a2 a3 a4 a1 a2 a3 a4 a1 a2", "a1 a2 a3 a4 a1 a4 a1 a2") == (2, 6, 6)


def test_an_extra_call_puts_the_rank_ahead() -> None:
    assert told("a1 a2 a3 a1 a2 a3", "a1 a2 a9 a3 a1 a2 a3") == (-1, 3, 3)


def test_one_of_several_equal_calls_is_told_as_a_range() -> None:
    assert told("b2 a1 a1 a1 b2 a1 a1 a1 b2 a1", "b2 a1 a1 a1 b2 a1 a1 b2 a1") == (1, 6, 8)


def test_where_nothing_but_equal_calls_is_made_nothing_is_claimed() -> None:
    assert told("a1 " * 9, "a1 " * 7, short=True) is None


def test_in_rounds_of_two_one_too_few_and_one_too_many_look_alike() -> None:
    left, right = "a1 a2 a1 a2 a1 a2 a1", "a1 a2 a1 a1 a2 a1 a2"
    assert told(left, right) is None
    assert told(left, right, short=True) == (1, 4, 4)


def test_a_shift_from_before_all_that_is_known_says_so() -> None:
    assert told("a1 a2 " * 10, "a2 a1 " * 10, first=50, short=True) == (1, None, 50)
    assert told("a1 a2 a1", "a2 a1 a2", first=50, short=True) is None, "too few to be sure"


def test_a_single_call_that_agrees_after_the_gap_is_no_proof() -> None:
    assert told("a1 a2 a3 b5", "a1 a2 b5", short=True) is None


def test_two_calls_in_another_order() -> None:
    order = swapped(align(calls("a1 b2 g3 a1 b2 g3 a1"), calls("a1 b2 g3 b7 a6 g3 a1")))
    assert order is not None
    assert {order[0].signature.op, order[1].signature.op} in ({"all_reduce"}, {"broadcast"})
    assert abs(order[0].seq - order[1].seq) == 1
    assert swapped(align(calls("a1 b2 a1 b2 a1"), calls("a1 b2 b2 a1 b2"))) is None, (
        "as well a call left out"
    )


def test_what_was_left_out_follows_from_earlier_rounds() -> None:
    left, right = calls("a1 b2 a1 b2 a1"), calls("a1 b2 a1 b2 b2")
    assert [c.seq for c in left_out(left, right, 5)] == [5]
    left, right = calls("a1 b2 g3 a1 b2 g3 a1 b2"), calls("a1 b2 g3 a1 b2 g3 a1 a1")
    assert [(c.seq, c.signature.op) for c in left_out(left, right, 8)] == [
        (8, "broadcast"),
        (6, "all_gather"),
    ]
    assert left_out(calls("a1 b2 a1"), calls("a1 b2 g9"), 3) == [], (
        "a call that was never made before says nothing"
    )


def test_the_window_ends_at_holes() -> None:
    known = {c.seq: c for c in calls("a1 " * 9) if c.seq != 4}
    assert [c.seq for c in window(known, 6)] == [5, 6, 7, 8, 9]
    assert window(known, 4) == []


def test_only_what_is_near_a_difference_is_shown() -> None:
    same = "a1 a2 a3 " * 10
    found = shown(align(calls(same + "a1 a2 a3 a1 a2 a3"), calls(same + "a1 a3 a1 a2 a3")).pairs)
    assert found[0].omitted == 28
    assert [(one and one.seq) for one, _ in (row.calls for row in found)] == [
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
    left, right = calls("a1 a2 a3 " * 42), calls("a1 a2 a3 " * 20 + "a2 a3 " + "a1 a2 a3 " * 20)
    assert shift(align(left, right)) is not None


# In the diagnosis.


def one(job: Job) -> Verdict:
    (verdict,) = job.verdicts()
    return verdict


def loop(job: Job, rank: int, steps: int, skips: int | None = None) -> None:
    """Three all-reduces a step, at lines 1 to 3; the second one of step ``skips`` is left out."""
    for step in range(steps):
        for line in (1, 2, 3):
            if not (step == skips and line == 2):
                job.call(rank, line=line, done=True)


def behind(ranks: int = 3) -> Job:
    """Rank 1 left out call 8 of 30, and has gone on to its own code."""
    job = Job(ranks)
    for rank in range(ranks):
        loop(job, rank, 10, skips=2 if rank == 1 else None)
    for rank in range(ranks):
        if rank != 1:
            job.complete(rank)
            job.ranks[rank].places["world"].completed -= 1
    job.heartbeat()
    return job


def test_a_missing_rank_that_is_behind_since_an_earlier_call() -> None:
    job = behind()
    job.wait(11)
    verdict = one(job)
    assert (verdict.kind, verdict.culprits) == (VerdictKind.MISSING_RANK, (1,))
    assert verdict.summary.endswith(
        "; it is 1 call behind the others since call 8 (all_reduce, train.py:2), which it never made"
    )
    assert verdict.divergence is not None
    assert verdict.divergence.since_seq == 8
    assert verdict.divergence.sides == ((0, 2), (1,))
    assert verdict.divergence.note.startswith("rank 1 is 1 call behind")


def test_of_two_ranks_the_other_is_named() -> None:
    job = behind(2)
    job.wait(11)
    assert "it is 1 call behind rank 0 since call 8" in one(job).summary


def test_calls_are_not_fetched_before_a_wait_is_worth_it() -> None:
    job = behind()
    job.wait(2)
    job.heartbeat()
    assert [r for r in job.diagnose().requests if not r.stacks] == []


def test_a_rank_that_is_only_late_has_no_divergence() -> None:
    job = Job(3)
    for rank in range(3):
        loop(job, rank, 4)
    job.everybody(but=(1,), done=False, line=1)
    job.wait(11)
    verdict = one(job)
    assert verdict.divergence is None
    assert "behind" not in verdict.summary


def test_a_mismatch_says_what_was_left_out() -> None:
    job = Job(4)
    for _ in range(5):
        job.everybody("all_reduce", line=1)
        job.everybody("broadcast", line=2)
    job.everybody("all_reduce", but=(1,), done=False, line=1)
    job.call(1, "broadcast", line=2)
    job.wait(2)
    verdict = one(job)
    assert verdict.kind is VerdictKind.MISMATCH
    assert verdict.summary.endswith(
        "; it left out call 11 (all_reduce, train.py:1) or made call 10 again"
    ), "in rounds of two, either"
    assert verdict.divergence is not None
    assert verdict.divergence.since_seq is None
    assert [tuple(c and c.seq for c in row.calls) for row in verdict.divergence.rows][-2:] == [
        (11, None),
        (None, 11),
    ]


def test_a_call_left_out_of_a_long_round_cannot_be_one_made_again() -> None:
    job = Job(3)
    for _ in range(2):
        for line in range(1, 13):
            job.everybody(line=line, shape=(line,))
    job.everybody(but=(1,), done=False, line=1, shape=(1,))
    job.call(1, line=2, shape=(2,))
    job.wait(2)
    verdict = one(job)
    assert verdict.summary.endswith("; it left out call 25 (all_reduce, train.py:1)")
    assert verdict.divergence is not None
    assert verdict.divergence.since_seq == 25


@pytest.mark.parametrize(
    "end", ["raised in the call", "raised elsewhere", "raised and called on", "alive"]
)
def test_a_call_that_raised_was_only_swallowed_if_its_script_went_on(end: str) -> None:
    """Rank 1's call 6 differs from its peers', and raises there."""
    job = Job(3)
    for _ in range(5):
        job.everybody(line=1)
    for rank in range(3):
        job.call(rank, shape=(3 if rank == 1 else 8,), line=1)
    place = job.ranks[1].places["world"]
    place.calls[5], place.completed = replace(place.calls[5], raised=True), 6
    if end == "raised and called on":
        job.call(1, "barrier", line=9)
    if end != "alive":
        site = Site(file="train.py", line=1 if end == "raised in the call" else 30, function="step")
        job.die(
            1,
            status=1,
            raised=ExceptionInfo(type="RuntimeError", message="bad size\nat all", site=site),
        )
    job.wait(2)
    note = one(job).summary.split("; ")[-1]
    if end == "raised in the call":
        assert note == "it failed in call 6 (all_reduce, train.py:1) with RuntimeError: bad size"
    elif end == "raised elsewhere":
        assert note == "it failed in call 6 (all_reduce, train.py:1) with an exception"
    else:
        assert note.startswith(
            "it is 1 call behind the others since call 6 (all_reduce, train.py:1), which raised"
        )


@pytest.mark.parametrize("swallowed", [True, False])
def test_a_call_that_raised_on_one_rank_alone(swallowed: bool) -> None:
    """Ranks 0 and 2 are in call 10; rank 1 is a call further, since its call 6 met nobody's."""
    job = Job(3)
    for _ in range(9):
        job.everybody(line=1)
    job.everybody(line=1, done=False)
    job.complete(1)
    job.call(1, "barrier", line=9)
    if swallowed:
        place = job.ranks[1].places["world"]
        place.calls[5] = replace(place.calls[5], raised=True)
    job.wait(11)
    verdict = one(job)
    if swallowed:
        assert (verdict.kind, verdict.culprits, verdict.waiting) == (
            VerdictKind.MISMATCH,
            (1,),
            (0, 2),
        )
        assert (
            "for rank 1; it is 1 call behind the others since call 6 (all_reduce, train.py:1), which raised"
            in verdict.summary
        )
    else:
        assert (verdict.kind, verdict.culprits) == (VerdictKind.NO_PROGRESS, ())
