"""Messages on what hosts report of their hardware."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hangwatch.model.hardware import Observation, Weight
from hangwatch.report.hardware import describe_observation

_MAX_CLAUSES = 3
_MAX_HOSTS = 3

_REMEDIES = {
    "link_downed": "Check the cable, the transceiver and the switch port of {about}.",
    "carrier_down_count": "Check the cable and the switch port of {about}.",
    "state": "Check the cable and the switch port of {about}.",
    "link_down": "Check the cable and the switch port of {about}.",
    "xid": "Take the node out of service, and run the GPU's diagnostics (dcgmi diag -r 3).",
    "lost": "Take the node out of service: the GPU needs a reset or a repair.",
    "oom_kill": "Raise the memory limit, or reduce what the rank and its workers keep in memory.",
    "hung_task": "Check the storage or the device that it waits for (dmesg shows its stack).",
    "nfs_not_responding": "Check the storage server and the network to it.",
    "nfs_requests_without_reply": "Check the storage server and the network to it.",
    "io_error": "Check the disk.",
    "uncorrected_memory_errors": "Take the node out of service, and test the GPU's memory.",
}


def format_single_host(
    found: Mapping[str, Sequence[Observation]], weight: Weight, host_count: int
) -> str:
    """One host of several reports something."""
    ((host, observations),) = found.items()
    clauses = _join_clauses(observations)
    if weight is Weight.FAULT:
        return (
            f"Of {host_count} hosts, {host} alone reports a fault of its hardware: {clauses}. That this"
            f" is the cause is inferred.{_choose_remedy(observations)}"
        )
    return f"Of {host_count} hosts, {host} alone reports this, which may contribute: {clauses}."


def format_host_observations(found: Mapping[str, Sequence[Observation]], weight: Weight) -> str:
    """Only one host is concerned, so that it cannot be compared with others."""
    ((host, observations),) = found.items()
    clauses = _join_clauses(observations)
    if weight is Weight.FAULT:
        return f"{host} reports a fault of its hardware: {clauses}.{_choose_remedy(observations)}"
    return f"{host} reports this, which may contribute: {clauses}."


def format_several_hosts(found: Mapping[str, Sequence[Observation]]) -> str:
    shown = [
        f"{host} ({describe_observation(observations[0])})"
        for host, observations in list(found.items())[:_MAX_HOSTS]
    ]
    more = len(found) - len(shown)
    others = f" and {more} others" if more else ""
    return f"Faults of their hardware are reported by {', '.join(shown)}{others}."


def _join_clauses(observations: Sequence[Observation]) -> str:
    clauses = list(dict.fromkeys(describe_observation(o) for o in observations))
    text = "; ".join(clauses[:_MAX_CLAUSES])
    more = len(clauses) - _MAX_CLAUSES
    return f"{text}; and {more} more" if more > 0 else text


def _choose_remedy(observations: Sequence[Observation]) -> str:
    """That of the first observation that has one, after a space; else empty."""
    for observation in observations:
        remedy = _REMEDIES.get(observation.what)
        if remedy is not None:
            return " " + remedy.format(about=observation.about)
    return ""
