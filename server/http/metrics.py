"""``/metrics``: computed from the live state at each scrape, so that no gauge can be out of date.

No label names a rank or a host, and only the newest jobs have series of their own: the number of
series is bounded for a fleet of any size.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from hangwatch import __version__
from hangwatch.model.calls import StreamKind
from hangwatch.model.ranks import RankState
from hangwatch.tracking.attempt import Attempt

from ..core.limits import LIMITS
from ..incidents import matching
from . import performance_metrics
from .app_state import AppState

JOB = "training_job"  # `job` is the label that Prometheus gives each target
MAX_JOBS_SHOWN = 100
OTHERS = "(others)"  # the label of all older jobs together
REPORTING_WITHIN_S = 60.0  # since the last heartbeat of an agent that is counted


class _Collector(Collector):
    def __init__(self, live: AppState) -> None:
        self._live = live

    def collect(self) -> Iterator[Metric]:
        jobs = self._live.list_latest_attempts()
        labels = {
            attempt.job: attempt.job if place < MAX_JOBS_SHOWN else OTHERS
            for place, attempt in enumerate(jobs)
        }
        yield from self._collect_ranks(jobs, labels)
        yield from self._collect_progress(jobs, labels)
        yield from self._collect_incidents(labels)
        yield from performance_metrics.collect_metrics(self._live, jobs, labels, JOB)
        yield from self._collect_agents()
        yield from self._collect_server()

    def _collect_ranks(self, jobs: Iterable[Attempt], labels: dict[str, str]) -> Iterator[Metric]:
        counts: dict[str, Counter[RankState]] = {}
        for attempt in jobs:
            counts.setdefault(labels[attempt.job], Counter()).update(
                self._live.get_rank_states(attempt).values()
            )
        ranks = GaugeMetricFamily(
            "hangwatch_ranks", "Ranks of a job's latest attempt by state", labels=[JOB, "state"]
        )
        for job, count in counts.items():
            for state in RankState:
                ranks.add_metric([job, state.value], count[state])
        yield ranks

    def _collect_progress(
        self, jobs: Iterable[Attempt], labels: dict[str, str]
    ) -> Iterator[Metric]:
        now, watch = self._live.now(), self._live.watch
        step = GaugeMetricFamily(
            "hangwatch_job_step", "Smallest training step of a job's ranks", labels=[JOB]
        )
        pace = GaugeMetricFamily(
            "hangwatch_job_steps_per_second", "Steps of a job in the last minute", labels=[JOB]
        )
        ages: dict[str, float] = {}
        calls: Counter[str] = Counter()
        dropped: Counter[str] = Counter()
        overflows: Counter[str] = Counter()
        for attempt in jobs:
            job = labels[attempt.job]
            processes = list(attempt.processes.values())
            ages[job] = max(
                [
                    ages.get(job, 0.0),
                    *(now - p.reports.agent_seen_at for p in processes if p.is_alive),
                ]
            )
            calls[job] += sum(
                s.entered
                for p in processes
                for s in p.streams.values()
                if s.kind is StreamKind.COLLECTIVE
            )
            dropped[job] += sum(p.recorder.dropped for p in processes)
            overflows[job] += sum(p.overflows for p in processes)
            if job != OTHERS:
                if reached := [p.step for p in processes if p.step is not None]:
                    step.add_metric([job], min(reached))
                current_pace = watch.states.paces.get(attempt.key)
                if current_pace is not None and current_pace.steps_per_s is not None:
                    pace.add_metric([job], current_pace.steps_per_s)
        yield step
        yield pace
        age = GaugeMetricFamily(
            "hangwatch_heartbeat_age_seconds",
            "Time since the last report of the rank of a job that has been silent longest",
            labels=[JOB],
        )
        entered = CounterMetricFamily(
            "hangwatch_collectives", "Collectives entered by all ranks of a job", labels=[JOB]
        )
        infinite = CounterMetricFamily(
            "hangwatch_overflows",
            "Calls with an Inf in 16 bits or under loss scaling, of jobs with HANGWATCH_CHECKS",
            labels=[JOB],
        )
        lost = CounterMetricFamily(
            "hangwatch_records_dropped", "Calls that a recorder could not record", labels=[JOB]
        )
        for job in ages:
            age.add_metric([job], ages[job])
            entered.add_metric([job], calls[job])
            lost.add_metric([job], dropped[job])
            infinite.add_metric([job], overflows[job])
        yield age
        yield entered
        yield lost
        yield infinite

    def _collect_incidents(self, labels: dict[str, str]) -> Iterator[Metric]:
        live = self._live
        records = [
            c
            for c in live.watch.incidents.records.values()
            if c.is_live and c.incident.job in labels
        ]
        opened = GaugeMetricFamily(
            "hangwatch_incidents_open",
            "Open incidents of jobs in memory",
            labels=[JOB, "kind", "severity"],
        )
        counted = Counter(
            (labels[c.incident.job], c.incident.kind.value, c.incident.severity.value)
            for c in records
        )
        for label_values, count in counted.items():
            opened.add_metric(list(label_values), count)
        yield opened
        stall = GaugeMetricFamily(
            "hangwatch_stall_seconds",
            "Age of the oldest open hang of a job, or 0",
            labels=[JOB],
        )
        since = dict.fromkeys(labels.values(), 0.0)
        for record in records:
            if matching.is_hang(record.incident):
                job = labels[record.incident.job]
                since[job] = max(since[job], live.now() - record.onset_at)
        for job, value in since.items():
            stall.add_metric([job], value)
        yield stall

    def _collect_agents(self) -> Iterator[Metric]:
        watch = self._live.watch
        oldest_at = self._live.now() - REPORTING_WITHIN_S
        reporting = [agent for agent in watch.agents.values() if agent.last_seen_at > oldest_at]
        costs = [agent.cost for agent in reporting if agent.cost is not None]
        memory = [cost.memory for cost in costs]
        cpu_s = watch.counters.agents_cpu_s
        yield CounterMetricFamily(
            "hangwatch_agents_cpu_seconds", "CPU time of node agents and their helpers", value=cpu_s
        )
        for name, what, value in (
            ("hangwatch_agents", "Node agents that reported in the last minute", len(reporting)),
            (
                "hangwatch_agents_memory_bytes",
                "Resident memory of all node agents together",
                sum(memory),
            ),
            (
                "hangwatch_agent_memory_max_bytes",
                "Resident memory of the largest node agent",
                max(memory, default=0),
            ),
            (
                "hangwatch_agents_answers_dropped",
                "Replies that node agents dropped for lack of space",
                sum(c.dropped for c in costs),
            ),
        ):
            yield GaugeMetricFamily(name, what, value=value)

    def _collect_server(self) -> Iterator[Metric]:
        watch = self._live.watch
        counters = watch.counters
        build = GaugeMetricFamily("hangwatch_build_info", "This server", labels=["version"])
        build.add_metric([__version__], 1)
        yield build
        late_s = max(watch.load.late_s, watch.load.waited_s)
        yield GaugeMetricFamily(
            "hangwatch_event_loop_lag_seconds",
            "How late the server's event loop runs",
            value=late_s,
        )
        for name, what, value in (
            ("hangwatch_heartbeats", "Heartbeats applied", counters.heartbeats),
            ("hangwatch_heartbeats_malformed", "Heartbeats that are malformed", counters.malformed),
            (
                "hangwatch_heartbeats_refused",
                "Heartbeats refused under overload, which are sent again",
                counters.refused,
            ),
            (
                "hangwatch_foreign_reports",
                "Reports of processes that were dropped because another node agent reports them",
                counters.foreign_reports,
            ),
            (
                "hangwatch_resyncs",
                "Requests to node agents to report everything again",
                counters.resyncs,
            ),
            ("hangwatch_incidents_opened", "Incidents opened since the start", counters.opened),
            ("hangwatch_diagnoses", "Rounds of diagnosis", counters.diagnoses),
            (
                "hangwatch_diagnosis_failures",
                "Rounds that failed because of an error in hangwatch",
                counters.diagnosis_failures,
            ),
            ("hangwatch_diagnosis_seconds", "Time spent on diagnosis", counters.diagnosis_s),
            ("hangwatch_store_failures", "Failed writes of incidents", watch.persistence.failures),
        ):
            yield CounterMetricFamily(name, what, value=value)
        refusals = CounterMetricFamily(
            "hangwatch_limit_refusals", "Requests that exceeded a limit", labels=["limit"]
        )
        for limit in LIMITS:
            refusals.add_metric([limit.name], counters.refusals_by_limit[limit.name])
        yield refusals
        sent = CounterMetricFamily(
            "hangwatch_alerts_sent", "Messages that an alert channel accepted", labels=["channel"]
        )
        failed = CounterMetricFamily(
            "hangwatch_alerts_failed",
            "Messages that an alert channel did not accept",
            labels=["channel"],
        )
        for channel, counts in watch.alerter.counts.items():
            sent.add_metric([channel], counts.sent)
            failed.add_metric([channel], counts.failed)
        yield sent
        yield failed


def format_exposition(live: AppState) -> bytes:
    """All metrics in the text format of Prometheus."""
    registry = CollectorRegistry()
    registry.register(_Collector(live))
    ProcessCollector(registry=registry)
    return generate_latest(registry)
