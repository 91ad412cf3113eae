"""The server's live state: heartbeats in, diagnosis at short intervals, incidents, alerts and
events out.

All of it runs on the one event loop thread; only the store's writes go to another, and what takes
long for many ranks: meanwhile heartbeats wait in line, so that nothing changes under it.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TypeVar

import msgspec

from hangwatch.diagnosis import Diagnosis, EvidenceRequest, diagnose, find_call_mismatches, is_quiet
from hangwatch.model.limits import Limits
from hangwatch.model.ranks import AttemptKey, RankState
from hangwatch.model.verdicts import Verdict
from hangwatch.protocol import heartbeat
from hangwatch.report.documents import build_incident_event
from hangwatch.tracking.attempt import Attempt
from hangwatch.tracking.call_stream import MAX_URGENT_SUSPECTS
from hangwatch.tracking.fleet import Fleet, FormerAttempt

from ..alerting import alerts
from ..alerting.alerts import Alerter
from ..alerting.persistence import PersistenceWorker
from ..core import garbage_collection
from ..core.clock import Clock
from ..core.events import EventLog
from ..core.job_views import AttemptView, JobView
from ..core.limits import Load, large
from ..core.waiting import within
from ..incidents.records import IncidentRecord
from ..incidents.registry import NOT_REPORTING_LIMIT_S, IncidentRegistry
from ..ingest.command_queue import CommandQueue
from ..ingest.heartbeat_queue import SLICE, HeartbeatQueue
from ..ondemand.dumps import DumpRegistry
from ..ondemand.recordings import RecordingRegistry
from ..ondemand.tracing import TraceRegistry
from ..performance.aggregation import PerformanceTotals
from ..recovery.aborter import Aborter
from ..recovery.policy import Rules
from ..storage.store import Store
from . import views
from .backoff import DiagnosisBackoff
from .pace import Pace
from .report_scheduler import ReportScheduler

log = logging.getLogger("hangwatch")

TICK = 0.25  # seconds between two diagnoses
PROMPT = 0.05  # seconds after a heartbeat to the next diagnosis
SETTLED = 10.0  # seconds after its end in which an attempt is still diagnosed: last words come late
FINISHED_KEPT = 20
UNHEARD_OF = 3.0  # seconds without a word, after which one that a later one follows has ended, too
FINISHED_PROCESSES = 20_000  # of all such attempts that a later one follows
SILENT_FOR = 60.0  # seconds after which a node agent does not count
SILENCE_EVERY = 3.0  # seconds
FINISHED_FOR = 3600.0  # seconds
DISMANTLED = 10  # processes of a large attempt that are dropped at a time
STACKS_WAIT = 1.5  # seconds an alert waits for its culprit's stack
GIVEN_UP = 15.0  # seconds after which one that was asked for will not come any more
INTERVAL = 0.5  # seconds between a host's heartbeats, where hosts are few
FRESH, FRESH_BEATS = (
    2.0,
    3,
)  # seconds, or heartbeats, after which nobody is ended any more for want of news
CALLS_WAIT = 3.0  # seconds that the diagnosis of a large attempt waits for calls
# seconds, at least, in which heartbeats that wait in line are taken in before the diagnosis of a
# large attempt
HEARD_FIRST = 1.0

T = TypeVar("T")


@dataclass(slots=True, kw_only=True)
class Counters:
    """What `/metrics` counts."""

    heartbeats: int = 0
    malformed: int = 0
    refused: int = 0  # for want of time
    resyncs: int = 0
    diagnoses: int = 0
    diagnosis_failures: int = 0
    diagnosis_s: float = 0.0
    opened: int = 0
    agents_cpu_s: float = 0.0


@dataclass(slots=True, kw_only=True)
class Agent:
    host: str
    heard_at: float
    cost: heartbeat.AgentCost | None = None  # as it said last


@dataclass(slots=True, kw_only=True)
class Watch:
    limits: Limits
    clock: Clock
    store: Store
    alerter: Alerter
    events: EventLog
    repeat_after: float = (
        0.0  # seconds after which an alert of a job that still hangs is repeated; 0 for never
    )
    retention_days: float = 90.0
    retention_mb: float = 1024.0
    rules: Rules | None = None  # for ending ranks that hang
    fleet: Fleet = field(default_factory=Fleet)
    performance: PerformanceTotals = field(default_factory=PerformanceTotals)
    counters: Counters = field(default_factory=Counters)
    load: Load = field(default_factory=Load)
    agents: OrderedDict[str, Agent] = field(
        default_factory=OrderedDict
    )  # who was heard last is the last
    ticked_at: float = 0.0
    line: HeartbeatQueue = field(init=False)
    book: IncidentRegistry = field(init=False)
    desk: CommandQueue = field(init=False)
    dumps: DumpRegistry = field(init=False)
    recordings: RecordingRegistry = field(init=False)
    traces: TraceRegistry = field(init=False)
    attention: ReportScheduler = field(init=False)
    rests: DiagnosisBackoff = field(init=False)
    keeper: PersistenceWorker = field(init=False)
    aborter: Aborter | None = field(init=False)
    states: dict[AttemptKey, dict[int, RankState]] = field(
        default_factory=dict
    )  # of each attempt's ranks, as last told
    paces: dict[AttemptKey, Pace] = field(default_factory=dict)
    large_jobs: dict[AttemptKey, JobView] = field(default_factory=dict)  # as last told
    _jobs: dict[str, str] = field(default_factory=dict)
    _away: float = (
        0.0  # seconds of a round in which large attempts were looked at, which rest by themselves
    )
    _asked_at: dict[AttemptKey, float] = field(
        default_factory=dict
    )  # for calls in which groups of a large attempt part
    _remains: list[Attempt] = field(default_factory=list)
    _clearing: asyncio.Task[None] | None = None
    _silent_agents: int = 0  # that have not been heard for long
    _silence_due: float = (
        -SILENCE_EVERY
    )  # when to look for such again: of a large job that was cut off there are thousands
    _failing: bool = False
    _news: asyncio.Event = field(default_factory=asyncio.Event)
    _garbage: garbage_collection.GarbageScheduler = field(
        default_factory=garbage_collection.GarbageScheduler
    )

    def __post_init__(self) -> None:
        self.line = HeartbeatQueue(self.ingest, self.load)
        self.book = IncidentRegistry(clock=self.clock)
        self.desk = CommandQueue(clock=self.clock)
        self.dumps = DumpRegistry(clock=self.clock, command_queue=self.desk)
        self.recordings = RecordingRegistry(clock=self.clock, command_queue=self.desk)
        self.traces = TraceRegistry(clock=self.clock)
        self.attention = ReportScheduler(
            fleet=self.fleet, desk=self.desk, traces=self.traces, load=self.load
        )
        self.rests = DiagnosisBackoff(self.limits.stall_after_s)
        self.keeper = PersistenceWorker(
            store=self.store,
            clock=self.clock,
            alerter=self.alerter,
            book=self.book,
            retention_days=self.retention_days,
            retention_mb=self.retention_mb,
            keep=lambda: [
                name for name, case in self.book.cases.items() if case.live and self._hangs_on(case)
            ],
        )
        self.aborter = self._aborter(self.rules) if self.rules is not None else None
        self.book.load_records(self.store.load())
        now, wall = self.clock.monotonic(), self.clock.wall()
        for known in self.store.latest_attempts():
            self.fleet.former_attempts[known.job] = FormerAttempt(
                number=known.attempt,
                restart=known.restart,
                last_seen_at=now - (wall - known.last_seen_at).total_seconds(),
                is_finished=known.state in ("finished", "failed"),
            )

    def _aborter(self, rules: Rules) -> Aborter:
        return Aborter(
            rules=rules, clock=self.clock, store=self.store, book=self.book, fleet=self.fleet, desk=self.desk, keeper=self.keeper,
            evidence=self._evidence,
        )  # fmt: skip

    def _evidence(self, case: IncidentRecord, attempt: Attempt) -> bool:
        """The culprits' stacks are there, or will not come."""
        return (
            not self._stacks_due(case, attempt) or self.clock.monotonic() - case.opened > GIVEN_UP
        )

    def ingest(self, beat: heartbeat.Heartbeat, urgent: bool = False) -> heartbeat.HeartbeatReply:
        """Takes in a heartbeat, and says what its host should do next."""
        now = self.clock.monotonic()
        self.counters.heartbeats += 1
        if self.counters.heartbeats % garbage_collection.HEARTBEATS == 0:
            garbage_collection.look_at_new()
        before = self.agents.get(beat.agent)
        cost = beat.cost or (before.cost if before else None)
        if beat.cost is not None:
            self.counters.agents_cpu_s += max(
                0.0, beat.cost.cpu_s - (before.cost.cpu_s if before and before.cost else 0.0)
            )
        if before is None:
            self.agents[beat.agent] = Agent(host=beat.host, heard_at=now, cost=cost)
        else:
            before.heard_at, before.cost = now, cost
            self.agents.move_to_end(beat.agent)
        complete = self.fleet.apply_heartbeat(beat, now)
        self.performance.apply_heartbeat(beat, self.fleet, now)
        resync = not complete or not (before is not None or beat.full or beat.number == 1)
        self.counters.resyncs += resync
        self.desk.answered({s.request for s in beat.samples} | {c.request for c in beat.calls})
        self.dumps.apply_samples(beat.samples, now)
        self.recordings.apply_replies(beat.recordings, now)
        self.traces.apply_heartbeat(beat, now)
        if beat.aborts and self.aborter is not None:
            self.aborter.answered(beat.aborts)
        if beat.processes or beat.samples or beat.calls or beat.aborts:
            self._news.set()
        if beat.processes:
            self.attention.ask_at_once(beat.agent, now)
        self.attention.heard(beat.agent, urgent, now)
        commands = self.desk.hand_out(beat.agent) + self.traces.build_commands(beat.agent, now)
        turn = self.attention.turn(beat.agent, self._interval, now)
        return heartbeat.HeartbeatReply(
            interval_s=turn.interval_s,
            news_s=self.load.news(self._interval, self._heard_agents),
            details_s=turn.details_s,
            urgent=turn.urgent,
            resync=resync,
            commands=commands,
            clock_s=round(now, 6),
        )

    def refuse(self, agent: str | None) -> None:
        """Notes that there was no time for a heartbeat of that node agent: its ranks are not lost."""
        self.counters.refused += 1
        if agent is not None:
            self.fleet.mark_refused(agent, self.clock.monotonic())

    @property
    def _interval(self) -> float:
        return self.load.interval(INTERVAL, self._heard_agents)

    @property
    def _heard_every(self) -> float:
        """Seconds between two words of a host, at most."""
        return self._interval + self.load.waited_s

    @property
    def lost_after(self) -> float:
        """Seconds without a heartbeat after which a host is shown as lost: the diagnosis's own limit."""
        return self._current_limits.lost_after_s

    @property
    def _current_limits(self) -> Limits:
        return replace(self.limits, report_interval_s=self._heard_every)

    @property
    def _heard_agents(self) -> int:
        return len(self.agents) - self._silent_agents

    async def run(self) -> None:
        """Diagnoses until it is cancelled."""
        while True:
            began, self._away = time.perf_counter(), 0.0
            try:
                await self.tick()
            except Exception:  # whatever it is, watching goes on
                self._complain()
            spent = time.perf_counter() - began - self._away
            self._news.clear()
            if await within(TICK, self._news):
                # However many hosts report, most of the time belongs to their heartbeats.
                await asyncio.sleep(max(PROMPT, 2 * spent))

    async def tick(self) -> None:
        """One round over all attempts."""
        now = self.clock.monotonic()
        for attempt in list(self.fleet.attempts.values()):
            if self.fleet.latest_attempt(attempt.job) is attempt and self._worth_a_look(
                attempt, now
            ):
                await self._diagnose(attempt)
                self.book.resolve_earlier_attempts(attempt, now)
        now = self.clock.monotonic()
        self.book.resolve_finished_jobs(self.fleet, now)
        if self.aborter is not None:
            await self.aborter.step(max(FRESH, FRESH_BEATS * self._heard_every))
        for case in self.book.take_changed():
            if case.own:
                self.keeper.changed(case, urgent=case.opened >= self.ticked_at or not case.open)
            # Encoded once, not for each reader: 100,000 ranks may be waiting.
            event = msgspec.json.encode(build_incident_event(case.incident))
            self.events.publish_event("incident", msgspec.Raw(event))
            await asyncio.sleep(0)
        self._announce(now)
        for attempt in list(self.fleet.attempts.values()):
            await self._tell_changes(attempt)
        self.desk.expire(now)
        self._forget(now)
        self._garbage.look(len(self.fleet.processes), now)
        if self._remains and self._clearing is None:
            self._clearing = asyncio.create_task(self._clear_up())
        self.attention.next_round(now)
        self.ticked_at = now

    def _worth_a_look(self, attempt: Attempt, now: float) -> bool:
        return not attempt.is_finished or now - attempt.last_seen_at < SETTLED

    async def _look(
        self, attempt: Attempt, work: Callable[[], T], within_s: float = 0.0
    ) -> tuple[T, float]:
        """The result of ``work``, which only reads what heartbeats change, and the CPU seconds that
        it took.
        """

        def timed() -> tuple[T, float]:
            began = time.thread_time()
            return work(), time.thread_time() - began

        def apart() -> tuple[T, float]:
            with garbage_collection.no_looks():
                return timed()

        if not large(attempt.rank_count):
            return timed()
        began = time.perf_counter()
        try:
            return await self.line.look(apart, within_s)
        finally:
            self._away += time.perf_counter() - began

    async def _clear_up(self) -> None:
        """Gives back the memory of what was forgotten, bit by bit: of a large attempt that takes a
        second.
        """
        while self._remains:
            until = time.perf_counter() + SLICE
            while self.fleet.drop_processes(self._remains[-1], DISMANTLED):
                if time.perf_counter() > until:
                    garbage_collection.look_at_new()
                    await asyncio.sleep(0)
                    until = time.perf_counter() + SLICE
            self._remains.pop()
        self._clearing = None

    async def _diagnose(self, attempt: Attempt) -> None:
        if self.rests.skips_diagnosis(attempt, self.clock.monotonic()):
            return
        if attempt.diverged_groups and large(attempt.rank_count) and self._calls_to_come(attempt):
            return
        before, spent = set(self.book.cases), 0.0
        limits = self._current_limits

        def diagnosed() -> Diagnosis:
            now = self.clock.monotonic()  # what was heard until it began counts as heard
            found = diagnose(attempt, now, limits)
            self.book.apply_verdicts(attempt, found.verdicts, now)
            return found

        try:
            found = Diagnosis()
            if not is_quiet(attempt) or self.book.list_open(attempt):
                found, spent = await self._look(
                    attempt, diagnosed, max(HEARD_FIRST, self.load.waited_s / 3)
                )
            now = self.clock.monotonic()
            self.rests.record_diagnosis(attempt, found, spent, self.load.waited_s, now)
            self.desk.want(attempt, found.requests, now)
            named = {
                rank for verdict in found.verdicts for rank in verdict.culprits or _inside(verdict)
            }
            if len(named) <= MAX_URGENT_SUSPECTS:  # of more than that, most are only not heard yet
                agents = {
                    process.agent
                    for rank in named
                    if (process := attempt.processes.get(rank)) is not None
                }
                self.attention.suspect(agents, now)
        except Exception:  # one job's odd state must not stop the watch over the others
            self._complain()
        self.counters.diagnoses += 1
        self.counters.diagnosis_s += spent
        self.counters.opened += len(set(self.book.cases) - before)

    def _calls_to_come(self, attempt: Attempt) -> bool:
        """Asks for the calls in which groups part. True while they are worth waiting for: without
        them, a diagnosis that takes seconds could say nothing of it.
        """
        now, key = self.clock.monotonic(), attempt.key
        parted = find_call_mismatches(
            attempt.streams_by_group,
            {group for group in attempt.diverged_groups if not large(len(group[2]))},
        )
        missing = [
            EvidenceRequest(rank=rank, stream_uid=uid, from_seq=seq)
            for parting in parted
            for rank, uid, seq in parting.calls_to_fetch
        ]
        self.desk.want(attempt, missing, now)
        if not (awaited := bool(missing) or attempt.awaits_calls):
            self._asked_at.pop(key, None)
        return awaited and now - self._asked_at.setdefault(key, now) < CALLS_WAIT

    def _announce(self, now: float) -> None:
        """Tells people of each incident: once, once more when a warning has become an alert, and
        when it is over.
        """
        wall = self.clock.wall()
        for case in self.book.cases.values():
            attempt = self.fleet.attempts.get(case.attempt_key)
            ready = (
                now - case.opened >= STACKS_WAIT
                or attempt is None
                or not self._stacks_due(case, attempt)
            )
            hangs_on = self._hangs_on(case)
            if event := alerts.due(
                case, ready=ready, hangs_on=hangs_on, now=wall, repeat_after=self.repeat_after
            ):
                self.keeper.tell(case, event)

    def _hangs_on(self, case: IncidentRecord) -> bool:
        """Its job is still there."""
        attempt = self.fleet.attempts.get(case.attempt_key)
        return attempt is not None and not attempt.is_finished

    def _stacks_due(self, case: IncidentRecord, attempt: Attempt) -> bool:
        """Some culprit's stack was asked for and is not there yet."""
        there = {rank for entry in case.incident.stacks for rank in entry.ranks}
        held = (attempt.processes.get(rank) for rank in case.incident.culprits if rank not in there)
        return any(p is not None and p.is_alive and self.desk.outstanding(p) for p in held)

    async def _tell_changes(self, attempt: Attempt) -> None:
        """Publishes the ranks, and the job, whose state is another than last time."""
        key, cases, now = (
            attempt.key,
            self.book.list_open(attempt),
            self.clock.monotonic(),
        )
        if self.rests.skips_states(attempt, now):
            return
        before = self.states.get(key, {})

        def seen() -> tuple[
            dict[int, RankState],
            JobView,
            dict[tuple[RankState | None, RankState], list[int]],
        ]:
            states = views.compute_states(attempt, cases, now, self.lost_after)
            return (
                states,
                views.describe_job(attempt, Counter(states.values()), cases, now),
                _changes(before, states),
            )

        (states, job, changed), spent = await self._look(attempt, seen)
        self.rests.record_states_report(attempt, spent, self.clock.monotonic())
        for (
            (was, state),
            ranks,
        ) in changed.items():  # one event for all that changed alike: they are thousands at once
            told = {
                "job": attempt.job,
                "attempt": attempt.number,
                "ranks": ranks,
                "state": state.value,
            }
            self.events.publish_event("rank", {**told, "before": was.value if was else None})
        self.states[key] = states
        if large(attempt.rank_count):
            self.large_jobs[key] = job
        latest = self.fleet.latest_attempt(attempt.job) is attempt
        if not latest and attempt.is_finished:
            return
        self.keeper.attempt(
            AttemptView(
                job=job.job,
                attempt=job.attempt,
                state=job.state,
                world_size=job.world_size,
                hosts=job.hosts,
                opened_at=self.clock.date(attempt.opened_at),
                last_seen_at=self.clock.date(attempt.last_seen_at),
                restart=attempt.restart,
            )
        )
        if latest:
            self.paces.setdefault(key, Pace()).note(job.step, now)
            if self._jobs.get(attempt.job) != f"{attempt.number} {job.state}":
                self._jobs[attempt.job] = f"{attempt.number} {job.state}"
                self.events.publish_event("job", msgspec.to_builtins(job))

    def _forget(self, now: float) -> None:
        latest = dict(sorted(self.fleet.attempts))  # its last number, by job
        old: list[Attempt] = []
        kept = processes = 0
        for attempt in sorted(self.fleet.attempts.values(), key=lambda a: -a.last_seen_at):
            followed, unheard = attempt.number != latest[attempt.job], now - attempt.last_seen_at
            # Of a host that was lost nobody ever tells how its ranks ended.
            if not (attempt.is_finished or (followed and unheard > UNHEARD_OF)):
                if unheard > NOT_REPORTING_LIMIT_S:
                    old.append(attempt)
                continue
            kept, processes = kept + 1, processes + len(attempt.processes)
            too_many = kept > FINISHED_KEPT or (processes > FINISHED_PROCESSES and followed)
            if too_many or unheard > FINISHED_FOR:
                old.append(attempt)
        for attempt in old:
            self.fleet.forget_attempt(attempt)
            if large(attempt.rank_count):
                self._remains.append(attempt)
            else:
                self.fleet.drop_processes(attempt, len(attempt.processes))
            key = attempt.key
            for kept_by_attempt in (
                self.states,
                self.paces,
                self.large_jobs,
                self.performance.attempts,
                self._asked_at,
            ):
                kept_by_attempt.pop(key, None)
            self.rests.forget_attempt(key)
            self.keeper.forget_attempt(key)
            if self.fleet.latest_attempt(attempt.job) is None:
                self._jobs.pop(attempt.job, None)
        if now >= self._silence_due:
            self._silence_due = now + SILENCE_EVERY
            self._forget_silent(now)

    def _forget_silent(self, now: float) -> None:
        """Node agents that have not been heard for long do not count; those whose ranks have all
        ended are forgotten.
        """
        silent = [
            agent
            for agent, _ in itertools.takewhile(
                lambda told: now - told[1].heard_at > SILENT_FOR, self.agents.items()
            )
        ]
        self._silent_agents = len(silent)
        for agent in silent:
            if now - self.agents[agent].heard_at > FINISHED_FOR or self.fleet.has_finished(agent):
                del self.agents[agent]
                self.attention.forget(agent)
                self.fleet.forget_agent(agent)
                self.performance.forget_agent(agent)
                self._silent_agents -= 1

    def _complain(self) -> None:
        """Logs a failure of our own once, and counts all of them."""
        self.counters.diagnosis_failures += 1
        if not self._failing:
            log.exception("the diagnosis failed; watching goes on, but please report this")
        self._failing = True


def _inside(verdict: Verdict) -> list[int]:
    """Those who are in the call that it is about: where it names nobody, what they say next
    decides.
    """
    return [rank for call in verdict.calls for rank in call.ranks]


def _changes(
    before: dict[int, RankState], states: dict[int, RankState]
) -> dict[tuple[RankState | None, RankState], list[int]]:
    """The ranks whose state is another, by what it was and what it is."""
    found: dict[tuple[RankState | None, RankState], list[int]] = {}
    if states != before:
        for rank, state in states.items():
            if (was := before.get(rank)) is not state:
                found.setdefault((was, state), []).append(rank)
    return found
