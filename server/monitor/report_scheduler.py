"""The schedule of reports: when each host should report again, and what is requested from it
immediately.

Hosts of a large job report rarely (`Load`), and the limits of the diagnosis follow their interval. A
few hosts should report again within a second, before all others: those with urgent changes, those
named by a diagnosis, and those for which `Fleet.is_urgent` holds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from hangwatch.diagnosis import EvidenceRequest, choose_window
from hangwatch.model.limits import Limits
from hangwatch.tracking.fleet import Fleet

from ..core.limits import is_large
from ..core.load import Load
from ..ingest.agent_registry import AgentRegistry
from ..ingest.command_queue import CommandQueue
from ..ondemand.traces import TraceRegistry

REQUESTED_INTERVAL_S = 0.2  # the interval of an agent with an open request or a trace
PRESSING_INTERVAL_S = 1.0  # the time to the next heartbeat of an agent that may decide a verdict
# The number of suspected agents, and the number of others, that report after PRESSING_INTERVAL_S in
# one round.
MAX_PRESSING_AGENTS = 50
SUSPECTED_S = 30.0  # an agent is suspected for so long after a diagnosis named it or it was urgent
MAX_SUSPECTED_AGENTS = 500  # urgent heartbeats make no more agents suspected than this

MIN_INTERVAL_S = 0.5  # the interval of a host where hosts are few
MAX_STEADY_S = 2.0
POLL_S = 25.0  # less than the minute after which proxies close a connection without data
MAX_POLLING_AGENTS = 256
MIN_RECENT_S = 2.0
RECENT_HEARTBEATS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class NextReport:
    """The time and the manner of an agent's next heartbeat."""

    interval_s: float  # seconds until it
    # The time for which the agent may omit the positions of ranks that make progress.
    details_s: float | None = None
    may_be_steady: bool = False  # the agent may report less often while it is steady
    urgent: bool = False  # the heartbeat is handled before others


@dataclass(slots=True, kw_only=True)
class ReportScheduler:
    """Decides when each agent reports. All times are seconds on the monotonic clock."""

    fleet: Fleet
    commands: CommandQueue
    traces: TraceRegistry
    load: Load
    suspected: dict[str, float] = field(default_factory=dict)  # the suspected agents, until when
    # The agents whose next heartbeat is urgent because this scheduler requested that.
    _awaited: set[str] = field(default_factory=set)
    # The numbers of suspected agents (True) and others (False) that report sooner in this round. The
    # limits are separate because half of all hosts may be urgent while a hang resolves.
    _pressing_counts: Counter[bool] = field(default_factory=Counter)

    def record_heartbeat(self, agent: str, urgent: bool, now: float) -> None:
        """Records a heartbeat. One that is urgent although that was not requested has changes."""
        if urgent and agent not in self._awaited and len(self.suspected) < MAX_SUSPECTED_AGENTS:
            self.suspect_agents([agent], now)

    def suspect_agents(self, agents: Iterable[str], now: float) -> None:
        """Makes agents report sooner for a while: their next heartbeats may decide a verdict."""
        self.suspected |= dict.fromkeys(agents, now + SUSPECTED_S)

    def request_urgent_evidence(self, agent: str, now: float) -> None:
        """Requests evidence from an agent of a large attempt without waiting for the diagnosis: the
        next one may start seconds later, and the agent's next heartbeat may be as late.
        """
        for tracked in self.fleet.list_processes(agent):
            attempt, rank = tracked.attempt, tracked.process.rank
            requests: list[EvidenceRequest] = []
            if tracked.needs_wait_sample:
                attempt.has_urgent_changes = True
                requests.append(EvidenceRequest(rank=rank, stacks=True))
            for stream, divergence in tracked.iter_new_sides():
                window = choose_window(divergence)
                requests.append(EvidenceRequest.for_calls(rank, stream, window))
            if requests and is_large(attempt.rank_count):
                self.commands.request_evidence(attempt, requests, now)

    def schedule_next(self, agent: str, usual_s: float, now: float) -> NextReport:
        """The next report of an agent if hosts usually report every ``usual_s`` seconds."""
        interval = self.load.until_slot_s(agent, usual_s, now)
        details = None
        is_usual, is_awaited = False, True
        is_traced = self.traces.is_agent_traced(agent)
        if is_traced or self.commands.has_open_request(agent):
            busy = len(self.traces.sessions) if is_traced else self.commands.busy_agent_count
            interval = min(interval, self.load.report_interval_s(REQUESTED_INTERVAL_S, busy))
        elif (is_suspected := agent in self.suspected) or self.fleet.is_urgent(agent):
            is_awaited = self._pressing_counts[is_suspected] < MAX_PRESSING_AGENTS
            if is_awaited:
                self._pressing_counts[is_suspected] += 1
                interval = min(interval, PRESSING_INTERVAL_S)
        else:
            details = self.load.terse_for_s(agent, usual_s, now)
            is_usual, is_awaited = True, False
        if is_awaited:
            self._awaited.add(agent)
        else:
            self._awaited.discard(agent)
        return NextReport(
            interval_s=interval,
            details_s=details,
            may_be_steady=is_usual,
            urgent=is_awaited,
        )

    def start_round(self, now: float) -> None:
        """Starts a new round of diagnosis, with new limits on how many agents report sooner."""
        self._pressing_counts.clear()
        self.suspected = {agent: until for agent, until in self.suspected.items() if until > now}

    def forget_agent(self, agent: str) -> None:
        self._awaited.discard(agent)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportIntervals:
    """The intervals at which hosts report at the current load, and the limits that follow."""

    configured_limits: Limits
    load: Load
    agents: AgentRegistry

    @property
    def interval_s(self) -> float:
        """Seconds between two heartbeats of a host."""
        return self.load.report_interval_s(MIN_INTERVAL_S, self.agents.reporting_count)

    @property
    def steady_s(self) -> float | None:
        """Seconds between two heartbeats of a steady host, which reports changes immediately: so few
        that one lost heartbeat does not make the host count as lost. None: `interval_s`.
        """
        interval_s = self.interval_s
        if interval_s >= MAX_STEADY_S:  # a large job's heartbeats need nothing more
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
