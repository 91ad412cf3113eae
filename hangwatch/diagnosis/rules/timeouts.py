"""A call timed out before the wait in it became a verdict: to blame is who had not come by then,
and not who raised. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from hangwatch.diagnosis import messages
from hangwatch.diagnosis.context import (
    POLITE,
    Case,
    ask_stacks,
    call_of,
    known_until,
    last_site,
    op_of,
)
from hangwatch.diagnosis.graph.awaited import Others, from_any
from hangwatch.diagnosis.graph.graph import Edge, Stop
from hangwatch.diagnosis.graph.waits import not_up, thread_waits
from hangwatch.model.calls import StreamKind
from hangwatch.model.kinds import Severity, VerdictKind
from hangwatch.model.limits import FROZEN_AFTER_S, MIN_WAIT_S
from hangwatch.model.ranks import Lifecycle
from hangwatch.model.verdicts import Verdict
from hangwatch.tracking.call_stream import CallStream
from hangwatch.tracking.process import Process

from .complaints import complains, timed_out
from .missing import PRECEDENCE, accused

_ASKED = 1000  # ranks that are looked at in search of those who had not come


def not_come(case: Case, first: Process, failed: set[int], at: float, *, due: bool) -> bool:
    """Says for want of whom the last call of ``first`` timed out at ``at``; False where that is not
    known.
    """
    last = first.newest_stream
    if last is None or not timed_out(first) or at - last.entered_at < MIN_WAIT_S:
        return False
    search = _Search(case, at, Others(case.attempt, case.now, case.graph.silent))
    search.begin(first, last)
    if search.doubted:
        return False
    due &= not search.unheard
    if search.ends:
        case.verdicts.append(_accused(case, first, search, failed, due))
        case.explained |= failed | search.passed | search.ends.keys() | case.graph.waiting()
        return True
    members = (
        last.group_state.members
        if last.group_state is not None and last.kind is StreamKind.COLLECTIVE
        else {}
    )
    there = max((s.entered_at for s in members.values()), default=at)
    if len(members) < len(last.group.ranks) or at - there < (at - last.entered_at) / 2:
        return False  # whoever came late left too little time
    case.verdicts.append(_nobody_missing(case, first, last, there, due))
    case.explained |= failed | members.keys() | case.graph.waiting()
    return True


@dataclass(slots=True)
class _Search:
    """From rank to rank along the waits as they were ``at`` the moment when the first of them timed
    out.
    """

    case: Case
    at: float
    others: Others
    ends: dict[int, Edge] = field(
        default_factory=dict
    )  # who had not come and waited for nobody, each with a wait for it
    passed: set[int] = field(default_factory=set)  # who waited
    doubted: bool = False  # whether or where someone waited is not known
    unheard: bool = False  # and may yet be told

    def begin(self, first: Process, last: CallStream) -> None:
        open_ = [(first, [last])]
        self.passed.add(first.rank)
        for process, sequences in open_:  # it grows meanwhile
            self.doubted |= len(self.passed) > _ASKED or any(map(from_any, sequences))
            if self.doubted:
                return
            for sequence in sequences:
                for on, seq in self._absent(process.rank, sequence).items():
                    if on in self.passed or on in self.ends:
                        continue
                    if inner := self._waited_in(on, sequence):
                        self.passed.add(on)
                        open_.append((self.case.attempt.processes[on], inner))
                    else:
                        self.ends[on] = Stop(
                            process.rank, sequence, sequence.entered_at, {on: seq}, False
                        ).edge(on)

    def _absent(self, rank: int, sequence: CallStream) -> dict[int, int]:
        """Those whom a call waited for, each with the call that it had not entered."""
        newest = sequence.calls.get(sequence.entered)
        awaited = self.others.awaited(
            rank, sequence, newest is not None and newest.blocking is True
        )
        members = sequence.group_state.members if sequence.group_state is not None else {}
        # Who was in it may have ended since, for want of the same ranks.
        there = {
            m
            for m, s in members.items()
            if s.entered >= sequence.entered and s.entered_at <= self.at
        }
        late = {
            m: sequence.entered
            for m, s in members.items()
            if s.entered == sequence.entered and s.entered_at > self.at
        }
        return late | {
            m: seq for m, seq in awaited.items() if m not in there or _frozen(self.case, m)
        }

    def _waited_in(self, rank: int, wanted: CallStream) -> list[CallStream]:
        """The calls in which one that had not entered ``wanted`` waited itself."""
        process = self.case.attempt.processes.get(rank)
        if process is None:
            # Where none of it was ever heard, it was not there when groups were set up; later,
            # nobody knows.
            self.doubted |= wanted.kind is not StreamKind.SETUP
            return []
        if process.is_alive and (
            known_until(self.case, rank) < self.at
            or process.last_progress_at > process.last_seen_at
        ):
            self.unheard = True
            self.doubted |= self.case.now - self.at >= self.case.limits.lost_after_s
        if _frozen(self.case, rank):
            return []
        held_from, held_until = process.blocked_interval
        self.doubted |= (
            min(held_until, self.at) - max(held_from, wanted.entered_at) >= MIN_WAIT_S
        )  # others held it up at first
        last = process.newest_stream
        if last is not None and last.entered_at <= self.at and complains(process):
            return [last]
        before = [s for s in process.unfinished_streams if 0.0 < s.entered_at <= self.at]
        if certain := [s for s in process.blocked_streams if s in before]:
            return certain
        waits = thread_waits(process) if before else False
        waited = [s for s in before if self._absent(rank, s)] if waits is not False else []
        self.doubted |= waits is None and bool(waited)
        return waited


def _accused(case: Case, first: Process, search: _Search, failed: set[int], due: bool) -> Verdict:
    kinds = {rank: _kind(case, rank) for rank in search.ends}
    kind = min(kinds.values(), key=PRECEDENCE.index)
    culprits = tuple(sorted(rank for rank in kinds if kinds[rank] is kind))
    edge = search.ends[culprits[0]]
    members = case.places.get(edge.sequence.group.key, {}) if edge.sequence.peer is None else {}
    there = {
        r for r, s in members.items() if s.entered >= edge.wait.seq and s.entered_at <= search.at
    }
    waiting = (failed | search.passed | there | case.graph.waiting()) - search.ends.keys()
    since = min(search.ends[r].sequence.entered_at for r in culprits)
    verdict = accused(case, kind, culprits, waiting, edge, since, due=due)
    process = case.attempt.processes.get(culprits[0])
    if (
        verdict.site is None
        and process is not None
        and (site := last_site(process, search.at)) is not None
    ):
        verdict = replace(verdict, site=site)
        if kind is VerdictKind.MISSING_RANK:
            whose = f"rank {process.rank}'s" if len(culprits) > 1 else "its"
            verdict = replace(
                verdict,
                summary=f"{verdict.summary}: {whose} last call was at {site}",
                advice=messages.UNSEEN_ADVICE,
            )
    ask_stacks(case, culprits, waiting, since)
    return replace(verdict, summary=f"{verdict.summary}; the call timed out on rank {first.rank}")


def _nobody_missing(
    case: Case, first: Process, last: CallStream, since: float, due: bool
) -> Verdict:
    ranks = last.group.ranks
    return Verdict(
        kind=VerdictKind.NO_PROGRESS,
        severity=Severity.ALERT,
        culprits=(),
        waiting=tuple(sorted(ranks)),
        group=last.group,
        seq=last.entered,
        calls=call_of(last, first.rank),
        began_at=since,
        is_confirmed=due,
        summary=(
            f"all {len(ranks)} ranks made the same call and it timed out on rank {first.rank}:"
            f" {op_of(last)} ({messages.where(last.group, last.entered)})"
        ),
        advice=messages.BELOW_ADVICE,
    )


def _kind(case: Case, rank: int) -> VerdictKind:
    process = case.attempt.processes.get(rank)
    if process is None or not_up(process):
        return VerdictKind.STARTUP_STALL
    return VerdictKind.FROZEN_RANK if _frozen(case, rank) else VerdictKind.MISSING_RANK


def _frozen(case: Case, rank: int) -> bool:
    """It ran no Python, or had not for a while when it was told to end."""
    process = case.attempt.processes.get(rank)
    if process is None or process.freeze_reason(case.now) is not None:
        return process is not None
    asked = (
        process.exit is not None
        and process.exit.signal in POLITE
        and process.lifecycle < Lifecycle.EXITING
    )
    ended_at, pulse_at = process.exited_at, process.pulse_at
    return (
        asked
        and ended_at is not None
        and pulse_at is not None
        and ended_at - pulse_at >= FROZEN_AFTER_S
    )
