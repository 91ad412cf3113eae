"""Sampling selects the same calls on every rank and excludes no call permanently."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from hangwatch.ring.sampling import (
    ALWAYS_CHECKED_CALLS,
    check_level,
    min_check_level,
    sample_calls,
    sampling_level,
    thin_checks,
)


def test_each_level_holds_half_of_the_one_below() -> None:
    levels = [check_level(seq) for seq in range(ALWAYS_CHECKED_CALLS + 1, 100_001)]
    for height in range(1, 9):
        share = sum(level >= height for level in levels) / len(levels)
        assert abs(share * 2**height - 1) < 0.1, height


def test_every_position_in_a_step_is_sampled_eventually() -> None:
    for calls_a_step in (1, 2, 4, 8, 16, 24, 32, 64):
        seen = {
            seq % calls_a_step
            for seq in range(ALWAYS_CHECKED_CALLS + 1, 20_000)
            if check_level(seq) >= 4
        }
        assert seen == set(range(calls_a_step))


def test_larger_calls_are_sampled_less_often() -> None:
    assert [min_check_level(every, 0, 64) for every in (1, 2, 3, 16, 17)] == [0, 1, 2, 4, 5]
    assert [min_check_level(16, size, 64) for size in (1, 64, 65, 128, 129, 1024)] == [
        4,
        4,
        5,
        5,
        6,
        8,
    ]


@settings(deadline=None)
@given(st.sets(st.integers(1, 5000), min_size=1), st.integers(1, 16))
def test_highest_levels_are_thinned(seqs: set[int], most: int) -> None:
    kept = thin_checks(sorted(seqs), most)
    assert 0 < len(kept) <= most and kept <= seqs
    assert min(map(check_level, kept)) >= max(map(check_level, seqs - kept), default=0)


def test_ranks_reporting_at_different_times_share_samples() -> None:
    """Nearly always: all samples of one rank may precede the first call that the other reports."""
    apart = tried = 0
    for start in range(9, 3000, 23):
        for length in (16, 50, 120, 400):
            for shift in (0, 7, 25, 60):
                one = thin_checks(list(range(start, start + length)), 8)
                other = thin_checks(list(range(start + shift % (length // 2), start + length)), 8)
                apart += not one & other
                tried += 1
    assert tried > 2000 and apart < tried / 100


def test_ranks_sample_same_calls_and_every_call_of_a_step() -> None:
    fine, coarse = sample_calls(range(900, 1000), 40), sample_calls(range(500, 1000), 8)
    assert {seq for seq in coarse if seq >= 900} <= set(fine)
    assert len(fine) <= 40 and len(coarse) <= 8 and coarse
    for period in (2, 13, 32, 34):
        hits = [0] * period
        for seq in range(1, 100 * 64 * period):
            hits[seq % period] += sampling_level(seq) >= 6
        assert min(hits) >= 50 and max(hits) <= 200, "about 100 of each call of a step that repeats"
