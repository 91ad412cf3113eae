"""Ranks that wait in init_process_group for a reason that what they were started with shows: another
size or address of the world than their peers, or the rank of another process.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace

from hangwatch.model.kinds import VerdictKind
from hangwatch.model.ranks import Lifecycle, Ranks
from hangwatch.model.verdicts import Verdict
from hangwatch.tracking.process import Process

from ..context import DiagnosisContext, get_newest_call
from ..messages import describe_ranks, describe_ranks_with

_SIZES_ADVICE = "WORLD_SIZE must be the same on every rank."
_MASTERS_ADVICE = "MASTER_ADDR and MASTER_PORT must be the same on every rank."
_LOOPBACK_ADVICE = "MASTER_ADDR must be an address of rank 0's host that the other hosts can reach."
_MAX_TWINS_SHOWN = 4

_Side = tuple[str, Ranks]  # what the ranks expect, as the end of a clause


def diagnose_world_sizes(context: DiagnosisContext) -> None:
    """One verdict on ranks that wait for each other, expect worlds of different sizes and have not all
    left init_process_group. It comes before the rules on waits: these ranks look like a deadlock.
    """
    if not context.attempt.has_different_sizes:
        return
    waits = {
        rank: calls[0]
        for rank, calls in context.graph.blocked_calls.items()
        if rank in context.processes
    }
    sizes = {rank: context.processes[rank].identity.world_size for rank in waits}
    concerned = _find_mutual_waits(context, sizes)
    if not concerned:
        return
    sides = _list_sides({rank: f"{sizes[rank]} ranks" for rank in concerned})
    culprits, summary = _compare_sides(sides)
    waiting = (context.graph.find_waiters_of(concerned) | concerned).difference(culprits)
    began_at = max(min(waits[rank].began_at for rank in ranks) for _, ranks in sides)
    known_until = min(map(context.get_state_known_until, concerned))
    first = waits[culprits[0]].stream
    verdict = Verdict(
        kind=VerdictKind.STARTUP_STALL,
        severity=context.get_start_severity(began_at),
        culprits=culprits,
        waiting=tuple(sorted(waiting)),
        group=first.group,
        seq=first.entered,
        calls=get_newest_call(first, culprits[0]),
        waits=context.select_waits(concerned),
        began_at=began_at,
        is_confirmed=known_until - began_at >= context.limits.stall_after_s,
        summary=summary,
        advice=add_twin_advice(context, _SIZES_ADVICE),
    )
    absent = {other for rank in concerned for other in waits[rank].awaited}
    context.accuse(verdict, absent, samples=verdict.is_confirmed)


def _find_mutual_waits(context: DiagnosisContext, sizes: Mapping[int, int]) -> set[int]:
    """The ranks of two worlds of different sizes, by ``sizes``, that wait for ranks of the other one."""
    ranks_by_sizes: dict[tuple[int, int], set[int]] = {}
    for group in context.graph.waiter_groups:
        awaited = [rank for rank in group[0].awaited if rank in sizes]
        is_awaiting_start = any(_is_initializing(context.processes[rank]) for rank in awaited)
        for blocked in group:
            size = sizes.get(blocked.rank)
            if size is None:
                continue
            if is_awaiting_start or _is_initializing(context.processes[blocked.rank]):
                for other in awaited:
                    if sizes[other] != size:
                        pair = ranks_by_sizes.setdefault((size, sizes[other]), set())
                        pair |= {blocked.rank, other}
    concerned: set[int] = set()
    for (size, other_size), ranks in ranks_by_sizes.items():
        if (other_size, size) in ranks_by_sizes:
            concerned |= ranks
    return concerned


def _is_initializing(process: Process) -> bool:
    return process.is_alive and process.lifecycle is Lifecycle.INITIALISING


def _list_sides(expected: Mapping[int, str]) -> list[_Side]:
    """The different expectations, each with its ranks, that of the most ranks first."""
    ranks_by_text: defaultdict[str, list[int]] = defaultdict(list)
    for rank in sorted(expected):
        ranks_by_text[expected[rank]].append(rank)
    sides = [(text, tuple(ranks)) for text, ranks in ranks_by_text.items()]
    return sorted(sides, key=lambda side: -len(side[1]))


def _compare_sides(sides: list[_Side]) -> tuple[Ranks, str]:
    """The ranks that differ from the majority or, if there is none, all of them; and the summary."""
    majority, *minorities = sides
    has_majority = len(majority[1]) > len(minorities[0][1])
    outliers = minorities if has_majority else sides
    culprits = tuple(sorted(rank for _, ranks in outliers for rank in ranks))
    clauses = [
        f"{describe_ranks_with(ranks, 'expects')} {text}" for text, ranks in (*minorities, majority)
    ]
    return culprits, "; ".join(clauses)


def explain_stuck_setup(context: DiagnosisContext, verdict: Verdict) -> Verdict:
    """The verdict on a set-up call that all ranks have entered, with what is known of its cause. Ranks
    that expect the master at another address than the majority are the culprits, and so are those on
    whose host an address of loopback does not lead to rank 0.
    """
    processes = {rank: context.processes[rank] for rank in verdict.waiting}
    if not all(map(_is_initializing, processes.values())):
        return verdict
    expected = {rank: f"the master at {p.identity.master}" for rank, p in processes.items()}
    sides = _list_sides(expected)
    majority = sides[0][1]
    address = processes[majority[0]].identity.master
    first = processes.get(0)
    away = []
    if first is not None:
        away = [rank for rank, process in processes.items() if process.host != first.host]
    host = address.rpartition(":")[0].strip("[]")
    is_loopback = host in ("localhost", "::1") or host.startswith("127.")
    if len(sides) > 1:
        culprits, summary = _compare_sides(sides)
        advice = _MASTERS_ADVICE
    elif first is not None and away and is_loopback:
        culprits = tuple(sorted(away))
        summary = (
            f"{describe_ranks_with(culprits, 'expects')} the master at {address}, which is their own"
            f" host; rank 0 runs on {first.host}"
        )
        advice = _LOOPBACK_ADVICE
    else:
        advice = (
            f"All of them expect the master at {address}: check that every host can reach it, that no"
            " other program listens there, and then the network and the devices, if the backend"
            " connects them here."
        )
        return replace(verdict, advice=add_twin_advice(context, advice))
    return replace(
        verdict,
        kind=VerdictKind.STARTUP_STALL,
        culprits=culprits,
        waiting=tuple(rank for rank in verdict.waiting if rank not in culprits),
        summary=summary,
        advice=add_twin_advice(context, advice),
    )


def add_twin_advice(context: DiagnosisContext, advice: str) -> str:
    """The advice, with the ranks that two processes have at the same time. Both are in
    init_process_group: a process that is ending, or a wrapper of a rank, is none of them.
    """
    pairs = []
    for rank, twin in sorted(context.attempt.twins.items()):
        holder = context.processes.get(rank)
        if holder is None or holder is twin or twin.rank != rank:
            continue
        is_same_world = twin.identity.master == holder.identity.master
        if is_same_world and _is_initializing(holder) and _is_initializing(twin):
            pairs.append((twin, holder))
    if not pairs:
        return advice
    ranks = describe_ranks(tuple(holder.rank for _, holder in pairs))
    where = "; ".join(
        f"pid {twin.identity.pid} on {twin.host} and pid {holder.identity.pid} on {holder.host}"
        for twin, holder in pairs[:_MAX_TWINS_SHOWN]
    )
    each = "each " if len(pairs) > 1 else ""
    return (
        f"Two processes {each}have {ranks} ({where}): RANK, or the launcher's --node-rank, must differ"
        " between them. If they belong to two jobs, each of these needs a MASTER_PORT of its own."
        f" {advice}"
    )
