"""The life of incidents: a verdict opens one and refines it while evidence is collected, and the
absence of the verdict resolves it.

One root cause is one incident: `relate_verdict` decides whether a verdict concerns an incident that
is already open.
"""

from __future__ import annotations

import enum
import threading
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any

from hangwatch.diagnosis.messages import update_waiter_count
from hangwatch.model.incidents import Incident, Recovery, Resolution
from hangwatch.model.kinds import KINDS, Role, Severity, VerdictKind, select_kinds
from hangwatch.model.ranks import AttemptKey, Lifecycle
from hangwatch.model.verdicts import Verdict
from hangwatch.protocol.heartbeat import get_family
from hangwatch.tracking.attempt import Attempt
from hangwatch.tracking.fleet import Fleet
from hangwatch.tracking.process import Process
from hangwatch.tracking.tenants import take_turns

from ..core import limits
from ..core.clock import Clock, ulid
from .evidence import add_device_advice, strip_verdict, update_evidence

# The kind of an incident may only be corrected this long after it was opened or kernels were received.
EVIDENCE_WINDOW_S = 10.0
# An incident stays open this long after the end of its job: another host may report late.
JOB_END_GRACE_S = 30.0
# A job that was not reported for this long is given up.
NOT_REPORTING_LIMIT_S = 24 * 3600.0
MAX_MEMBERS_KEPT = 64
MAX_RECORDS_KEPT = 1000

_ENDS = frozenset(select_kinds(lambda spec: spec.role is Role.END))
_ROOTS = frozenset(select_kinds(lambda spec: spec.role is Role.ROOT))
_HANGS = frozenset(
    select_kinds(lambda spec: spec.role in (Role.END, Role.HANG) or spec.blocks_culprits)
)
_ALONE = frozenset(select_kinds(lambda spec: spec.role is Role.INDEPENDENT))

# An incident whose verdict is absent for this long is resolved if the job is alive.
VERDICT_ABSENT_S = 2.0
# The time is longer after a restart of the server, while the state of the attempt is still arriving.
AFTER_RESTART_ABSENT_S = 10.0
# The absence of a verdict only means something this long after the last heartbeat.
RECENT_HEARTBEAT_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class AlertSummary:
    """The alert verdicts that concerned an incident at the last diagnosis, at time ``at``.

    ``accused`` are the culprits of the verdicts that have the same cause, and not only the same
    consequences.
    """

    at: float
    accused: frozenset[int]
    waiting: frozenset[int]


@dataclass(slots=True, kw_only=True)
class IncidentRecord:
    """An incident, and what only the server keeps about it. Times in seconds are monotonic."""

    incident: Incident
    # The HOST/PROCESS of each rank distinguishes a rerun of a job from the same run.
    members: dict[int, str] = field(default_factory=dict)
    alerted_severity: Severity | None = None  # the last alert's severity
    alerted_at: datetime | None = None  # the time of the last alert
    reminders: int = 0
    is_resolution_announced: bool = False
    is_own: bool = True  # False for an incident of another server in the same database
    opened_at: float = 0.0
    onset_at: float = 0.0
    last_seen_at: float = 0.0  # the time of the last verdict that concerned it
    is_restored: bool = False  # True: older than this server's start, and not confirmed since
    alert_summary: AlertSummary | None = None
    # The time of the next decision on its recovery; infinite if no rank will be ended for it.
    recovery_check_at: float = 0.0

    @property
    def attempt_key(self) -> AttemptKey:
        return AttemptKey(self.incident.job, self.incident.attempt)

    @property
    def is_open(self) -> bool:
        return self.incident.is_open

    @property
    def is_live(self) -> bool:
        """Whether this server updates it."""
        return self.is_own and self.is_open

    @property
    def is_aborted(self) -> bool:
        """Whether ranks were or will be ended for it, which explains all that happens since."""
        recovery = self.incident.recovery
        if recovery is None or recovery.announced_at is None:
            return False
        return self.is_open or any(abort.result != "left" for abort in recovery.aborts)

    @property
    def recovery(self) -> Recovery:
        """The recovery of an incident that has one."""
        assert self.incident.recovery is not None
        return self.incident.recovery

    def belongs_to(self, attempt: Attempt) -> bool:
        """A restored incident belongs to the attempt that has one of its processes: after a restart
        of the server, attempts may be numbered differently.
        """
        if not self.is_restored:
            return self.incident.attempt == attempt.number
        return any(
            get_member_key(process) == self.members[process.rank]
            for process in attempt.find_processes(self.members)
        )


