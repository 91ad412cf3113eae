"""Ranks that ended: the first failure is the cause, unless the rank failed because another one was
absent, or its launcher ended it after all ranks had finished their work.

A timeout or the rank's own watchdog may end it before its wait became a verdict: then the rank is a
victim, and the culprits are those that had not entered the call by then.
"""

from __future__ import annotations

import re
import signal
from bisect import bisect_right
from dataclasses import dataclass, field, replace
from math import inf

from hangwatch.model.calls import StreamKind
from hangwatch.model.groups import Group
from hangwatch.model.kinds import KINDS, VerdictKind
from hangwatch.model.limits import (
    DETECTION_DELAY_S,
    MIN_VICTIM_WAIT_S,
    MIN_WAIT_S,
    PEER_ERROR_DELAY_S,
    TEARDOWN_S,
)
from hangwatch.model.ranks import Lifecycle
from hangwatch.model.verdicts import Verdict
from hangwatch.report.recovery import get_signal_name
from hangwatch.tracking.call_stream import CallStream
from hangwatch.tracking.process import INTERRUPT, Process

from ..context import (
    PEER_ERROR_TYPES,
    TERMINATION_SIGNALS,
    DiagnosisContext,
    find_last_site,
    get_newest_call,
    has_peer_error,
    has_timed_out,
    was_ended_by_watchdog,
)
from ..graph.devices import build_device_graph
from ..graph.edges import BlockedCall, WaitEdge, get_op_name, is_not_initialized, receives_from_any
from ..graph.progress import is_process_waiting
from ..messages import (
    Messages,
    describe_position,
    describe_ranks,
    format_exception,
    format_lower_layers_advice,
)
from .absence import KIND_PRECEDENCE, make_absence_verdict
from .devices import make_stalled_verdict, make_stuck_verdict
from .progress import check_agreement, make_no_progress_verdict

_MAX_SEARCHED_RANKS = 1000  # ranks whose waits are followed back from a failure
_LAUNCHER_SIGNALS = (signal.SIGKILL, *TERMINATION_SIGNALS)
_CRASH_SIGNALS = (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGFPE, signal.SIGILL)
_WATCHDOG_ADVICE = (
    "The watchdog's message in the rank's log says which call did not complete, how long it took, and"
    " which error the network reported."
)
_PORT_MESSAGE = re.compile(r"EADDRINUSE|address already in use", re.IGNORECASE)
_PORT_ADVICE = (
    "Another process of its host has the port, such as another job or a rank of this one: each job needs a"
    " MASTER_PORT of its own, and only one process may be rank 0."
)
_NO_STACK_ADVICE = (
    "Check what it does after that call; with a longer timeout there is time to sample its stack."
)


def has_failed_exit(process: Process) -> bool:
    """Whether the process ended, or is about to end, with a failure."""
    end = process.exit
    if end is None:
        # Python may take long to exit, or never finish exiting, after an uncaught exception.
        has_raised = process.exception is not None and process.exception.type != INTERRUPT
        return has_raised and process.lifecycle is Lifecycle.EXITING
    if _is_exit_unseen(process):
        return process.lifecycle < Lifecycle.EXITING or process.exception is not None
    return end.has_failed


def was_terminated(process: Process) -> bool:
    """Whether a user or a launcher ended the process with a termination signal. An exception that it raised
    before is a failure of its own.
    """
    if process.exit is None or process.exit.signal not in TERMINATION_SIGNALS:
        return False
    return process.exception is None or process.exception.type == INTERRUPT


def get_failure_time(process: Process) -> float:
    """When the process failed. Its exception, or the start of its exit, precedes the end of the process,
    which may take long.

    If no one saw its end, the recorder's last pulse is accurate to a tenth of a second, unless the
    host was too busy.
    """
    times = [process.exited_at, process.exception_at]
    if process.lifecycle is Lifecycle.EXITING or _is_exit_unseen(process):
        times.append(process.activity.pulse_at)
    return min((at for at in times if at is not None), default=inf)


def _is_exit_unseen(process: Process) -> bool:
    """Whether the process was gone before its node agent could read its exit status."""
    end = process.exit
    return end is not None and end.signal is None and end.exit_status is None


