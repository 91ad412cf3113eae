"""Samples, sizes, histograms and bandwidths of calls, and stragglers on clocks that differ."""

from __future__ import annotations

import random

import pytest

from hangwatch.model.calls import Signature
from hangwatch.performance.distributions import (
    DurationHistogram,
    compute_bandwidths,
    full_size,
    is_even_split,
)
from hangwatch.performance.stragglers import (
    Arrival,
    CallSkew,
    LatenessStats,
    find_latecomers,
    find_straggler,
    find_straggler_causes,
    measure_skew,
)
from hangwatch.protocol.heartbeat import ClockOffset
from hangwatch.report.performance import format_straggler


@pytest.mark.parametrize(
    ("op", "recorded", "size", "factor"),
    # n = 8; the sizes are what nccl-tests prints as such: the whole array of an all-gather or a
    # reduce-scatter
    [
        ("all_reduce", 800, 800, 1.75),
        ("all_reduce_coalesced", 800, 800, 1.75),
        ("reduce_scatter_tensor", 800, 800, 0.875),  # its input
        ("reduce_scatter", 800, 800, 0.875),
        ("all_gather_into_tensor", 100, 800, 0.875),  # its input
        ("all_gather", 800, 800, 0.875),  # its list of outputs
        ("all_to_all_single", 800, 800, 0.875),
        ("gather", 100, 800, 0.875),
        ("scatter", 100, 800, 0.875),
        ("broadcast", 800, 800, 1.0),
        ("reduce", 800, 800, 1.0),
        ("send", 800, 800, 1.0),
    ],
)
def test_bandwidths_are_those_of_nccl_tests(
    op: str, recorded: int, size: int, factor: float
) -> None:
    assert full_size(op, recorded, 8) == size
    assert compute_bandwidths(op, 8, 4e9, 2.0) == (2.0, 2.0 * factor)


def test_no_bandwidth_without_data() -> None:
    assert compute_bandwidths("barrier", 8, 4e9, 1.0) is None
    assert compute_bandwidths("my_own_put", 8, 4e9, 1.0) is None
    assert compute_bandwidths("all_reduce", 8, 4e9, None) is None
    assert is_even_split(Signature(op="all_to_all_single", splits=((8,), (8,))))
    assert not is_even_split(Signature(op="all_to_all_single", splits=((3, 5), (4, 4))))


def test_quantiles_are_right_within_a_bucket() -> None:
    histogram = DurationHistogram()
    values = [random.Random(1).lognormvariate(6, 2) for _ in range(1)] + [
        1.5 * k for k in range(1, 1001)
    ]
    for us in values:
        histogram.add_duration(us)
    for share, exact in ((0.5, 750e-6), (0.95, 1425e-6)):
        assert (quantile := histogram.quantile(share)) is not None and abs(
            quantile / exact - 1
        ) < 0.05
    assert DurationHistogram().quantile(0.5) is None
    one = DurationHistogram()
    one.add_duration(7.0)
    assert one.quantile(0.95) == 7.0e-6, "never more than the longest"


def test_clock_uncertainty_is_the_shortest_round_trip() -> None:
    offset, ahead = ClockOffset(), 5000.0
    assert offset.bounds is None
    for at, there, back in ((0, 0.001, 0.050), (1, 0.050, 0.001), (2, 0.020, 0.020)):
        offset.add_exchange(at, at + there + ahead, at + there + back)
    low, high = offset.bounds or (0, 0)
    assert low <= ahead <= high and high - low < 0.004, (
        "the quickest in either direction, not the quickest of both"
    )
    offset.add_exchange(10.0, 10.0 + 70.0, 10.002)
    assert offset.bounds == (pytest.approx(69.998), pytest.approx(70.0)), "another server"


def make_arrivals(*at: float, hosts: str = "", error: float = 0.0) -> list[Arrival]:
    return [
        Arrival(rank=r, arrived_at=a, error_s=error, host=hosts[r] if hosts else "a")
        for r, a in enumerate(at)
    ]


def test_no_rank_is_last_within_clock_uncertainty() -> None:
    call = measure_skew(1, make_arrivals(0.0, 0.001, 0.004))
    assert (call.last_ranks, call.lag_s, call.spread_s, call.error_s) == (
        {2},
        pytest.approx(0.003),
        pytest.approx(0.004),
        0.0,
    )
    unsure = measure_skew(1, make_arrivals(0.0, 0.001, 0.004, hosts="aab", error=0.002))
    assert (unsure.last_ranks, unsure.lag_s, unsure.spread_s) == (set(), 0.0, 0.0)
    assert measure_skew(
        1, make_arrivals(0.0, 0.001, 0.009, hosts="aab", error=0.002)
    ).last_ranks == {2}
    assert (
        measure_skew(1, make_arrivals(0.020, 0.0205, 0.0, hosts="aba", error=0.002)).last_ranks
        == set()
    )
    assert measure_skew(1, make_arrivals(1.0, 1.0)).last_ranks == set()


def describe_straggler(
    late: LatenessStats, group: str, error_s: float, *, queued: bool = False
) -> str:
    return format_straggler(
        late.ranks,
        group,
        share=late.share,
        lag_s=late.lag_s,
        error_s=error_s,
        waited_share=None if queued else late.waited_share,
    )


