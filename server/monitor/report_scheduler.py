"""When each host should report again, and what is requested from it immediately.

Hosts of a large job report rarely (`Load`). A few should report again within a second, before all
others: those with urgent changes, those named by a diagnosis, and those for which
`Fleet.is_urgent` holds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from hangwatch.diagnosis import EvidenceRequest, choose_window
from hangwatch.tracking.fleet import Fleet

from ..core.limits import is_large
from ..core.load import Load
from ..ingest.command_queue import CommandQueue
from ..ondemand.tracing import TraceRegistry

REQUESTED_INTERVAL_S = 0.2  # between the heartbeats of an agent with an open request or a trace
PRESSING_INTERVAL_S = 1.0  # until the next heartbeat of an agent that may decide a verdict
# In one round, at most this many suspected agents and this many others report after
# PRESSING_INTERVAL_S.
MAX_PRESSING_AGENTS = 50
SUSPECTED_S = 30.0  # how long an agent is suspected after a diagnosis named it or it was urgent
MAX_SUSPECTED_AGENTS = 500  # with more, an urgent heartbeat does not make its agent suspected


@dataclass(frozen=True, slots=True, kw_only=True)
class NextReport:
    """When and how an agent should send its next heartbeat."""

    interval_s: float  # from now
    # For this long the agent may omit the positions of ranks that make progress.
    details_s: float | None = None
    may_be_steady: bool = False  # it may report less often while it is steady
    urgent: bool = False  # the heartbeat is handled before others


@dataclass(slots=True, kw_only=True)
class ReportScheduler:
    """Decides when each agent reports. All times are seconds on the monotonic clock."""

    fleet: Fleet
    commands: CommandQueue
    traces: TraceRegistry
    load: Load
    suspected: dict[str, float] = field(default_factory=dict)  # by agent, until when
    # Agents whose next heartbeat is urgent because this scheduler requested that.
    _awaited: set[str] = field(default_factory=set)
    # How many agents report sooner in this round: suspected ones (True) and others (False). The
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
        """When an agent should report next if hosts usually report every ``usual_s`` seconds."""
        interval = self.load.until_slot_s(agent, usual_s, now)
        details = None
        is_usual, is_awaited = False, True
        if self.traces.is_agent_traced(agent):
            agent_count = len(self.traces.sessions)
            requested = self.load.report_interval_s(REQUESTED_INTERVAL_S, agent_count)
            interval = min(interval, requested)
        elif self.commands.has_open_request(agent):
            agent_count = self.commands.busy_agent_count
            requested = self.load.report_interval_s(REQUESTED_INTERVAL_S, agent_count)
            interval = min(interval, requested)
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
