"""The evidence of an incident, taken from the state of its attempt: calls, processes, stacks, the
kernels and positions of devices, and the hosts' hardware. Pure.

The evidence lacks what differs between two reads of an unchanged job, such as the age of a call, so
that an incident only counts as changed when its document changes.
"""

from __future__ import annotations

import heapq
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from datetime import datetime
from typing import NamedTuple, TypeVar

from hangwatch.diagnosis.hardware import InvolvedHost, list_involved_hosts
from hangwatch.model.calls import Call
from hangwatch.model.groups import Group
from hangwatch.model.hardware import HostObservation, MissingEvidence, UnavailableSource, Weight
from hangwatch.model.incidents import Incident, MergedStack, ProcessSnapshot
from hangwatch.model.kernels import RankKernels
from hangwatch.model.kinds import VerdictKind
from hangwatch.model.ranks import RECORDER_THREAD_NAME, ThreadStack
from hangwatch.model.verdicts import DevicePosition, Verdict
from hangwatch.report import job_status
from hangwatch.stacks.activities import classify_activity, list_remote_executions
from hangwatch.tracking.attempt import Attempt
from hangwatch.tracking.process import StackSample, estimate_bytes

MAX_THREADS_SHOWN = 16  # threads of one culprit
MAX_EXECUTIONS_SHOWN = 16  # threads that execute remote calls
# An incident shows stacks of about so many bytes, and a quarter of it of the culprits' other threads.
MAX_STACK_BYTES = 2 << 20
MAX_DETAILED_CULPRITS = 8  # more culprits than this are shown with their calling threads only
MAX_PROCESSES_SHOWN = 64
MAX_KERNEL_RANKS_SHOWN = 64
MAX_POSITIONS_SHOWN = 256
MAX_OBSERVATIONS_SHOWN = 256
MAX_GAPS_SHOWN = 16
# The age of a sample is measured on its host, so it may seem slightly older than the onset.
CLOCK_SLACK_S = 0.5

DateConverter = Callable[[float], datetime]
T = TypeVar("T")

# Everything of a stack but its time.
_get_stack_content = operator.attrgetter("ranks", "thread", "source", "frames", "native", "error")


class _Caller(NamedTuple):
    rank: int
    sample: StackSample
    thread: ThreadStack | None  # the one that makes the calls; None if the sample has no thread


def strip_verdict(verdict: Verdict) -> Verdict:
    """The verdict without what changes from one diagnosis to the next although the job does not."""
    divergence = verdict.divergence
    if divergence is not None:
        rows = []
        for row in divergence.rows:
            first, second = row.calls
            calls = (first and _strip_call(first), second and _strip_call(second))
            rows.append(replace(row, calls=calls))
        divergence = replace(divergence, rows=tuple(rows))
    return replace(
        verdict,
        began_at=0.0,
        calls=tuple(
            replace(call_class, call=replace(_strip_call(call_class.call), raised=False))
            for call_class in verdict.calls
        ),
        divergence=divergence,
    )


def _strip_call(call: Call) -> Call:
    return replace(
        call,
        signature=replace(call.signature, numel=0, agree=0),
        chain=0,
        entered_s=0.0,
        duration_s=None,
        blocking=None,
        thread=0,
    )


def update_evidence(
    incident: Incident, attempt: Attempt, since: float, convert_date: DateConverter
) -> Incident:
    """The incident with the evidence of its attempt now, and the earlier one that is no longer known.
    ``since`` is its onset, monotonic.
    """
    hosts = list_involved_hosts(attempt, replace(incident, began_at=since))
    return replace(
        incident,
        processes=collect_processes(attempt, incident.culprits) or incident.processes,
        stacks=collect_stacks(attempt, incident, since, convert_date),
        kernels=collect_kernels(attempt, incident, since, convert_date),
        device=collect_device_positions(attempt, incident, incident.device),
        hardware=collect_hardware(hosts, incident.hardware),
        hardware_missing=collect_missing(hosts) or incident.hardware_missing,
    )


def collect_processes(attempt: Attempt, culprits: Iterable[int]) -> tuple[ProcessSnapshot, ...]:
    """The culprits' processes, then those that failed."""
    shown_ranks = list(dict.fromkeys(culprits))
    for process in attempt.find_processes(sorted(attempt.ended_ranks.difference(shown_ranks))):
        if process.exit is not None and process.exit.has_failed:
            shown_ranks.append(process.rank)
    return tuple(
        ProcessSnapshot(
            rank=process.rank,
            host=process.host,
            pid=process.identity.pid,
            state=process.activity.state,
            exit_status=process.exit.exit_status if process.exit else None,
            signal=process.exit.signal if process.exit else None,
            exception=process.exception,
            handling=process.handling,
            flight_file=process.flight_file,
        )
        for process in attempt.find_processes(shown_ranks[:MAX_PROCESSES_SHOWN])
    )


