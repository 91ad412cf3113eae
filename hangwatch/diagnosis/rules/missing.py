"""The ends of the wait chains: ranks that others wait for and that do not wait themselves.

Two kinds of ends are not culprits: members of a foreign group that are not ranks of the attempt, and
ranks that are not recorded. Whether they made the call is not known.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import inf

from hangwatch.model.calls import StreamKind
from hangwatch.model.kinds import VerdictKind
from hangwatch.model.limits import MIN_WAIT_S, REPORT_JITTER_S, SECOND_SAMPLE_S
from hangwatch.model.ranks import Ranks
from hangwatch.model.verdicts import Verdict
from hangwatch.tracking.call_stream import MAX_URGENT_SUSPECTS
from hangwatch.tracking.process import FreezeReason, Process

from ..context import MAX_CULPRIT_STACKS, DiagnosisContext
from ..graph.edges import BlockedCall, WaitEdge, has_entered, is_not_initialized, shows_all_members
from ..graph.progress import RankWait, classify_rank_wait, has_stack_changed, needs_another_sample
from ..messages import describe_not_entered, describe_ranks, format_waiter_count, pluralize
from .absence import KIND_PRECEDENCE, make_absence_verdict

_SIMULTANEOUS_SHARE = 0.9  # culprits are awaited for at least this share of the longest wait

_OUTSIDE_ADVICE = (
    "The group numbers its members by itself: look at the program at its other end, which may be at"
    " work."
)
_UNWATCHED_ADVICE = (
    "Other calls that need all ranks were completed, so the process exists, and it does not"
    " report: pass HANGWATCH_URL to every rank and install hangwatch into the Python of each;"
    " `hangwatch doctor` on its host reports what is wrong there."
)


def diagnose_chain_ends(context: DiagnosisContext) -> None:
    """One verdict for each set of chain ends that delay some rank in common."""
    graph = context.graph
    chain_ends = graph.find_chain_ends() - graph.get_waiting_ranks()
    if len(chain_ends) > MAX_URGENT_SUSPECTS:
        groups = graph.waiter_groups
        since = min([b.began_at for group in groups for b in group], default=context.now)
        if context.now - since < context.limits.suspicion_delay_s:
            chain_ends = _find_unable_ranks(context, chain_ends)
        else:
            # With many ranks, the next heartbeats of some hosts are not due yet. No wait for a rank that
            # has not reported since the first wait began is known to last.
            kept = graph.silent_ranks.keys() | context.attempt.unable_ranks
            chain_ends = {
                rank
                for rank in chain_ends
                if rank in kept or context.get_state_known_until(rank) > since
            }
    waits_by_end = collect_longest_waits(context, chain_ends)
    for component in graph.group_chain_ends(chain_ends):
        victims = graph.find_waiters_of(component) - component - context.deadlocked_ranks
        unexplained = component - context.explained_ranks
        ends = sorted(rank for rank in unexplained if rank in waits_by_end)
        if ends and victims.isdisjoint(context.explained_ranks):
            _ChainEnds(context, waits_by_end, victims).diagnose(ends)


def _find_unable_ranks(context: DiagnosisContext, ranks: Collection[int]) -> set[int]:
    """The ranks that have left or are frozen. The others of many ranks, for which no rank has waited
    long, are probably only waiting for their next report.
    """
    return {
        rank
        for rank in context.attempt.unable_ranks.intersection(ranks)
        if context.get_unable_kind(rank) is not None
    }


@dataclass(eq=False)
class LongestWaits:
    """The longest waits for one rank. Ranks with the same waiters share one object."""

    waits: list[tuple[float, BlockedCall]]  # each with the time until which it is known to last
    last_began_at: float  # when the last of all waiting ranks entered its call

    @property
    def blocked_calls(self) -> list[BlockedCall]:
        return [blocked for _, blocked in self.waits]

    @cached_property
    def began_at(self) -> float:
        return min(blocked.began_at for _, blocked in self.waits)

    @cached_property
    def longest_s(self) -> float:
        """The longest known duration."""
        return max(known_until - blocked.began_at for known_until, blocked in self.waits)


def collect_longest_waits(
    context: DiagnosisContext, chain_ends: set[int]
) -> dict[int, LongestWaits]:
    """The longest waits for each chain end, except those for which only deadlocked ranks wait."""
    groups_by_end: dict[int, list[LongestWaits]] = {}  # one of each waiter group
    for blocked_calls in context.graph.waiter_groups:
        awaited_ends = chain_ends.intersection(blocked_calls[0].awaited)
        longest = _select_longest(context, blocked_calls) if awaited_ends else None
        if longest is not None:
            for rank in awaited_ends:
                groups_by_end.setdefault(rank, []).append(longest)
    joined: dict[tuple[int, ...], LongestWaits] = {}  # by the identities of what is joined
    waits_by_end = {}
    for rank, groups in groups_by_end.items():
        key = tuple(map(id, groups))
        if key not in joined:
            waits = [wait for group in groups for wait in group.waits]
            joined[key] = LongestWaits(waits, max(group.last_began_at for group in groups))
        waits_by_end[rank] = joined[key]
    return waits_by_end


def _select_longest(
    context: DiagnosisContext, blocked_calls: Iterable[BlockedCall]
) -> LongestWaits | None:
    """The waits that may be the longest: each other one began later and is known for no longer. None if
    all of the ranks are deadlocked.
    """
    # The waits by when they began: sorting 100,000 pairs would block all threads for too long.
    longest_by_start: dict[float, tuple[float, BlockedCall]] = {}
    for blocked in blocked_calls:
        if blocked.rank in context.deadlocked_ranks:
            continue
        known_until = context.get_state_known_until(blocked.rank)
        former = longest_by_start.get(blocked.began_at)
        if former is None or known_until > former[0]:
            longest_by_start[blocked.began_at] = known_until, blocked
    longest: list[tuple[float, BlockedCall]] = []
    for began_at in sorted(longest_by_start):
        wait = longest_by_start[began_at]
        if not longest or wait[0] > longest[-1][0]:
            longest.append(wait)
    return LongestWaits(longest, max(longest_by_start)) if longest else None


@dataclass(slots=True)
class _ChainEnds:
    """The ends of wait chains that delay the same ``victims``."""

    context: DiagnosisContext
    waits_by_end: dict[int, LongestWaits]
    victims: set[int]
    # The ends that themselves wait for what another rank may do.
    possible_victims: set[int] = field(default_factory=set)

    def diagnose(self, ends: list[int]) -> None:
        context, waits_by_end = self.context, self.waits_by_end
        delay_s = context.limits.suspicion_delay_s
        if len(ends) > MAX_URGENT_SUSPECTS:
            # The first comparison decides for nearly all of 100,000 ranks.
            is_any_awaited_long = any(
                waits_by_end[rank].longest_s >= delay_s and self._get_age_s(rank) >= delay_s
                for rank in ends
            )
            if not is_any_awaited_long:
                context.explained_ranks |= self.victims.union(ends)
                ends = sorted(_find_unable_ranks(context, ends))
                if not ends:
                    return
        outside = [rank for rank in ends if rank < 0]
        if len(outside) == len(ends):
            self._accuse_outside_members(outside)
            return
        context.explained_ranks.update(outside)
        ends = [rank for rank in ends if rank >= 0]
        unwatched = self._find_unwatched(ends)
        if len(unwatched) == len(ends):
            self._accuse_unwatched_ranks(tuple(unwatched))
            return
        ends = [rank for rank in ends if rank not in unwatched]
        kinds = self._classify_ends(ends)
        # The ranks that are alive in their own code.
        absent_kinds = (VerdictKind.MISSING_RANK, VerdictKind.SLOW_RANK)
        absent = {rank for rank, kind in kinds.items() if kind in absent_kinds}
        spared = self._find_victims(absent)
        ranks_by_kind: dict[VerdictKind, list[int]] = {}
        for rank, kind in kinds.items():
            if rank not in spared:
                ranks_by_kind.setdefault(kind, []).append(rank)
        silences = context.graph.silent_ranks
        lost_ranks = ranks_by_kind.get(VerdictKind.LOST_NODE, ())
        if len(ranks_by_kind) > 1 and all(silences[rank].is_proven_alive for rank in lost_ranks):
            # The lost ranks kept running without reporting: the cause is among the ranks that report.
            ranks_by_kind.pop(VerdictKind.LOST_NODE, None)
        self._accuse_first_kind(ranks_by_kind)
        if spared:
            began_at = min(waits_by_end[rank].began_at for rank in spared)
            context.request_stacks(sorted(spared), (), began_at)
            for rank in sorted(spared)[:MAX_CULPRIT_STACKS]:
                self._request_new_sample(context.processes[rank], began_at)

    def _classify_ends(self, ends: list[int]) -> dict[int, VerdictKind]:
        """The kind of each rank.

        Where any one of several ranks would suffice, only those that are closest to entering the call
        are kept: only they delay the waiting ranks.
        """
        kinds = {rank: self._classify_end(rank) for rank in ends}
        precedences = {}
        for rank in ends:
            if all(blocked.any_suffices for blocked in self.waits_by_end[rank].blocked_calls):
                precedences[rank] = KIND_PRECEDENCE.index(kinds[rank])
        closest = max(precedences.values(), default=0)
        for rank, precedence in precedences.items():
            if precedence < closest:
                del kinds[rank]
        return kinds

    def _classify_end(self, rank: int) -> VerdictKind:
        context, waits = self.context, self.waits_by_end[rank]
        blocked_calls = waits.blocked_calls
        process = context.processes.get(rank)
        unable_kind = context.get_unable_kind(rank)
        if unable_kind is not None:
            return unable_kind
        if rank in context.graph.silent_ranks:
            return VerdictKind.LOST_NODE
        if process is None:
            return VerdictKind.STARTUP_STALL
        # Calls that `hangwatch.collective` declares, or of groups that the world does not number, need
        # no init_process_group, and a rank of another world can still make them.
        if is_not_initialized(process) and not all(
            b.stream.group.is_declared or b.stream.group.foreign for b in blocked_calls
        ):
            return VerdictKind.STARTUP_STALL
        is_first_setup_awaited = any(
            b.stream.kind is StreamKind.SETUP and b.awaited[rank] == 1 for b in blocked_calls
        )
        if is_first_setup_awaited and not any(
            stream.kind is StreamKind.SETUP for stream in process.streams.values()
        ):
            return VerdictKind.STARTUP_STALL
        if context.is_in_phase(process):
            return VerdictKind.SLOW_RANK
        within_slow_limit = context.now - waits.began_at < context.limits.slow_limit_s
        if within_slow_limit and self._is_working(rank):
            return VerdictKind.SLOW_RANK
        return VerdictKind.MISSING_RANK

    def _is_working(self, rank: int) -> bool:
        return self.context.is_working(rank, self.waits_by_end[rank].began_at)

    def _find_victims(self, absent: set[int]) -> set[int]:
        """The absent ranks that wait for another absent one, as their stacks show: those that certainly
        wait for a rank are victims of any other one, and those that may do so of one that does not.

        Only some of many ranks are sampled. If there are such waits among these, ranks without a sample
        that do not work may be victims as well.
        """
        ranks_by_wait = defaultdict(set)  # None: what they do is not known
        for rank in absent:
            process = self.context.processes[rank]
            wait = None
            if process.samples and not self.context.is_in_phase(process):
                wait = classify_rank_wait(process, self.waits_by_end[rank].began_at)
            ranks_by_wait[wait].add(rank)
        certain = ranks_by_wait[RankWait.CERTAIN]
        possible = certain | ranks_by_wait[RankWait.POSSIBLE]
        if not possible:
            return set()
        idle_unsampled = {rank for rank in ranks_by_wait[None] if not self._is_working(rank)}
        self.possible_victims = possible | idle_unsampled
        others = absent - self.possible_victims
        if others & ranks_by_wait[RankWait.EXCLUDED] or any(map(self._is_working, others)):
            return self.possible_victims
        return certain if certain != absent else set()

    def _get_age_s(self, rank: int) -> float:
        """How long ranks are known to have waited for this one while it was not blocked itself."""
        context, waits = self.context, self.waits_by_end[rank]
        process = context.processes.get(rank)
        if rank in context.graph.newly_released_ranks:
            return 0.0
        made_long_ago_s = context.limits.stall_after_s / 2
        if process is not None and context.now - process.newest_call_at >= made_long_ago_s:
            # Completions of such calls that were reported just now, as after a time without heartbeats from
            # the host, do not show when they completed, nor yet whether it is blocked in its newest call.
            for stream in process.streams.values():
                if context.now - stream.last_completion_at < MIN_WAIT_S:
                    return 0.0
        known_until = context.now
        if rank not in context.graph.silent_ranks:
            known_until = context.get_state_known_until(rank)
        freed_at = 0.0
        if rank in self.possible_victims:
            # The last rank to arrive may have delayed the others, if they waited for it as well. It may only
            # just have entered the call, and not count as waiting yet.
            freed_at = waits.last_began_at
            for blocked in waits.blocked_calls:
                for stream in context.get_members(blocked.stream.group).values():
                    if stream.entered == blocked.stream.entered:
                        freed_at = max(freed_at, stream.entered_at)
        earliest = self._get_accountable_since(rank, freed_at)
        blocked_from, blocked_until = (0.0, 0.0) if process is None else process.blocked_interval
        longest_s = 0.0
        for wait_known_until, blocked in waits.waits:
            first = max(earliest, blocked.began_at)
            last = min(known_until, wait_known_until)
            blocked_s = max(0.0, min(blocked_until, last) - max(blocked_from, first))
            longest_s = max(longest_s, last - first - blocked_s)
        return longest_s

    def _get_accountable_since(self, rank: int, began_at: float) -> float:
        """The time since which a wait that began at ``began_at`` can be attributed to the rank."""
        silence = self.context.graph.silent_ranks.get(rank)
        if silence is not None:
            return max(began_at, silence.last_alive_at)
        if rank in self.context.processes:
            return began_at
        return max(began_at, self.context.attempt.opened_at)

    def _find_first_edge(self, ranks: Collection[int]) -> WaitEdge:
        """The wait for the longest awaited of the ranks that began first. If several waits of its group
        began within the error of the reported times, it is the one in the call with the lowest number:
        the later calls are missing for the same reason.
        """
        awaited = min(ranks, key=lambda rank: self.waits_by_end[rank].began_at)
        blocked_calls = self.waits_by_end[awaited].blocked_calls
        first = min(blocked_calls, key=lambda blocked: blocked.began_at)
        simultaneous = [
            blocked
            for blocked in blocked_calls
            if blocked.began_at - first.began_at <= REPORT_JITTER_S
            and blocked.stream.group is first.stream.group
        ]
        oldest = min(simultaneous, key=lambda b: (b.awaited[awaited], b.began_at))
        return oldest.make_edge(awaited)

    def _accuse_first_kind(self, ranks_by_kind: dict[VerdictKind, list[int]]) -> None:
        """Accuses the ranks of the kind that comes first, without those that were only just missed."""
        context, limits = self.context, self.context.limits
        kind = min(ranks_by_kind, key=KIND_PRECEDENCE.index)
        ranks = ranks_by_kind[kind]
        ages_s = {rank: self._get_age_s(rank) for rank in ranks}
        age_s = max(ages_s.values())
        if kind not in (VerdictKind.EXITED_RANK, VerdictKind.FROZEN_RANK):
            threshold_s = min(age_s, limits.stall_after_s) * _SIMULTANEOUS_SHARE
            ranks = [rank for rank in ranks if ages_s[rank] >= threshold_s]
        began_at = min(
            self._get_accountable_since(rank, self.waits_by_end[rank].began_at) for rank in ranks
        )
        edge = self._find_first_edge(ranks)
        # Hosts run ahead of their devices: what these wait for comes first.
        edge = context.graph.devices.find_longest_wait((edge.wait.on_rank,)) or edge
        victims = self.victims
        if kind is VerdictKind.LOST_NODE:
            ranks = context.find_silent_node_mates(ranks)
            victims = context.graph.find_waiters_of(ranks)
        culprits = tuple(sorted(ranks))
        waiting = (victims | context.find_waiting_devices(culprits)).difference(culprits)
        alive = list(context.iter_alive(culprits))
        is_immediate = kind is VerdictKind.EXITED_RANK
        if kind is VerdictKind.FROZEN_RANK:
            process = context.processes[culprits[0]]
            is_immediate = process.freeze_reason(context.now) is FreezeReason.STOPPED
        # Whether any of them waits is only a guess; a stack sample would show it.
        is_guess = bool(waiting) and context.graph.uncertain_ranks.issuperset(waiting)
        limit_s = limits.stall_after_s
        if is_guess and kind is VerdictKind.EXITED_RANK and self._have_entered(ranks):
            limit_s = inf  # some backends never report that an asynchronous call is complete
        elif is_immediate:
            limit_s = max(
                context.get_settle_s(context.attempt.find_processes(culprits)), MIN_WAIT_S
            )
        elif is_guess:
            limit_s *= 2
        if kind is VerdictKind.MISSING_RANK:
            is_any_slow = VerdictKind.SLOW_RANK in ranks_by_kind
            if any(needs_another_sample(process, began_at, is_any_slow) for process in alive):
                limit_s += SECOND_SAMPLE_S
            if any(context.list_called_samples_due(process, began_at) for process in alive):
                limit_s += 2 * SECOND_SAMPLE_S  # samples of other ranks are requested after its own
        is_due = age_s >= limit_s
        context.accuse(
            make_absence_verdict(context, kind, culprits, waiting, edge, began_at, due=is_due)
        )
        alive_ranks = [process.rank for process in alive]
        if age_s >= limits.suspicion_delay_s or is_immediate:
            # A rank imports, downloads and connects before its process group exists.
            are_moving = kind is VerdictKind.STARTUP_STALL
            context.request_stacks(alive_ranks, waiting, began_at, are_moving=are_moving)
        if kind is VerdictKind.SLOW_RANK:
            context.request_device_evidence(alive_ranks, began_at)
            for process in alive:
                if context.shows_progress(process, began_at):
                    self._request_new_sample(process, began_at)

    def _have_entered(self, ranks: Iterable[int]) -> bool:
        """Whether these ranks have entered every call in which another rank may wait for them."""
        return all(
            has_entered(blocked.stream, rank, blocked.awaited[rank])
            for rank in ranks
            for blocked in self.waits_by_end[rank].blocked_calls
        )

    def _request_new_sample(self, process: Process, began_at: float) -> None:
        """Requests the stacks of a rank whose last sample is old: it, or what it waits for, made progress
        then, and only a new sample shows whether that is still so.
        """
        context = self.context
        interval_s = context.limits.stall_after_s
        if has_stack_changed(process, began_at):
            interval_s /= 2  # two samples within the limit show whether the rank stays in one place
        if process.samples and context.now - process.samples[-1].taken_at >= interval_s:
            context.request_stack(process.rank)

    def _accuse_outside_members(self, outside: Collection[int]) -> None:
        """Adds a warning, since nothing shows whether these processes work, or an alert once that lasts.
        Ranks of an attempt of their own get none: its diagnosis names them.
        """
        context = self.context
        ranks = tuple(sorted(outside, reverse=True))
        members = map(context.attempt.foreign_groups.find_outside, ranks)
        if all(m is not None and m.is_alive and not m.attempt.is_finished for m in members):
            return
        own_victims = {rank for rank in self.victims if rank >= 0}
        # A process without a world may serve another program, which lets it wait for any time.
        age_s = max(map(self._get_age_s, ranks))
        is_long = age_s >= context.limits.slow_limit_s and not context.attempt.is_of_group
        kind = VerdictKind.MISSING_RANK if is_long else VerdictKind.SLOW_RANK
        edge = self._find_first_edge(ranks)
        calls = context.find_missing_call(edge, own_victims)
        summary = describe_not_entered(
            ranks,
            edge.op,
            edge.group,
            edge.seq,
            len(own_victims),
            edge.rank_at_other_end,
            ranks_inside=calls[0].ranks if calls else (),
        )
        self._accuse_no_rank(kind, ranks, own_victims, edge, summary, _OUTSIDE_ADVICE)

    def _find_unwatched(self, ends: Collection[int]) -> list[int]:
        """The ends whose calls are not recorded."""
        attempt = self.context.attempt
        unwatched = []
        # Whether a group shows that an end exists that does not report, by the id of the group's state.
        # Before all of 100,000 ranks have started, there are as many ends, and the groups have as many
        # members.
        is_shown: dict[int, bool] = {}
        for rank in ends:
            process = attempt.processes.get(rank)
            if process is not None:
                if process.identity.unrecorded:
                    unwatched.append(rank)
                continue
            for blocked in self.waits_by_end[rank].blocked_calls:
                state = blocked.stream.group_state
                if state is None:
                    continue
                if id(state) not in is_shown:
                    is_shown[id(state)] = shows_all_members(attempt, state)
                if is_shown[id(state)]:
                    unwatched.append(rank)
                    break
        return unwatched

    def _accuse_unwatched_ranks(self, ranks: Ranks) -> None:
        """Adds a warning at first, as for a late start: the unwatched ranks may be at work."""
        edge = self._find_first_edge(ranks)
        whether_made = pluralize("is not watched: whether it made", ranks)
        summary = (
            f"{format_waiter_count(len(self.victims))} in {edge.op} for {describe_ranks(ranks)}, which"
            f" {whether_made} the call is not known"
        )
        advice = _UNWATCHED_ADVICE
        for process in self.context.attempt.find_processes(ranks):
            if process.identity.unrecorded:  # the reason, with its remedy
                advice = f"Nothing is recorded of that process: {process.identity.unrecorded}."
                break
        kind = VerdictKind.STARTUP_STALL
        self._accuse_no_rank(kind, ranks, self.victims, edge, summary, advice)

    def _accuse_no_rank(
        self,
        kind: VerdictKind,
        ends: Collection[int],
        victims: set[int],
        edge: WaitEdge,
        summary: str,
        advice: str,
    ) -> None:
        """Opens a verdict without culprits on the waits for ``ends``, about which little is known."""
        context = self.context
        is_due = max(map(self._get_age_s, ends)) >= context.limits.stall_after_s
        began_at = self.waits_by_end[edge.wait.on_rank].began_at
        messages = (summary, advice)
        verdict = make_absence_verdict(
            context, kind, (), victims, edge, began_at, due=is_due, messages=messages
        )
        context.accuse(verdict, {*ends, *self.victims}, samples=is_due)


def drop_outside_members(verdict: Verdict) -> Verdict:
    """The verdict with ranks of the attempt alone. Its texts may name others."""
    calls = [replace(c, ranks=_select_known(c.ranks)) for c in verdict.calls]
    return replace(
        verdict,
        culprits=_select_known(verdict.culprits),
        waiting=_select_known(verdict.waiting),
        calls=tuple(c for c in calls if c.ranks),
        waits=tuple(w for w in verdict.waits if w.rank >= 0 and w.on_rank >= 0),
    )


def _select_known(ranks: Ranks) -> Ranks:
    return tuple(rank for rank in ranks if rank >= 0)