def get_member_key(process: Process) -> str:
    """``HOST/PROCESS``."""
    return f"{process.host}/{process.key}"


@dataclass(slots=True, kw_only=True)
class IncidentRegistry:
    """All incidents. ``changed`` has the ids of incidents that changed since `take_changed`.

    An attempt may be diagnosed in another thread. ``records`` is therefore replaced and never
    changed, so that concurrent readers are not disturbed; so are the tuples of ``_open_by_family``.
    """

    clock: Clock
    records: dict[str, IncidentRecord] = field(default_factory=dict)
    changed: set[str] = field(default_factory=set)
    opened_count: int = 0  # since the server started
    refusals: Counter[str] = field(default_factory=Counter)  # by limit
    # The open incidents of each family of jobs.
    _open_by_family: dict[str, tuple[IncidentRecord, ...]] = field(default_factory=dict)
    _write_lock: threading.Lock = field(default_factory=threading.Lock)

    def _store_records(self, records: Collection[IncidentRecord]) -> None:
        with self._write_lock:
            for record in records:
                if (former := self.records.get(record.incident.id)) is not None:
                    self._unindex_record(former)
                if record.is_open:
                    family = get_family(record.incident.job)
                    opened = self._open_by_family.get(family, ())
                    self._open_by_family[family] = (*opened, record)
            self.records = self.records | {record.incident.id: record for record in records}

    def _unindex_record(self, record: IncidentRecord) -> None:
        """Takes a record out of the open ones, if it is one of them."""
        family = get_family(record.incident.job)
        opened = self._open_by_family.get(family, ())
        others = tuple([other for other in opened if other is not record])
        self._open_by_family[family] = others
        if not others:
            del self._open_by_family[family]

    def drop_incidents(self, incident_ids: Collection[str]) -> None:
        with self._write_lock:
            for incident_id in incident_ids:
                if (record := self.records.get(incident_id)) is not None:
                    self._unindex_record(record)
            self.records = {
                incident_id: record
                for incident_id, record in self.records.items()
                if incident_id not in incident_ids
            }

    def load_records(self, records: Iterable[IncidentRecord]) -> None:
        """Adds incidents of an earlier or another server, which precede the start of this one."""
        loaded = list(records)
        for record in loaded:
            record.is_restored = True
            record.last_seen_at = self.clock.monotonic()
            record.opened_at = self.clock.monotonic_at(record.incident.opened_at)
            record.onset_at = self.clock.monotonic_at(record.incident.onset_at)
        self._store_records(loaded)

    def list_open(self, attempt: Attempt) -> list[IncidentRecord]:
        """The open incidents of an attempt, oldest first."""
        opened = [
            record for record in self._list_open_of_job(attempt.job) if record.belongs_to(attempt)
        ]
        return sorted(opened, key=lambda record: record.opened_at)

    def _list_open_of_job(self, job: str) -> list[IncidentRecord]:
        opened = self._open_by_family.get(get_family(job), ())
        return [record for record in opened if record.is_live and record.incident.job == job]

    def list_ended_with(self, attempt: Attempt) -> list[IncidentRecord]:
        """The incidents that were open when their attempt ended."""
        return [
            record
            for record in self.records.values()
            if record.is_own
            and record.attempt_key == attempt.key
            and record.incident.resolution in (Resolution.ENDED, Resolution.ABORTED)
        ]

    def apply_verdicts(self, attempt: Attempt, verdicts: Sequence[Verdict], now: float) -> None:
        """Applies a diagnosis of an attempt at time ``now``: opens, refines and resolves incidents."""
        records = self.list_open(attempt)
        confirmed = [verdict for verdict in verdicts if verdict.is_confirmed]
        suspicions = [v for v in verdicts if not v.is_confirmed and v.seq is not None]
        for verdict in self._match_verdicts(records, attempt, confirmed, now):
            is_explained = any(
                record.opened_at == now
                and relate_verdict(record.incident, verdict, gathering=False)
                for record in records
            )
            if not is_explained and self._may_open(attempt.job, verdict):
                records.append(self._open_incident(attempt, verdict, now))
        for record in records:
            # A suspicion about the call of an incident keeps it open.
            incident = record.incident
            is_suspected = any(
                suspicion.seq == incident.seq
                and relate_verdict(incident, suspicion, gathering=False)
                for suspicion in suspicions
            )
            # The absence of a verdict counts once a rank of the incident was reported again.
            has_reported = attempt.last_seen_at >= record.last_seen_at and any(
                process.reports.last_seen_at >= record.last_seen_at
                for process in attempt.find_processes(incident.involved_ranks)
            )
            if is_suspected or not has_reported:
                record.last_seen_at = now
            updated = update_evidence(incident, attempt, record.onset_at, self.clock.date)
            self._replace_incident(record, updated)
            if record.last_seen_at < now and has_made_progress(record, attempt, now):
                why = Resolution.ENDED if attempt.is_finished else Resolution.PROGRESS
                self.resolve_incident(record, why, now)

    def resolve_earlier_attempts(
        self, attempt: Attempt, now: float, current: Collection[AttemptKey] = ()
    ) -> None:
        """Resolves the incidents of earlier attempts once the newest attempt has been initialised,
        other than those of the ``current`` ones, whose ranks still run.
        """
        older = [
            record
            for record in self._list_open_of_job(attempt.job)
            if not record.belongs_to(attempt) and record.attempt_key not in current
        ]
        processes = attempt.processes.values()
        if not older or all(process.lifecycle < Lifecycle.INITIALISED for process in processes):
            return
        for record in older:
            # The host of an older incident may not have reported yet after a restart of the server.
            if not record.is_restored or now - attempt.opened_at > AFTER_RESTART_ABSENT_S:
                self.resolve_incident(record, Resolution.RESTARTED, now)

    def resolve_finished_jobs(self, fleet: Fleet, now: float) -> None:
        """Resolves the incidents of jobs that ended, or that were not reported for a long time."""
        for record in self.records.values():
            if not record.is_live:
                continue
            job = record.incident.job
            attempt = fleet.attempts.get(record.attempt_key) or fleet.latest_attempt(job)
            last = attempt or fleet.former_attempts.get(job)
            is_finished = last is not None and last.is_finished
            last_seen_at = record.last_seen_at if last is None else last.last_seen_at
            if now - last_seen_at <= (JOB_END_GRACE_S if is_finished else NOT_REPORTING_LIMIT_S):
                continue
            if not is_finished:
                why = Resolution.NOT_REPORTING
            elif record.is_aborted:
                why = Resolution.ABORTED
            else:
                why = Resolution.ENDED
            self.resolve_incident(record, why, last_seen_at)

    def record_recovery(self, record: IncidentRecord, recovery: Recovery) -> None:
        self._replace_incident(record, replace(record.incident, recovery=recovery))

    def update_recovery(self, record: IncidentRecord, **changes: Any) -> None:
        """Changes the recovery of an incident that has one."""
        self.record_recovery(record, replace(record.recovery, **changes))

    def resolve_incident(self, record: IncidentRecord, why: Resolution, at: float) -> None:
        """Resolves an incident as of ``at``, monotonic."""
        resolved = replace(
            record.incident,
            status="resolved",
            resolved_at=self.clock.date(max(at, record.opened_at)),
            resolution=why,
        )
        self._replace_incident(record, resolved)
        with self._write_lock:
            self._unindex_record(record)

    def take_changed(self) -> list[IncidentRecord]:
        """The incidents that changed since the last call, oldest first."""
        changed = map(self.records.get, sorted(self.changed))
        taken = [record for record in changed if record is not None]
        self.changed.clear()
        excess = len(self.records) - MAX_RECORDS_KEPT
        if excess > 0:
            closed = [record for record in self.records.values() if not record.is_open]
            closed.sort(key=lambda record: record.opened_at)
            turns = take_turns(reversed(closed), lambda record: record.incident.job)
            self.drop_incidents({record.incident.id for record in turns[-excess:]})
        return taken

    def _match_verdicts(
        self,
        records: list[IncidentRecord],
        attempt: Attempt,
        verdicts: Sequence[Verdict],
        now: float,
    ) -> list[Verdict]:
        """Refines each open incident by the verdict that fits best. Returns the other verdicts."""
        unmatched = list(verdicts)
        all_related = []
        for record in records:
            # The kernels of devices are read after an incident was opened, and that takes long.
            newest_at = max(record.opened_at, attempt.kernels_at)
            gathering = now - newest_at < EVIDENCE_WINDOW_S and not record.is_aborted
            related = [(relate_verdict(record.incident, v, gathering), v) for v in verdicts]
            all_related.append((record, related))
            record.alert_summary = summarize_alerts(record.incident.kind, related, now)
            for relation, verdict in related:
                if relation is Relation.SAME and verdict in unmatched:
                    unmatched.remove(verdict)
                    self._refine_incident(record, attempt, verdict, now)
                    break
        for record, related in all_related:
            for relation, verdict in sorted(related, key=lambda pair: -pair[0]):
                if relation is Relation.NONE or verdict not in unmatched:
                    continue
                unmatched.remove(verdict)
                if relation is Relation.REFINES and record.last_seen_at < now:
                    self._refine_incident(record, attempt, verdict, now)
                record.last_seen_at = now
        return unmatched

    def _may_open(self, job: str, verdict: Verdict) -> bool:
        """Whether the job's family may have another open incident. Half of them are for alerts."""
        limit = limits.OPEN_INCIDENTS
        family = get_family(job)
        maximum = limit.maximum if verdict.is_alert else limit.maximum // 2
        if len(self._open_by_family.get(family, ())) < maximum:
            return True
        self.refusals[limit.name] += 1
        return False

    def _open_incident(self, attempt: Attempt, verdict: Verdict, now: float) -> IncidentRecord:
        onset = min(now, verdict.began_at) if verdict.began_at > 0 else now
        incident = Incident(
            id=ulid(self.clock.wall()),
            job=attempt.job,
            attempt=attempt.number,
            status="open",
            onset_at=self.clock.date(onset),
            opened_at=self.clock.date(now),
            **verdict.list_fields(),
        )
        record = IncidentRecord(incident=incident, opened_at=now, onset_at=onset, last_seen_at=now)
        record.alert_summary = summarize_alerts(verdict.kind, [(Relation.SAME, verdict)], now)
        self.changed.add(incident.id)
        self._refine_incident(record, attempt, verdict, now)
        self._store_records([record])
        self.opened_count += 1
        return record

    def _refine_incident(
        self, record: IncidentRecord, attempt: Attempt, verdict: Verdict, now: float
    ) -> None:
        """Gives the incident the new verdict, with the evidence of the earlier one that this one lacks.
        An alert stays an alert.
        """
        before = record.incident
        after = strip_verdict(verdict)
        waiting = set(after.waiting)
        # A process that has ended no longer waits, but it did. NCCL's watchdog aborts a call before it
        # ends the process, so that the host may have run on for a moment, and its next call may have
        # raised.
        waiting |= attempt.ended_ranks.intersection(record.members)
        if attempt.ended_ranks:
            waiting.update(before.waiting)
        for process in attempt.find_processes(before.waiting):
            # The heartbeat of the rank's host may be late; nothing is known to have changed.
            if process.reports.last_seen_at <= record.last_seen_at:
                waiting.add(process.rank)
        waiting -= set(after.culprits)
        is_same_kind = after.kind is before.kind
        refined = replace(
            after,
            summary=update_waiter_count(after.summary, len(after.waiting), len(waiting)),
            advice=add_device_advice(after, attempt),
            severity=Severity.ALERT if before.is_alert else after.severity,
            waiting=tuple(sorted(waiting)),
            calls=after.calls or before.calls,
            waits=after.waits or before.waits,
            divergence=after.divergence or (before.divergence if is_same_kind else None),
            site=after.site or (before.site if is_same_kind else None),
        )
        record.last_seen_at = now
        record.is_restored = False
        self._replace_incident(
            record, replace(before, **refined.list_fields(), attempt=attempt.number)
        )
        for process in attempt.find_processes(verdict.involved_ranks[:MAX_MEMBERS_KEPT]):
            record.members[process.rank] = get_member_key(process)

    def _replace_incident(self, record: IncidentRecord, incident: Incident) -> None:
        if incident != record.incident:
            record.incident = incident
            self.changed.add(incident.id)