def _sort_by_cause(failed: list[Process]) -> list[Process]:
    """Sorts failures by time, corrected where the time of a consequence may precede its cause.

    A process that reports a lost connection may have noticed the end of another one before that was
    seen. A process that vanished may have lived a little longer than its last pulse, until an
    exception elsewhere. A process that was terminated after such a report was terminated because of
    it.
    """
    first_peer_error_at = min(map(get_failure_time, filter(has_peer_error, failed)), default=inf)
    exception_times = sorted(
        p.exception_at for p in failed if p.exception_at is not None and not has_peer_error(p)
    )

    def failure_sort_key(process: Process) -> tuple[float, bool]:
        failed_at = get_failure_time(process)
        if has_peer_error(process):
            # A process that times out closes its connections, and its peers may report that first.
            lead_s = DETECTION_DELAY_S if has_timed_out(process) else 0.0
            return failed_at + PEER_ERROR_DELAY_S - lead_s, False
        if was_terminated(process) and first_peer_error_at <= failed_at:
            return max(failed_at, first_peer_error_at + PEER_ERROR_DELAY_S), True
        if _is_exit_unseen(process) and process.exception is None:
            earlier_count = bisect_right(exception_times, failed_at + DETECTION_DELAY_S)
            if earlier_count:
                return max(failed_at, exception_times[earlier_count - 1]), True
        return failed_at, False

    return sorted(failed, key=failure_sort_key)


def diagnose_exits(context: DiagnosisContext) -> None:
    """One verdict for the first failure. Later ones are consequences: launchers kill the other
    ranks within a second, and peers fail on the lost connection.
    """
    unable = [context.processes[rank] for rank in sorted(context.attempt.unable_ranks)]
    failed = _sort_by_cause([process for process in unable if has_failed_exit(process)])
    if not failed:
        return
    first = failed[0]
    if first.rank in context.explained_ranks:
        return  # the rank failed because of a call that was wrong before
    if was_terminated(first) and not context.graph.find_waiters_of([first.rank]):
        return
    is_in_teardown = _is_teardown(context, failed)
    if is_in_teardown:
        return
    # No peer causes an exception of another type.
    is_peer_error = first.exception is None or PEER_ERROR_TYPES.search(first.exception.type)
    last = first.newest_stream
    not_reporting: list[int] = []
    if last is not None and is_peer_error:
        departed = _find_departed_before(context, first, last)
        if departed:
            _accuse_departed(context, VerdictKind.EXITED_RANK, departed, failed, last)
            return
        not_reporting = _find_not_reporting_since(context, first, last)
        lost_by = context.now - context.limits.stall_after_s
        silences = context.graph.silent_ranks
        if any(r in silences and silences[r].last_alive_at <= lost_by for r in not_reporting):
            lost_ranks = context.find_silent_node_mates(not_reporting)
            _accuse_departed(context, VerdictKind.LOST_NODE, lost_ranks, failed, last)
            return
    # The last reports of other ranks need time to arrive, as does the exit of a rank that it may have lost.
    ended_at = first.exited_at
    if ended_at is None:
        delay_s = PEER_ERROR_DELAY_S if has_peer_error(first) else 0.0
        ended_at = get_failure_time(first) + delay_s
    has_settled = context.now - ended_at >= context.get_settle_s([first])
    due = has_settled and not not_reporting and is_in_teardown is False
    failed_ranks = {process.rank for process in failed}
    # Whether its watchdog ended the first of these ranks and it was not the only one, or had waited for a
    # while. A rank that fails by itself, as on an error of its device, does so soon.
    waited_since = max(first.device_changed_at, first.newest_call_at)
    has_waited = get_failure_time(first) - waited_since >= MIN_VICTIM_WAIT_S
    is_victim = has_waited or any(map(was_ended_by_watchdog, failed[1:]))
    if was_ended_by_watchdog(first) and is_victim:
        _accuse_awaited_by_watchdog(context, first, failed_ranks, due=due)
    elif not _accuse_awaited_at_timeout(context, first, failed_ranks, due=due):
        _accuse_dead_rank(context, failed, due=due)


