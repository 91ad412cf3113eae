"""Adds up the performance reports in heartbeats, by job and process group. Memory is bounded,
whatever the size of the jobs and whatever is sent.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hangwatch.model.calls import StreamKind
from hangwatch.model.ranks import AttemptKey
from hangwatch.performance.distributions import MAX_DURATION_US, are_valid_counts
from hangwatch.protocol import heartbeat
from hangwatch.tracking.attempt import Attempt
from hangwatch.tracking.call_stream import CallStream
from hangwatch.tracking.fleet import Fleet

from .arrivals import ClockBounds
from .job_totals import JobTotals

MAX_REPORTED_NUMBER = 1 << 60
MAX_SIZE_CLASS = 64


@dataclass(slots=True)
class PerformanceTotals:
    """The totals of all jobs. Changed only by `apply_heartbeat` and `forget_agent`."""

    attempts: dict[AttemptKey, JobTotals] = field(default_factory=dict)
    clocks: ClockBounds = field(default_factory=dict)
    _report_numbers: dict[str, int] = field(default_factory=dict)  # the last report of each agent

    def apply_heartbeat(self, beat: heartbeat.Heartbeat, fleet: Fleet, now: float) -> None:
        """Adds a heartbeat's report. A repeated report, and parts about unknown processes and
        streams, are ignored.
        """
        report = beat.performance
        if report is None or report.number <= self._report_numbers.get(beat.agent, 0):
            return
        self._report_numbers[beat.agent] = report.number
        if report.clock is not None and report.clock[0] <= report.clock[1]:
            self.clocks[beat.agent] = report.clock
        for part in report.sequences:
            tracked = fleet.processes.get((beat.host, part.key))
            if tracked is None:
                continue
            process = tracked.process
            stream = process.streams.get(part.uid)
            if stream is None or not tracked.holds_rank or not _is_plausible(part):
                continue
            job = self.attempts.setdefault(tracked.attempt.key, JobTotals())
            self._add_part(job, process.rank, stream, beat.agent, part, now)

    def _add_part(
        self,
        job: JobTotals,
        rank: int,
        stream: CallStream,
        agent: str,
        part: heartbeat.StreamPerformance,
        now: float,
    ) -> None:
        job.add_report(part)
        group = job.get_group(stream.group)
        if group is None:
            return
        group.add_report(rank, part, now)
        group.queued |= stream.completed is None
        members = stream.group.ranks
        if stream.kind is StreamKind.COLLECTIVE and rank in members and len(members) > 1:
            for spread_s in group.add_samples(rank, agent, part.samples, self.clocks, now):
                job.spread.add_duration(spread_s * 1e6)

    def get_job(self, attempt: Attempt) -> JobTotals:
        """The totals of an attempt; empty ones if it has not reported any calls."""
        return self.attempts.get(attempt.key) or JobTotals()

    def forget_agent(self, agent: str) -> None:
        self._report_numbers.pop(agent, None)
        self.clocks.pop(agent, None)


def _is_plausible(part: heartbeat.StreamPerformance) -> bool:
    """Whether all numbers are within the limits; they may come from anywhere."""
    return (
        0 <= part.missed < MAX_REPORTED_NUMBER
        and all(_is_plausible_total(total) for total in part.totals)
        and all(_is_plausible_sample(sample) for sample in part.samples)
    )


def _is_plausible_total(total: heartbeat.CallTotals) -> bool:
    return (
        0 <= total.size <= MAX_SIZE_CLASS
        and 0 <= total.calls < MAX_REPORTED_NUMBER
        and 0 <= total.bytes < MAX_REPORTED_NUMBER
        and 0 <= total.longest_us <= MAX_DURATION_US
        and are_valid_counts(total.latency)
    )


def _is_plausible_sample(sample: heartbeat.CallSample) -> bool:
    _, entered_us, since_previous_us, duration_us, _, size_class, size_bytes = sample
    return (
        0 <= entered_us < MAX_REPORTED_NUMBER
        and -1 <= since_previous_us < MAX_REPORTED_NUMBER
        and -1 <= duration_us <= MAX_DURATION_US
        and 0 <= size_class <= MAX_SIZE_CLASS
        and -1 <= size_bytes < MAX_REPORTED_NUMBER
    )
