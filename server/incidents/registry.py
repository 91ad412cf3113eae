"""The life of incidents: a verdict opens one and refines it while evidence is collected, and the
absence of the verdict resolves it.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hangwatch.model.incidents import Incident, Resolution
from hangwatch.model.ranks import AttemptKey, Lifecycle
from hangwatch.model.recoveries import Recovery
from hangwatch.model.verdicts import Verdict
from hangwatch.tracking.attempt import Attempt
from hangwatch.tracking.fleet import Fleet

from ..core.clock import Clock, ulid
from . import evidence
from .device_evidence import collect_device_positions, keep_known_positions
from .hardware_evidence import update_hardware
from .matching import Relation, relate_verdict
from .records import IncidentRecord, get_member_key
from .refinement import refine_verdict, summarize_alerts
from .resolution import AFTER_RESTART_ABSENT_S, has_made_progress, has_reported_since

# The kind of an incident may only be corrected this long after it was opened.
EVIDENCE_WINDOW_S = 10.0
# An incident stays open this long after the end of its job: another host may report late.
JOB_END_GRACE_S = 30.0
# A job that was not reported for this long is given up.
NOT_REPORTING_LIMIT_S = 24 * 3600.0
MAX_MEMBERS_KEPT = 64
MAX_RECORDS_KEPT = 1000


@dataclass(slots=True, kw_only=True)
class IncidentRegistry:
    """All incidents. ``changed`` has the ids of those that changed since `take_changed`.

    An attempt may be diagnosed in another thread. ``records`` is therefore replaced and never
    changed, so that concurrent readers are not disturbed.
    """

    clock: Clock
    records: dict[str, IncidentRecord] = field(default_factory=dict)
    changed: set[str] = field(default_factory=set)
    _write_lock: threading.Lock = field(default_factory=threading.Lock)

    def _store_records(self, records: Iterable[IncidentRecord]) -> None:
        with self._write_lock:
            self.records = self.records | {record.incident.id: record for record in records}

    def drop_incidents(self, incident_ids: Collection[str]) -> None:
        with self._write_lock:
            self.records = {
                incident_id: record
                for incident_id, record in self.records.items()
                if incident_id not in incident_ids
            }

    def load_records(self, records: Iterable[IncidentRecord]) -> None:
        """Adds the incidents of an earlier server, or of another one. Their onset and opening
        precede the start of this server.
        """
        loaded = list(records)
        for record in loaded:
            record.is_restored = True
            record.last_seen_at = self.clock.monotonic()
            record.opened_at = self.clock.monotonic_at(record.incident.opened_at)
            record.onset_at = self.clock.monotonic_at(record.incident.onset_at)
        self._store_records(loaded)

    def list_open(self, attempt: Attempt) -> list[IncidentRecord]:
        """The open incidents of an attempt, oldest first."""
        open_records = [
            record
            for record in self.records.values()
            if record.is_live and record.incident.job == attempt.job and record.belongs_to(attempt)
        ]
        return sorted(open_records, key=lambda record: record.opened_at)

    def list_ended_with(self, attempt: Attempt) -> list[IncidentRecord]:
        """The incidents that were open when their attempt ended, oldest first."""
        ended = [
            record
            for record in self.records.values()
            if record.is_own
            and record.incident.resolution in (Resolution.ENDED, Resolution.ABORTED)
            and record.attempt_key == attempt.key
        ]
        return sorted(ended, key=lambda record: record.opened_at)

    def apply_verdicts(self, attempt: Attempt, verdicts: Sequence[Verdict], now: float) -> None:
        """Applies a diagnosis of an attempt at time ``now``: opens, refines and resolves incidents."""
        records = self.list_open(attempt)
        confirmed = [verdict for verdict in verdicts if verdict.is_confirmed]
        for verdict in self._match_verdicts(records, attempt, confirmed, now):
            is_explained = any(
                record.opened_at == now
                and relate_verdict(record.incident, verdict, gathering=False)
                for record in records
            )
            if not is_explained:
                records.append(self._open_incident(attempt, verdict, now))
        for record in records:
            is_suspected = any(_is_suspicion_of(verdict, record.incident) for verdict in verdicts)
            if is_suspected or not has_reported_since(record, attempt):
                record.last_seen_at = now
            self._update_evidence(record, attempt)
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
            for record in self.records.values()
            if record.is_live
            and record.incident.job == attempt.job
            and not record.belongs_to(attempt)
            and record.attempt_key not in current
        ]
        if not older or all(
            process.lifecycle < Lifecycle.INITIALISED for process in attempt.processes.values()
        ):
            return
        for record in older:
            # After a restart of the server, the host of an older incident may not have reported yet.
            if not record.is_restored or now - attempt.opened_at > AFTER_RESTART_ABSENT_S:
                self.resolve_incident(record, Resolution.RESTARTED, now)

    def resolve_finished_jobs(self, fleet: Fleet, now: float) -> None:
        """Resolves the incidents of jobs that ended, or that were not reported for a long time."""
        for record in self.records.values():
            if not record.is_live:
                continue
            job = record.incident.job
            attempt = fleet.attempts.get(record.attempt_key)
            attempt = attempt or fleet.latest_attempt(job)
            last = attempt or fleet.former_attempts.get(job)
            is_finished = last is not None and last.is_finished
            last_seen_at = record.last_seen_at if last is None else last.last_seen_at
            if now - last_seen_at <= (JOB_END_GRACE_S if is_finished else NOT_REPORTING_LIMIT_S):
                continue
            if not is_finished:
                why = Resolution.UNHEARD
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

    def take_changed(self) -> list[IncidentRecord]:
        """The incidents that changed since the last call, oldest first."""
        taken = [self.records[i] for i in sorted(self.changed) if i in self.records]
        self.changed.clear()
        excess = len(self.records) - MAX_RECORDS_KEPT
        if excess > 0:
            closed = [record for record in self.records.values() if not record.is_open]
            closed.sort(key=lambda record: record.opened_at)
            self.drop_incidents({record.incident.id for record in closed[:excess]})
        return taken

    def _match_verdicts(
        self,
        records: list[IncidentRecord],
        attempt: Attempt,
        verdicts: Sequence[Verdict],
        now: float,
    ) -> list[Verdict]:
        """Refines each open incident by the verdict that fits it best. Returns the verdicts that
        concern no open incident.
        """
        unmatched = list(verdicts)
        all_related = []
        for record in records:
            gathering = now - record.opened_at < EVIDENCE_WINDOW_S and not record.is_aborted
            related = [(relate_verdict(record.incident, v, gathering), v) for v in verdicts]
            all_related.append((record, related))
        for record, related in all_related:
            record.alert_summary = summarize_alerts(record.incident.kind, related, now)
            same = (v for relation, v in related if relation is Relation.SAME and v in unmatched)
            if (verdict := next(same, None)) is not None:
                unmatched.remove(verdict)
                self._refine_incident(record, attempt, verdict, now)
        for record, related in all_related:
            for relation, verdict in sorted(related, key=lambda pair: -pair[0]):
                if relation is Relation.NONE or verdict not in unmatched:
                    continue
                unmatched.remove(verdict)
                if relation is Relation.REFINES and record.last_seen_at < now:
                    self._refine_incident(record, attempt, verdict, now)
                record.last_seen_at = now
        return unmatched

    def _open_incident(self, attempt: Attempt, verdict: Verdict, now: float) -> IncidentRecord:
        onset = min(now, verdict.began_at) if verdict.began_at > 0 else now
        incident = Incident(
            id=ulid(self.clock.wall()),
            job=attempt.job,
            attempt=attempt.number,
            status="open",
            onset_at=self.clock.date(onset),
            opened_at=self.clock.date(now),
            verdict=verdict,
        )
        record = IncidentRecord(incident=incident, opened_at=now, onset_at=onset, last_seen_at=now)
        record.alert_summary = summarize_alerts(verdict.kind, [(Relation.SAME, verdict)], now)
        self.changed.add(incident.id)
        self._refine_incident(record, attempt, verdict, now)
        self._store_records([record])
        return record

    def _refine_incident(
        self, record: IncidentRecord, attempt: Attempt, verdict: Verdict, now: float
    ) -> None:
        before = record.incident
        refined = refine_verdict(
            before.verdict, verdict, attempt, record.members, record.last_seen_at
        )
        record.last_seen_at = now
        self._replace_incident(record, replace(before, attempt=attempt.number, verdict=refined))
        record.is_restored = False
        for rank in (*verdict.culprits, *verdict.waiting)[:MAX_MEMBERS_KEPT]:
            member_key = get_member_key(attempt, rank)
            if member_key is not None:
                record.members[rank] = member_key

    def _update_evidence(self, record: IncidentRecord, attempt: Attempt) -> None:
        """Updates the incident's processes, device positions and stacks."""
        incident = record.incident
        stacks = evidence.collect_stacks(
            attempt, incident.verdict, record.onset_at, self.clock.date
        )
        updated = replace(
            update_hardware(incident, attempt, record.onset_at),
            stacks=evidence.keep_known_stacks(incident.stacks, stacks),
            processes=(
                evidence.collect_processes(attempt, incident.culprits) or incident.processes
            ),
            device=keep_known_positions(
                incident.device, collect_device_positions(attempt, incident.verdict)
            ),
        )
        self._replace_incident(record, updated)

    def _replace_incident(self, record: IncidentRecord, incident: Incident) -> None:
        if incident != record.incident:
            record.incident = incident
            self.changed.add(incident.id)


def _is_suspicion_of(verdict: Verdict, incident: Incident) -> bool:
    """An unconfirmed verdict about the call of an incident keeps it open."""
    if verdict.is_confirmed or verdict.seq is None or verdict.seq != incident.seq:
        return False
    return relate_verdict(incident, verdict, gathering=False) is not Relation.NONE
