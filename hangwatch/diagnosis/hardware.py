"""What hosts report of their hardware, as evidence for a verdict: requests it, and adds to the advice
what it may explain. It never makes a verdict.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import inf
from statistics import mode

from hangwatch.model.hardware import (
    Observation,
    ObservedValue,
    Weight,
    XidAction,
    find_known_problems,
    find_xid,
)
from hangwatch.model.kinds import KINDS, HardwareScope
from hangwatch.model.limits import EVENT_BEFORE_ONSET_S, LATE_BY_S, READING_DELAY_S, REREAD_AFTER_S
from hangwatch.model.verdicts import Verdict
from hangwatch.report.terminal import describe_observation
from hangwatch.tracking.attempt import Attempt, HostHardware
from hangwatch.tracking.process import Process

from .context import DiagnosisContext, EvidenceRequest

MAX_HOSTS_READ = 256  # hosts that are read for one verdict
_PROCESS_PREFIX = "process "
_MIN_SPINNING_SHARE = 2  # the spinning GPUs for each idle one
_MIN_HINT_GROWTH = 10
_WAITING_GPU = ("idle", "spins")  # observations that only mean something beside other GPUs
_MIN_HOSTS_COMPARED = 3  # either one of two hosts may be the one that is different
_MAX_CLAUSES = 3
_MAX_HOSTS = 3  # hosts that are named

_REMEDIES = {
    "link_downed": "Check the cable, the transceiver and the switch port of {about}.",
    "carrier_down_count": "Check the cable and the switch port of {about}.",
    "state": "Check the cable and the switch port of {about}.",
    "link_down": "Check the cable and the switch port of {about}.",
    "lost": "Take the node out of service: the GPU needs a reset or a repair.",
    "oom_kill": "Raise the memory limit, or reduce what the rank and its workers keep in memory.",
    "hung_task": "Check the storage or the device that it waits for (dmesg shows its stack).",
    "nfs_not_responding": "Check the storage server and the network to it.",
    "nfs_requests_without_reply": "Check the storage server and the network to it.",
    "io_error": "Check the disk.",
    "uncorrected_memory_errors": "Take the node out of service, and test the GPU's memory.",
    "memory_errors_since_boot": "Take the nodes out of service, and test the memory of these GPUs.",
    "inactive_nvlinks": "Check the NVLinks of these GPUs (nvidia-smi nvlink -s).",
    "sxid": "Take the node out of service, and check its NVSwitches (the log of Fabric Manager).",
}


_XID_REMEDIES = {
    XidAction.CHECK_PROGRAM: (
        "Look for a bad address or index in the program (compute-sanitizer finds it); the GPU is well"
        " unless other programs get this error there, too."
    ),
    XidAction.RESTART_JOB: (
        "Restart the job; if the error returns on this GPU, take the node out of service."
    ),
    XidAction.RESET_GPU: (
        "Take the node out of service, reset the GPU (nvidia-smi --gpu-reset), and run its diagnostics"
        " (dcgmi diag -r 3)."
    ),
    XidAction.RESTART_NODE: (
        "Take the node out of service and restart it; if the error returns, the GPU needs a repair."
    ),
    XidAction.CHECK_NVLINK: (
        "Take the node out of service, and check its NVLinks (nvidia-smi nvlink -e, dcgmi diag -r 3)."
    ),
}
_XID_REPORTS = ("xid", "program_xid")
_XIDS = (*_XID_REPORTS, "earlier_xid")
# A completion is reported up to this long after it, and a GPU completes nothing after a fatal Xid.
_COMPLETION_DELAY_S = READING_DELAY_S + LATE_BY_S


@dataclass
class InvolvedHost:
    """A host whose hardware may explain a verdict, with the ranks of the verdict that are on it."""

    name: str
    onset: float
    processes: list[Process] = field(default_factory=list)
    hardware: HostHardware | None = None  # read since the onset

    @cached_property
    def observations(self) -> tuple[Observation, ...]:
        """What concerns the verdict: its own processes, and no events of long before the onset. An Xid
        after which all these ranks have completed calls is no cause either.
        """
        if self.hardware is None:
            return ()
        own_names = {f"{_PROCESS_PREFIX}{process.identity.pid}" for process in self.processes}
        earliest = self.onset - EVENT_BEFORE_ONSET_S
        completed_at = inf  # the time by which all of them have completed a call
        for process in self.processes:
            streams = process.streams.values()
            times = [max(s.last_completion_at, s.device_changed_at) for s in streams]
            completed_at = min(completed_at, max(times, default=0.0))
        concerned = []
        for observation in self.hardware.observations:
            since = earliest
            if observation.what in _XID_REPORTS:
                since = max(earliest, completed_at - _COMPLETION_DELAY_S)
            is_late = self.hardware.taken_at - observation.age_s >= since
            is_foreign = (
                observation.about.startswith(_PROCESS_PREFIX) and observation.about not in own_names
            )
            if observation.concerns_job or (is_late and not is_foreign):
                concerned.append(observation)
        return tuple(concerned)


def list_involved_hosts(attempt: Attempt, verdict: Verdict) -> list[InvolvedHost]:
    """The hosts of the culprits, then those of the ranks that wait, if `KindSpec.hardware` includes them."""
    scope = KINDS[verdict.kind].hardware
    if scope is HardwareScope.NONE:
        return []
    ranks = verdict.involved_ranks if scope is HardwareScope.ALL else verdict.culprits
    hosts: dict[str, InvolvedHost] = {}
    for process in attempt.find_processes(ranks):
        host = hosts.get(process.host)
        if host is None:
            if len(hosts) >= MAX_HOSTS_READ:
                break
            host = hosts[process.host] = InvolvedHost(process.host, verdict.began_at)
            hardware = attempt.hardware.get(process.host)
            if hardware is not None and hardware.taken_at >= verdict.began_at:
                host.hardware = hardware
        host.processes.append(process)
    return list(hosts.values())


def request_hardware(context: DiagnosisContext) -> None:
    """Requests a reading of the hosts of each verdict, and further ones while it lasts. The first time,
    the last host asks NCCL about all ranks: those of the culprits, which come first, may not answer.
    """
    for verdict in context.verdicts:
        hosts = list_involved_hosts(context.attempt, verdict)
        for host in hosts:
            hardware = host.hardware
            if hardware is None or context.now - hardware.taken_at > REREAD_AFTER_S:
                addressed = next((p for p in host.processes if p.is_alive), host.processes[0])
                request = EvidenceRequest(
                    rank=addressed.rank,
                    hardware=True,
                    whole_job=hardware is None and host is hosts[-1],
                    since=verdict.began_at,
                )
                context.requests.append(request)


def add_hardware_advice(context: DiagnosisContext, verdict: Verdict) -> Verdict:
    """Adds to the verdict's advice what its hosts report. If all were read and a single one reports a
    fault, the advice names it, as an inference.
    """
    hosts = list_involved_hosts(context.attempt, verdict)
    read = [host for host in hosts if host.hardware is not None]
    if not read:
        return verdict
    is_complete = len(read) == len(hosts) < MAX_HOSTS_READ
    # NCCL reports on the whole job. Its hints are left out: ranks that lag, as most of them wait in a hang.
    reported = [
        observation
        for host in read
        for observation in host.observations
        if observation.concerns_job and observation.weight is Weight.FAULT
    ]
    parts = (
        f"NCCL itself reports: {_join_clauses(reported)}.{_find_remedy(reported)}"
        if reported
        else "",
        _describe_faults(read, is_complete)
        or _describe_idle_gpus(read)
        or _describe_hints(read, is_complete)
        or _describe_different_facts(read, is_complete),
        _describe_known_problem(read),
    )
    advice = " ".join([verdict.advice, *filter(None, parts)]).strip()
    return replace(verdict, advice=advice)


def _describe_faults(read: Sequence[InvolvedHost], is_complete: bool) -> str:
    found = _group_observations(read, Weight.FAULT)
    if not found:
        return ""
    faults = {observation.what for observations in found.values() for observation in observations}
    whose = "the program" if faults == {"program_xid"} else "its hardware"
    if len(found) > 1 or not is_complete:
        shown = [
            f"{host} ({describe_observation(observations[0])})"
            for host, observations in list(found.items())[:_MAX_HOSTS]
        ]
        others = _format_others(len(found) - len(shown))
        whose = whose.replace("its", "their")
        return f"Faults of {whose} are reported by {', '.join(shown)}{others}."
    ((host, observations),) = found.items()
    text = f"{host} reports a fault of {whose}: {_join_clauses(observations)}."
    if len(read) > 1:
        text = (
            f"Of {len(read)} hosts, {host} alone reports a fault of {whose}:"
            f" {_join_clauses(observations)}. That this is the cause is inferred."
        )
    return f"{text}{_find_remedy(observations)}"


def _find_remedy(observations: Sequence[Observation]) -> str:
    """The first remedy for any of them, after a space; empty if there is none."""
    for observation in observations:
        remedy = _REMEDIES.get(observation.what, "").format(about=observation.about)
        xid = find_xid(observation.now) if observation.what in _XIDS else None
        if xid is not None:
            remedy = _XID_REMEDIES.get(xid.action, "")
        if remedy:
            return f" {remedy}"
    return ""


def _describe_hints(read: Sequence[InvolvedHost], is_complete: bool) -> str:
    """Describes the hints of a single host, since any job has hints of several. Where only one host is
    concerned, it names the values that are abnormal by themselves.
    """
    found = _group_observations(read, Weight.HINT)
    if len(found) != 1 or not is_complete:
        return ""
    ((host, observations),) = found.items()
    subject = f"Of {len(read)} hosts, {host} alone"
    if len(read) == 1:
        subject = host
        observations = [observation for observation in observations if observation.is_abnormal]
    if not observations:
        return ""
    return f"{subject} reports this, which may contribute: {_join_clauses(observations)}."


def _group_observations(
    read: Sequence[InvolvedHost], weight: Weight
) -> dict[str, list[Observation]]:
    """What each host reports of this weight, without what any job has: some lost packets, and GPUs that
    idle or spin while a rank waits.
    """
    found: dict[str, list[Observation]] = {}
    for host in read:
        for observation in host.observations:
            if observation.weight is not weight or observation.concerns_job:
                continue
            before, now = observation.before, observation.now
            is_ordinary = observation.what in _WAITING_GPU
            if observation.is_counter and isinstance(before, int) and isinstance(now, int):
                is_ordinary |= now - before < _MIN_HINT_GROWTH
            if weight is not Weight.HINT or not is_ordinary:
                found.setdefault(host.name, []).append(observation)
    return found


def _describe_idle_gpus(read: Sequence[InvolvedHost]) -> str:
    """A few GPUs that are idle before the call where most spin, as NCCL's kernels do that wait."""
    idle, spinning = [], 0
    for host in read:
        for observation in host.observations:
            if observation.what == "idle":
                idle.append((host.name, observation.about))
            spinning += observation.what == "spins"
    if not idle or spinning < _MIN_SPINNING_SHARE * len(idle):
        return ""
    names = ", ".join(f"{gpu} of {host}" for host, gpu in idle[:_MAX_HOSTS])
    verb = "is" if len(idle) == 1 else "are"
    others = _format_others(len(idle) - _MAX_HOSTS)
    return (
        f"{names}{others} {verb} idle while {spinning} GPUs spin, as"
        " NCCL's kernels do that wait for the others: check what that GPU's rank does before the call,"
        " and the GPU itself."
    )


