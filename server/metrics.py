"""``/metrics``: computed from the live state when it is asked for, so that no gauge can be out of step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from hangwatch import __version__
from hangwatch.types import RankState

from .live import Live


class _Collector(Collector):
    def __init__(self, live: Live) -> None:
        self._live = live

    def collect(self) -> Iterator[Metric]:
        yield from self._jobs()
        yield from self._server()

    def _jobs(self) -> Iterator[Metric]:
        live = self._live
        ranks = GaugeMetricFamily("hangwatch_ranks", "Ranks of a job's latest attempt by state", labels=["job", "state"])
        steps = GaugeMetricFamily("hangwatch_job_step", "Smallest training step of a job's ranks", labels=["job"])
        for attempt in live.jobs():
            counts = Counter(live.states(attempt).values())
            for state in RankState:
                ranks.add_metric([attempt.job, state.value], counts[state])
            reached = [p.step for p in attempt.ranks.values() if p.step is not None]
            if reached:
                steps.add_metric([attempt.job], min(reached))
        yield ranks
        yield steps
        opened = GaugeMetricFamily("hangwatch_incidents_open", "Open incidents", labels=["job", "kind", "severity"])
        counted = Counter(
            (c.incident.job, c.incident.kind.value, c.incident.severity.value) for c in live.incidents(status="open")
        )
        for labels, count in counted.items():
            opened.add_metric(list(labels), count)
        yield opened

    def _server(self) -> Iterator[Metric]:
        watch = self._live.watch
        counters = watch.counters
        build = GaugeMetricFamily("hangwatch_build_info", "This server", labels=["version"])
        build.add_metric([__version__], 1)
        yield build
        yield GaugeMetricFamily("hangwatch_agents", "Node agents heard of in the last hour", value=len(watch.agents))
        for name, what, value in (
            ("hangwatch_heartbeats", "Heartbeats taken in", counters.heartbeats),
            ("hangwatch_heartbeats_malformed", "Heartbeats refused", counters.malformed),
            ("hangwatch_resyncs", "Node agents asked to tell everything anew", counters.resyncs),
            ("hangwatch_incidents_opened", "Incidents opened since the start", counters.opened),
            ("hangwatch_diagnoses", "Rounds of diagnosis", counters.diagnoses),
            ("hangwatch_diagnosis_failures", "Rounds that failed by a fault of hangwatch", counters.diagnosis_failures),
            ("hangwatch_diagnosis_seconds", "Time spent on diagnosis", counters.diagnosis_s),
            ("hangwatch_store_failures", "Failed writes of incidents", watch.keeper.failures),
            ("hangwatch_alerts_sent", "Alerts that a channel took", sum(c.sent for c in watch.alerter.counts.values())),
            ("hangwatch_alerts_failed", "Alerts that a channel did not take", sum(c.failed for c in watch.alerter.counts.values())),
        ):
            yield CounterMetricFamily(name, what, value=value)


def exposition(live: Live) -> bytes:
    """The Prometheus text format."""
    registry = CollectorRegistry()
    registry.register(_Collector(live))
    return generate_latest(registry)
