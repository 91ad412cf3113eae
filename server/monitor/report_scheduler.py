"""When each host should report again, and what is requested from it immediately.

Hosts of a large job report rarely (`Load`). A few should report again within a second, before all
others: those with urgent changes, those named by a diagnosis, and those for which
`Fleet.is_urgent` holds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from hangwatch.diagnosis import EvidenceRequest
from hangwatch.tracking.fleet import Fleet

from ..core.limits import is_large
from ..core.load import Load
from ..ingest.command_queue import MAX_CALLS_REQUESTED, CommandQueue
from ..ondemand.tracing import TraceRegistry

REQUESTED_INTERVAL_S = 0.2  # seconds between the heartbeats of a host of which something is asked
PRESSING_INTERVAL_S = 1.0  # seconds until the next one of a host of which the next word may decide
# hosts that are pressing, and as many that are suspected, of which that is asked in one round
MAX_PRESSING_AGENTS = 50
SUSPECTED_S = (
    30.0  # seconds for which a host that a diagnosis named, or that had urgent news, is suspected
)
MAX_SUSPECTED_AGENTS = 500  # hosts with urgent news


@dataclass(frozen=True, slots=True, kw_only=True)
class NextReport:
    """What a reply says about the next heartbeat."""

    interval_s: float  # until it
    details_s: float | None = None  # for which it need not tell where ranks are that get on
    urgent: bool = False  # it comes before others


@dataclass(slots=True, kw_only=True)
class ReportScheduler:
    """Decides when each agent reports. All times are seconds on the monotonic clock."""

    fleet: Fleet
    commands: CommandQueue
    traces: TraceRegistry
    load: Load
    suspected: dict[str, float] = field(default_factory=dict)  # agents, until when
    _awaited: set[str] = field(
        default_factory=set
    )  # agents whose next heartbeat is urgent because it was asked to be
    # In this round, at those who are pressing, and at the suspected: while a hang dissolves, half
    # of the hosts are pressing.
    _pressing_counts: Counter[bool] = field(default_factory=Counter)

    def record_heartbeat(self, agent: str, urgent: bool, now: float) -> None:
        """Records a heartbeat. One that is urgent without being requested to be carries changes."""
        if urgent and agent not in self._awaited and len(self.suspected) < MAX_SUSPECTED_AGENTS:
            self.suspect_agents([agent], now)

    def suspect_agents(self, agents: Iterable[str], now: float) -> None:
        """Makes agents report sooner for a while: their next heartbeats may decide a verdict."""
        self.suspected |= dict.fromkeys(agents, now + SUSPECTED_S)

    def request_urgent_evidence(self, agent: str, now: float) -> None:
        """Of large attempts: the next diagnosis, which would ask for it, may be seconds away, and
        the agent's next heartbeat, too.
        """
        for tracked in self.fleet.iter_mutual_waits(agent):
            attempt = tracked.attempt
            if is_large(attempt.rank_count):
                self.commands.request_evidence(
                    attempt, [EvidenceRequest(rank=tracked.process.rank, stacks=True)], now
                )
        for diverged in self.fleet.iter_divergences(agent):
            attempt = diverged.tracked.attempt
            if is_large(attempt.rank_count):
                self.commands.request_evidence(
                    attempt,
                    [
                        EvidenceRequest(
                            rank=diverged.tracked.process.rank,
                            stream_uid=diverged.stream.uid,
                            from_seq=max(1, diverged.seq - MAX_CALLS_REQUESTED + 1),
                        )
                    ],
                    now,
                )

    def schedule_next(self, agent: str, usual_s: float, now: float) -> NextReport:
        """When an agent reports next, where hosts usually report every ``usual_s`` seconds."""
        interval, details, awaited = self.load.until_slot_s(agent, usual_s, now), None, True
        if self.traces.is_agent_traced(agent):
            interval = min(
                interval,
                self.load.report_interval_s(REQUESTED_INTERVAL_S, len(self.traces.sessions)),
            )
        elif self.commands.has_open_request(agent):
            interval = min(
                interval,
                self.load.report_interval_s(
                    REQUESTED_INTERVAL_S, len(self.commands.evidence_requests)
                ),
            )
        elif (suspected := agent in self.suspected) or self.fleet.is_urgent(agent):
            awaited = self._pressing_counts[suspected] < MAX_PRESSING_AGENTS
            self._pressing_counts[suspected] += awaited
            interval = min(interval, PRESSING_INTERVAL_S) if awaited else interval
        else:
            details, awaited = self.load.terse_for_s(agent, usual_s, now), False
        (self._awaited.add if awaited else self._awaited.discard)(agent)
        return NextReport(interval_s=interval, details_s=details, urgent=awaited)

    def start_round(self, now: float) -> None:
        """Starts a new round of diagnosis, with new limits on how many agents report sooner."""
        self._pressing_counts.clear()
        self.suspected = {agent: until for agent, until in self.suspected.items() if until > now}

    def forget_agent(self, agent: str) -> None:
        self._awaited.discard(agent)
