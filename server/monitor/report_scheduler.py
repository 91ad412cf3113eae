"""When each host should report again, and what it is asked at once: those first whose next word may
decide.

Hosts of a large job report seldom (`Load`). A few of them are worth hearing again within a second,
and before all others: those that have news, those whom a diagnosis names, and those of which
`Fleet.pressing` says so.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from hangwatch.diagnosis import EvidenceRequest
from hangwatch.tracking.fleet import Fleet

from ..core.limits import Load, large
from ..ingest.command_queue import CALLS_ASKED, CommandQueue
from ..ondemand.tracing import TraceRegistry

EAGER = 0.2  # seconds between the heartbeats of a host of which something is asked
SECOND_LOOK = 1.0  # seconds until the next one of a host of which the next word may decide
# hosts that are pressing, and as many that are suspected, of which that is asked in one round
SECOND_LOOKS = 50
SUSPECTED_FOR = (
    30.0  # seconds for which a host that a diagnosis named, or that had urgent news, is suspected
)
SUSPECTED_MOST = 500  # hosts with urgent news


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """What an answer says of the next heartbeat."""

    interval_s: float  # until it
    details_s: float | None = None  # for which it need not tell where ranks are that get on
    urgent: bool = False  # it comes before others


@dataclass(slots=True, kw_only=True)
class ReportScheduler:
    """All times are seconds on the monotonic clock."""

    fleet: Fleet
    desk: CommandQueue
    traces: TraceRegistry
    load: Load
    suspected: dict[str, float] = field(default_factory=dict)  # agents, until when
    _awaited: set[str] = field(
        default_factory=set
    )  # agents whose next heartbeat is urgent because it was asked to be
    # In this round, at those who are pressing, and at the suspected: while a hang dissolves, half
    # of the hosts are pressing.
    _second_looks: Counter[bool] = field(default_factory=Counter)

    def heard(self, agent: str, urgent: bool, now: float) -> None:
        """A heartbeat came. One that is urgent of its own accord has news."""
        if urgent and agent not in self._awaited and len(self.suspected) < SUSPECTED_MOST:
            self.suspect([agent], now)

    def suspect(self, agents: Iterable[str], now: float) -> None:
        """What they say next may decide."""
        self.suspected |= dict.fromkeys(agents, now + SUSPECTED_FOR)

    def ask_at_once(self, agent: str, now: float) -> None:
        """Of large attempts: the next diagnosis, which would ask for it, may be seconds away, and
        the agent's next heartbeat, too.
        """
        for process, attempt in self.fleet.iter_mutual_waits(agent):
            if large(attempt.rank_count):
                self.desk.want(attempt, [EvidenceRequest(rank=process.rank, stacks=True)], now)
        for process, attempt, sequence, seq in self.fleet.iter_divergences(agent):
            if large(attempt.rank_count):
                self.desk.want(
                    attempt,
                    [
                        EvidenceRequest(
                            rank=process.rank,
                            stream_uid=sequence.uid,
                            from_seq=max(1, seq - CALLS_ASKED + 1),
                        )
                    ],
                    now,
                )

    def turn(self, agent: str, usual_s: float, now: float) -> Turn:
        """Where hosts report every ``usual_s`` seconds."""
        interval, details, awaited = self.load.turn(agent, usual_s, now), None, True
        if self.traces.is_agent_traced(agent):
            interval = min(interval, self.load.interval(EAGER, len(self.traces.sessions)))
        elif self.desk.busy(agent):
            interval = min(interval, self.load.interval(EAGER, len(self.desk.asked)))
        elif (suspected := agent in self.suspected) or self.fleet.is_urgent(agent):
            awaited = self._second_looks[suspected] < SECOND_LOOKS
            self._second_looks[suspected] += awaited
            interval = min(interval, SECOND_LOOK) if awaited else interval
        else:
            details, awaited = self.load.details(agent, usual_s, now), False
        (self._awaited.add if awaited else self._awaited.discard)(agent)
        return Turn(interval_s=interval, details_s=details, urgent=awaited)

    def next_round(self, now: float) -> None:
        """A diagnosis has been, or there was nothing to diagnose."""
        self._second_looks.clear()
        self.suspected = {agent: until for agent, until in self.suspected.items() if until > now}

    def forget(self, agent: str) -> None:
        self._awaited.discard(agent)
