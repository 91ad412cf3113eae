"""How calls perform, in ``/metrics``. Labels are jobs and torch's operations: their number is
bounded.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from prometheus_client.core import HistogramMetricFamily, Metric

from hangwatch.performance.distributions import BUCKETS_PER_OCTAVE, DurationHistogram
from hangwatch.tracking.attempt import Attempt

from ..performance.job_totals import JobTotals
from ..performance.views import list_stragglers
from .app_state import AppState
from .metric_families import HISTOGRAMS, JOB, make_metric
from .performance_board import get_ranked_groups

BUCKET_EXPONENTS = range(4, 26, 2)  # powers of two of microseconds: from 16 µs to 17 s


def collect_metrics(
    live: AppState, jobs: Iterable[Attempt], labels: Mapping[str, str]
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
    totals_by_op = {
        (job, op): totals
        for job, job_totals in totals_by_job.items()
        for op, totals in job_totals.operations.items()
    }
    calls = {key: totals.calls for key, totals in totals_by_op.items()}
    yield make_metric("hangwatch_calls", calls, JOB, "op")
    sizes = {key: totals.bytes for key, totals in totals_by_op.items()}
    yield make_metric("hangwatch_call_bytes", sizes, JOB, "op")
    latencies = [(key, totals.latency) for key, totals in totals_by_op.items()]
    yield _make_histogram("hangwatch_call_seconds", latencies, JOB, "op")
    spreads = [((job,), job_totals.spread) for job, job_totals in totals_by_job.items()]
    yield _make_histogram("hangwatch_arrival_spread_seconds", spreads, JOB)
    yield make_metric("hangwatch_straggler_waited_ratio", waited_ratios, JOB)


def _make_histogram(
    name: str, histograms: Iterable[tuple[tuple[str, ...], DurationHistogram]], *labels: str
) -> Metric:
    """One of `HISTOGRAMS`, by label values, without those that are empty."""
    family = HistogramMetricFamily(name, HISTOGRAMS[name], labels=labels)
    for label_values, histogram in histograms:
        if histogram.counts:
            family.add_metric(label_values, _build_buckets(histogram), None)
    return family


def _build_buckets(distribution: DurationHistogram) -> list[tuple[str, float]]:
    """Cumulative counts by upper bound in seconds."""
    buckets: list[tuple[str, float]] = []
    for exponent in BUCKET_EXPONENTS:
        last_index = exponent * BUCKETS_PER_OCTAVE
        count = sum(n for index, n in distribution.counts.items() if index <= last_index)
        buckets.append((f"{2**exponent / 1e6:g}", float(count)))
    return [*buckets, ("+Inf", float(distribution.total_count))]
