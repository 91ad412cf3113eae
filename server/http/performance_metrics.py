"""How calls perform, in ``/metrics``. Labels are jobs and torch's operations: their number is
bounded.
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

from ..performance.job_totals import JobTotals
from ..performance.views import list_stragglers
from .app_state import AppState
from .performance_board import get_ranked_groups

BUCKET_EXPONENTS = range(4, 26, 2)  # powers of two of microseconds: from 16 µs to 17 s


def collect_metrics(
    live: AppState, jobs: Iterable[Attempt], labels: Mapping[str, str], label_name: str
) -> Iterator[Metric]:
    """Metrics of jobs under their ``labels``, which several may share."""
    totals_by_job: dict[str, JobTotals] = {}
    waited_ratios: dict[str, float] = {}
    for attempt in jobs:
        job = labels[attempt.job]
        job_totals = totals_by_job.setdefault(job, JobTotals())
        job_totals.merge_operations(live.watch.performance.get_job(attempt))
        stragglers = list_stragglers(get_ranked_groups(live, attempt))
        shares = [straggler.waited_share or 0.0 for straggler in stragglers]
        waited_ratios[job] = max([waited_ratios.get(job, 0.0), *shares])
    calls = CounterMetricFamily("hangwatch_calls", "Calls by all ranks", labels=[label_name, "op"])
    size = CounterMetricFamily(
        "hangwatch_call_bytes",
        "Sizes of all ranks' calls, as nccl-tests count them",
        labels=[label_name, "op"],
    )
    latency = HistogramMetricFamily(
        "hangwatch_call_seconds",
        "From entry to completion, of calls whose completion is known",
        labels=[label_name, "op"],
    )
    spread = HistogramMetricFamily(
        "hangwatch_arrival_spread_seconds",
        "From the first to the last arrival at a call of a group, of those compared",
        labels=[label_name],
    )
    ratio = GaugeMetricFamily(
        "hangwatch_straggler_waited_ratio",
        "Share of the time in which ranks wait for a straggler, or 0",
        labels=[label_name],
    )
    for job, job_totals in totals_by_job.items():
        for op, totals in job_totals.operations.items():
            calls.add_metric([job, op], totals.calls)
            size.add_metric([job, op], totals.bytes)
            if totals.latency.counts:
                latency.add_metric([job, op], _build_buckets(totals.latency), None)
        if job_totals.spread.counts:
            spread.add_metric([job], _build_buckets(job_totals.spread), None)
        ratio.add_metric([job], waited_ratios[job])
    yield from (calls, size, latency, spread, ratio)


def _build_buckets(distribution: DurationHistogram) -> list[tuple[str, float]]:
    """Cumulative counts by upper bound in seconds."""
    buckets: list[tuple[str, float]] = []
    for exponent in BUCKET_EXPONENTS:
        last_index = exponent * BUCKETS_PER_OCTAVE
        count = sum(n for index, n in distribution.counts.items() if index <= last_index)
        buckets.append((f"{2**exponent / 1e6:g}", float(count)))
    return [*buckets, ("+Inf", float(distribution.total_count))]