def _describe_different_facts(read: Sequence[InvolvedHost], is_complete: bool) -> str:
    """A version or a rate that one host alone has."""
    if len(read) < _MIN_HOSTS_COMPARED or not is_complete:
        return ""
    values: dict[tuple[str, str], dict[str, ObservedValue]] = {}
    for host in read:
        for observation in host.observations:
            if observation.weight is Weight.FACT:
                by_host = values.setdefault((observation.about, observation.what), {})
                by_host[host.name] = observation.now
    for (about, what), by_host in values.items():
        usual = mode(by_host.values())
        unusual = [(host, value) for host, value in by_host.items() if value != usual]
        if len(by_host) == len(read) and len(unusual) == 1:
            name, value = unusual[0]
            return f"{name} alone has {about} {what} {value}, where the other hosts have {usual}."
    return ""


def _describe_known_problem(read: Sequence[InvolvedHost]) -> str:
    """The first known problem of a version that a host has."""
    for host in read:
        facts = {
            observation.about: str(observation.now)
            for observation in host.observations
            if observation.what == "version"
        }
        facts["torch"] = next((p.identity.torch for p in host.processes if p.identity.torch), "")
        for component in ("nccl", "torch"):
            version, machine = facts.get(component, ""), facts.get("machine", "")
            for known in find_known_problems(component, version, machine):
                return known.describe(version)
    return ""


def _format_others(count: int) -> str:
    return f" and {count} other{'s' if count > 1 else ''}" if count > 0 else ""


def _join_clauses(observations: Sequence[Observation]) -> str:
    clauses = list(dict.fromkeys(describe_observation(o) for o in observations))
    text = "; ".join(clauses[:_MAX_CLAUSES])
    more = len(clauses) - _MAX_CLAUSES
    return f"{text}; and {more} more" if more > 0 else text
