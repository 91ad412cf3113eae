"""What hosts report of their hardware, as evidence of an incident. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from hangwatch.diagnosis.hardware import InvolvedHost, list_involved_hosts
from hangwatch.model.hardware import (
    HostObservation,
    MissingEvidence,
    UnavailableSource,
    Weight,
)
from hangwatch.model.incidents import Incident
from hangwatch.tracking.attempt import Attempt

MAX_OBSERVATIONS_SHOWN = 256
MAX_GAPS_SHOWN = 16


def update_hardware(incident: Incident, attempt: Attempt, since: float) -> Incident:
    """The incident with what the hosts have reported since the onset."""
    hosts = list_involved_hosts(attempt, replace(incident.verdict, began_at=since))
    return replace(
        incident,
        hardware=keep_known_hardware(incident.hardware, collect_hardware(hosts)),
        hardware_missing=collect_missing(hosts) or incident.hardware_missing,
    )


def collect_hardware(hosts: Iterable[InvolvedHost]) -> tuple[HostObservation, ...]:
    """What the hosts reported, faults first; versions are left out."""
    found = [
        HostObservation(host=host.name, observation=observation)
        for host in hosts
        for observation in host.observations
        if observation.weight is not Weight.FACT
    ]
    found.sort(key=lambda entry: entry.observation.weight is not Weight.FAULT)
    return tuple(found[:MAX_OBSERVATIONS_SHOWN])


def collect_missing(hosts: Iterable[InvolvedHost]) -> tuple[MissingEvidence, ...]:
    """The sources that the hosts could read if something were done about it."""
    hosts_by_gap: dict[UnavailableSource, list[str]] = {}
    for host in hosts:
        for gap in host.hardware.unavailable if host.hardware is not None else ():
            if gap.remedy:
                hosts_by_gap.setdefault(gap, []).append(host.name)
    return tuple(
        MissingEvidence(hosts=tuple(names), source=gap.source, reason=gap.reason, remedy=gap.remedy)
        for gap, names in list(hosts_by_gap.items())[:MAX_GAPS_SHOWN]
    )


def keep_known_hardware(
    before: Sequence[HostObservation], now: Sequence[HostObservation]
) -> tuple[HostObservation, ...]:
    """``now``, and what was observed earlier and is not any more. What did not change keeps its age."""
    earlier, current = ({_get_key(entry): entry for entry in entries} for entries in (before, now))
    kept = {
        key: entry
        for key, entry in earlier.items()
        if key not in current or current[key].observation.now == entry.observation.now
    }
    return tuple({**current, **kept}.values())[:MAX_OBSERVATIONS_SHOWN]


def _get_key(entry: HostObservation) -> tuple[object, ...]:
    """All of an observation but its age, and the growing value of a counter."""
    seen = entry.observation
    now = None if seen.is_counter else seen.now
    return (entry.host, seen.source, seen.about, seen.what, seen.before, now)
