"""A call timed out before the wait in it became a verdict: to blame is who had not come by then,
and not who raised. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from hangwatch.diagnosis import messages
from hangwatch.diagnosis.context import (
    TERMINATION_SIGNALS,
    DiagnosisContext,
    find_last_site,
    get_newest_call,
    get_op_name,
    get_state_known_until,
    request_stacks,
)
from hangwatch.diagnosis.graph.awaited import WaitResolver, receives_from_any
from hangwatch.diagnosis.graph.graph import BlockedCall, WaitEdge
from hangwatch.diagnosis.graph.waits import is_main_thread_waiting, is_not_initialized
from hangwatch.diagnosis.peer_errors import has_peer_error, has_timed_out
from hangwatch.model.calls import StreamKind
from hangwatch.model.kind_spec import Severity
from hangwatch.model.kinds import VerdictKind
from hangwatch.model.limits import FROZEN_AFTER_S, MIN_WAIT_S
from hangwatch.model.ranks import Lifecycle
from hangwatch.model.verdicts import Verdict
from hangwatch.tracking.call_stream import CallStream
from hangwatch.tracking.process import Process

from .absence_verdict import make_absence_verdict
from .end_kinds import KIND_PRECEDENCE

_MAX_SEARCHED_RANKS = 1000  # ranks that are looked at in search of those who had not come


def diagnose_timeout(
    context: DiagnosisContext, first: Process, failed: set[int], timed_out_at: float, *, due: bool
) -> bool:
    """Says for want of whom the last call of ``first`` timed out at ``at``; False where that is not
    known.
    """
    last = first.newest_stream
    if last is None or not has_timed_out(first) or timed_out_at - last.entered_at < MIN_WAIT_S:
        return False
    search = _TimeoutSearch(
        context,
        timed_out_at,
        WaitResolver(context.attempt, context.now, context.graph.silent_ranks),
    )
    search.follow_waits(first, last)
    if search.is_uncertain:
        return False
    due &= not search.not_reporting
    if search.chain_ends:
        context.verdicts.append(_make_absence_verdict(context, first, search, failed, due))
        context.explained_ranks |= (
            failed
            | search.waiting_ranks
            | search.chain_ends.keys()
            | context.graph.get_waiting_ranks()
        )
        return True
    members = (
        last.group_state.members
        if last.group_state is not None and last.kind is StreamKind.COLLECTIVE
        else {}
    )
    there = max((s.entered_at for s in members.values()), default=timed_out_at)
    if (
        len(members) < len(last.group.ranks)
        or timed_out_at - there < (timed_out_at - last.entered_at) / 2
    ):
        return False  # whoever came late left too little time
    context.verdicts.append(_make_no_progress_verdict(context, first, last, there, due))
    context.explained_ranks |= failed | members.keys() | context.graph.get_waiting_ranks()
    return True


@dataclass(slots=True)
class _TimeoutSearch:
    """From rank to rank along the waits as they were ``at`` the moment when the first of them timed
    out.
    """

    context: DiagnosisContext
    timed_out_at: float
    resolver: WaitResolver
    chain_ends: dict[int, WaitEdge] = field(
        default_factory=dict
    )  # who had not come and waited for nobody, each with a wait for it
    waiting_ranks: set[int] = field(default_factory=set)  # who waited
    is_uncertain: bool = False  # whether or where someone waited is not known
    not_reporting: bool = False  # and may yet be told

    def follow_waits(self, first: Process, last: CallStream) -> None:
        open_ = [(first, [last])]
        self.waiting_ranks.add(first.rank)
        for process, sequences in open_:  # it grows meanwhile
            self.is_uncertain |= len(self.waiting_ranks) > _MAX_SEARCHED_RANKS or any(
                map(receives_from_any, sequences)
            )
            if self.is_uncertain:
                return
            for sequence in sequences:
                for on, seq in self._find_absent(process.rank, sequence).items():
                    if on in self.waiting_ranks or on in self.chain_ends:
                        continue
                    if inner := self._find_waited_streams(on, sequence):
                        self.waiting_ranks.add(on)
                        open_.append((self.context.attempt.processes[on], inner))
                    else:
                        self.chain_ends[on] = BlockedCall(
                            process.rank, sequence, sequence.entered_at, {on: seq}, False
                        ).make_edge(on)

    def _find_absent(self, rank: int, stream: CallStream) -> dict[int, int]:
        """Those whom a call waited for, each with the call that it had not entered."""
        newest = stream.calls.get(stream.entered)
        awaited = self.resolver.find_awaited_ranks(
            rank, stream, newest is not None and newest.blocking is True
        )
        members = stream.group_state.members if stream.group_state is not None else {}
        # Who was in it may have ended since, for want of the same ranks.
        there = {
            m
            for m, s in members.items()
            if s.entered >= stream.entered and s.entered_at <= self.timed_out_at
        }
        late = {
            m: stream.entered
            for m, s in members.items()
            if s.entered == stream.entered and s.entered_at > self.timed_out_at
        }
        return late | {
            m: seq for m, seq in awaited.items() if m not in there or _was_frozen(self.context, m)
        }

    def _find_waited_streams(self, rank: int, wanted: CallStream) -> list[CallStream]:
        """The calls in which one that had not entered ``wanted`` waited itself."""
        process = self.context.attempt.processes.get(rank)
        if process is None:
            # Where none of it was ever heard, it was not there when groups were set up; later,
            # nobody knows.
            self.is_uncertain |= wanted.kind is not StreamKind.SETUP
            return []
        if process.is_alive and (
            get_state_known_until(self.context, rank) < self.timed_out_at
            or process.reports.last_progress_at > process.reports.last_seen_at
        ):
            self.not_reporting = True
            self.is_uncertain |= (
                self.context.now - self.timed_out_at >= self.context.limits.lost_after_s
            )
        if _was_frozen(self.context, rank):
            return []
        held_from, held_until = process.blocked_interval
        self.is_uncertain |= (
            min(held_until, self.timed_out_at) - max(held_from, wanted.entered_at) >= MIN_WAIT_S
        )  # others held it up at first
        last = process.newest_stream
        if last is not None and last.entered_at <= self.timed_out_at and has_peer_error(process):
            return [last]
        before = [
            s
            for s in process.open_calls.unfinished_streams
            if 0.0 < s.entered_at <= self.timed_out_at
        ]
        if certain := [s for s in process.open_calls.blocked_streams if s in before]:
            return certain
        waits = is_main_thread_waiting(process) if before else False
        waited = [s for s in before if self._find_absent(rank, s)] if waits is not False else []
        self.is_uncertain |= waits is None and bool(waited)
        return waited


def _make_absence_verdict(
    context: DiagnosisContext, first: Process, search: _TimeoutSearch, failed: set[int], due: bool
) -> Verdict:
    kinds = {rank: _classify_absent(context, rank) for rank in search.chain_ends}
    kind = min(kinds.values(), key=KIND_PRECEDENCE.index)
    culprits = tuple(sorted(rank for rank in kinds if kinds[rank] is kind))
    edge = search.chain_ends[culprits[0]]
    members = (
        context.streams_by_group.get(edge.stream.group.key, {}) if edge.stream.peer is None else {}
    )
    there = {
        r
        for r, s in members.items()
        if s.entered >= edge.wait.seq and s.entered_at <= search.timed_out_at
    }
    waiting = (
        failed | search.waiting_ranks | there | context.graph.get_waiting_ranks()
    ) - search.chain_ends.keys()
    since = min(search.chain_ends[r].stream.entered_at for r in culprits)
    verdict = make_absence_verdict(context, kind, culprits, waiting, edge, since, due=due)
    process = context.attempt.processes.get(culprits[0])
    if (
        verdict.site is None
        and process is not None
        and (site := find_last_site(process, search.timed_out_at)) is not None
    ):
        verdict = replace(verdict, site=site)
        if kind is VerdictKind.MISSING_RANK:
            whose = f"rank {process.rank}'s" if len(culprits) > 1 else "its"
            verdict = replace(
                verdict,
                summary=f"{verdict.summary}: {whose} last call was at {site}",
                advice=messages.NO_STACK_ADVICE,
            )
    request_stacks(context, culprits, waiting, since)
    return replace(verdict, summary=f"{verdict.summary}; the call timed out on rank {first.rank}")


def _make_no_progress_verdict(
    context: DiagnosisContext, first: Process, last: CallStream, since: float, due: bool
) -> Verdict:
    ranks = last.group.ranks
    return Verdict(
        kind=VerdictKind.NO_PROGRESS,
        severity=Severity.ALERT,
        culprits=(),
        waiting=tuple(sorted(ranks)),
        group=last.group,
        seq=last.entered,
        calls=get_newest_call(last, first.rank),
        began_at=since,
        is_confirmed=due,
        summary=(
            f"all {len(ranks)} ranks made the same call and it timed out on rank {first.rank}:"
            f" {get_op_name(last)} ({messages.describe_position(last.group, last.entered)})"
        ),
        advice=messages.LOWER_LAYERS_ADVICE,
    )


def _classify_absent(context: DiagnosisContext, rank: int) -> VerdictKind:
    process = context.attempt.processes.get(rank)
    if process is None or is_not_initialized(process):
        return VerdictKind.STARTUP_STALL
    return VerdictKind.FROZEN_RANK if _was_frozen(context, rank) else VerdictKind.MISSING_RANK


def _was_frozen(context: DiagnosisContext, rank: int) -> bool:
    """It ran no Python, or had not for a while when it was told to end."""
    process = context.attempt.processes.get(rank)
    if process is None or process.freeze_reason(context.now) is not None:
        return process is not None
    asked = (
        process.exit is not None
        and process.exit.signal in TERMINATION_SIGNALS
        and process.lifecycle < Lifecycle.EXITING
    )
    ended_at, pulse_at = process.exited_at, process.activity.pulse_at
    return (
        asked
        and ended_at is not None
        and pulse_at is not None
        and ended_at - pulse_at >= FROZEN_AFTER_S
    )
