"""The life of incidents: a verdict opens one, refines it while evidence comes in, and its absence
resolves it.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime

from hangwatch.model.incidents import Resolution
from hangwatch.model.kinds import KINDS, Severity, VerdictKind
from hangwatch.model.ranks import Lifecycle
from hangwatch.model.verdicts import Verdict
from hangwatch.tracking.attempt import Attempt
from hangwatch.tracking.fleet import Fleet

from ..core import schema
from ..core.clock import Clock, ulid
from . import evidence
from .matching import Relation, relate_verdict

EVIDENCE_WINDOW_S = (
    10.0  # seconds after its opening in which an incident's kind may still be corrected
)
VERDICT_ABSENT_S = (
    2.0  # seconds without its verdict after which an incident is over, in a job that is alive
)
AFTER_RESTART_ABSENT_S = (
    10.0  # the same after a restart of the server: the attempt's state is still coming in
)
RECENT_HEARTBEAT_S = (
    5.0  # seconds since the last heartbeat within which the absence of a verdict means something
)
# seconds after the end of its job in which it stays open: another host may be late with its last
# words
JOB_END_GRACE_S = 30.0
NOT_REPORTING_LIMIT_S = (
    24 * 3600.0
)  # seconds after which nobody is expected to speak for a job any more
MAX_MEMBERS_KEPT = 64
MAX_RECORDS_KEPT = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class AlertSummary:
    """What the alerts that spoke of an incident at the last diagnosis, at time ``at``, say of it.

    ``accused`` are the culprits of those that have the same cause, and not only the same
    consequences.
    """

    at: float
    accused: frozenset[int]
    waiting: frozenset[int]


@dataclass(slots=True, kw_only=True)
class IncidentRecord:
    """An incident, and what the server alone remembers of it."""

    incident: schema.Incident
    members: dict[int, str] = field(
        default_factory=dict
    )  # rank -> "HOST/PROCESS": tells a rerun from the same run
    alerted: Severity | None = None  # what people were told
    told_at: datetime | None = None  # when
    reminders: int = 0
    closed: bool = False  # people were told that it is over
    own: bool = True  # and not that of another server in the same database
    opened: float = 0.0  # when, on the monotonic clock
    onset: float = 0.0
    seen: float = 0.0  # when a verdict last spoke of it
    loaded: bool = False  # from before this server started, and not heard of since
    standing: AlertSummary | None = None

    @property
    def open(self) -> bool:
        return self.incident.status == "open"

    @property
    def live(self) -> bool:
        """It is this server's to keep up to date."""
        return self.own and self.open

    @property
    def aborted(self) -> bool:
        """Ranks were ended for it, or are about to be: what happens to the job from then on is a
        consequence.
        """
        recovery = self.incident.recovery
        if recovery is None or recovery.announced_at is None:
            return False
        return self.open or any(end.result != "left" for end in recovery.ends)


