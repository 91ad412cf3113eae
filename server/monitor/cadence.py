"""When hosts report, and when jobs are diagnosed.

A host reports every max(0.5 s, hosts/500 s), and its node agent reports immediately when the set of
its blocked ranks or a process changes. So 500 hosts report in a second at most, and the limits of the
diagnosis follow their interval. What differs from this rule does so for a reason that was measured:

- From 10,000 hosts on the interval is 20 s, up to 750 heartbeats a second: a host counts as lost 5 s
  after its heartbeat was due, so that at 25 s a lost node would be named 10 s after it is due.
- A steady host, whose ranks all make progress, reports every 2 s where hosts are few. Reporting twice
  a second takes its node agent twice the CPU time, more than the goal of 1 % of a core.
- From an interval of 2 s on, each host has a slot in it, and changes are reported within a second or
  two: otherwise thousands of hosts, which a hang blocks at the same moment, would report together.
  A host whose ranks all make progress then sends their positions with every third heartbeat only.
- A few hosts report within a second, before all others: those with a request to answer, those with
  urgent changes, those named by a diagnosis, and those for which `Fleet.is_urgent` holds.
- Jobs share these rates: hosts are those of the job and of the jobs that its ranks start, and only a
  job with more hosts than its share of the rate reports less often (`ReportScheduler.weigh_hosts`).

A round of the diagnosis begins as soon as something was reported, and four times a second in any case.
All small jobs are diagnosed in each round, except for those of a family that takes long (`RoundTurns`),
and rounds take a third of a core at most. A large job,
which takes seconds, has a share of its own: a third of a core while the next reports may decide a
verdict, at most a seventh otherwise.
"""

from __future__ import annotations

import time
import zlib
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field, replace

from hangwatch.diagnosis import Diagnosis
from hangwatch.model.kinds import select_kinds
from hangwatch.model.limits import Limits
from hangwatch.model.ranks import AttemptKey
from hangwatch.protocol.commands import Command
from hangwatch.protocol.heartbeat import HeartbeatReply, get_family
from hangwatch.tracking.attempt import Attempt

from ..core.limits import is_large
from ..shared_state import SharedState

MIN_INTERVAL_S = 0.5
USUAL_HEARTBEATS_PER_S = 500  # all hosts together
MAX_USUAL_INTERVAL_S = 20.0  # up to MAX_HEARTBEATS_PER_S, and on an overloaded server
MAX_HEARTBEATS_PER_S = 750  # reached by 15,000 hosts: with more, the interval grows again
RARE_INTERVAL_S = 2.0  # steady hosts report so rarely; from here on, hosts have slots
MIN_SLOT_WAIT_S = 1.0  # a host leaves out a slot that begins sooner than this after its heartbeat
FULL_UPDATE_INTERVALS = 3  # a host with a slot sends all positions once in so many intervals
MAX_CHANGES_PER_S = 8000  # heartbeats for a moment, if all hosts report changes

REQUESTED_INTERVAL_S = 0.2  # the interval of an agent with an open request or a trace
PRESSING_INTERVAL_S = 1.0  # the time to the next heartbeat of an agent that may decide a verdict
# The number of suspected agents, and the number of others, of a family that report after
# PRESSING_INTERVAL_S in one round.
MAX_PRESSING_AGENTS = 50
SUSPECTED_S = 30.0  # an agent is suspected for so long after a diagnosis named it or it was urgent
MAX_SUSPECTED_AGENTS = 500  # urgent heartbeats make no more agents of a family suspected than this

POLL_S = 25.0  # less than the minute after which proxies close a connection without data
MAX_POLLING_AGENTS = 256
MIN_RECENT_S = 2.0
RECENT_HEARTBEATS = 3

ROUND_INTERVAL_S = 0.25
MIN_PAUSE_S = 0.05  # the pause before the next round if a heartbeat arrives during the interval

FAMILY_ROUND_S = 0.1  # the time in a round after which a family's other attempts wait for the next