def _is_teardown(context: DiagnosisContext, failed: list[Process]) -> bool | None:
    """Whether these processes were ended after they had finished their work, as Ray ends its workers,
    with an exit status that is not 0. None if the others may be about to end.

    A process that destroyed its groups has finished. Where a thread makes the calls, its end does
    not end the process, so nothing but the end of all processes in the same way shows that they
    finished: then all have completed the same calls, and none waits.
    """
    for process in failed:
        end = process.exit
        if end is None or process.exception is not None:
            return False
        if end.signal and end.signal not in _LAUNCHER_SIGNALS:
            return False
    if context.graph.find_waiters_of(process.rank for process in failed):
        return False
    if all(process.lifecycle is Lifecycle.DESTROYED for process in failed):
        return True
    for process in failed:
        newest = process.newest_stream
        call = newest.calls.get(newest.entered) if newest is not None else None
        if call is None or call.thread in (0, process.identity.pid):
            return False  # its main thread made the newest call, or it is not known
    if context.graph.get_waiting_ranks():
        return False
    processes = context.processes.values()
    if len(processes) < 2 or len({process.exit for process in failed}) > 1:
        return False
    streams = [stream for process in processes for stream in process.streams.values()]
    if not all(map(_is_complete, streams)):
        return False
    if len(failed) == len(processes):
        return True
    is_recent = context.now - get_failure_time(failed[0]) < TEARDOWN_S
    return None if is_recent else False


def _is_complete(stream: CallStream) -> bool:
    """Whether all calls of a stream are complete, and all members of the group made as many."""
    if stream.is_pending or (stream.device is not None and stream.device.is_behind_host):
        return False
    state = stream.group_state
    is_collective = stream.kind is StreamKind.COLLECTIVE
    return not is_collective or state is None or not state.has_member_behind(stream)


def _find_departed_before(context: DiagnosisContext, first: Process, last: CallStream) -> list[int]:
    """The ranks that had finished without a failure, and that the first failed rank waited for in
    its ``last`` call, directly or through other ranks.
    """
    departed = []
    seen = {first.rank}
    to_search = [first]
    resolver = context.graph.resolver
    for process in to_search:  # grows in the loop
        if len(seen) > _MAX_SEARCHED_RANKS:
            break
        for stream in process.streams.values():
            is_failed_call = stream is last
            if not (stream.is_pending or is_failed_call):
                continue
            awaited = resolver.find_awaited_ranks(process.rank, stream, is_failed_call)
            unseen = awaited.keys() - seen
            seen |= unseen
            for other in context.attempt.find_processes(unseen):
                if _had_left(other, first, stream.group):
                    departed.append(other.rank)
                else:
                    to_search.append(other)
    return departed


def _had_left(process: Process, first: Process, group: Group) -> bool:
    """Whether the process left ``group`` without a failure before the first failure."""
    if process.exception is not None:
        return False
    ended_in_time = get_failure_time(process) <= get_failure_time(first) + DETECTION_DELAY_S
    if process.exit is not None and ended_in_time and not has_failed_exit(process):
        return True
    if process.exit is not None and process.exit.signal not in TERMINATION_SIGNALS:
        return False
    if process.lifecycle is Lifecycle.EXITING:
        return True
    return process.lifecycle is Lifecycle.DESTROYED and process.has_left(group)


def _find_not_reporting_since(
    context: DiagnosisContext, first: Process, last: CallStream
) -> list[int]:
    """The members of the last call's group on other nodes that may not have run until the failure."""
    end = first.exit.signal if first.exit is not None else None
    if end is not None and end not in (signal.SIGABRT, *TERMINATION_SIGNALS):
        return []  # a signal ended it that neither a launcher sends nor an abort raises
    failed_at = get_failure_time(first)
    not_reporting = []
    for process in context.iter_alive(last.group.ranks):
        if process.agent == first.agent:
            continue
        silence = context.graph.silent_ranks.get(process.rank)
        if silence is not None and silence.is_proven_alive:
            continue
        last_alive_at = process.reports.agent_seen_at if silence is None else silence.last_alive_at
        if last_alive_at <= failed_at + DETECTION_DELAY_S:
            not_reporting.append(process.rank)
    return not_reporting