@dataclass(slots=True, kw_only=True)
class IncidentRegistry:
    """All incidents. `changed` collects the ids of those that changed, for whoever takes them out.

    An attempt may be observed in another thread: `cases` is replaced, never changed, so that
    whoever reads it meanwhile is not disturbed.
    """

    clock: Clock
    cases: dict[str, IncidentRecord] = field(default_factory=dict)
    changed: set[str] = field(default_factory=set)
    _writing: threading.Lock = field(default_factory=threading.Lock)

    def _store_records(self, cases: Iterable[IncidentRecord]) -> None:
        with self._writing:
            self.cases = self.cases | {case.incident.id: case for case in cases}

    def drop_incidents(self, incidents: Collection[str]) -> None:
        """Forgets incidents, by id."""
        with self._writing:
            self.cases = {name: case for name, case in self.cases.items() if name not in incidents}

    def load_records(self, cases: Iterable[IncidentRecord]) -> None:
        """Takes in what an earlier server, or another one, knows. Their onset and opening lie
        before this one's start.
        """
        now, loaded = self.clock.monotonic(), list(cases)
        for case in loaded:
            wall = self.clock.wall()
            case.loaded, case.seen = True, now
            case.opened = now - (wall - case.incident.opened_at).total_seconds()
            case.onset = now - (wall - case.incident.onset_at).total_seconds()
        self._store_records(loaded)

    def list_open(self, attempt: Attempt) -> list[IncidentRecord]:
        """The open incidents of an attempt, oldest first."""
        found = [
            c
            for c in self.cases.values()
            if c.live and c.incident.job == attempt.job and _belongs_to_attempt(c, attempt)
        ]
        return sorted(found, key=lambda c: c.opened)

    def list_ended_with(self, attempt: Attempt) -> list[IncidentRecord]:
        """Those that were open when their job ended, oldest first."""
        ended = [
            c
            for c in self.cases.values()
            if c.own and c.incident.resolution in (Resolution.ENDED, Resolution.ABORTED)
        ]
        found = [
            c
            for c in ended
            if (c.incident.job, c.incident.attempt) == (attempt.job, attempt.number)
        ]
        return sorted(found, key=lambda c: c.opened)

    def apply_verdicts(self, attempt: Attempt, verdicts: Sequence[Verdict], now: float) -> None:
        """Takes in what the diagnosis says of an attempt at time ``now``, monotonic."""
        cases = self.list_open(attempt)
        due = [v for v in verdicts if v.is_confirmed]
        left = self._match_verdicts(cases, attempt, due, now)
        for verdict in left:
            opened = [c for c in cases if c.opened == now]
            if any(relate_verdict(c.incident, verdict, gathering=False) for c in opened):
                continue
            cases.append(self._open_incident(attempt, verdict, now))
        for case in cases:
            suspected = any(
                not v.is_confirmed and v.seq is not None and _same_call(case.incident, v)
                for v in verdicts
            )
            if suspected or not _has_reported_since(case, attempt):
                case.seen = now
            self._update_evidence(case, attempt)
            if case.seen < now and _has_made_progress(case, attempt, now):
                self.resolve_incident(
                    case, Resolution.ENDED if attempt.is_finished else Resolution.PROGRESS, now
                )

    def resolve_earlier_attempts(self, attempt: Attempt, now: float) -> None:
        """The newest attempt of a job runs, or ran, however briefly: what was wrong with earlier
        ones is over.
        """
        older = [
            c
            for c in self.cases.values()
            if c.live and c.incident.job == attempt.job and not _belongs_to_attempt(c, attempt)
        ]
        if not older or not any(
            p.lifecycle >= Lifecycle.INITIALISED for p in attempt.processes.values()
        ):
            return
        for case in older:
            # After a restart of the server, the host that an older incident is about may yet have
            # to report.
            if not case.loaded or now - attempt.opened_at > AFTER_RESTART_ABSENT_S:
                self.resolve_incident(case, Resolution.RESTARTED, now)

    def resolve_finished_jobs(self, fleet: Fleet, now: float) -> None:
        """Nothing hangs any more in a job that has ended, or that nobody has spoken for since long."""
        for case in self.cases.values():
            if not case.live:
                continue
            job = case.incident.job
            known = fleet.attempts.get((job, case.incident.attempt)) or fleet.latest_attempt(job)
            last = known or fleet.former_attempts.get(job)
            over, heard_at = (
                (last.is_finished, last.last_seen_at) if last is not None else (False, case.seen)
            )
            if now - heard_at > (JOB_END_GRACE_S if over else NOT_REPORTING_LIMIT_S):
                ended = Resolution.ABORTED if case.aborted else Resolution.ENDED
                self.resolve_incident(case, ended if over else Resolution.UNHEARD, heard_at)

    def record_recovery(self, case: IncidentRecord, recovery: schema.Recovery) -> None:
        """Notes what was decided about ending ranks for it, or what became of that."""
        self._replace_incident(case, case.incident.model_copy(update={"recovery": recovery}))

    def resolve_incident(self, case: IncidentRecord, why: Resolution, at: float) -> None:
        """It is over since ``at``, monotonic."""
        over = {
            "status": "resolved",
            "resolved_at": self.clock.date(max(at, case.opened)),
            "resolution": why,
        }
        self._replace_incident(case, case.incident.model_copy(update=over))

    def take_changed(self) -> list[IncidentRecord]:
        """Those that changed since the last time, oldest first."""
        taken = [self.cases[i] for i in sorted(self.changed) if i in self.cases]
        self.changed.clear()
        closed = [c for c in self.cases.values() if not c.open]
        if too_many := sorted(closed, key=lambda c: c.opened)[
            : max(0, len(self.cases) - MAX_RECORDS_KEPT)
        ]:
            self.drop_incidents({case.incident.id for case in too_many})
        return taken

    def _match_verdicts(
        self, cases: list[IncidentRecord], attempt: Attempt, verdicts: list[Verdict], now: float
    ) -> list[Verdict]:
        """Gives each open incident the verdicts that speak of it, the best one's words; the rest
        are returned.
        """
        left = list(verdicts)
        related = {
            c.incident.id: [
                (
                    relate_verdict(
                        c.incident, v, now - c.opened < EVIDENCE_WINDOW_S and not c.aborted
                    ),
                    v,
                )
                for v in left
            ]
            for c in cases
        }
        for case in cases:
            case.standing = _summarize_alerts(case.incident.kind, related[case.incident.id], now)
            exact = [
                v for how, v in related[case.incident.id] if how is Relation.SAME and v in left
            ]
            if exact:
                left.remove(exact[0])
                self._refine_incident(case, attempt, exact[0], now)
        for case in cases:
            close = [(how, v) for how, v in related[case.incident.id] if how and v in left]
            for how, verdict in sorted(close, key=lambda found: -found[0]):
                left.remove(verdict)
                if how is Relation.REFINES and case.seen < now:
                    self._refine_incident(case, attempt, verdict, now)
                case.seen = now
        return left

    def _open_incident(self, attempt: Attempt, verdict: Verdict, now: float) -> IncidentRecord:
        opened_at = self.clock.date(now)
        onset = min(now, verdict.began_at) if verdict.began_at > 0 else now
        blank = schema.Incident(
            id=ulid(self.clock.wall()),
            job=attempt.job,
            attempt=attempt.number,
            kind=verdict.kind,
            severity=verdict.severity,
            status="open",
            onset_at=self.clock.date(onset),
            opened_at=opened_at,
            summary=verdict.summary,
            advice=verdict.advice,
            culprits=[],
            waiting=[],
        )
        case = IncidentRecord(incident=blank, opened=now, onset=onset, seen=now)
        case.standing = _summarize_alerts(verdict.kind, [(Relation.SAME, verdict)], now)
        self._refine_incident(case, attempt, verdict, now)
        self._store_records([case])
        return case

    def _refine_incident(
        self, case: IncidentRecord, attempt: Attempt, verdict: Verdict, now: float
    ) -> None:
        case.seen = now
        before = case.incident
        waiting = set(verdict.waiting)
        if any(p.exit is not None for p in attempt.processes.values()):
            waiting |= set(before.waiting)  # the dead do not wait, but they did
        severe = Severity.ALERT in (before.severity, verdict.severity)
        self._replace_incident(
            case,
            before.model_copy(
                update={
                    "attempt": attempt.number,
                    "kind": verdict.kind,
                    "severity": Severity.ALERT if severe else Severity.WARNING,
                    "summary": verdict.summary,
                    "advice": verdict.advice,
                    "culprits": list(verdict.culprits),
                    "waiting": sorted(waiting - set(verdict.culprits)),
                    "group": evidence.convert_group(verdict.group),
                    "seq": verdict.seq,
                    "fields": list(verdict.differing_fields),
                    "calls": evidence.convert_calls(verdict.calls) or before.calls,
                    "divergence": (
                        evidence.convert_divergence(verdict.divergence)
                        or (before.divergence if verdict.kind is before.kind else None)
                    ),
                    "waits": evidence.convert_waits(verdict.waits) or before.waits,
                    "site": (
                        evidence.convert_site(verdict.site)
                        or (before.site if verdict.kind is before.kind else None)
                    ),
                }
            ),
        )
        case.loaded = False
        for rank in (*verdict.culprits, *verdict.waiting)[:MAX_MEMBERS_KEPT]:
            if (held := attempt.processes.get(rank)) is not None:
                case.members[rank] = f"{held.host}/{held.key}"

    def _update_evidence(self, case: IncidentRecord, attempt: Attempt) -> None:
        """Brings its processes and stacks up to date."""
        incident = case.incident
        stacks = evidence.collect_stacks(
            attempt, incident.culprits, incident.waiting, case.onset, self.clock.date
        )
        stacks = evidence.keep_known_stacks(incident.stacks, stacks)
        processes = evidence.convert_processes(attempt, incident.culprits) or incident.processes
        self._replace_incident(
            case, incident.model_copy(update={"stacks": stacks, "processes": processes})
        )

    def _replace_incident(self, case: IncidentRecord, incident: schema.Incident) -> None:
        if incident != case.incident:
            case.incident = incident
            self.changed.add(incident.id)


