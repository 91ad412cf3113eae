"""``/metrics``: computed from the live state at each scrape, so that no gauge can be out of date.

The number of series is bounded: only the newest jobs have some of their own, no rank or host has.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from prometheus_client import ProcessCollector, core
from prometheus_client.registry import Collector

from hangwatch import __version__
from hangwatch.model.calls import StreamKind
from hangwatch.model.ranks import RankState
from hangwatch.performance.distributions import BUCKETS_PER_OCTAVE, DurationHistogram
from hangwatch.tracking.attempt import Attempt

from ..core.limits import LIMITS
from ..incidents.registry import is_hang
from ..monitor.watch import Watch
from ..performance.views import list_stragglers
from .app_state import AppState

MAX_JOBS_SHOWN = 100
OTHERS = "(others)"  # the label of all older jobs together
BUCKET_EXPONENTS = range(4, 26, 2)  # powers of two of microseconds: from 16 µs to 17 s
REPORTING_WITHIN_S = 60.0  # the age of the last heartbeat of an agent that counts as reporting
JOB = "training_job"  # a label's name; `job` is the label that Prometheus gives each target

GAUGES = {
    "hangwatch_ranks": "Ranks of a job's latest attempt by state",
    "hangwatch_job_step": "Smallest training step of a job's ranks",
    "hangwatch_job_steps_per_second": "Steps of a job in the last minute",
    "hangwatch_heartbeat_age_seconds": (
        "Time since the last report of the rank of a job that has been silent longest"
    ),
    "hangwatch_incidents_open": "Open incidents of jobs in memory",
    "hangwatch_stall_seconds": "Age of the oldest open hang of a job, or 0",
    "hangwatch_straggler_waited_ratio": (
        "Share of the time in which ranks wait for a straggler, or 0"
    ),
    "hangwatch_agents": "Node agents that reported in the last minute",
    "hangwatch_agents_memory_bytes": "Resident memory of all node agents together",
    "hangwatch_agent_memory_max_bytes": "Resident memory of the largest node agent",
    "hangwatch_agents_answers_dropped": "Replies that node agents dropped for lack of space",
    "hangwatch_build_info": "This server",
    "hangwatch_event_loop_lag_seconds": "How late the server's event loop runs",
}
COUNTERS = {
    "hangwatch_collectives": "Collectives entered by all ranks of a job",
    "hangwatch_records_dropped": "Calls that a recorder could not record",
    "hangwatch_overflows": (
        "Calls with an Inf in 16 bits or under loss scaling, of jobs with HANGWATCH_CHECKS"
    ),
    "hangwatch_calls": "Calls by all ranks",
    "hangwatch_call_bytes": "Sizes of all ranks' calls, as nccl-tests count them",
    "hangwatch_agents_cpu_seconds": "CPU time of node agents and their helpers",
    "hangwatch_heartbeats": "Heartbeats applied",
    "hangwatch_heartbeats_malformed": "Heartbeats that are malformed",
    "hangwatch_heartbeats_refused": "Heartbeats refused under overload, which are sent again",
    "hangwatch_foreign_reports": (
        "Reports of processes that were dropped because another node agent reports them"
    ),
    "hangwatch_unrequested_replies": "Stacks, calls and hardware that were not requested, and dropped",
    "hangwatch_stacks_dropped": "Stacks of the job with the most that were dropped for lack of memory",
    "hangwatch_resyncs": "Requests to node agents to report everything again",
    "hangwatch_incidents_opened": "Incidents opened since the start",
    "hangwatch_diagnoses": "Rounds of diagnosis",
    "hangwatch_diagnosis_failures": "Rounds that failed because of an error in hangwatch",
    "hangwatch_diagnosis_seconds": "Time spent on diagnosis",
    "hangwatch_task_failures": "Failures of background tasks, which were started again",
    "hangwatch_store_failures": "Failed writes of incidents",
    "hangwatch_limit_refusals": "Requests that exceeded a limit",
    "hangwatch_alerts_sent": "Messages that an alert channel accepted",
    "hangwatch_alerts_failed": "Messages that an alert channel did not accept",
}
HISTOGRAMS = {
    "hangwatch_call_seconds": "From entry to completion, of calls whose completion is known",
    "hangwatch_arrival_spread_seconds": (
        "From the first to the last arrival at a call of a group, of those compared"
    ),
}

# Attempts with the labels of their jobs, which several may share.
LabelledAttempts = Sequence[tuple[Attempt, str]]


@dataclass(frozen=True, slots=True, eq=False)
class StateCollector(Collector):
    """All metrics."""

    state: AppState

    def collect(self) -> Iterator[core.Metric]:
        state = self.state
        jobs = [
            (attempt, attempt.job if place < MAX_JOBS_SHOWN else OTHERS)
            for place, attempt in enumerate(state.list_latest_attempts())
        ]
        yield from _collect_progress(state, jobs)
        yield from _collect_incidents(state, jobs)
        yield from _collect_performance(state, jobs)
        yield from _collect_server(state.watch, state.now())
        yield make_metric("hangwatch_task_failures", state.tasks.count_failures(), "task")
        yield from ProcessCollector(registry=None).collect()


def _collect_progress(state: AppState, jobs: LabelledAttempts) -> Iterator[core.Metric]:
    now = state.now()
    ranks: Counter[tuple[str, str]] = Counter()
    steps = {}
    paces = {}
    ages: dict[str, float] = {}
    calls: Counter[str] = Counter()
    dropped: Counter[str] = Counter()
    overflows: Counter[str] = Counter()
    for attempt, job in jobs:
        by_state = Counter(state.get_rank_states(attempt).values())
        ranks.update({(job, state.value): by_state[state] for state in RankState})
        processes = list(attempt.processes.values())
        process_ages = [now - p.reports.agent_seen_at for p in processes if p.is_alive]
        ages[job] = max([ages.get(job, 0.0), *process_ages])
        streams = (stream for p in processes for stream in p.streams.values())
        calls[job] += sum(s.entered for s in streams if s.kind is StreamKind.COLLECTIVE)
        dropped[job] += sum(p.dropped_records for p in processes)
        overflows[job] += sum(p.overflows for p in processes)
        if job == OTHERS:
            continue
        reached = [p.step for p in processes if p.step is not None]
        if reached:
            steps[job] = min(reached)
        pace = state.watch.diagnoser.get_record(attempt).steps_per_s
        if pace is not None:
            paces[job] = pace
    yield make_metric("hangwatch_ranks", ranks, JOB, "state")
    yield make_metric("hangwatch_job_step", steps, JOB)
    yield make_metric("hangwatch_job_steps_per_second", paces, JOB)
    yield make_metric("hangwatch_heartbeat_age_seconds", ages, JOB)
    yield make_metric("hangwatch_collectives", calls, JOB)
    yield make_metric("hangwatch_records_dropped", dropped, JOB)
    yield make_metric("hangwatch_overflows", overflows, JOB)


def _collect_incidents(state: AppState, jobs: LabelledAttempts) -> Iterator[core.Metric]:
    labels = {attempt.job: job for attempt, job in jobs}
    counts: Counter[tuple[str, str, str]] = Counter()
    ages = dict.fromkeys(labels.values(), 0.0)
    for record in state.shared.incidents.records.values():
        incident = record.incident
        if record.is_live and incident.job in labels:
            job = labels[incident.job]
            counts[job, incident.kind.value, incident.severity.value] += 1
            if is_hang(incident):
                ages[job] = max(ages[job], state.now() - record.onset_at)
    yield make_metric("hangwatch_incidents_open", counts, JOB, "kind", "severity")
    yield make_metric("hangwatch_stall_seconds", ages, JOB)


def _collect_performance(state: AppState, jobs: LabelledAttempts) -> Iterator[core.Metric]:
    calls: Counter[tuple[str, str]] = Counter()
    sizes: Counter[tuple[str, str]] = Counter()
    latencies: defaultdict[tuple[str, str], DurationHistogram] = defaultdict(DurationHistogram)
    spreads: defaultdict[str, DurationHistogram] = defaultdict(DurationHistogram)
    waited_ratios: dict[str, float] = {}
    for attempt, job in jobs:
        job_totals = state.shared.performance.get_job(attempt)
        for op, totals in job_totals.operations.items():
            calls[job, op] += totals.calls
            sizes[job, op] += totals.bytes
            latency = totals.latency
            latencies[job, op].merge_counts(latency.counts.items(), latency.longest_us)
        for group in job_totals.groups.values():
            spread = group.arrivals.spread
            spreads[job].merge_counts(spread.counts.items(), spread.longest_us)
        stragglers = list_stragglers(state.get_ranked_groups(attempt))
        shares = [straggler.waited_share or 0.0 for straggler in stragglers]
        waited_ratios[job] = max([waited_ratios.get(job, 0.0), *shares])
    yield make_metric("hangwatch_calls", calls, JOB, "op")
    yield make_metric("hangwatch_call_bytes", sizes, JOB, "op")
    yield _make_histogram("hangwatch_call_seconds", latencies, JOB, "op")
    yield _make_histogram("hangwatch_arrival_spread_seconds", spreads, JOB)
    yield make_metric("hangwatch_straggler_waited_ratio", waited_ratios, JOB)


def make_metric(
    name: str, values: float | Mapping[Any, float], *labels: str
) -> core.CounterMetricFamily | core.GaugeMetricFamily:
    """One of `GAUGES` or `COUNTERS`, with one value or one for each combination of label values."""
    family: core.CounterMetricFamily | core.GaugeMetricFamily
    if name in GAUGES:
        family = core.GaugeMetricFamily(name, GAUGES[name], labels=labels)
    else:
        family = core.CounterMetricFamily(name, COUNTERS[name], labels=labels)
    if not isinstance(values, Mapping):
        values = {(): values}
    for key, value in values.items():
        family.add_metric([key] if isinstance(key, str) else key, value)
    return family


def _make_histogram(
    name: str, histograms: Mapping[Any, DurationHistogram], *labels: str
) -> core.Metric:
    """One of `HISTOGRAMS`: cumulative counts by upper bound in seconds, of non-empty histograms."""
    family = core.HistogramMetricFamily(name, HISTOGRAMS[name], labels=labels)
    for key, histogram in histograms.items():
        if not histogram.counts:
            continue
        buckets = []
        for exponent in BUCKET_EXPONENTS:
            last_index = exponent * BUCKETS_PER_OCTAVE
            count = sum(n for index, n in histogram.counts.items() if index <= last_index)
            buckets.append((f"{2**exponent / 1e6:g}", float(count)))
        buckets.append(("+Inf", float(histogram.total_count)))
        family.add_metric([key] if isinstance(key, str) else key, buckets, None)
    return family


def _collect_server(watch: Watch, now: float) -> Iterator[core.Metric]:
    """The metrics of node agents and of the server itself."""
    oldest_at = now - REPORTING_WITHIN_S
    reporting = [agent for agent in watch.shared.agents.values() if agent.last_seen_at > oldest_at]
    costs = [agent.cost for agent in reporting if agent.cost is not None]
    memory = [cost.memory for cost in costs]
    counters = watch.shared.counters
    load = watch.shared.load
    values = {
        "hangwatch_agents_cpu_seconds": watch.shared.agents.cpu_s,
        "hangwatch_agents": len(reporting),
        "hangwatch_agents_memory_bytes": sum(memory),
        "hangwatch_agent_memory_max_bytes": max(memory, default=0),
        "hangwatch_agents_answers_dropped": sum(cost.dropped for cost in costs),
        "hangwatch_event_loop_lag_seconds": max(load.late_s, load.waited_s),
        "hangwatch_heartbeats": counters.heartbeats,
        "hangwatch_heartbeats_malformed": counters.malformed,
        "hangwatch_heartbeats_refused": counters.refused,
        "hangwatch_foreign_reports": watch.shared.fleet.foreign_reports,
        "hangwatch_unrequested_replies": counters.unrequested,
        "hangwatch_stacks_dropped": counters.dropped_samples,
        "hangwatch_resyncs": counters.resyncs,
        "hangwatch_incidents_opened": watch.shared.incidents.opened_count,
        "hangwatch_diagnoses": counters.diagnoses,
        "hangwatch_diagnosis_failures": watch.shared.failures.count,
        "hangwatch_diagnosis_seconds": counters.diagnosis_s,
        "hangwatch_store_failures": watch.persistence.failures,
    }
    for name, value in values.items():
        yield make_metric(name, value)
    yield make_metric("hangwatch_build_info", {__version__: 1}, "version")
    alerter = watch.persistence.alerter
    refused = counters.refusals_by_limit + watch.shared.incidents.refusals + alerter.refusals
    refusals = {limit.name: refused[limit.name] for limit in LIMITS}
    yield make_metric("hangwatch_limit_refusals", refusals, "limit")
    sent: Counter[str] = Counter()
    failed: Counter[str] = Counter()
    for queue in alerter.queues.values():  # two channels may have the same name
        sent[queue.channel.name] += queue.sent
        failed[queue.channel.name] += queue.failed
    yield make_metric("hangwatch_alerts_sent", sent, "channel")
    yield make_metric("hangwatch_alerts_failed", failed, "channel")