class Relation(enum.IntEnum):
    NONE = 0
    CONSEQUENCE = 1  # explained by the incident: keeps it open and changes nothing
    REFINES = 2  # the same root cause, better understood
    SAME = 3


def is_hang(incident: Incident) -> bool:
    """Whether ranks are blocked because of the incident."""
    return bool(incident.waiting) or (incident.kind in _HANGS and incident.is_alert)


def relate_verdict(incident: Incident, verdict: Verdict, gathering: bool) -> Relation:
    """The relation of a verdict on the same attempt to an open incident. ``gathering``: the incident
    is so new that its evidence is still being collected.
    """
    if verdict.kind in _ALONE or incident.kind in _ALONE:
        has_same_location = _has_same_group(incident, verdict) or (
            set(incident.culprits) == set(verdict.culprits)
        )
        is_same = verdict.kind is incident.kind and has_same_location
        return Relation.SAME if is_same else Relation.NONE
    if verdict.kind is incident.kind:
        if (same := _relate_same_kind(incident, verdict)) is not Relation.NONE:
            return same
    elif _has_same_position(incident, verdict) and verdict.kind not in _ENDS:
        rises = verdict.is_alert and not incident.is_alert
        falls = incident.is_alert and not verdict.is_alert
        return Relation.REFINES if rises or (gathering and not falls) else Relation.CONSEQUENCE
    if not incident.is_alert:
        if not _share_culprits(incident, verdict):
            return Relation.NONE
        return Relation.REFINES if verdict.is_alert else Relation.CONSEQUENCE
    if incident.kind in _ENDS:  # the end of a process makes other ranks wait or die
        if verdict.kind in _ROOTS:
            is_refined = gathering and _share_ranks(incident, verdict)
            return Relation.REFINES if is_refined else Relation.NONE
        # Nodes report at different times, so the first death may only be known later. Deaths after
        # the loss of a node are its consequences.
        may_be_first = verdict.kind in _ENDS and not KINDS[incident.kind].is_unreachable
        return Relation.REFINES if gathering and may_be_first else Relation.CONSEQUENCE
    return _relate_to_hang(incident, verdict, gathering)


