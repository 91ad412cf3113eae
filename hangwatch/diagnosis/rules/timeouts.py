"""Calls that ended a rank before the wait in them became a verdict, by a timeout or by the rank's own
watchdog. The rank is a victim: the culprits are those that had not entered the call by then.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from hangwatch.model.calls import StreamKind
from hangwatch.model.kinds import KINDS, VerdictKind
from hangwatch.model.limits import FROZEN_AFTER_S, MIN_VICTIM_WAIT_S, MIN_WAIT_S
from hangwatch.model.ranks import Lifecycle
from hangwatch.model.verdicts import Verdict
from hangwatch.tracking.call_stream import CallStream
from hangwatch.tracking.process import Process

from ..context import (
    TERMINATION_SIGNALS,
    DiagnosisContext,
    find_last_site,
    get_state_known_until,
    has_peer_error,
    has_timed_out,
    was_ended_by_watchdog,
)
from ..graph.devices import build_device_graph
from ..graph.edges import BlockedCall, WaitEdge, get_op_name
from ..graph.progress import is_process_waiting
from ..graph.waits import is_not_initialized, receives_from_any
from ..messages import describe_position, format_lower_layers_advice
from .absence import make_absence_verdict
from .agreement import check_agreement
from .chain_ends import KIND_PRECEDENCE
from .devices import make_stalled_verdict, make_stuck_verdict
from .failures import MAX_SEARCHED_RANKS, get_failure_time
from .progress import make_no_progress_verdict

_WATCHDOG_ADVICE = (
    "The watchdog's message in the rank's log says which call did not complete, how long it took, and"
    " which error the network reported."
)
_NO_STACK_ADVICE = (
    "Check what it does after that call; with a longer timeout there is time to sample its stack."
)


def diagnose_timeout(
    context: DiagnosisContext, first: Process, failed: set[int], timed_out_at: float, *, due: bool
) -> bool:
    """Adds a verdict on the ranks without which the last call of ``first`` timed out. Returns False
    if these are unknown.
    """
    last = first.newest_stream
    is_timeout = has_timed_out(first) or was_ended_by_watchdog(first)
    if last is None or not is_timeout or timed_out_at - last.entered_at < MIN_WAIT_S:
        return False
    search = _TimeoutSearch(context, timed_out_at)
    search.follow_waits(first, last)
    if search.is_uncertain:
        return False
    due &= not search.not_reporting
    if search.chain_ends:
        verdict = _make_absence_verdict(context, first, search, failed, due)
    else:
        members: Mapping[int, CallStream] = {}
        if last.group_state is not None and last.kind is StreamKind.COLLECTIVE:
            members = last.group_state.members
        if len(members) < len(last.group.ranks):
            return False
        complete_at = max(stream.entered_at for stream in members.values())
        if timed_out_at - complete_at < (timed_out_at - last.entered_at) / 2:
            return False  # the last member entered too late to blame the lower layers
        agreement = check_agreement(context, members, last.group.ranks, last.entered)
        ending = f"it timed out on rank {first.rank}"
        position = describe_position(last.group, last.entered)
        verdict = make_no_progress_verdict(
            last,
            first.rank,
            last.group.ranks,
            complete_at,
            due=due,
            summary=agreement.describe(ending, get_op_name(last), first.rank, position),
            advice=format_lower_layers_advice(are_equal=agreement.is_known),
        )
    waiting = failed | search.waiting_ranks | context.graph.get_waiting_ranks()
    context.accuse(verdict, waiting | search.chain_ends.keys(), samples=len(search.chain_ends) > 0)
    return True


@dataclass(slots=True)
class _TimeoutSearch:
    """Follows the waits from rank to rank, as they were when the first call timed out."""

    context: DiagnosisContext
    timed_out_at: float
    # Ranks that had not entered a call and did not wait themselves, each with a wait for it.
    chain_ends: dict[int, WaitEdge] = field(default_factory=dict)
    waiting_ranks: set[int] = field(default_factory=set)
    is_uncertain: bool = False  # whether or where some rank waited is unknown
    not_reporting: bool = False  # the state of some rank at that time may still be reported

    def follow_waits(self, first: Process, last: CallStream) -> None:
        to_search = [(first, [last])]
        self.waiting_ranks.add(first.rank)
        for process, streams in to_search:  # grows in the loop
            if len(self.waiting_ranks) > MAX_SEARCHED_RANKS:
                self.is_uncertain = True
            if any(map(receives_from_any, streams)):
                self.is_uncertain = True
            if self.is_uncertain:
                return
            for stream in streams:
                for rank, seq in self._find_absent(process.rank, stream).items():
                    if rank in self.waiting_ranks or rank in self.chain_ends:
                        continue
                    waited_streams = self._find_waited_streams(rank, stream)
                    if waited_streams:
                        self.waiting_ranks.add(rank)
                        to_search.append((self.context.attempt.processes[rank], waited_streams))
                    else:
                        blocked = BlockedCall(process.rank, stream, stream.entered_at, {rank: seq})
                        self.chain_ends[rank] = blocked.make_edge(rank)

    def _find_absent(self, rank: int, stream: CallStream) -> dict[int, int]:
        """The ranks that a call waited for, each with the number of the call that it had not
        entered.
        """
        if self.context.graph.resolver.find_uncounted_ranks(rank, stream):
            self.is_uncertain = True
            return {}
        newest = stream.calls.get(stream.entered)
        is_blocking = newest is not None and newest.blocking is True
        awaited = self.context.graph.resolver.find_awaited_ranks(rank, stream, is_blocking)
        members = stream.group_state.members if stream.group_state is not None else {}
        # Members that had entered the call may have ended since, because of the same absent ranks.
        entered_in_time: set[int] = set()
        absent: dict[int, int] = {}
        for member, other in members.items():
            if other.entered >= stream.entered and other.entered_at <= self.timed_out_at:
                entered_in_time.add(member)
            elif other.entered == stream.entered:
                absent[member] = stream.entered
        for member, seq in awaited.items():
            if member not in entered_in_time or _was_frozen(self.context, member):
                absent[member] = seq
        return absent

    def _find_waited_streams(self, rank: int, awaited: CallStream) -> list[CallStream]:
        """The calls in which a rank that had not entered ``awaited`` waited itself."""
        process = self.context.attempt.processes.get(rank)
        if process is None:
            # A rank that never reported was absent when groups were set up; for later calls, that
            # is unknown.
            if awaited.kind is not StreamKind.SETUP:
                self.is_uncertain = True
            return []
        self._check_reports(process)
        if _was_frozen(self.context, rank):
            return []
        blocked_from, blocked_until = process.blocked_interval
        blocked_s = min(blocked_until, self.timed_out_at) - max(blocked_from, awaited.entered_at)
        if blocked_s >= MIN_WAIT_S:
            self.is_uncertain = True  # other ranks delayed it at first
        last = process.newest_stream
        if last is not None and last.entered_at <= self.timed_out_at and has_peer_error(process):
            return [last]
        return self._select_waited_streams(process)

    def _check_reports(self, process: Process) -> None:
        """Records whether the rank's state at the time of the timeout is unknown."""
        if not process.is_alive:
            return
        known_until = get_state_known_until(self.context, process.rank)
        has_later_progress = process.reports.last_progress_at > process.reports.last_seen_at
        if known_until < self.timed_out_at or has_later_progress:
            self.not_reporting = True
            if self.context.now - self.timed_out_at >= self.context.limits.lost_after_s:
                self.is_uncertain = True

    def _select_waited_streams(self, process: Process) -> list[CallStream]:
        candidates = [
            stream
            for stream in process.open_calls.unfinished_streams
            if 0.0 < stream.entered_at <= self.timed_out_at
        ]
        blocked = [stream for stream in process.open_calls.blocked_streams if stream in candidates]
        if blocked or not candidates:
            return blocked
        is_waiting = is_process_waiting(process)
        if is_waiting is False:
            return []
        waited = [stream for stream in candidates if self._find_absent(process.rank, stream)]
        if waited and is_waiting is None:
            self.is_uncertain = True
        return waited