def _summarize_alerts(
    kind: VerdictKind, related: Iterable[tuple[Relation, Verdict]], now: float
) -> AlertSummary | None:
    alerts = [(how, v) for how, v in related if how and v.severity is Severity.ALERT]
    causes = [v for how, v in alerts if how is not Relation.CONSEQUENCE or v.kind is kind]
    if not alerts:
        return None
    accused = frozenset(rank for v in causes for rank in v.culprits)
    return AlertSummary(
        at=now, accused=accused, waiting=frozenset(rank for _, v in alerts for rank in v.waiting)
    )


def _belongs_to_attempt(case: IncidentRecord, attempt: Attempt) -> bool:
    if not case.loaded:
        return case.incident.attempt == attempt.number
    held = attempt.processes
    return any(
        r in held and f"{held[r].host}/{held[r].key}" == member
        for r, member in case.members.items()
    )


def _has_reported_since(case: IncidentRecord, attempt: Attempt) -> bool:
    """Somebody it concerns was heard since a verdict last spoke of it: only then does the absence
    of verdicts mean something.
    """
    if attempt.last_seen_at < case.seen:
        return False
    concerned = (
        attempt.processes.get(r) for r in (*case.incident.culprits, *case.incident.waiting)
    )
    return any(p is not None and p.last_seen_at >= case.seen for p in concerned)


def _same_call(incident: schema.Incident, verdict: Verdict) -> bool:
    return (
        incident.seq == verdict.seq
        and relate_verdict(incident, verdict, gathering=False) is not Relation.NONE
    )


def _has_made_progress(case: IncidentRecord, attempt: Attempt, now: float) -> bool:
    """The verdict is gone because the job went on, and not because it ended or is not heard."""
    processes = list(attempt.processes.values())
    if KINDS[case.incident.kind].is_call_error and not case.incident.waiting:
        return False  # it hangs nobody, and is there all the same
    if attempt.is_finished:
        clean = all(p.exit is not None and p.exit.exit_status == 0 for p in processes)
        return clean or case.incident.severity is Severity.WARNING
    failed = any(
        p.exception is not None or (p.exit is not None and p.exit.has_failed) for p in processes
    )  # or is about to
    if failed or now - attempt.last_seen_at > RECENT_HEARTBEAT_S:
        return False
    return now - max(case.seen, attempt.opened_at) >= (
        AFTER_RESTART_ABSENT_S if case.loaded else VERDICT_ABSENT_S
    )