def _relate_to_hang(incident: Incident, verdict: Verdict, gathering: bool) -> Relation:
    if not is_hang(incident):
        return Relation.NONE
    if verdict.kind in _ENDS:
        return Relation.CONSEQUENCE  # launchers and people end jobs that hang
    if not _share_ranks(incident, verdict):
        return Relation.NONE
    if verdict.kind in _ROOTS:
        if not verdict.waiting and not KINDS[verdict.kind].blocks_culprits:
            return Relation.NONE  # a separate bug that blocks no rank
    elif not verdict.is_alert:
        return Relation.CONSEQUENCE
    return Relation.REFINES if gathering and incident.kind not in _ROOTS else Relation.CONSEQUENCE


def _relate_same_kind(incident: Incident, verdict: Verdict) -> Relation:
    spec = KINDS[incident.kind]
    if spec.is_of_whole_job:
        return Relation.SAME
    if spec.blocks_culprits:
        # No rank is on two cycles.
        return Relation.SAME if _share_culprits(incident, verdict) else Relation.NONE
    if _has_same_position(incident, verdict):
        return Relation.SAME
    if spec.is_call_error:
        if not _has_same_group(incident, verdict):
            return Relation.NONE
        # The calls of a group stay different after a divergence: later differences have the same
        # cause. But where it began may be found later.
        is_exact = bool(incident.calls)
        if is_exact or incident.seq is None or verdict.seq is None or verdict.seq > incident.seq:
            return Relation.CONSEQUENCE
        return Relation.REFINES
    is_same = incident.culprits and set(incident.culprits) == set(verdict.culprits)
    return Relation.SAME if is_same else Relation.NONE