def _make_absence_verdict(
    context: DiagnosisContext, first: Process, search: _TimeoutSearch, failed: set[int], due: bool
) -> Verdict:
    kinds: dict[int, VerdictKind] = {}
    for rank in search.chain_ends:
        if is_not_initialized(context.attempt.processes.get(rank)):
            kinds[rank] = VerdictKind.STARTUP_STALL
        elif _was_frozen(context, rank):
            kinds[rank] = VerdictKind.FROZEN_RANK
        else:
            kinds[rank] = VerdictKind.MISSING_RANK
    kind = min(kinds.values(), key=KIND_PRECEDENCE.index)
    culprits = tuple(sorted(rank for rank in kinds if kinds[rank] is kind))
    edge = search.chain_ends[culprits[0]]
    waiting = failed | search.waiting_ranks | context.graph.get_waiting_ranks()
    if edge.stream.peer is None:
        members = context.streams_by_group.get(edge.group.key, {})
        for rank, stream in members.items():
            if stream.entered >= edge.seq and stream.entered_at <= search.timed_out_at:
                waiting.add(rank)
    waiting -= search.chain_ends.keys()
    began_at = min(search.chain_ends[rank].stream.entered_at for rank in culprits)
    verdict = make_absence_verdict(context, kind, culprits, waiting, edge, began_at, due=due)
    if verdict.site is None:
        verdict = _add_last_site(context, verdict, search.timed_out_at)
    return replace(
        verdict,
        severity=KINDS[kind].severity,  # the wait for it has already ended a rank
        summary=f"{verdict.summary}; {_describe_end(first)}",
    )


