"""Reports to the server, every few seconds, how the calls of this host's ranks perform."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from hangwatch.protocol import heartbeat
from hangwatch.protocol.clocks import ClockOffset

from .call_tally import ProcessTally
from .uplink import HeartbeatOutcome

REPORT_INTERVAL_S = 2.0  # between two reports

USUAL_HEARTBEAT_INTERVAL_S, HEARTBEATS_PER_REPORT = (
    0.5,
    8,
)  # where a server has so much to do that heartbeats are further apart than usual: so many of them

MAX_STREAMS_PER_REPORT = 512  # sequences in one report; the others go with the next one


@dataclass(slots=True)
class PerformanceReporter:
    """What the server is told of all processes, until it has acknowledged it."""

    _report_number: int = 0
    _unacked_report: heartbeat.PerformanceReport | None = None
    _backlog: list[heartbeat.StreamPerformance] = field(default_factory=list)
    _next_report_ns: int = 0
    _report_interval_s: float = REPORT_INTERVAL_S
    _clock_offset: ClockOffset = field(default_factory=ClockOffset)

    def next_report(
        self, now_ns: int, tallies: Mapping[str, ProcessTally], *, flush: bool = False
    ) -> heartbeat.PerformanceReport | None:
        """What this heartbeat should say: what was not acknowledged, again as it was; or what is
        new, where it is time.
        """
        if self._unacked_report is not None or (now_ns < self._next_report_ns and not flush):
            return self._unacked_report
        self._next_report_ns = now_ns + int(self._report_interval_s * 1e9)
        if not self._backlog:
            self._backlog = [
                part for key, tally in tallies.items() for part in tally.build_report(key)
            ]
        if self._backlog:
            self._report_number += 1
            parts, self._backlog = (
                self._backlog[:MAX_STREAMS_PER_REPORT],
                self._backlog[MAX_STREAMS_PER_REPORT:],
            )
            self._unacked_report = heartbeat.PerformanceReport(
                number=self._report_number, clock=self.clock_bounds_s, sequences=tuple(parts)
            )
        return self._unacked_report

    @property
    def clock_bounds_s(self) -> tuple[float, float] | None:
        """Between which seconds the server's clock is ahead of this host's; None before its first
        answer.
        """
        return self._clock_offset.bounds

    def mark_delivered(self, report: heartbeat.PerformanceReport | None) -> None:
        """The server has it, or will never take it."""
        if (
            report is not None
            and self._unacked_report is not None
            and report.number == self._unacked_report.number
        ):
            self._unacked_report = None

    def apply_outcome(self, outcome: HeartbeatOutcome) -> None:
        """Learns from an exchange how far the server's clock is from this host's, and how often it
        wants to hear.
        """
        if outcome.reply is None:
            return
        self._report_interval_s = (
            REPORT_INTERVAL_S
            if outcome.reply.interval_s <= USUAL_HEARTBEAT_INTERVAL_S
            else max(REPORT_INTERVAL_S, HEARTBEATS_PER_REPORT * outcome.reply.interval_s)
        )
        if outcome.reply.clock_s is not None and outcome.answered_s:
            self._clock_offset.add_exchange(
                outcome.sent_s, outcome.reply.clock_s, outcome.answered_s
            )