# The pause before the next run, as a multiple of the CPU time of the last one.
DECIDING_FACTOR = 2.0  # the next reports may decide a verdict: a third of a core
USUAL_FACTOR = 6.0  # at most a seventh of a core
MAX_FACTOR = 12.0  # for MAX_PAUSE_S at most, and the longest pause because of queued heartbeats
MAX_PAUSE_S = 4.0
STATES_FACTOR = 30.0  # before the next report of the states of ranks
# Most ranks that seem to wait have only not reported since, as long as some ranks make calls.
STILL_AFTER_S = 3.0
# Changes decide a verdict only after they have lasted for a while.
RECENT_CHANGES_S = 5.0
# A verdict is new for this long after its onset, and may become more precise after it is due.
FRESH_VERDICT_S = 10.0
# The pause grows by its own length for each such time that heartbeats have been queued.
BACKLOG_STEP_S = 2.5
_EARLY_KINDS = frozenset(select_kinds(lambda spec: spec.is_due_early))


def find_interval_s(hosts: float, late_s: float = 0.0, least_s: float = MIN_INTERVAL_S) -> float:
    """Seconds between two heartbeats of each of ``hosts``. The interval grows with the event loop's
    lateness, ``late_s``, on a server that lacks CPU time.
    """
    affordable_s = max(least_s, hosts / USUAL_HEARTBEATS_PER_S) * (1 + 10 * late_s)
    return min(affordable_s, max(MAX_USUAL_INTERVAL_S, hosts / MAX_HEARTBEATS_PER_S))


def find_fair_share(wanted: Collection[int], total: int) -> float:
    """The most that each gets of ``total`` if nobody gets more than is wanted, and what some leave is
    shared by the others (max-min fairness); infinite if there is enough for all.
    """
    remaining: float = total
    for served, want in enumerate(sorted(wanted)):
        share = remaining / (len(wanted) - served)
        if want > share:
            return share
        remaining -= want
    return float("inf")


def find_slot_wait_s(agent: str, interval_s: float, now: float) -> float:
    """Seconds until a host's own slot in each interval, so that hosts do not report together."""
    until_s = find_own_time_s(agent, interval_s, now)
    too_soon_s = min(MIN_SLOT_WAIT_S, interval_s / 10)
    return until_s if until_s > too_soon_s else until_s + interval_s


def find_own_time_s(agent: str, period_s: float, now: float) -> float:
    """Seconds until the time within each period that the agent's id decides."""
    offset_s = zlib.crc32(agent.encode()) / (1 << 32) * period_s
    return (offset_s - now) % period_s


