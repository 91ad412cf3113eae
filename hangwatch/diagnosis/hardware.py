"""What hosts know of their hardware, as evidence for a verdict: requests it, and adds to the advice
what it may explain. It never makes a verdict.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from hangwatch.model.hardware import Observation, Weight
from hangwatch.model.kind_spec import HardwareScope
from hangwatch.model.kinds import KINDS
from hangwatch.model.verdicts import Verdict
from hangwatch.tracking.attempt import Attempt
from hangwatch.tracking.host_hardware import HostHardware
from hangwatch.tracking.process import Process

from . import messages
from .context import DiagnosisContext, EvidenceRequest

MAX_HOSTS_READ = 256  # for one verdict
REREAD_AFTER_S = 60.0
# An event of this long before the onset may still be the cause: ranks may have had work queued.
_EVENT_BEFORE_ONSET_S = 120.0
_PROCESS_PREFIX = "process "


@dataclass(slots=True)
class InvolvedHost:
    """A host whose hardware may explain a verdict, with the ranks of the verdict that are on it."""

    name: str
    processes: list[Process] = field(default_factory=list)
    hardware: HostHardware | None = None  # read since the onset

    @property
    def reporter(self) -> Process:
        """The process by which its node agent is addressed."""
        return next((p for p in self.processes if p.is_alive), self.processes[0])


def list_involved_hosts(attempt: Attempt, verdict: Verdict) -> list[InvolvedHost]:
    """Those of the culprits, then those of the ranks that wait, where the kind says so."""
    scope = KINDS[verdict.kind].hardware
    if scope is HardwareScope.NONE:
        return []
    ranks = verdict.culprits
    if scope is HardwareScope.ALL:
        ranks += verdict.waiting
    hosts: dict[str, InvolvedHost] = {}
    for rank in ranks:
        process = attempt.processes.get(rank)
        if process is None:
            continue
        host = hosts.get(process.host)
        if host is None:
            if len(hosts) >= MAX_HOSTS_READ:
                continue
            host = hosts[process.host] = InvolvedHost(process.host)
            hardware = attempt.hardware.get(process.host)
            if hardware is not None and hardware.taken_at >= verdict.began_at:
                host.hardware = hardware
        host.processes.append(process)
    return list(hosts.values())


def request_hardware(context: DiagnosisContext) -> None:
    """Requests a reading of the hosts of each verdict, and further ones while it lasts."""
    for verdict in context.verdicts:
        for host in list_involved_hosts(context.attempt, verdict):
            hardware = host.hardware
            if hardware is None or context.now - hardware.taken_at > REREAD_AFTER_S:
                context.requests.append(
                    EvidenceRequest(rank=host.reporter.rank, hardware=True, since=verdict.began_at)
                )


def add_hardware_advice(context: DiagnosisContext, verdict: Verdict) -> Verdict:
    """Adds to the verdict's advice what its hosts report. If all were read and a single one reports a
    fault, the advice names it, as an inference.
    """
    hosts = list_involved_hosts(context.attempt, verdict)
    read = [host for host in hosts if host.hardware is not None]
    if not read:
        return verdict
    for weight in (Weight.FAULT, Weight.HINT):
        found = {
            host.name: observations
            for host in read
            if (observations := list(_select_observations(host, verdict, weight)))
        }
        advice = _describe(found, weight, host_count=len(hosts), read_count=len(read))
        if advice:
            return replace(verdict, advice=f"{verdict.advice} {advice}".strip())
    return verdict


def _describe(
    found: Mapping[str, list[Observation]], weight: Weight, *, host_count: int, read_count: int
) -> str:
    """Empty where nothing can be concluded: hints of several hosts are what any job has."""
    if not found:
        return ""
    if host_count == 1:
        return messages.format_host_observations(found, weight)
    if len(found) == 1 and read_count == host_count:
        return messages.format_single_host(found, weight, host_count)
    return messages.format_several_hosts(found) if weight is Weight.FAULT else ""


def _select_observations(
    host: InvolvedHost, verdict: Verdict, weight: Weight
) -> Iterator[Observation]:
    """Those that concern these ranks, and that are not older than the hang by much."""
    assert host.hardware is not None
    own_names = {f"{_PROCESS_PREFIX}{process.identity.pid}" for process in host.processes}
    for observation in host.hardware.observations:
        if observation.weight is not weight:
            continue
        happened_at = host.hardware.taken_at - observation.age_s
        if happened_at < verdict.began_at - _EVENT_BEFORE_ONSET_S:
            continue
        if observation.about.startswith(_PROCESS_PREFIX) and observation.about not in own_names:
            continue
        yield observation