def make_stack(
    ranks: Sequence[int],
    sample: StackSample,
    thread: ThreadStack | None,
    convert_date: DateConverter,
) -> MergedStack:
    """One thread of a sample, or the sample's error if there is no thread."""
    frames = []
    for frame in thread.frames if thread else ():
        if frame.handler is not None or frame.polls is not None:
            frame = replace(frame, handler=None, polls=None)
        frames.append(frame)
    return MergedStack(
        ranks=tuple(ranks),
        thread=thread.thread if thread else None,
        source=sample.source,
        taken_at=convert_date(sample.taken_at),
        frames=tuple(frames),
        native=sample.native,
        error=sample.error if thread is None else thread.error,
    )


def collect_stacks(
    attempt: Attempt, incident: Incident, since: float, convert_date: DateConverter
) -> tuple[MergedStack, ...]:
    """The earlier stacks of ranks that can no longer be sampled, then the culprits' stacks and those
    of the waiting ranks, merged where equal; then, if one of these may wait for a remote call, the threads
    that execute one. A stack that differs from an earlier one only in its time keeps the earlier time.
    """
    culprits = list(_find_callers(attempt, incident.culprits, incident.group, since))
    victims = list(_find_callers(attempt, incident.waiting, incident.group, since))
    stacks = _merge_calling_stacks(culprits, convert_date)
    other_stacks = []
    if len(incident.culprits) <= MAX_DETAILED_CULPRITS:
        for rank, sample, caller in culprits:
            others = [
                thread
                for thread in sample.threads
                if thread is not caller and thread.thread != RECORDER_THREAD_NAME
            ]
            # First the child processes that the rank waits for, then its own thread that holds
            # the GIL.
            others.sort(key=lambda thread: (thread.pid is None, not thread.holds_gil))
            for thread in others[:MAX_THREADS_SHOWN]:
                other_stacks.append(make_stack([rank], sample, thread, convert_date))
    stacks += _limit_stacks(other_stacks, MAX_STACK_BYTES // 4)
    stacks += _merge_calling_stacks(victims, convert_date)
    if any(classify_activity(c.thread).waits.awaits_remote_call for c in (*culprits, *victims)):
        shown = {(stack.ranks, stack.thread) for stack in stacks}
        executions = []
        for rank, sample, _ in _find_callers(attempt, sorted(attempt.processes), None, since):
            for thread in list_remote_executions(sample.threads):
                if ((rank,), thread.thread) not in shown:
                    executions.append(make_stack([rank], sample, thread, convert_date))
            if len(executions) >= MAX_EXECUTIONS_SHOWN:
                break
        stacks += executions[:MAX_EXECUTIONS_SHOWN]
    covered = {rank for stack in stacks if stack.error is None for rank in stack.ranks}
    kept = []
    kept_ranks: set[int] = set()
    for stack in incident.stacks:
        if stack.error is None and covered.isdisjoint(stack.ranks):
            kept.append(stack)
            kept_ranks.update(stack.ranks)
    current = [s for s in stacks if s.error is None or not kept_ranks.issuperset(s.ranks)]
    current = _keep_unchanged(incident.stacks, current, _get_stack_content)
    return tuple(_limit_stacks([*kept, *current], MAX_STACK_BYTES))


def _limit_stacks(stacks: list[MergedStack], max_bytes: int) -> list[MergedStack]:
    """The first stacks, which take at most so much memory together, and always the first one."""
    size = 0
    for count, stack in enumerate(stacks):
        size += estimate_bytes(stack.frames)
        if size > max_bytes and count:
            return stacks[:count]
    return stacks


def _find_callers(
    attempt: Attempt, ranks: Iterable[int], group: Group | None, since: float
) -> Iterator[_Caller]:
    """The ranks that were sampled since then, with the thread that makes the calls of ``group``. The
    newest sample counts that has stacks, or else the newest failure.
    """
    for process in attempt.find_processes(ranks):
        recent = [s for s in process.samples if s.taken_at >= since - CLOCK_SLACK_S]
        if recent:
            with_threads = [s for s in recent if s.threads]
            sample = (with_threads or recent)[-1]
            yield _Caller(process.rank, sample, process.find_caller(sample, group, since))


def _merge_calling_stacks(
    callers: Iterable[_Caller], convert_date: DateConverter
) -> list[MergedStack]:
    """One entry for all ranks whose stacks are equal; the most frequent first."""
    classes: dict[object, list[_Caller]] = {}
    for caller in callers:
        _, sample, thread = caller
        merge_key = (sample.source, sample.error, thread and (thread.thread, thread.frames))
        classes.setdefault(merge_key, []).append(caller)
    stacks = []
    for equal in sorted(classes.values(), key=len, reverse=True):
        ranks = [caller.rank for caller in equal]
        _, sample, thread = equal[0]
        stacks.append(make_stack(ranks, sample, thread, convert_date))
    return stacks


def _keep_unchanged(
    before: Iterable[T], now: Iterable[T], get_content: Callable[[T], object]
) -> list[T]:
    """``now``, but an entry with the content of an earlier one is replaced by that one."""
    earlier = {get_content(entry): entry for entry in before}
    return [earlier.get(get_content(entry), entry) for entry in now]


def collect_kernels(
    attempt: Attempt, incident: Incident, since: float, convert_date: DateConverter
) -> tuple[RankKernels, ...]:
    """The kernels on the devices of the incident's ranks, read since then, and the earlier ones of ranks
    whose kernels are no longer known; culprits first.
    """
    if attempt.kernels_at < since - CLOCK_SLACK_S or not attempt.kernels_at:
        return incident.kernels
    known = {entry.rank: entry for entry in incident.kernels}
    for process in attempt.find_processes(incident.involved_ranks):
        sample = process.kernels
        if sample is None or sample.taken_at < since - CLOCK_SLACK_S:
            continue
        entry = RankKernels(
            rank=process.rank,
            source=sample.source,
            taken_at=convert_date(sample.taken_at),
            kernels=sample.kernels,
            error=sample.error,
        )
        before = known.get(process.rank, entry)
        known[process.rank] = before if replace(before, taken_at=entry.taken_at) == entry else entry
    culprits = frozenset(incident.culprits)
    shown = sorted(known.values(), key=lambda entry: (entry.rank not in culprits, entry.rank))
    return tuple(shown[:MAX_KERNEL_RANKS_SHOWN])


def collect_device_positions(
    attempt: Attempt, verdict: Verdict, before: tuple[DevicePosition, ...]
) -> tuple[DevicePosition, ...]:
    """The positions of the members of the verdict's group, and of the groups that its waits are in.
    If these are too many, the culprits and the members that have completed least are shown. Positions
    that are unchanged from ``before`` keep their age; if nothing is known any more, ``before`` is.
    """
    culprits = frozenset(verdict.culprits)
    names = {wait.group for wait in verdict.waits}
    if verdict.group is not None:
        names.add(verdict.group.name)
    found = []
    for (_, name, _, _), members in attempt.streams_by_group.items():
        if name not in names:
            continue
        for rank, stream in members.items():
            device = stream.device
            if device is not None:
                order = (rank not in culprits, device.completed, rank, name)
                found.append((order, device))
    shown = heapq.nsmallest(MAX_POSITIONS_SHOWN, found, key=lambda entry: entry[0])
    positions = []
    for (_, _, rank, name), device in shown:
        counters = device.list_counters(attempt.last_seen_at)
        positions.append(DevicePosition(rank=rank, group=name, **counters))
    positions.sort(key=lambda p: (p.group, p.rank not in culprits, p.rank))
    current = _keep_unchanged(before, positions, lambda p: (p.rank, p.group, p.counters))
    return tuple(current) or before


def add_device_advice(verdict: Verdict, attempt: Attempt) -> str:
    """The verdict's advice. If the positions of the devices are unknown and might name a culprit, the
    advice includes how to make them known.
    """
    if verdict.kind is not VerdictKind.NO_PROGRESS:
        return verdict.advice
    for process in attempt.find_processes(verdict.involved_ranks):
        if process.device_setting:
            return job_status.add_device_advice(verdict.advice, process.device_setting)
    return verdict.advice


def collect_hardware(
    hosts: Iterable[InvolvedHost], before: Iterable[HostObservation]
) -> tuple[HostObservation, ...]:
    """The observations of the hosts, faults first, then what was only observed ``before``. Unchanged
    observations keep their age; versions are left out.
    """
    found = []
    for host in hosts:
        for observation in host.observations:
            if observation.weight is not Weight.FACT:
                found.append(HostObservation(host=host.name, observation=observation))
    found.sort(key=lambda entry: entry.observation.weight is not Weight.FAULT)
    shown = {_get_key(entry): entry for entry in found[:MAX_OBSERVATIONS_SHOWN]}
    for earlier in before:
        current = shown.get(_get_key(earlier))
        if current is None or current.observation.now == earlier.observation.now:
            shown[_get_key(earlier)] = earlier
    return tuple(shown.values())[:MAX_OBSERVATIONS_SHOWN]


def collect_missing(hosts: Iterable[InvolvedHost]) -> tuple[MissingEvidence, ...]:
    """The sources that the hosts cannot read and for which there is a remedy."""
    hosts_by_gap: dict[UnavailableSource, list[str]] = {}
    for host in hosts:
        for gap in () if host.hardware is None else host.hardware.unavailable:
            if gap.remedy:
                hosts_by_gap.setdefault(gap, []).append(host.name)
    missing = [
        MissingEvidence(hosts=tuple(names), source=gap.source, reason=gap.reason, remedy=gap.remedy)
        for gap, names in hosts_by_gap.items()
    ]
    return tuple(missing[:MAX_GAPS_SHOWN])


def _get_key(entry: HostObservation) -> tuple[object, ...]:
    """Everything of an observation but its age, and the growing value of a counter."""
    seen = entry.observation
    now = None if seen.is_counter else seen.now
    return (entry.host, seen.source, seen.about, seen.what, seen.before, now)