@dataclass(slots=True, kw_only=True)
class ReportScheduler:
    """Decides when each agent reports. All times are seconds on the monotonic clock."""

    shared: SharedState
    configured_limits: Limits
    suspected: dict[str, float] = field(default_factory=dict)  # the suspected agents, until when
    # The numbers of suspected agents (True) and others (False) that report sooner in this round, by
    # family. The limits are separate because half of all hosts may be urgent while a hang resolves.
    _pressing_counts: Counter[tuple[str, bool]] = field(default_factory=Counter)
    _suspected_counts: Counter[str] = field(default_factory=Counter)  # in this round, by family
    _fair_hosts: tuple[Counter[str], float] | None = None  # valid for these numbers of agents

    def weigh_hosts(self, *families: str) -> float:
        """The number of hosts by which the interval of a family's hosts is chosen: as many hosts alone
        would report as often. For several families, the lowest number.
        """
        counts = self.shared.agents.reporting_counts
        if self._fair_hosts is None or self._fair_hosts[0] is not counts:
            affordable = int(USUAL_HEARTBEATS_PER_S * MIN_INTERVAL_S)
            self._fair_hosts = counts, find_fair_share(counts.values(), affordable)
        share = self._fair_hosts[1]
        hosts = min(map(counts.__getitem__, families))
        return hosts if hosts <= share else hosts * USUAL_HEARTBEATS_PER_S * MIN_INTERVAL_S / share

    def get_interval_s(self, *families: str) -> float:
        """Seconds between two heartbeats of a host of these families."""
        return find_interval_s(self.weigh_hosts(*families), self.shared.load.late_s)

    def get_max_gap_s(self, *families: str) -> float:
        """Seconds between two heartbeats of a host, including the time that they are queued."""
        wait_s = max(map(self.shared.load.get_wait_s, families))
        return self.get_interval_s(*families) + wait_s

    @property
    def longest_gap_s(self) -> float:
        """Seconds between two heartbeats of a host of the largest family, on the busiest queue."""
        counts = self.shared.agents.reporting_counts
        largest = max(counts, key=counts.__getitem__, default="")
        return self.get_interval_s(largest) + self.shared.load.waited_s

    def get_limits(self, job: str) -> Limits:
        """The configured limits, at the interval at which the hosts of a job report now."""
        gap_s = self.get_max_gap_s(get_family(job))
        return replace(self.configured_limits, report_interval_s=gap_s)

    def get_recent_s(self, job: str) -> float:
        """The age in seconds up to which a job's heartbeat is recent enough to end a rank because of
        it.
        """
        return max(MIN_RECENT_S, RECENT_HEARTBEATS * self.get_max_gap_s(get_family(job)))

    def make_reply(
        self, agent: str, now: float, *, commands: tuple[Command, ...], needs_resync: bool
    ) -> HeartbeatReply:
        """The reply to an agent's heartbeat, with the time and the manner of its next one."""
        shared = self.shared
        families = shared.agents.get_families(agent)
        hosts = self.weigh_hosts(*families)
        usual_s = find_interval_s(hosts, shared.load.late_s)
        has_slots = usual_s >= RARE_INTERVAL_S
        interval_s = find_slot_wait_s(agent, usual_s, now) if has_slots else usual_s
        details_s = steady_s = None
        is_awaited = True
        is_traced = shared.traces.is_agent_traced(agent)
        if is_traced or shared.commands.has_open_request(agent):
            busy_counts = shared.commands.busy_counts
            busy = len(shared.traces.requests) if is_traced else busy_counts[families[0]]
            requested_s = find_interval_s(busy, shared.load.late_s, REQUESTED_INTERVAL_S)
            interval_s = min(interval_s, requested_s)
        elif (is_suspected := agent in self.suspected) or shared.fleet.is_urgent(agent):
            pressing = (families[0], is_suspected)
            is_awaited = self._pressing_counts[pressing] < MAX_PRESSING_AGENTS
            if is_awaited:
                self._pressing_counts[pressing] += 1
                interval_s = min(interval_s, PRESSING_INTERVAL_S)
        else:
            is_awaited = False
            if has_slots:  # positions of ranks that make progress may be left out until then
                details_s = find_own_time_s(agent, FULL_UPDATE_INTERVALS * usual_s, now)
            else:
                # One lost heartbeat of a steady host does not make it count as lost.
                gap_s = usual_s + max(map(shared.load.get_wait_s, families))
                limits = replace(self.configured_limits, report_interval_s=gap_s)
                rare_s = min(RARE_INTERVAL_S, limits.lost_after_s / 2)
                steady_s = rare_s if rare_s > usual_s else None
        shared.agents[agent].is_awaited = is_awaited
        return HeartbeatReply(
            interval_s=interval_s,
            steady_s=steady_s,
            changes_s=max(1.0, hosts / MAX_CHANGES_PER_S) if has_slots else None,
            details_s=details_s,
            urgent=is_awaited,
            poll_s=POLL_S if hosts <= MAX_POLLING_AGENTS else None,
            resync=needs_resync,
            commands=commands,
            clock_s=round(now, 6),
        )

    def record_heartbeat(self, agent: str, urgent: bool, now: float) -> None:
        """Records a heartbeat. One that is urgent although that was not requested has changes."""
        is_awaited = self.shared.agents[agent].is_awaited
        [family, *_] = self.shared.agents.get_families(agent)
        if urgent and not is_awaited and self._suspected_counts[family] < MAX_SUSPECTED_AGENTS:
            self._suspected_counts[family] += agent not in self.suspected
            self.suspect_agents([agent], now)

    def suspect_agents(self, agents: Iterable[str], now: float) -> None:
        """Makes agents report sooner for a while: their next heartbeats may decide a verdict."""
        self.suspected |= dict.fromkeys(agents, now + SUSPECTED_S)

    def start_round(self, now: float) -> None:
        """Starts a new round of diagnosis, with new limits on how many agents report sooner."""
        self._pressing_counts.clear()
        self.suspected = {agent: until for agent, until in self.suspected.items() if until > now}
        self._suspected_counts = Counter(
            self.shared.agents.get_families(agent)[0] for agent in self.suspected
        )


