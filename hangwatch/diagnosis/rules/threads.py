"""Ranks in which several threads make calls: threads that are blocked while the training continues, and
threads that make calls on one group at the same time.
"""

from __future__ import annotations

from collections.abc import Collection

from hangwatch.model.calls import StreamKind
from hangwatch.model.kinds import VerdictKind
from hangwatch.model.limits import QUIET_AFTER_S
from hangwatch.model.verdicts import CallClass, Verdict

from ..context import DiagnosisContext
from ..graph.edges import BlockedCall, group_by_awaited
from ..graph.progress import find_waiting_caller
from ..messages import describe_position, describe_ranks, format_line
from .absence import make_absence_verdict

_MAX_SAMPLED = 2  # waiting ranks that are sampled, and as many awaited ones


def diagnose_thread_waits(context: DiagnosisContext) -> None:
    """One verdict for each set of ranks that threads have waited for as long as a stall.

    The threads use a group of their own, such as those that save checkpoints. Nothing else is delayed,
    so the awaited ranks are slow and not missing, until the limit for slow ranks.
    """
    graph = context.graph
    excluded = (graph.silent_ranks, graph.blocked_calls, graph.stuck_streams)
    for blocked_calls in group_by_awaited(graph.thread_waits.values()):
        first = min(blocked_calls, key=lambda blocked: blocked.began_at)
        waiting = {blocked.rank for blocked in blocked_calls}
        # The awaited ranks that report, and wait for no rank themselves.
        culprits = tuple(
            process.rank
            for process in context.iter_alive(sorted(first.awaited))
            if not any(process.rank in ranks for ranks in excluded)
        )
        age_s = context.now - first.began_at
        if not culprits or age_s < context.limits.suspicion_delay_s:
            continue
        if context.explained_ranks.intersection({*waiting, *culprits}):
            continue
        _request_samples(context, waiting, first.began_at)
        _request_samples(context, culprits, first.began_at)
        is_late = age_s >= context.limits.slow_limit_s
        kind = VerdictKind.MISSING_RANK if is_late else VerdictKind.SLOW_RANK
        edge = first.make_edge(culprits[0])
        is_due = age_s >= context.limits.stall_after_s and any(
            _is_thread_waiting(context, blocked) for blocked in blocked_calls
        )
        context.accuse(
            make_absence_verdict(context, kind, culprits, waiting, edge, first.began_at, due=is_due)
        )


def _request_samples(context: DiagnosisContext, ranks: Collection[int], since: float) -> None:
    """Requests one sample of some of the ranks since the wait began: they are at work. Once a rank
    makes no more calls, another one shows whether it waits for its thread.
    """
    for rank in sorted(ranks)[:_MAX_SAMPLED]:
        process = context.processes[rank]
        is_quiet = context.now - process.newest_call_at >= QUIET_AFTER_S
        needed_since = max(since, process.newest_call_at) if is_quiet else since
        if all(sample.taken_at < needed_since for sample in process.samples):
            context.request_stack(rank)


def _is_thread_waiting(context: DiagnosisContext, blocked: BlockedCall) -> bool:
    """Whether a stack shows the wait, in another thread than the one of the newest call. The Works
    of some backends never report that they are complete.
    """
    for sample in context.processes[blocked.rank].samples:
        caller = find_waiting_caller(sample, blocked.stream)
        if sample.taken_at >= blocked.began_at and caller is not None and caller.call_recency:
            return True
    return False


def diagnose_concurrent_use(context: DiagnosisContext) -> None:
    """One warning for each group, for all ranks with concurrent calls: the order of the calls of two
    threads is a matter of chance, and may differ from rank to rank.
    """
    for key in context.attempt.concurrent_groups:
        members = context.attempt.streams_by_group[key]
        shared = {
            rank: stream
            for rank, stream in members.items()
            if stream.concurrent_calls and stream.kind is StreamKind.COLLECTIVE
        }
        if not shared:
            continue
        concerned = set(shared)
        for rank, stream in members.items():
            threads = {call.thread for call in stream.calls.values() if call.thread}
            if len(threads) > 1:
                concerned.add(rank)
        culprits = tuple(sorted(concerned))
        first_rank = min(shared, key=lambda rank: (shared[rank].concurrent_at, rank))
        stream = shared[first_rank]
        calls = stream.concurrent_calls
        newest_call = calls[-1]
        lines = dict.fromkeys(format_line(c.site) for c in calls if c.site is not None)
        places = f", at {' and '.join(lines)}" if lines else ""
        verdict = Verdict(
            kind=VerdictKind.CONCURRENT_USE,
            culprits=culprits,
            waiting=(),
            group=stream.group,
            seq=newest_call.seq,
            calls=tuple(CallClass(ranks=(first_rank,), call=call) for call in calls),
            began_at=stream.concurrent_at,
            summary=(
                f"two threads of {describe_ranks(culprits)} make calls on one group at the same"
                f" time{places} ({describe_position(stream.group, newest_call.seq)})"
            ),
            advice=(
                "Give each thread its own process group (new_group), or let one thread make all"
                " calls: the order of calls from two threads is a matter of chance, and if it"
                " differs between ranks, they mismatch or hang."
            ),
            site=newest_call.site,
        )
        context.accuse(verdict, explains=None)
