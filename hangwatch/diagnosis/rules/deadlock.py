"""Deadlocks: cycles in the wait-for graph. The ranks that can never continue form components that wait
for each other; of each, the ranks are named that cause the deadlock.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator
from dataclasses import replace
from graphlib import CycleError, TopologicalSorter

from hangwatch.model.calls import StreamKind
from hangwatch.model.kinds import VerdictKind
from hangwatch.model.limits import MIN_WAIT_S
from hangwatch.model.verdicts import CallClass, Verdict
from hangwatch.tracking.call_stream import CallStream

from ..context import MAX_CULPRIT_STACKS, DiagnosisContext, get_newest_call
from ..graph.edges import BlockedCall, WaitEdge, get_op_name, group_by_awaited
from ..graph.graph import WaitGraph
from ..graph.progress import get_calling_thread_since, has_working_thread
from ..messages import describe_deadlock

_MAX_CALLS_SHOWN = 16
_MAX_CYCLE_STARTS = 16  # ranks from which the shortest cycle is searched for

WRONG_TAG_ADVICE = "The tags of a send and its receive must be equal: compare the two lines."
REORDERED_TAGS_ADVICE = (
    "The two ranks have used these tags before: look for a place where one of them uses its tags in"
    " a different order."
)


def diagnose_deadlocks(context: DiagnosisContext) -> None:
    """One verdict for each cycle of waits that no rank outside can end."""
    graph = context.graph
    for component, waiters in find_cycle_components(graph, find_blocked_ranks(graph)):
        if not component.isdisjoint(context.explained_ranks):
            continue
        groups = group_by_awaited(graph.blocked_calls[rank] for rank in component)
        awaited_ranks = {rank for group in groups for rank in group[0].awaited}
        # Ranks outside that have left, are frozen or do not report are the cause, and the cycle may be a
        # consequence.
        is_caused_outside = any(
            rank in graph.silent_ranks or context.get_unable_kind(rank) is not None
            for rank in awaited_ranks - graph.blocked_calls.keys()
        )
        if not is_caused_outside:
            _diagnose_cycle(context, component, waiters)


def _diagnose_cycle(context: DiagnosisContext, component: set[int], waiters: set[int]) -> None:
    graph = context.graph
    core, cycle, common_ranks = find_deadlock_core(graph, component)
    culprits = tuple(sorted(core))
    blocked_calls = [blocked for rank in culprits for blocked in graph.blocked_calls[rank]]
    began_at = max(blocked.began_at for blocked in blocked_calls)
    waiting = (component | waiters) - core
    # A rank is uncertain if its wait is a guess or another of its threads was seen working.
    uncertain = core & graph.uncertain_ranks
    for process in context.attempt.find_processes(core):
        if has_working_thread(process, began_at):
            uncertain.add(process.rank)
    for rank in sorted(uncertain)[:MAX_CULPRIT_STACKS]:
        context.request_stack(rank)
    # Devices may execute calls of different groups at the same time, and so in another order.
    if uncertain or not core.isdisjoint(graph.held_up_ranks):
        known_until = min(map(context.get_state_known_until, core))
        is_confirmed = known_until - began_at >= context.limits.stall_after_s
    else:
        # Once the requested stacks have arrived, a thread working beside the waiting one would have been
        # seen.
        sampled = context.iter_alive(culprits[:MAX_CULPRIT_STACKS])
        are_sampled = all(get_calling_thread_since(process, began_at) for process in sampled)
        needed_waits = 2 if are_sampled else 4
        is_confirmed = context.now - began_at >= needed_waits * MIN_WAIT_S
    calls: list[CallClass] = []
    for rank in culprits[:_MAX_CALLS_SHOWN]:
        calls += get_newest_call(graph.blocked_calls[rank][0].stream, rank)
    cycle_waits = [(edge.wait, get_op_name(edge.stream)) for edge in cycle]
    summary, advice = describe_deadlock(culprits, cycle_waits, common_ranks)
    verdict = Verdict(
        kind=VerdictKind.DEADLOCK,
        culprits=culprits,
        waiting=tuple(sorted(waiting)),
        group=cycle[0].group,
        seq=cycle[0].seq,
        calls=tuple(calls),
        waits=context.select_waits(core | waiting, cycle),
        began_at=began_at,
        is_confirmed=is_confirmed,
        summary=summary,
        advice=advice,
    )
    context.accuse(_add_tag_mismatch(context, verdict, blocked_calls))
    context.deadlocked_ranks |= core | waiting
    context.request_stacks(culprits, waiting, began_at)


def _add_tag_mismatch(
    context: DiagnosisContext, verdict: Verdict, blocked_calls: list[BlockedCall]
) -> Verdict:
    """Explains a deadlock by a receive that waits for one tag while its peer sent another.

    One of the tags is wrong, and the verdict becomes a mismatch; unless one of the tags was used
    before: then that one may be right, and one of the ranks may use its tags in a different order.
    """
    blocking_streams = {id(blocked.stream) for blocked in blocked_calls}
    receives = [blocked for blocked in blocked_calls if blocked.stream.kind is StreamKind.RECV]
    awaited_ranks = {rank for blocked in receives for rank in blocked.awaited}
    sends_by_channel = defaultdict(list)  # the keys are the sender, the receiver and the group
    for process in context.attempt.find_processes(awaited_ranks):
        for stream in process.streams.values():
            if stream.kind is StreamKind.SEND:
                channel = (process.rank, stream.peer, stream.group.key)
                sends_by_channel[channel].append(stream)
    for edge in (blocked.make_edge(rank) for blocked in receives for rank in blocked.awaited):
        receiver, sender = edge.wait.rank, edge.wait.on_rank
        sends = sends_by_channel.get((sender, receiver, edge.group.key), [])
        was_awaited_tag_sent = any(s.tag == edge.stream.tag and s.entered for s in sends)
        # A stream in which the sender is blocked counts more than one that is older.
        for sending in sorted(sends, key=lambda s: (id(s) not in blocking_streams, s.entered_at)):
            receive_count = context.graph.resolver.count_met_calls(sender, sending)
            if sending.tag != edge.stream.tag and sending.entered > receive_count:
                is_blocking = id(sending) in blocking_streams
                return _explain_by_tags(verdict, edge, sending, is_blocking, was_awaited_tag_sent)
    return verdict


def _explain_by_tags(
    verdict: Verdict,
    edge: WaitEdge,
    sending: CallStream,
    is_blocking: bool,
    was_awaited_tag_sent: bool,
) -> Verdict:
    receiving, receiver, sender = edge.stream, edge.wait.rank, edge.wait.on_rank
    # The message names no call number, since those of a channel are not those of the group.
    description = (
        f"rank {receiver} waits to receive tag {receiving.tag} from rank {sender}, which"
        f" {'sends' if is_blocking else 'sent'} tag {sending.tag}"
        f" ({receiving.group.title})"
    )
    was_sent_tag_received = sending.other_end is not None and sending.other_end.entered > 0
    if was_sent_tag_received or was_awaited_tag_sent:
        advice = REORDERED_TAGS_ADVICE
        if not (was_sent_tag_received and was_awaited_tag_sent):
            # They have used only one of the two tags.
            new_tag = receiving.tag if was_sent_tag_received else sending.tag
            advice = (
                f"The two ranks have not used tag {new_tag} before, unlike the other one: either it is"
                " wrong, or one of them uses its tags in a different order."
            )
        summary = f"{verdict.summary}; {description}"
        return replace(verdict, differing_fields=("tag",), summary=summary, advice=advice)
    culprits = tuple(sorted((receiver, sender)))
    waiting = set(verdict.involved_ranks).difference(culprits)
    return replace(
        verdict,
        kind=VerdictKind.MISMATCH,
        culprits=culprits,
        waiting=tuple(sorted(waiting)),
        group=receiving.group,
        seq=edge.seq,
        differing_fields=("tag",),
        calls=(*get_newest_call(sending, sender), *get_newest_call(receiving, receiver)),
        summary=description,
        advice=WRONG_TAG_ADVICE,
    )


def find_blocked_ranks(graph: WaitGraph) -> set[int]:
    """The ranks that can never continue, even if every rank that does not wait does what others
    wait for.

    A call needs all awaited ranks, unless any one of them suffices. A rank with several calls may
    wait in any one of them.
    """
    groups_by_awaited = graph.index.groups_by_awaited
    # The number of ranks that each waiter group still needs.
    missing_counts = [1 if g[0].any_suffices else len(g[0].awaited) for g in graph.waiter_groups]
    blocked = set(graph.blocked_calls)
    free_ranks = list(graph.find_chain_ends())
    while free_ranks:
        for index in groups_by_awaited[free_ranks.pop()]:
            missing_counts[index] -= 1
            if missing_counts[index] == 0:
                freed = graph.index.ranks_by_group[index] & blocked
                blocked -= freed
                free_ranks += freed & groups_by_awaited.keys()
    return blocked


def find_cycle_components(
    graph: WaitGraph, blocked: set[int]
) -> Iterator[tuple[set[int], set[int]]]:
    """Sets of ranks that wait for each other and no other of ``blocked``, with those that wait for them."""
    remaining = set(blocked)
    while remaining:
        rank = min(remaining)
        while True:
            component = _find_awaited_ranks(graph, [rank], blocked)
            outside = component - {rank} - graph.find_waiters_of([rank], blocked)
            if not outside:
                break
            rank = min(outside)  # the waits lead there, and none leads back
        waiters = graph.find_waiters_of(component, blocked)
        yield component, waiters
        remaining -= component | waiters


def find_deadlock_core(
    graph: WaitGraph, component: set[int]
) -> tuple[set[int], list[WaitEdge], set[int]]:
    """The ranks that cause the deadlock of a component, a shortest cycle of waits among them, and the
    ranks that are on every cycle.

    A rank without which there would be no cycle is a cause. A rank that waits for it is on a cycle with
    it if it waits for all others, as in a barrier; of these, the ranks that have waited longest, in the
    same call, are causes as well. If no rank is on all cycles, all ranks are.
    """
    cycle = _find_shortest_cycle(graph, component)
    cycle_ranks = [edge.wait.rank for edge in cycle]
    common_ranks = {rank for rank in cycle_ranks if _is_acyclic(graph, component - {rank})}
    # The waiter groups that wait for any of these, with their ranks of the component only.
    by_awaited = graph.index.groups_by_awaited
    waiter_groups = []
    for index in {index for rank in common_ranks for index in by_awaited.get(rank, ())}:
        in_component = [b for b in graph.waiter_groups[index] if b.rank in component]
        if in_component:
            waiter_groups.append(in_component)
    waiter_groups.sort(key=lambda g: (min(b.began_at for b in g), min(b.rank for b in g)))
    for waiter_group in ([], *waiter_groups):
        ranks = common_ranks | {blocked.rank for blocked in waiter_group}
        if not _is_acyclic(graph, ranks):
            ranks &= _find_awaited_ranks(graph, common_ranks, ranks)
            return ranks, _find_shortest_cycle(graph, ranks), common_ranks
    return component, cycle, common_ranks


def _find_awaited_ranks(graph: WaitGraph, ranks: Collection[int], within: set[int]) -> set[int]:
    """The ranks that ``ranks`` wait for, directly or through other ranks of ``within``."""
    seen: set[int] = set()
    searched: set[int] = set()  # the identities of mappings
    to_search = list(ranks)
    while to_search:
        for blocked in graph.blocked_calls.get(to_search.pop(), ()):
            if id(blocked.awaited) in searched:
                continue
            searched.add(id(blocked.awaited))
            unseen = (blocked.awaited.keys() & within) - seen
            seen |= unseen
            to_search += unseen
    return seen


def _find_shortest_cycle(graph: WaitGraph, component: set[int]) -> list[WaitEdge]:
    """A shortest cycle of waits, starting with its lowest rank."""
    starts = sorted(component)[:_MAX_CYCLE_STARTS]
    cycles = [_find_cycle_from(graph, start, component) for start in starts]
    cycle = min(cycles, key=len)
    ranks = [edge.wait.rank for edge in cycle]
    lowest = ranks.index(min(ranks))
    return cycle[lowest:] + cycle[:lowest]


def _find_cycle_from(graph: WaitGraph, start: int, component: set[int]) -> list[WaitEdge]:
    """The shortest path of waits from a rank of a component back to it, by breadth-first search."""
    edge_to: dict[int, WaitEdge] = {}
    searched: set[int] = set()  # the identities of mappings
    to_search = [start]
    for rank in to_search:  # grows in the loop
        if start in edge_to:
            break
        for blocked in graph.blocked_calls[rank]:
            if id(blocked.awaited) in searched:
                continue
            searched.add(id(blocked.awaited))
            for awaited in sorted((blocked.awaited.keys() & component) - edge_to.keys()):
                edge_to[awaited] = blocked.make_edge(awaited)
                to_search.append(awaited)
    path = [edge_to[start]]
    while path[-1].wait.rank != start:
        path.append(edge_to[path[-1].wait.rank])
    return path[::-1]


def _is_acyclic(graph: WaitGraph, ranks: set[int]) -> bool:
    """Whether the waits among ``ranks`` have no cycle. A mapping of awaited ranks, which many ranks may
    share, is a node between these and the awaited ones.
    """
    sorter: TopologicalSorter[int | tuple[int]] = TopologicalSorter()
    known: set[int] = set()  # the identities of mappings
    for rank in ranks:
        for blocked in graph.blocked_calls[rank]:
            mapping = id(blocked.awaited)
            sorter.add(rank, (mapping,))
            if mapping not in known:
                known.add(mapping)
                sorter.add((mapping,), *(blocked.awaited.keys() & ranks))
    try:
        sorter.prepare()
    except CycleError:
        return False
    return True