@dataclass(slots=True)
class RoundTurns:
    """Decides which attempts have their turn in a round: those that have waited longest first, and of
    each family only so many as take `FAMILY_ROUND_S`. So the attempts of one job, however many there
    are, do not delay those of others.
    """

    _rounds: int = 0
    _served: dict[AttemptKey, int] = field(default_factory=dict)  # the last round of each attempt

    def iter_due(self, attempts: Collection[Attempt]) -> Iterator[Attempt]:
        """The attempts that have their turn. The time that each takes is that until the next one."""
        self._rounds += 1
        self._served = {a.key: self._served.get(a.key, 0) for a in attempts}
        spent_s: defaultdict[str, float] = defaultdict(float)
        for attempt in sorted(attempts, key=lambda attempt: self._served[attempt.key]):
            family = get_family(attempt.job)
            if spent_s[family] < FAMILY_ROUND_S:
                began_at = time.perf_counter()
                self._served[attempt.key] = self._rounds
                yield attempt
                spent_s[family] += time.perf_counter() - began_at


@dataclass(slots=True)
class DiagnosisBackoff:
    """Decides when a large attempt may be diagnosed again. Times are seconds, monotonic."""

    attempt: Attempt
    stall_after_s: float
    _until: float = 0.0  # no diagnosis before this time
    _changes_until: float = 0.0  # no diagnosis of urgent changes before this time
    changed_at: float = float("-inf")  # the beginning of the last diagnosis of urgent changes

    def skips_diagnosis(self, now: float) -> bool:
        """True if the attempt must not be diagnosed yet."""
        return now < (self._changes_until if self.attempt.has_urgent_changes else self._until)

    def record_diagnosis(
        self, diagnosis: Diagnosis, spent_s: float, waited_s: float, now: float
    ) -> None:
        """Records what a diagnosis took, and how long the oldest queued heartbeat has waited."""
        if not is_large(self.attempt.rank_count):
            return
        unconfirmed = [v for v in diagnosis.verdicts if not v.is_confirmed]
        self._changes_until = now + DECIDING_FACTOR * spent_s
        if any(v.kind in _EARLY_KINDS for v in unconfirmed):
            self._until = self._changes_until
        else:
            pause_s = max(USUAL_FACTOR * spent_s, MAX_PAUSE_S)
            if self._awaits_reports(diagnosis, now):
                pause_s = DECIDING_FACTOR * spent_s
            pause_s *= 1 + waited_s / BACKLOG_STEP_S
            self._until = now + min(pause_s, MAX_FACTOR * spent_s)
        due_at = min((v.began_at + self.stall_after_s for v in unconfirmed), default=now)
        if due_at > now:
            self._until = min(self._until, due_at)

    def _awaits_reports(self, diagnosis: Diagnosis, now: float) -> bool:
        """Whether the reports of the next seconds may decide a verdict."""
        if now - self.changed_at < RECENT_CHANGES_S:
            # A verdict on what has just begun has probably taken the changes into account.
            return not any(
                verdict.is_confirmed and now - verdict.began_at < FRESH_VERDICT_S
                for verdict in diagnosis.verdicts
            )
        if now - self.attempt.newest_call_at < STILL_AFTER_S:
            return False
        for verdict in diagnosis.verdicts:
            due_s = now - verdict.began_at - self.stall_after_s
            if due_s >= 0.0 and (not verdict.is_confirmed or due_s < FRESH_VERDICT_S):
                return True
        return False