def _has_same_group(incident: Incident, verdict: Verdict) -> bool:
    ours, theirs = incident.group, verdict.group
    if ours is None or theirs is None:
        return False
    return ours.name == theirs.name and ours.ranks == theirs.ranks


def _has_same_position(incident: Incident, verdict: Verdict) -> bool:
    is_same_call = incident.seq is not None and incident.seq == verdict.seq
    if not (is_same_call and _has_same_group(incident, verdict)):
        return False
    # Each pair of ranks in a group counts its point-to-point calls separately: only the two ranks
    # distinguish one pair from another.
    calls = (*incident.calls, *verdict.calls)
    if all(call_class.call.peer is None for call_class in calls):
        return True
    return _share_culprits(incident, verdict)


def _share_culprits(incident: Incident, verdict: Verdict) -> bool:
    return not set(incident.culprits).isdisjoint(verdict.culprits)


def _share_ranks(incident: Incident, verdict: Verdict) -> bool:
    ranks = set(verdict.involved_ranks)
    if incident.kind is verdict.kind and KINDS[verdict.kind].blocks_culprits:
        # A rank that waits for two cycles does not make them one.
        return not (
            ranks.isdisjoint(incident.culprits)
            and set(verdict.culprits).isdisjoint(incident.waiting)
        )
    # `isdisjoint` stops at the first common rank.
    return not (ranks.isdisjoint(incident.culprits) and ranks.isdisjoint(incident.waiting))


