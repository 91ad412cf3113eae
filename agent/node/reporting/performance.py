"""Reports to the server, every few seconds, how the calls of this host's ranks perform."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from hangwatch.protocol import heartbeat
from hangwatch.protocol.clocks import ClockOffset

from .call_tally import ProcessTally
from .uplink import HeartbeatOutcome

REPORT_INTERVAL_S = 2.0

# If heartbeats are further apart than usual, since the server is busy, so are reports.
USUAL_HEARTBEAT_INTERVAL_S = 0.5
HEARTBEATS_PER_REPORT = 8

MAX_STREAMS_PER_REPORT = 512  # the others follow in the next report


@dataclass(slots=True)
class PerformanceReporter:
    """Makes one report after the other, each of which is repeated until it is acknowledged."""

    _report_number: int = 0
    _unacked_report: heartbeat.PerformanceReport | None = None
    _backlog: list[heartbeat.StreamPerformance] = field(default_factory=list)
    _next_report_ns: int = 0
    _report_interval_s: float = REPORT_INTERVAL_S
    _clock_offset: ClockOffset = field(default_factory=ClockOffset)

    def next_report(
        self, now_ns: int, tallies: Mapping[str, ProcessTally], *, flush: bool = False
    ) -> heartbeat.PerformanceReport | None:
        """The report for this heartbeat, if any: the unacknowledged one, unchanged, or a new one if
        it is due.
        """
        if self._unacked_report is not None:
            return self._unacked_report
        if now_ns < self._next_report_ns and not flush:
            return None
        self._next_report_ns = now_ns + int(self._report_interval_s * 1e9)
        if not self._backlog:
            for key, tally in tallies.items():
                self._backlog.extend(tally.build_report(key))
        if self._backlog:
            self._report_number += 1
            parts = self._backlog[:MAX_STREAMS_PER_REPORT]
            self._backlog = self._backlog[MAX_STREAMS_PER_REPORT:]
            self._unacked_report = heartbeat.PerformanceReport(
                number=self._report_number, clock=self.clock_bounds_s, sequences=tuple(parts)
            )
        return self._unacked_report

    @property
    def clock_bounds_s(self) -> tuple[float, float] | None:
        """The bounds, in seconds, of how far the server's clock is ahead of this host's; None
        before the first reply.
        """
        return self._clock_offset.bounds

    def mark_delivered(self, report: heartbeat.PerformanceReport | None) -> None:
        """The server has the report, or will never accept it."""
        if report is None or self._unacked_report is None:
            return
        if report.number == self._unacked_report.number:
            self._unacked_report = None

    def apply_outcome(self, outcome: HeartbeatOutcome) -> None:
        """Updates the offset of the server's clock, and the interval between reports."""
        if outcome.reply is None:
            return
        self._report_interval_s = REPORT_INTERVAL_S
        if outcome.reply.interval_s > USUAL_HEARTBEAT_INTERVAL_S:
            slow_interval_s = HEARTBEATS_PER_REPORT * outcome.reply.interval_s
            self._report_interval_s = max(REPORT_INTERVAL_S, slow_interval_s)
        if outcome.reply.clock_s is not None and outcome.answered_s:
            self._clock_offset.add_exchange(
                outcome.sent_s, outcome.reply.clock_s, outcome.answered_s
            )