def _accuse_departed(
    context: DiagnosisContext,
    kind: VerdictKind,
    departed: list[int],
    failed: list[Process],
    last: CallStream,
) -> None:
    """Accuses ranks that left before ``last``, in which the first failed rank needed them: it failed on
    their closed connections. Ranks that left by themselves are an `EXITED_RANK`, and those of a node
    that disappeared with its node agent a `LOST_NODE`, which only its peers show.
    """
    first, culprits = failed[0], tuple(sorted(departed))
    waiting = {process.rank for process in failed} | context.graph.get_waiting_ranks()
    waiting -= set(departed)
    blocked = BlockedCall(first.rank, last, last.entered_at, {culprits[0]: last.entered})
    edge = blocked.make_edge(culprits[0])
    began_at = last.entered_at
    due = context.now - get_failure_time(first) >= context.limits.settle_s
    if kind is VerdictKind.LOST_NODE:
        began_at = min(context.graph.silent_ranks[rank].last_alive_at for rank in departed)
        due = True
    verdict = make_absence_verdict(context, kind, culprits, waiting, edge, began_at, due=due)
    verdict = replace(verdict, calls=())
    if kind is VerdictKind.EXITED_RANK:
        site = find_last_site(context.processes[culprits[0]])
        verdict = replace(verdict, calls=get_newest_call(last, first.rank), site=site)
    context.accuse(verdict)


def _accuse_dead_rank(context: DiagnosisContext, failed: list[Process], *, due: bool) -> None:
    first, last = failed[0], failed[0].newest_stream
    waiting = context.graph.find_waiters_of([first.rank])
    waiting |= context.graph.get_waiting_ranks() - {first.rank}
    waiting |= context.find_waiting_devices([first.rank])
    summary, advice = _describe_death(failed)
    verdict = Verdict(
        kind=VerdictKind.DEAD_RANK,
        culprits=(first.rank,),
        waiting=tuple(sorted(waiting)),
        waits=context.select_waits(waiting),
        began_at=get_failure_time(first),
        is_confirmed=due,
        summary=summary,
        advice=advice,
        site=first.exception.site if first.exception is not None else find_last_site(first),
    )
    if last is not None and last.is_pending and last.kind is StreamKind.COLLECTIVE:
        calls = get_newest_call(last, first.rank)
        verdict = replace(verdict, group=last.group, seq=last.entered, calls=calls)
    context.accuse(verdict, {process.rank for process in failed})


def _describe_death(failed: list[Process]) -> Messages:
    """The texts on the exception of the first failed rank, which comes before whatever ends the process
    and may not have ended it yet, or on how it ended.
    """
    first, exception, end = failed[0], failed[0].exception, failed[0].exit
    if exception is not None:
        summary = f"rank {first.rank} raised {format_exception(exception)}"
        if exception.site is not None:
            summary = f"{summary} at {exception.site}"
        if _PORT_MESSAGE.search(exception.message):
            return summary, _PORT_ADVICE
        return summary, _format_exception_advice(failed[1:])
    advice = "Check its last lines on stderr: it ended before the other ranks."
    if end is not None and end.signal:
        summary = f"rank {first.rank} was killed by {get_signal_name(end.signal)}"
        if end.signal == signal.SIGKILL:
            advice = (
                "SIGKILL usually comes from the kernel's out-of-memory killer or from scancel:"
                " check dmesg and the host's memory."
            )
        elif end.signal in _CRASH_SIGNALS:
            advice = (
                "It crashed in native code: check its last lines on stderr, and enable core files"
                " (ulimit -c unlimited)."
            )
    elif end is None or end.exit_status is None:
        summary = f"rank {first.rank} vanished"
        if _is_exit_unseen(first):
            advice = "Its node agent could not read its exit status: check its launcher's log."
    else:
        summary = f"rank {first.rank} exited with status {end.exit_status}"
    return summary, advice


def _format_exception_advice(others: list[Process]) -> str:
    """The advice on whether exceptions of other failed ranks are consequences, as far as that is known."""
    types_by_rank = {}
    for process in others:
        exception = process.exception
        if exception is None or exception.type == INTERRUPT or has_peer_error(process):
            continue
        types_by_rank[process.rank] = exception.type
    if not types_by_rank:
        return "Its exception came first; the errors of other ranks are consequences of it."
    # A lost connection raises exceptions of other types.
    independent = {
        rank: name for rank, name in types_by_rank.items() if not PEER_ERROR_TYPES.search(name)
    }
    if not independent:
        return "Its exception came first."
    types = set(independent.values())
    raised = types.pop() if len(types) == 1 else "exceptions"
    ranks = describe_ranks(tuple(independent))
    return f"Its exception came first; {ranks} also raised {raised}, which may be unrelated."


