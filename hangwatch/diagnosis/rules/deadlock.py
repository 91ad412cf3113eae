"""Deadlocks: cycles in the wait-for graph."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace

from hangwatch.diagnosis import messages
from hangwatch.diagnosis.context import (
    MAX_CULPRIT_STACKS,
    DiagnosisContext,
    EvidenceRequest,
    get_newest_call,
    get_op_name,
    get_state_known_until,
    request_stacks,
    select_waits,
)
from hangwatch.diagnosis.graph.cycles import (
    DeadlockCore,
    find_blocked_ranks,
    find_cycle_components,
    find_deadlock_core,
)
from hangwatch.diagnosis.graph.graph import BlockedCall, WaitEdge
from hangwatch.diagnosis.graph.thread_waits import get_calling_thread_since, has_working_thread
from hangwatch.model.calls import StreamKind
from hangwatch.model.kinds import KINDS, VerdictKind
from hangwatch.model.limits import MIN_WAIT_S
from hangwatch.model.verdicts import CallClass, Verdict
from hangwatch.tracking.call_stream import CallStream

from .end_kinds import get_unable_kind

_MAX_CALLS_SHOWN = 16
_MAX_STACK_REQUESTS = 16


def diagnose_deadlocks(context: DiagnosisContext) -> None:
    """One verdict for each cycle of waits that no rank outside can end."""
    blocked_ranks = find_blocked_ranks(context.graph)
    for component, waiters in find_cycle_components(context.graph, blocked_ranks):
        is_explained = not component.isdisjoint(context.explained_ranks)
        if not is_explained and not _waits_for_departed(context, component):
            _diagnose_cycle(context, component, waiters)


def _diagnose_cycle(context: DiagnosisContext, component: set[int], waiters: set[int]) -> None:
    core = find_deadlock_core(context.graph, component)
    culprits = tuple(sorted(core.ranks))
    blocked_calls = [blocked for rank in culprits for blocked in context.graph.blocked_calls[rank]]
    began_at = max(blocked.began_at for blocked in blocked_calls)
    waiting = (component | waiters) - core.ranks
    uncertain = _find_uncertain_ranks(context, core.ranks, began_at)
    for rank in sorted(uncertain)[:_MAX_STACK_REQUESTS]:
        context.requests.append(EvidenceRequest(rank=rank, stacks=True))
    first_edge = core.cycle[0]
    cycle_waits = [(edge.wait, get_op_name(edge.stream)) for edge in core.cycle]
    verdict = Verdict(
        kind=VerdictKind.DEADLOCK,
        severity=KINDS[VerdictKind.DEADLOCK].severity,
        culprits=culprits,
        waiting=tuple(sorted(waiting)),
        group=first_edge.stream.group,
        seq=first_edge.wait.seq,
        calls=_collect_newest_calls(context, culprits),
        waits=select_waits(context, core.ranks | waiting, core.cycle),
        began_at=began_at,
        is_confirmed=_is_confirmed(context, core, uncertain, began_at),
        summary=messages.describe_deadlock(culprits, cycle_waits),
        advice=messages.format_deadlock_advice(tuple(sorted(core.common_ranks)), culprits),
    )
    context.verdicts.append(_add_tag_mismatch(context, verdict, blocked_calls))
    context.explained_ranks |= core.ranks | waiting
    context.deadlocked_ranks |= core.ranks | waiting
    request_stacks(context, culprits, waiting, began_at)


def _find_uncertain_ranks(context: DiagnosisContext, ranks: set[int], began_at: float) -> set[int]:
    """The ranks that may not be blocked: their waiting is a guess, or another of their threads was
    seen working.
    """
    processes = context.attempt.processes
    working = {
        rank
        for rank in ranks
        if rank in processes and has_working_thread(processes[rank], began_at)
    }
    return (ranks & context.graph.uncertain_ranks) | working


def _is_confirmed(
    context: DiagnosisContext, core: DeadlockCore, uncertain: set[int], began_at: float
) -> bool:
    # Devices may execute calls of different groups at the same time, and so in another order.
    if uncertain or not core.ranks.isdisjoint(context.graph.held_up_ranks):
        known_until = min(get_state_known_until(context, rank) for rank in core.ranks)
        return known_until - began_at >= context.limits.stall_after_s
    needed_waits = 3 if _are_stacks_sampled(context, core.ranks, began_at) else 4
    return context.now - began_at >= needed_waits * MIN_WAIT_S


def _collect_newest_calls(
    context: DiagnosisContext, culprits: tuple[int, ...]
) -> tuple[CallClass, ...]:
    calls: list[CallClass] = []
    for rank in culprits[:_MAX_CALLS_SHOWN]:
        blocked = context.graph.blocked_calls[rank][0]
        calls += get_newest_call(blocked.stream, rank)
    return tuple(calls)


def _waits_for_departed(context: DiagnosisContext, component: set[int]) -> bool:
    """Whether the component also waits for ranks that have left, are frozen or do not report: these
    are the cause, and the cycle may be a consequence.
    """
    awaited_by_identity = {}
    for rank in component:
        for blocked in context.graph.blocked_calls[rank]:
            awaited_by_identity[id(blocked.awaited)] = blocked.awaited
    awaited_ranks: set[int] = set()
    for awaited in awaited_by_identity.values():
        awaited_ranks |= awaited.keys()
    awaited_ranks -= context.graph.blocked_calls.keys()
    return any(
        rank in context.graph.silent_ranks or get_unable_kind(context, rank) is not None
        for rank in awaited_ranks
    )


def _are_stacks_sampled(context: DiagnosisContext, ranks: set[int], began_at: float) -> bool:
    """Whether the requested stacks have arrived, so that a thread working beside the waiting one
    would have been seen.
    """
    known = [context.attempt.processes.get(rank) for rank in sorted(ranks)[:MAX_CULPRIT_STACKS]]
    return all(
        get_calling_thread_since(process, began_at) is not None
        for process in known
        if process is not None and process.is_alive
    )


def _add_tag_mismatch(
    context: DiagnosisContext, verdict: Verdict, blocked_calls: list[BlockedCall]
) -> Verdict:
    """Explains a deadlock by a receive that waits for one tag while its peer sent another.

    One of the tags is wrong, and the verdict becomes a mismatch; unless one of the tags was used
    before: then that one may be right, and one of the ranks may use its tags in a different order.
    """
    blocking_streams = {id(blocked.stream) for blocked in blocked_calls}
    for edge in _iter_blocked_receives(blocked_calls):
        for sending in _find_unreceived_sends(context, edge, blocking_streams):
            is_blocking = id(sending) in blocking_streams
            return _explain_by_tags(context, verdict, edge, sending, is_blocking)
    return verdict


def _iter_blocked_receives(blocked_calls: list[BlockedCall]) -> Iterator[WaitEdge]:
    for blocked in blocked_calls:
        if blocked.stream.kind is StreamKind.RECV:
            for rank in blocked.awaited:
                yield blocked.make_edge(rank)


def _find_unreceived_sends(
    context: DiagnosisContext, edge: WaitEdge, blocking_streams: Collection[int]
) -> Iterator[CallStream]:
    """The awaited sender's streams to the receiver with another tag and more sends than receives:
    those in which the sender is blocked first, then the oldest.
    """
    sends = _list_sends_to_receiver(context, edge)
    sends.sort(key=lambda stream: (id(stream) not in blocking_streams, stream.entered_at))
    for sending in sends:
        receiving = sending.other_end
        receive_count = receiving.entered if receiving is not None else 0
        if sending.tag != edge.stream.tag and sending.entered > receive_count:
            yield sending


def _list_sends_to_receiver(context: DiagnosisContext, edge: WaitEdge) -> list[CallStream]:
    process = context.attempt.processes.get(edge.wait.on_rank)
    return [
        stream
        for stream in (process.streams.values() if process is not None else ())
        if stream.kind is StreamKind.SEND
        and stream.peer == edge.wait.rank
        and stream.group.key == edge.stream.group.key
    ]


def _explain_by_tags(
    context: DiagnosisContext,
    verdict: Verdict,
    edge: WaitEdge,
    sending: CallStream,
    is_blocking: bool,
) -> Verdict:
    receiving, receiver, sender = edge.stream, edge.wait.rank, edge.wait.on_rank
    description = messages.describe_tag_mismatch(
        receiver, receiving.tag, sender, sending.tag, receiving.group, is_blocking
    )
    matching_receive = sending.other_end
    was_sent_tag_received = matching_receive is not None and matching_receive.entered > 0
    was_awaited_tag_sent = any(
        stream.tag == receiving.tag and stream.entered
        for stream in _list_sends_to_receiver(context, edge)
    )
    if was_sent_tag_received or was_awaited_tag_sent:
        were_both_used = was_sent_tag_received and was_awaited_tag_sent
        return replace(
            verdict,
            differing_fields=("tag",),
            summary=f"{verdict.summary}; {description}",
            advice=messages.REORDERED_TAGS_ADVICE
            if were_both_used
            else messages.format_new_tag_advice(
                receiving.tag if was_sent_tag_received else sending.tag
            ),
        )
    culprits = tuple(sorted((receiver, sender)))
    waiting = {*verdict.culprits, *verdict.waiting} - set(culprits)
    return replace(
        verdict,
        kind=VerdictKind.MISMATCH,
        culprits=culprits,
        waiting=tuple(sorted(waiting)),
        group=receiving.group,
        seq=edge.wait.seq,
        differing_fields=("tag",),
        calls=(*get_newest_call(sending, sender), *get_newest_call(receiving, receiver)),
        summary=description,
        advice=messages.WRONG_TAG_ADVICE,
    )
