"""The number of calls before a fault is drawn for each program, and moves the numbers in its verdict."""

from __future__ import annotations

from statistics import median

import pytest

from tests.harness.depth import (
    MAX_CALLS,
    MIN_CALLS,
    SEED_VARIABLE,
    choose_seed,
    draw_depth,
    shift_call_numbers,
)
from tests.harness.expected import ExpectedVerdict


def test_depth_depends_on_seed_and_name_only() -> None:
    assert draw_depth("killed", 7) == draw_depth("killed", 7)
    assert draw_depth("killed", 7) != draw_depth("killed", 8)
    assert draw_depth("killed", 7) != draw_depth("nccl/killed", 7)


def test_depths_cover_their_range_evenly_by_logarithm() -> None:
    calls = [draw_depth(f"program{n}", 1).calls for n in range(2000)]
    assert min(calls) >= MIN_CALLS and max(calls) <= MAX_CALLS
    assert min(calls) < 320 and max(calls) > 4700
    assert 1050 < median(calls) < 1450


def test_seed_is_that_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SEED_VARIABLE, "42")
    assert choose_seed() == 42
    monkeypatch.delenv(SEED_VARIABLE)
    assert choose_seed() != choose_seed()


def test_call_numbers_move_by_the_earlier_calls() -> None:
    expected = ExpectedVerdict(
        ranks=4,
        summary=(
            "1 call behind the others since call 8 (all_reduce, program.py:16)",
            "calls 18-20 (",
        ),
        divergence=([8, None], [None, 10]),
    )
    shifted = shift_call_numbers(expected, 500)
    assert shifted.summary == (
        "1 call behind the others since call 508 (all_reduce, program.py:16)",
        "calls 518-520 (",
    )
    assert shifted.divergence == ([508, None], [None, 510])
    assert shift_call_numbers(expected, 0) == expected