def _accuse_awaited_at_timeout(
    context: DiagnosisContext, first: Process, failed: set[int], *, due: bool
) -> bool:
    """Accuses the ranks without which the last call of ``first`` timed out; False if they are unknown."""
    last, timed_out_at = first.newest_stream, get_failure_time(first)
    is_timeout = has_timed_out(first) or was_ended_by_watchdog(first)
    if last is None or not is_timeout or timed_out_at - last.entered_at < MIN_WAIT_S:
        return False
    search = _TimeoutSearch(context, timed_out_at)
    search.follow_waits(first, last)
    if search.is_uncertain:
        return False
    due &= not search.not_reporting
    explained = failed | search.waiting_ranks | context.graph.get_waiting_ranks()
    if search.chain_ends:
        verdict = _make_verdict_at_timeout(context, first, search, explained, due)
        context.accuse(verdict, explained | search.chain_ends.keys(), samples=True)
        return True
    state = last.group_state
    if state is None or last.kind is not StreamKind.COLLECTIVE:
        return False
    if len(state.members) < len(last.group.ranks):
        return False
    complete_at = max(stream.entered_at for stream in state.members.values())
    if timed_out_at - complete_at < (timed_out_at - last.entered_at) / 2:
        return False  # the last member entered too late to blame the lower layers
    agreement = check_agreement(context, last.group, last.entered)
    ending = f"it timed out on rank {first.rank}"
    verdict = make_no_progress_verdict(
        last,
        first.rank,
        last.group.ranks,
        complete_at,
        due=due,
        summary=agreement.describe(ending, get_op_name(last), first.rank),
        advice=format_lower_layers_advice(are_equal=agreement.is_known),
    )
    context.accuse(verdict, explained)
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
            are_too_many = len(self.waiting_ranks) > _MAX_SEARCHED_RANKS
            if are_too_many or any(map(receives_from_any, streams)):
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
                        to_search.append((self.context.processes[rank], waited_streams))
                    else:
                        blocked = BlockedCall(process.rank, stream, stream.entered_at, {rank: seq})
                        self.chain_ends[rank] = blocked.make_edge(rank)

    def _find_absent(self, rank: int, stream: CallStream) -> dict[int, int]:
        """The ranks that a call waited for, with the numbers of the calls that they had not entered."""
        resolver = self.context.graph.resolver
        if resolver.find_uncounted_ranks(rank, stream):
            self.is_uncertain = True
            return {}
        newest = stream.calls.get(stream.entered)
        is_blocking = newest is not None and newest.blocking is True
        awaited = resolver.find_awaited_ranks(rank, stream, is_blocking)
        members = stream.group_state.members if stream.group_state is not None else {}
        # Members that had entered the call may have ended since, because of the same absent ranks.
        entered_in_time = set()
        absent = {}
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
        context = self.context
        process = context.processes.get(rank)
        if process is None:
            # A rank that never reported was absent when groups were set up; for later calls, that
            # is unknown.
            self.is_uncertain |= awaited.kind is not StreamKind.SETUP
            return []
        known_until = context.get_state_known_until(rank)
        has_later_progress = process.reports.last_progress_at > process.reports.last_seen_at
        if process.is_alive and (known_until < self.timed_out_at or has_later_progress):
            self.not_reporting = True
            if context.now - self.timed_out_at >= context.limits.lost_after_s:
                self.is_uncertain = True
        if _was_frozen(context, rank):
            return []
        blocked_from, blocked_until = process.blocked_interval
        blocked_s = min(blocked_until, self.timed_out_at) - max(blocked_from, awaited.entered_at)
        if blocked_s >= MIN_WAIT_S:
            self.is_uncertain = True  # other ranks delayed it at first
        last = process.newest_stream
        if last is not None and last.entered_at <= self.timed_out_at and has_peer_error(process):
            return [last]
        candidates = [
            stream
            for stream in process.unfinished_streams
            if 0.0 < stream.entered_at <= self.timed_out_at
        ]
        blocked = [stream for stream in process.blocked_streams if stream in candidates]
        if blocked or not candidates:
            return blocked
        is_waiting = is_process_waiting(process)
        if is_waiting is False:
            return []
        waited = [stream for stream in candidates if self._find_absent(rank, stream)]
        if waited and is_waiting is None:
            self.is_uncertain = True
        return waited


