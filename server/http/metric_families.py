"""The names and texts of all metrics, and Prometheus's objects for them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

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

LabelValues = TypeVar("LabelValues", str, tuple[str, str], tuple[str, str, str])


def make_metric(
    name: str, values: float | Mapping[LabelValues, float], *labels: str
) -> CounterMetricFamily | GaugeMetricFamily:
    """One of `GAUGES` or `COUNTERS`, with one value or one for each combination of label values."""
    family: CounterMetricFamily | GaugeMetricFamily
    if name in GAUGES:
        family = GaugeMetricFamily(name, GAUGES[name], labels=labels)
    else:
        family = CounterMetricFamily(name, COUNTERS[name], labels=labels)
    if isinstance(values, Mapping):
        for key, value in values.items():
            family.add_metric([key] if isinstance(key, str) else key, value)
    else:
        family.add_metric([], values)
    return family
