"""Jobs in which no rank makes calls any more and none is known to wait in one: ranks may wait for each
other outside of recorded calls, by files, by keys of a store, or in another library.

Stacks show where all ranks are. The rank that the others wait for is blocked where they are not. A
rank that works, a declared phase, and servers without requests keep such a job from being suspected.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from hangwatch.model.calls import Site
from hangwatch.model.kinds import KINDS, Role, Severity, VerdictKind
from hangwatch.model.limits import MAX_EVIDENCE_WAIT_S
from hangwatch.model.verdicts import Verdict
from hangwatch.stacks.activities import classify_activity
from hangwatch.stacks.frames import (
    find_innermost_user_frame,
    find_user_site,
    waits_for_communication,
)
from hangwatch.tracking.attempt import Attempt
from hangwatch.tracking.process import Process

from ..context import DiagnosisContext, find_newest_sample, get_pause_limit_s, has_paused
from ..graph.edges import can_communicate
from ..graph.progress import (
    RankWait,
    classify_rank_wait,
    get_calling_thread_since,
    has_two_samples,
    is_polling,
    list_other_threads,
    works_on_remote_call,
)
from ..messages import describe_ranks_with, pluralize

_MAX_SAMPLED = 1024  # ranks; of more, evenly distributed ones are sampled, and none is named
_MAX_REQUESTS = 64  # stacks at a time
_MAX_PLACES_SHOWN = 3
_CULPRIT_ADVICE = (
    "No rank waits in a recorded call: the others seem to wait for it in another way, such as by a file,"
    " a key of a store, or another library."
)
_ADVICE = (
    "No rank waits in a recorded call: look at what their stacks wait for. If the job may be idle for"
    " so long, hangwatch.phase() declares that."
)


@dataclass(slots=True, eq=False)
class _Place:
    """The ranks in the same function, and the most that any of their stacks shows of their wait."""

    site: Site | None
    wait: RankWait
    ranks: list[int] = field(default_factory=list)


def diagnose_quiet_job(context: DiagnosisContext) -> None:
    """One verdict for the whole job, if no other one says why no rank makes calls."""
    attempt, limits = context.attempt, context.limits
    processes = [attempt.processes[rank] for rank in sorted(attempt.processes)]
    has_cause = any(KINDS[v.kind].role is not Role.INDEPENDENT for v in context.verdicts)
    # Members of a group that no world contains need not be one job: each may serve requests of its own.
    if has_cause or attempt.is_of_group or not has_paused(attempt, context.now, limits):
        return
    if not processes or len(processes) < attempt.rank_count:
        return
    # A job that ends, or that is not recorded, is quiet as well.
    if not all(can_communicate(p) and not p.identity.unrecorded for p in processes):
        return
    if context.graph.silent_ranks or _may_wait_in_calls(context, processes):
        return
    known_until = min(context.get_state_known_until(process.rank) for process in processes)
    began_at = max([attempt.opened_at, *(process.last_advanced_at for process in processes)])
    active_since = known_until - limits.suspicion_delay_s
    since = {}  # when each rank, on its host or its device, last made progress; one that polls makes none
    for process in processes:
        changed_at = max(began_at, process.device_changed_at)
        if not is_polling(process, changed_at):
            changed_at = max(changed_at, process.activity.last_active_at)
        since[process.rank] = changed_at
    working = tuple(rank for rank, idle_since in since.items() if idle_since > active_since)
    in_phase = next(filter(context.is_in_phase, processes), None)
    if in_phase is not None and in_phase.phase is not None:
        context.pause_note = f"rank {in_phase.rank} is in its phase {in_phase.phase.name!r}"
        return
    sampled = processes[:: -(-len(processes) // _MAX_SAMPLED)]
    # Where a CPU is scarce, ranks that poll look as if they worked, until they are sampled.
    needed_since = since | dict.fromkeys(working, began_at)
    is_missing = len(working) < len(processes) and _request_samples(context, sampled, needed_since)
    working = working or tuple(p.rank for p in processes if _is_working(context, p, since[p.rank]))
    if working:
        context.pause_note = describe_ranks_with(working, "works")
        return
    places = _find_places(sampled, since, context.now)
    if not places:
        context.pause_note = "no stack shows what they do"
        return
    if _is_idle(sampled, places, since):
        context.pause_note = f"all seem to wait for requests: {_describe_places(places)}"
        return
    culprits = []
    if len(sampled) == len(processes) == sum(len(place.ranks) for place in places):
        culprits = _find_outliers(places)
    is_missing |= any(
        not has_two_samples(attempt.processes[rank], since[rank]) for rank in culprits
    )
    limit_s = get_pause_limit_s(attempt, limits)
    idle_s = known_until - max(since.values())
    due_s = min(known_until - began_at - limit_s, idle_s - limits.stall_after_s)
    alert_after_s = max(limit_s, limits.slow_limit_s)
    if not attempt.newest_call_at:
        alert_after_s = max(alert_after_s, limits.startup_after_s)
    is_late = known_until - began_at >= alert_after_s
    summary, site = _summarize(attempt, places, culprits)
    context.accuse(
        Verdict(
            kind=VerdictKind.QUIET_JOB,
            severity=Severity.ALERT if culprits and is_late else Severity.WARNING,
            culprits=tuple(culprits),
            waiting=tuple(p.rank for p in processes if p.rank not in culprits),
            began_at=began_at,
            is_confirmed=due_s >= (MAX_EVIDENCE_WAIT_S if is_missing else 0.0),
            summary=summary,
            advice=_CULPRIT_ADVICE if culprits else _ADVICE,
            site=site,
        )
    )


def _may_wait_in_calls(context: DiagnosisContext, processes: Collection[Process]) -> bool:
    """Whether some rank may wait in a call: what it waits for is the subject of other rules."""
    graph = context.graph
    if context.attempt.incomplete_ranks:
        return True
    waits = (graph.thread_waits, graph.unsampled_waits, graph.released_ranks, graph.uncertain_ranks)
    if graph.get_waiting_ranks() or any(waits) or graph.still_devices.waits:
        return True
    # The completion of some calls is never reported.
    for process in processes:
        if process.unfinished_streams:
            caller = get_calling_thread_since(process, process.last_advanced_at)
            if waits_for_communication(caller):
                return True
    return False


def _is_working(context: DiagnosisContext, process: Process, since: float) -> bool:
    return context.shows_progress(process, since) or works_on_remote_call(process, since)


def _request_samples(
    context: DiagnosisContext, processes: Collection[Process], since: Mapping[int, float]
) -> bool:
    """Requests two samples of each rank since it is idle, and new ones now and then. True if the first
    one of some rank has not arrived.
    """
    unsampled = []
    due_again = []
    for process in processes:
        if all(sample.taken_at < since[process.rank] for sample in process.samples):
            unsampled.append(process)
        elif process.freeze_reason(context.now) is None:
            is_old = context.now - process.samples[-1].taken_at >= context.limits.stall_after_s
            if is_old or not has_two_samples(process, since[process.rank]):
                due_again.append(process)
    for process in (unsampled or due_again)[:_MAX_REQUESTS]:
        context.request_stack(process.rank)
    return bool(unsampled)


def _find_places(
    processes: Collection[Process], since: Mapping[int, float], now: float
) -> list[_Place]:
    """Where the ranks are, as far as stacks show it. The place of most ranks comes first."""
    places: dict[object, _Place] = {}
    for process in processes:
        sample = find_newest_sample(process, since[process.rank])
        thread = sample.calling_thread if sample is not None else None
        wait = classify_rank_wait(process, since[process.rank]) or RankWait.UNKNOWN
        frame = find_innermost_user_frame(thread.frames) if thread is not None else None
        key: object = None if frame is None else (frame.file, frame.function)
        if reason := process.freeze_reason(now):
            key, wait = reason, RankWait.EXCLUDED
        elif thread is None:
            continue
        place = places.setdefault(key, _Place(find_user_site(thread), wait))
        place.ranks.append(process.rank)
        # A polling loop is seen on several lines, and not every line shows that it waits.
        place.wait = max(place.wait, wait)
    return sorted(places.values(), key=lambda place: -len(place.ranks))


def _find_outliers(places: Sequence[_Place]) -> list[int]:
    """The ranks that are blocked where the others are not; none if that is not clear."""
    own_waits = [place for place in places if place.wait is RankWait.EXCLUDED]
    waiters = [place for place in places if place.wait is RankWait.POSSIBLE]
    others = [place for place in places if place.wait is not RankWait.CERTAIN]
    if 0 < len(others) < len(places):
        return _list_ranks(own_waits or others)
    is_known = len(own_waits) + len(waiters) == len(places)
    if own_waits and waiters and is_known:
        outliers = _list_ranks(own_waits)
        if len(outliers) <= len(_list_ranks(waiters)):
            return outliers
    if len(places) == 2 and len(places[0].ranks) > len(places[1].ranks):
        return _list_ranks(places[1:])
    return []


def _list_ranks(places: Collection[_Place]) -> list[int]:
    return sorted(rank for place in places for rank in place.ranks)


def _is_idle(
    processes: Sequence[Process], places: Sequence[_Place], since: Mapping[int, float]
) -> bool:
    """Whether the ranks are the workers of an engine that has no requests: all wait in the same place for
    an item, except those that serve its clients.
    """
    workers = set()
    if len(places) == 1 or len(places[0].ranks) > 1:
        workers = set(places[0].ranks)
    for process in processes:
        sample = find_newest_sample(process, since[process.rank])
        caller = sample.calling_thread if sample is not None else None
        waits = classify_activity(caller).waits
        is_idle = waits.awaits_requests
        if process.rank in workers:
            is_idle = waits.may_be_idle
        elif sample is not None and waits.waits_for_thread:
            # The calling thread may wait for another one that serves the clients.
            others = [thread for thread in list_other_threads(sample) if thread.pid is None]
            is_idle |= any(classify_activity(thread).waits.awaits_requests for thread in others)
        if not is_idle:
            return False
    return True


def _summarize(
    attempt: Attempt, places: Sequence[_Place], culprits: Collection[int]
) -> tuple[str, Site | None]:
    """The summary, and the line of the culprits or, without any, of a job whose ranks are in one place."""
    state = "no rank makes calls any more" if attempt.newest_call_at else "no rank has made a call"
    if not culprits:
        site = places[0].site if len(places) == 1 else None
        return f"{state}, and none is known to wait in one: {_describe_places(places)}", site
    blocked = [place for place in places if set(culprits).intersection(place.ranks)]
    others = [place for place in places if place not in blocked]
    where = _describe_places([*blocked, *others])
    if len(blocked) == 1:
        they_are = pluralize("it is", culprits)
        where = f"{they_are} {_describe_site(blocked[0])}; {_describe_places(others)}"
    subject = describe_ranks_with(tuple(culprits), "is")
    summary = f"{state}, and {subject} blocked where the others are not: {where}"
    return summary, blocked[0].site


def _describe_site(place: _Place) -> str:
    return f"at {place.site}" if place.site is not None else "in code of no known line"


def _describe_places(places: Sequence[_Place]) -> str:
    """``ranks 0, 2 are at train.py:7 in main; rank 1 is at train.py:9 in read``."""
    clauses = []
    for place in places[:_MAX_PLACES_SHOWN]:
        subject = describe_ranks_with(tuple(place.ranks), "is")
        clauses.append(f"{subject} {_describe_site(place)}")
    if len(places) > _MAX_PLACES_SHOWN:
        clauses.append("and others elsewhere")
    return "; ".join(clauses)
