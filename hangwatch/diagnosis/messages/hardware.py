"""Messages on what hosts report of their hardware."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hangwatch.model.hardware import Observation, ObservedValue, Weight
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
    """One host reports something, of all that are concerned."""
    ((host, observations),) = found.items()
    clauses = _join_clauses(observations)
    if weight is Weight.HINT:
        start = f"Of {host_count} hosts, {host} alone" if host_count > 1 else host
        return f"{start} reports this, which may contribute: {clauses}."
    remedy = _choose_remedy(observations)
    if host_count == 1:
        return f"{host} reports a fault of its hardware: {clauses}.{remedy}"
    return (
        f"Of {host_count} hosts, {host} alone reports a fault of its hardware: {clauses}. That this"
        f" is the cause is inferred.{remedy}"
    )


def format_job_report(observations: Sequence[Observation]) -> str:
    """What NCCL reports of its communicators."""
    return f"NCCL itself reports: {_join_clauses(observations)}."


def format_idle_gpus(idle: Sequence[tuple[str, str]], spinning: int) -> str:
    """``idle`` are hosts and their GPUs."""
    names = ", ".join(f"{gpu} of {host}" for host, gpu in idle[:_MAX_HOSTS])
    verb = "is" if len(idle) == 1 else "are"
    others = _format_others(len(idle) - _MAX_HOSTS)
    return (
        f"{names}{others} {verb} idle while {spinning} GPUs spin, as"
        " NCCL's kernels do that wait for the others: check what that GPU's rank does before the call,"
        " and the GPU itself."
    )


def format_different_fact(
    host: str, name: str, unusual: ObservedValue, usual: ObservedValue
) -> str:
    return f"{host} alone has {name} {unusual}, where the other hosts have {usual}."


def format_several_hosts(found: Mapping[str, Sequence[Observation]]) -> str:
    shown = [
        f"{host} ({describe_observation(observations[0])})"
        for host, observations in list(found.items())[:_MAX_HOSTS]
    ]
    others = _format_others(len(found) - len(shown))
    return f"Faults of their hardware are reported by {', '.join(shown)}{others}."


def _format_others(count: int) -> str:
    return f" and {count} other{'s' if count > 1 else ''}" if count > 0 else ""


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