def _make_verdict_at_timeout(
    context: DiagnosisContext,
    first: Process,
    search: _TimeoutSearch,
    victims: set[int],
    due: bool,
) -> Verdict:
    kinds = {}
    for rank in search.chain_ends:
        if is_not_initialized(context.processes.get(rank)):
            kinds[rank] = VerdictKind.STARTUP_STALL
        elif _was_frozen(context, rank):
            kinds[rank] = VerdictKind.FROZEN_RANK
        else:
            kinds[rank] = VerdictKind.MISSING_RANK
    kind = min(kinds.values(), key=KIND_PRECEDENCE.index)
    culprits = tuple(sorted(rank for rank in kinds if kinds[rank] is kind))
    edge = search.chain_ends[culprits[0]]
    waiting = set(victims)
    if edge.stream.peer is None:
        for rank, stream in context.get_members(edge.group).items():
            if stream.entered >= edge.seq and stream.entered_at <= search.timed_out_at:
                waiting.add(rank)
    waiting -= search.chain_ends.keys()
    began_at = min(search.chain_ends[rank].stream.entered_at for rank in culprits)
    verdict = make_absence_verdict(context, kind, culprits, waiting, edge, began_at, due=due)
    summary, advice, site = verdict.summary, verdict.advice, verdict.site
    process = context.processes.get(culprits[0])
    if site is None and process is not None:
        site = find_last_site(process, search.timed_out_at)
        if site is not None and kind is VerdictKind.MISSING_RANK:
            possessive = f"rank {culprits[0]}'s" if len(culprits) > 1 else "its"
            summary = f"{summary}: {possessive} last call was at {site}"
            advice = _NO_STACK_ADVICE
    return replace(
        verdict,
        severity=KINDS[kind].severity,  # the wait for it has already ended a rank
        summary=f"{summary}; {_describe_end(first)}",
        advice=advice,
        site=site,
    )


def _describe_end(process: Process) -> str:
    """How a rank ended after it had waited for too long."""
    if was_ended_by_watchdog(process):
        return f"rank {process.rank} was ended by its watchdog (SIGABRT)"
    return f"the call timed out on rank {process.rank}"


def _was_frozen(context: DiagnosisContext, rank: int) -> bool:
    """Whether the rank is frozen, or had not run Python for a while when a signal terminated it."""
    process = context.processes.get(rank)
    if process is None:
        return False
    if process.freeze_reason(context.now) is not None:
        return True
    if process.exit is None or process.exit.signal not in TERMINATION_SIGNALS:
        return False
    if process.lifecycle >= Lifecycle.EXITING or process.exited_at is None:
        return False
    return process.lacks_pulse(process.exited_at)


def _accuse_awaited_by_watchdog(
    context: DiagnosisContext, first: Process, failed: set[int], *, due: bool
) -> None:
    """Adds the verdict on what ``first``, which its watchdog ended before others, waited for."""
    devices = build_device_graph(context.attempt, ended=failed)
    waiting = failed | context.graph.get_waiting_ranks()
    culprits = devices.find_stuck_ranks()
    if culprits and not devices.uncertain_ends:
        waiting |= devices.find_waiters_of(devices.culprits) | devices.culprits
        verdict = make_stuck_verdict(devices, culprits, waiting - culprits, due=due)
    elif devices.stalled_groups and not devices.host_ends:
        group = devices.stalled_groups[0]
        waiting.update(group.ranks)
        # The end of the rank proves that the call did not just take long: no grace is needed.
        has_stalled = devices.get_waited_s(group.ranks) >= context.limits.stall_after_s
        verdict = make_stalled_verdict(context, devices, group, waiting, due=due or has_stalled)
    elif _accuse_awaited_at_timeout(context, first, failed, due=due):
        return
    else:
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