def test_several_may_be_late_together() -> None:
    call = measure_skew(1, make_arrivals(0.0, 0.002, 0.050, 0.053, hosts="aabb", error=0.004))
    assert (call.last_ranks, call.lag_s) == ({2, 3}, pytest.approx(0.048))
    assert measure_skew(1, make_arrivals(0.0, 0.050, 0.052, 0.053)).last_ranks == {
        2,
        3,
    }, "never the majority: one early rank makes no stragglers"
    calls = [
        measure_skew(
            n,
            make_arrivals(
                0.1 * n, 0.1 * n + 0.001, *(0.1 * n + 0.05 + 0.001 * ((n + r) % 2) for r in (0, 1))
            ),
        )
        for n in range(90)
    ]
    straggler = find_straggler(calls, find_latecomers(calls))
    assert straggler is not None and straggler.ranks == {2, 3}
    assert (
        "ranks 2-3 come last in 100 % of the calls of dp, 49 ms after the others, which wait for"
        " them 49 %" in describe_straggler(straggler, "dp", 0)
    )


def judge_calls(
    lags: list[tuple[int | None, float]], every: float = 0.1, step: int = 4
) -> list[CallSkew]:
    return [
        CallSkew(
            seq=1 + step * n,
            last_arrival_at=every * step * n,
            last_ranks=frozenset(last),
            lag_s=lag,
            lost_s=lag,
            spread_s=lag,
            error_s=0.0,
        )
        for n, (last, lag) in enumerate(([] if rank is None else [rank], lag) for rank, lag in lags)
    ]


def test_straggler_is_awaited_repeatedly() -> None:
    calls = judge_calls([(3, 0.05) if n % 10 else (1, 0.001) for n in range(60)])
    late = find_latecomers(calls)
    straggler = find_straggler(calls, late)
    assert straggler is not None and straggler.ranks == late[0].ranks == {3}
    assert straggler.share == 0.9 and straggler.lag_s == 0.05
    assert straggler.waited_share == pytest.approx(0.45, rel=0.02), "0.9 x 50 ms in each 100 ms"
    assert describe_straggler(straggler, "dp_1", 0.0).startswith(
        "rank 3 comes last in 90 % of the calls of dp_1, 50 ms after the others, which wait"
    )
    assert "50 ms (± 5.0 ms) after" in describe_straggler(straggler, "dp_1", 0.005)
    assert describe_straggler(straggler, "dp_1", 0.0, queued=True).endswith(
        "50 ms after the others, as their threads make them"
    )


@pytest.mark.parametrize(
    "lags",
    [
        [(n % 4, 0.05) for n in range(200)],  # everybody in turn
        [(3, 0.0004)] * 200,  # always the same rank, but by too little to matter
        [(3, 0.05)] * 20,  # too few
        [(n % 4, 0.001) for n in range(199)] + [(3, 60.0)],  # a checkpoint
        [(None, 0.0)] * 200,  # below the clocks' uncertainty
        [(3, 0.01), (2, 0.01)] * 100,  # two of them
    ],
)
def test_no_straggler(lags: list[tuple[int | None, float]]) -> None:
    calls = judge_calls(lags)
    assert find_straggler(calls, find_latecomers(calls)) is None


def test_straggler_late_in_one_call_of_eight_is_found() -> None:
    rng = random.Random(4)
    calls = judge_calls(
        [(3, 0.08) if n % 8 == 0 else (rng.randrange(4), 0.0002) for n in range(256)], every=0.02
    )
    straggler = find_straggler(calls, find_latecomers(calls))
    assert straggler is not None and straggler.ranks == {3}


def test_overlapping_waits_count_once() -> None:
    """Each step of 100 ms ends with ten immediate calls; rank 2 is 50 ms late for all of them."""
    calls = []
    for seq in range(1, 801):
        at = 0.1 * (seq // 10) + 0.0001 * (seq % 10)
        since = 0.0991 if seq % 10 == 0 else 0.0001
        calls.append(
            measure_skew(
                seq,
                [
                    Arrival(rank, at + 0.05 * (rank == 2), since_previous_s=since)
                    for rank in range(4)
                ],
            )
        )
    straggler = find_straggler(calls, find_latecomers(calls))
    assert (
        straggler is not None and straggler.ranks == {2} and straggler.lag_s == pytest.approx(0.05)
    )
    assert 0.4 < straggler.waited_share < 0.6, "of each step 50 ms"


def test_rank_that_waited_for_straggler_is_excused_elsewhere() -> None:
    calls = judge_calls([(3, 0.05)] * 60)
    three = find_latecomers(calls)[0]
    two = find_latecomers(judge_calls([(2, 0.05)] * 60))[0]
    tensor, data, world = frozenset({2, 3}), frozenset({0, 2}), frozenset({0, 1, 2, 3})
    assert find_straggler_causes({0: (three, tensor), 1: (two, data)}) == {1: {3}}
    assert find_straggler_causes({0: (three, world), 1: (two, data)}) == {}, (
        "all of its peers waited as well"
    )
    assert find_straggler_causes({0: (three, tensor), 1: (three, frozenset({1, 3}))}) == {}