def summarize_alerts(
    kind: VerdictKind, related: Iterable[tuple[Relation, Verdict]], now: float
) -> AlertSummary | None:
    """Summarizes the alerts among the verdicts that are related to an incident of a kind."""
    alerts = [(relation, verdict) for relation, verdict in related if relation and verdict.is_alert]
    if not alerts:
        return None
    causes = [
        verdict
        for relation, verdict in alerts
        if relation is not Relation.CONSEQUENCE or verdict.kind is kind
    ]
    return AlertSummary(
        at=now,
        accused=frozenset(rank for verdict in causes for rank in verdict.culprits),
        waiting=frozenset(rank for _, verdict in alerts for rank in verdict.waiting),
    )


def has_made_progress(record: IncidentRecord, attempt: Attempt, now: float) -> bool:
    """Whether the verdict is absent because the job made progress, not because it ended."""
    incident = record.incident
    if KINDS[incident.kind].is_call_error and not incident.waiting:
        return False  # no rank was blocked by the incident, so progress does not refute it
    processes = attempt.processes.values()
    exits = [process.exit for process in processes if process.exit is not None]
    if attempt.is_finished:
        is_clean = len(exits) == len(processes) and all(end.exit_status == 0 for end in exits)
        return is_clean or not incident.is_alert
    if now - attempt.last_seen_at > RECENT_HEARTBEAT_S:
        return False
    if any(end.has_failed for end in exits):
        return False
    if any(process.exception is not None for process in processes):
        return False
    absent_s = now - max(record.last_seen_at, attempt.opened_at)
    return absent_s >= (AFTER_RESTART_ABSENT_S if record.is_restored else VERDICT_ABSENT_S)
