"""How often hosts report at the current load, and the limits of the diagnosis that follow."""

from __future__ import annotations

from dataclasses import dataclass, replace

from hangwatch.model.limits import Limits

from ..core.load import Load
from .agent_registry import AgentRegistry

MIN_INTERVAL_S = 0.5  # between the heartbeats of a host, where hosts are few
MAX_STEADY_S = 2.0
POLL_S = 25.0  # less than the minute after which proxies close a connection without data
MAX_POLLING_AGENTS = 256
MIN_RECENT_S = 2.0
RECENT_HEARTBEATS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportIntervals:
    configured_limits: Limits
    load: Load
    agents: AgentRegistry

    @property
    def interval_s(self) -> float:
        """Seconds between two heartbeats of a host."""
        return self.load.report_interval_s(MIN_INTERVAL_S, self.agents.reporting_count)

    @property
    def steady_s(self) -> float | None:
        """Seconds between two heartbeats of a steady host, which reports changes immediately. Short
        enough that one lost heartbeat does not make the host count as lost. None: `interval_s`.
        """
        interval_s = self.interval_s
        if interval_s >= MAX_STEADY_S:  # nothing else is computed for each heartbeat of a large job
            return None
        wanted_s = min(MAX_STEADY_S, self.lost_after_s / 2)
        return wanted_s if wanted_s > interval_s else None

    @property
    def poll_s(self) -> float | None:
        """The longest wait of a host's request for commands, in seconds; None: there are too many hosts."""
        return POLL_S if self.agents.reporting_count <= MAX_POLLING_AGENTS else None

    @property
    def max_gap_s(self) -> float:
        """Seconds between two heartbeats of a host, including the time that they are queued."""
        return self.interval_s + self.load.waited_s

    @property
    def change_report_s(self) -> float | None:
        """Seconds within which a host reports changes; None if its next heartbeat is soon enough."""
        return self.load.changes_within_s(self.interval_s, self.agents.reporting_count)

    @property
    def recent_s(self) -> float:
        """The age in seconds up to which a heartbeat is recent enough to end a rank because of it."""
        return max(MIN_RECENT_S, RECENT_HEARTBEATS * self.max_gap_s)

    @property
    def limits(self) -> Limits:
        """The configured limits, at the interval at which hosts report now."""
        return replace(self.configured_limits, report_interval_s=self.max_gap_s)

    @property
    def lost_after_s(self) -> float:
        """Seconds without a heartbeat after which a host is lost."""
        return self.limits.lost_after_s