def _describe_end(process: Process) -> str:
    """How a rank ended after it had waited for too long."""
    if was_ended_by_watchdog(process):
        return f"rank {process.rank} was ended by its watchdog (SIGABRT)"
    return f"the call timed out on rank {process.rank}"


def _add_last_site(context: DiagnosisContext, verdict: Verdict, timed_out_at: float) -> Verdict:
    """The verdict with the line of the first culprit's last call, if it is known."""
    culprits = verdict.culprits
    process = context.attempt.processes.get(culprits[0])
    site = find_last_site(process, timed_out_at) if process is not None else None
    if site is None:
        return verdict
    if verdict.kind is not VerdictKind.MISSING_RANK:
        return replace(verdict, site=site)
    possessive = f"rank {culprits[0]}'s" if len(culprits) > 1 else "its"
    return replace(
        verdict,
        site=site,
        summary=f"{verdict.summary}: {possessive} last call was at {site}",
        advice=_NO_STACK_ADVICE,
    )


def _was_frozen(context: DiagnosisContext, rank: int) -> bool:
    """Whether the rank is frozen, or had not run Python for a while when a signal terminated it."""
    process = context.attempt.processes.get(rank)
    if process is None:
        return False
    if process.freeze_reason(context.now) is not None:
        return True
    if process.exit is None or process.exit.signal not in TERMINATION_SIGNALS:
        return False
    if process.lifecycle >= Lifecycle.EXITING:
        return False
    ended_at, pulse_at = process.exited_at, process.activity.pulse_at
    if ended_at is None or pulse_at is None:
        return False
    return ended_at - pulse_at >= FROZEN_AFTER_S


def has_waited(aborted: Iterable[Process]) -> bool:
    """Whether ranks that were aborted in a collective are victims: several were, or the only one
    had waited for a while. A rank that fails by itself, as on an error of its device, does so soon.
    """
    waits_s = [
        get_failure_time(process) - max(process.device_changed_at, process.newest_call_at)
        for process in aborted
    ]
    return len(waits_s) > 1 or max(waits_s, default=0.0) >= MIN_VICTIM_WAIT_S


def diagnose_watchdog_end(
    context: DiagnosisContext, first: Process, failed: set[int], *, due: bool
) -> None:
    """Adds the verdict on what ``first``, which its watchdog ended before others, waited for."""
    devices = build_device_graph(context.attempt, ended=failed)
    waiting = failed | context.graph.get_waiting_ranks()
    verdict: Verdict | None = None
    culprits = set() if devices is None else devices.find_stuck_ranks()
    if devices is not None and culprits and not devices.uncertain_ends:
        waiting |= devices.find_waiters_of(devices.culprits) | devices.culprits
        waiting -= culprits
        verdict = make_stuck_verdict(devices, culprits, waiting, due=due)
    elif devices is not None and devices.stalled_groups and not devices.host_ends:
        group = devices.stalled_groups[0]
        waiting.update(group.ranks)
        # The end of the rank proves that the call did not just take long: no grace is needed.
        has_stalled = devices.get_waited_s(group.ranks) >= context.limits.stall_after_s
        verdict = make_stalled_verdict(context, devices, group, waiting, due=due or has_stalled)
    elif diagnose_timeout(context, first, failed, get_failure_time(first), due=due):
        return
    if verdict is None:
        last = first.newest_stream
        assert last is not None  # a rank that its watchdog ended has a device with calls
        position = describe_position(last.group, last.entered)
        verdict = make_no_progress_verdict(
            last,
            first.rank,
            waiting,
            last.entered_at,
            due=due,
            summary=f"{get_op_name(last)} did not complete ({position})",
            advice=_WATCHDOG_ADVICE,
        )
    context.accuse(replace(verdict, summary=f"{verdict.summary}; {_describe_end(first)}"))
