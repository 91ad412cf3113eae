"""How calls perform, in ``/metrics``. Labels are jobs and operations that torch has: their number
is bounded.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from hangwatch.performance.distributions import BUCKETS_PER_OCTAVE, DurationHistogram
from hangwatch.tracking.attempt import Attempt

from ..performance import views as views
from ..performance.aggregation import JobLedger
from .app_state import Live
from .performance_board import ranked

EDGES = range(4, 26, 2)  # powers of two of microseconds: from 16 µs to 17 s


def collect(
    live: Live, jobs: Iterable[Attempt], labels: Mapping[str, str], label: str
) -> Iterator[Metric]:
    """Of the given jobs under their labels, of which several may share one; `label` is their name."""
    together: dict[str, JobLedger] = {}
    waited: dict[str, float] = {}
    for attempt in jobs:
        job = labels[attempt.job]
        together.setdefault(job, JobLedger()).join(live.watch.performance.of(attempt))
        waited[job] = max(
            [
                waited.get(job, 0.0),
                *(s.waited_share or 0.0 for s in views.stragglers(ranked(live, attempt))),
            ]
        )
    calls = CounterMetricFamily("hangwatch_calls", "Calls by all ranks", labels=[label, "op"])
    size = CounterMetricFamily(
        "hangwatch_call_bytes",
        "Sizes of all ranks' calls, as nccl-tests count them",
        labels=[label, "op"],
    )
    took = HistogramMetricFamily(
        "hangwatch_call_seconds",
        "From entry to completion, of calls that told when they were over",
        labels=[label, "op"],
    )
    spread = HistogramMetricFamily(
        "hangwatch_arrival_spread_seconds",
        "From the first to the last arrival at a call of a group, of those compared",
        labels=[label],
    )
    ratio = GaugeMetricFamily(
        "hangwatch_straggler_waited_ratio",
        "Share of the time that is waited for one rank, or 0",
        labels=[label],
    )
    for job, ledger in together.items():
        for op, totals in ledger.ops.items():
            calls.add_metric([job, op], totals.calls)
            size.add_metric([job, op], totals.bytes)
            if totals.latency.counts:
                took.add_metric([job, op], _buckets(totals.latency), None)
        if ledger.spread.counts:
            spread.add_metric([job], _buckets(ledger.spread), None)
        ratio.add_metric([job], waited[job])
    yield from (calls, size, took, spread, ratio)


def _buckets(told: DurationHistogram) -> list[tuple[str, float]]:
    found = [
        (
            f"{2**edge / 1e6:g}",
            float(
                sum(count for at, count in told.counts.items() if at <= edge * BUCKETS_PER_OCTAVE)
            ),
        )
        for edge in EDGES
    ]
    return [*found, ("+Inf", float(told.total_count))]
