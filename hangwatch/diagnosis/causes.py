"""One verdict for each root cause; everybody whom it only holds up is a victim and never blamed."""

from __future__ import annotations

import signal
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from hangwatch.frames import site_of
from hangwatch.state import Attempt, Process, Sequence
from hangwatch.types import Call, CallClass, Kind, Lifecycle, Limits, SequenceKind, Severity, Site, Verdict, Wait

from . import words
from .mismatch import GroupKey, Parting, partings
from .progress import looked_twice, moves
from .waits import STANDING, Edge, WaitGraph, not_up, wait_graph

_STACKS_OF_WAITING = 4  # of those only waiting, this many are looked at
_WAITS_SHOWN = 64
# Somebody asked the process to stop: not by itself a failure.
_POLITE = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """Evidence that the diagnosis would like to have from one rank's node agent."""

    rank: int
    stacks: bool = False
    uid: int = 0  # else: the calls of this sequence, from `from_seq` on
    from_seq: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """Verdicts (one per root cause; those with ``due`` False are only suspicions) and what to ask for."""

    verdicts: tuple[Verdict, ...] = ()
    requests: tuple[Request, ...] = ()


@dataclass(slots=True)
class _Case:
    """One attempt, looked at once."""

    attempt: Attempt
    now: float
    limits: Limits
    places: dict[GroupKey, dict[int, Sequence]]
    graph: WaitGraph
    explained: set[int] = field(default_factory=set)  # ranks whose trouble has a verdict
    verdicts: list[Verdict] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)


def diagnose(attempt: Attempt, now: float, limits: Limits) -> Diagnosis:
    """What is wrong with one attempt of a job at time ``now``.

    Definite causes come first, and whatever a definite cause explains is not judged again: a mismatch before the deaths that
    it leads to, a death before the waits for the dead.
    """
    places = attempt.collectives()
    case = _Case(attempt, now, limits, places, wait_graph(attempt, places, now))
    for parting in partings(attempt, places):
        _mismatch(case, parting)
    _dead(case)
    _deadlocks(case)
    _ends(case)
    _no_progress(case)
    return Diagnosis(verdicts=tuple(case.verdicts), requests=tuple(dict.fromkeys(case.requests)))


def _mismatch(case: _Case, parting: Parting) -> None:
    case.requests += [Request(rank=rank, uid=uid, from_seq=seq) for rank, uid, seq in parting.missing]
    setup = parting.kind is SequenceKind.SETUP
    members = case.places[parting.group.key]
    # Everybody at or behind the parting is held up by it, as are those who wait for them.
    blocked = case.graph.waiting()
    held = {r for r in parting.group.ranks if r in blocked and (r not in members or members[r].first_unfinished >= parting.seq)}
    waiting = (held | case.graph.reaching(held | set(parting.odd))) - set(parting.odd)
    stopped = {r for r, s in members.items() if s.entered == parting.seq and (p := case.attempt.ranks.get(r)) and not p.alive}
    since = min((members[r].entered_at for ranks in parting.classes for r in ranks), default=case.now)
    ready = len(parting.calls) == len(parting.classes) and not parting.missing
    known_by = max((_heard(case, r) for ranks in parting.classes for r in ranks), default=case.now)
    summary = words.mismatch(parting.odd, parting.calls, parting.fields, parting.group, parting.seq)
    advice = (
        "Process groups must be created in the same order, with the same members, on every rank."
        if setup
        else "Every rank of a group must make the same calls in the same order: compare the two lines."
    )
    case.verdicts.append(
        Verdict(
            kind=Kind.GROUP_MISMATCH if setup else Kind.MISMATCH,
            severity=Severity.ALERT,
            culprits=parting.odd,
            waiting=tuple(sorted(waiting)),
            group=parting.group,
            seq=parting.seq,
            fields=parting.fields,
            calls=parting.calls,
            waits=_waits(case, waiting),
            since=since,
            due=ready or case.now - known_by > 3.0,
            summary=summary,
            advice=advice,
            site=next((c.call.site for c in parting.calls if set(c.ranks) <= set(parting.odd)), None),
        )
    )
    case.explained |= set(parting.odd) | waiting | held | stopped
    if waiting:
        _ask_stacks(case, parting.odd, waiting, since)


def _dead(case: _Case) -> None:
    """The first death is the cause; launchers kill the rest within a second of it, and peers fail on the lost connection."""
    dead = [p for p in case.attempt.ranks.values() if p.ended is not None and _untimely(p)]
    if not dead:
        return
    first = min(dead, key=_time_of_death)
    if first.rank in case.explained:
        return  # died in a call that was wrong before it
    began = _time_of_death(first)
    waiting = case.graph.reaching([first.rank]) | {r for r in case.graph.waiting() if r != first.rank}
    if first.ended is not None and first.ended.signal in _POLITE and not case.graph.reaching([first.rank]):
        return  # stopped by whoever runs the job
    since_exit = case.now - (first.ended_at or case.now)
    seq = next((s for s in first.sequences.values() if s.pending and s.kind is SequenceKind.COLLECTIVE), None)
    case.verdicts.append(
        Verdict(
            kind=Kind.DEAD_RANK,
            severity=Severity.ALERT,
            culprits=(first.rank,),
            waiting=tuple(sorted(waiting)),
            group=seq.group if seq else None,
            seq=seq.first_unfinished if seq else None,
            calls=_call_of(seq, first.rank) if seq else (),
            waits=_waits(case, waiting),
            since=began,
            due=since_exit >= case.limits.settle,
            summary=words.died(first),
            advice=words.dead_advice(first),
            site=first.raised.site if first.raised is not None else _last_site(first),
        )
    )
    case.explained |= {first.rank, *waiting, *(p.rank for p in dead)}


def _untimely(process: Process) -> bool:
    end = process.ended
    if end is None:
        return False
    if end.exit_status is None and end.signal is None:
        return process.lifecycle < Lifecycle.EXITING or process.raised is not None
    return end.failed


def _time_of_death(process: Process) -> float:
    """When it failed: an exception comes before the exit, which may take its time."""
    times = [t for t in (process.ended_at, process.raised_at) if t is not None]
    return min(times, default=float("inf"))


def _deadlocks(case: _Case) -> None:
    for knot in case.graph.cycles():
        if knot & case.explained:
            continue
        edges = [e for r in knot for e in case.graph.edges[r] if e.wait.on in knot]
        since = max(e.since for e in edges)
        doubtful = knot & case.graph.doubtful
        if doubtful:
            case.requests += [Request(rank=r, stacks=True) for r in sorted(doubtful)[:16]]
        waiting = case.graph.reaching(knot)
        chain = "; ".join(f"rank {e.wait.rank} waits for rank {e.wait.on} in {_op(e.sequence)}" for e in edges[:4])
        case.verdicts.append(
            Verdict(
                kind=Kind.DEADLOCK,
                severity=Severity.ALERT,
                culprits=tuple(sorted(knot)),
                waiting=tuple(sorted(waiting)),
                group=edges[0].sequence.group,
                seq=edges[0].wait.seq,
                calls=tuple(c for r in sorted(knot)[:16] for c in _call_of(case.graph.edges[r][0].sequence, r)),
                waits=_waits(case, knot | waiting),
                since=since,
                due=case.now - since >= (case.limits.stall_after if doubtful else 2 * STANDING),
                summary=f"{words.those(tuple(sorted(knot)))} wait for one another: {chain}",
                advice="No rank on the cycle can go on: order the calls of these groups or peers alike on all of them.",
            )
        )
        case.explained |= knot | waiting
        _ask_stacks(case, tuple(sorted(knot)), waiting, since)


def _ends(case: _Case) -> None:
    """The ends of the wait chains: those who are waited for and wait for nobody."""
    ends = case.graph.ends() - set(case.graph.stuck)
    into: dict[int, list[Edge]] = {}
    for edges in case.graph.edges.values():
        for edge in edges:
            if edge.wait.on in ends:
                into.setdefault(edge.wait.on, []).append(edge)
    for component in _components(case.graph, ends):
        open_ends = sorted(component - case.explained)
        victims = case.graph.reaching(component) - component
        if not open_ends or victims & case.explained:
            continue
        by_kind: dict[Kind, list[int]] = {}
        for rank in open_ends:
            by_kind.setdefault(_kind_of_end(case, rank, into[rank]), []).append(rank)
        kind = min(by_kind, key=_PRECEDENCE.index)
        _end(case, kind, by_kind[kind], into, victims)


_PRECEDENCE = (
    Kind.EXITED_RANK, Kind.FROZEN_RANK, Kind.LOST_NODE, Kind.STARTUP_STALL, Kind.MISSING_RANK, Kind.SLOW_RANK,
)  # fmt: skip


def _kind_of_end(case: _Case, rank: int, edges: list[Edge]) -> Kind:
    process = case.attempt.ranks.get(rank)
    since = min(e.since for e in edges)
    if process is not None and (not process.alive or process.lifecycle >= Lifecycle.DESTROYED):
        return Kind.EXITED_RANK
    if process is not None and (process.stopped(case.now) or process.state == "D"):
        return Kind.FROZEN_RANK
    if process is not None and case.now - process.heard_at > case.limits.lost_after:
        return Kind.LOST_NODE
    if not_up(process) or any(_is_init(e) for e in edges):
        return Kind.STARTUP_STALL
    assert process is not None
    in_phase = process.phase is not None and case.now - process.phase_at < (process.phase_limit or case.limits.slow_limit)
    slow = case.now - since < case.limits.slow_limit and moves(process, since, case.now)
    return Kind.SLOW_RANK if in_phase or slow else Kind.MISSING_RANK


def _end(case: _Case, kind: Kind, ranks: list[int], into: dict[int, list[Edge]], victims: set[int]) -> None:
    since = min(e.since for r in ranks for e in into[r])
    age = case.now - since
    if kind not in (Kind.EXITED_RANK, Kind.FROZEN_RANK):
        # Those who came late only a moment ago are not yet part of it.
        limit = min(age, case.limits.stall_after) * 0.9
        ranks = [r for r in ranks if case.now - min(e.since for e in into[r]) >= limit] or ranks
    culprits = tuple(sorted(ranks))
    edge = min((e for r in ranks for e in into[r]), key=lambda e: e.since)
    waiting = victims - set(culprits)
    process = case.attempt.ranks.get(culprits[0])
    stopped = process is not None and process.stopped(case.now)
    at_once = kind is Kind.EXITED_RANK or (kind is Kind.FROZEN_RANK and stopped)
    verdict = Verdict(
        kind=kind,
        severity=Severity.WARNING if kind is Kind.SLOW_RANK else Severity.ALERT,
        culprits=culprits,
        waiting=tuple(sorted(waiting)),
        group=edge.sequence.group,
        seq=edge.wait.seq,
        calls=_waiting_calls(case, edge, waiting),
        waits=_waits(case, waiting),
        since=since,
        due=age >= (max(case.limits.settle, STANDING) if at_once else case.limits.stall_after),
        site=next((site for r in culprits if (site := _site(case, r, since)) is not None), None),
    )
    case.verdicts.append(_say(case, verdict, edge))
    case.explained |= set(culprits) | waiting
    alive = [r for r in culprits if (p := case.attempt.ranks.get(r)) and p.alive]
    if age >= _suspicion(case.limits) or at_once:
        _ask_stacks(case, alive, waiting, since)


def _suspicion(limits: Limits) -> float:
    """When to begin gathering evidence, in time for two looks before the verdict is due."""
    return max(limits.stall_after / 2, limits.stall_after - 10.0)


def _say(case: _Case, verdict: Verdict, edge: Edge) -> Verdict:
    op = _op(edge.sequence)
    count = len(verdict.waiting)
    wait = words.count_wait(count)
    place = words.where(edge.sequence.group, edge.wait.seq)
    absent = [case.attempt.ranks.get(r) for r in verdict.culprits]
    process = absent[0]
    summary = words.not_entered(verdict.culprits, op, edge.sequence.group, edge.wait.seq, count)
    advice = "Its stack shows what it does instead of joining the others."
    if verdict.kind is Kind.STARTUP_STALL:
        summary = f"{words.those(verdict.culprits)} never reached init_process_group, in which {wait}"
        advice = words.startup_advice(absent)
    elif verdict.kind is Kind.EXITED_RANK:
        done = "has finished" if process is not None and not process.alive else "has destroyed its process group"
        summary = f"{words.those(verdict.culprits)} {done} while {wait} for it in {op} ({place})"
        advice = "The others made a call more than it did: look for uneven data or a loop that ends early."
    elif verdict.kind is Kind.FROZEN_RANK and process is not None:
        stopped = {"T": "is stopped (SIGSTOP or job control)", "t": "is stopped by a debugger"}
        state = stopped.get(process.state, "is in uninterruptible sleep")
        summary = f"{words.those(verdict.culprits)} {state}; {wait} in {op}"
        advice = "kill -CONT lets it go on." if process.state == "T" else "The kernel holds it: look at its disk, network file system or driver."
    elif verdict.kind is Kind.LOST_NODE and process is not None:
        summary = f"nothing is heard of host {process.host} with {words.those(verdict.culprits)}; {wait} in {op}"
        advice = "Is the host up, and its network? Its last state is what is shown here."
    elif verdict.kind is Kind.SLOW_RANK and process is not None:
        doing = f" in its phase {process.phase!r}" if process.phase else ""
        summary = f"{words.those(verdict.culprits)} still works{doing} while {wait} for it in {op}"
        advice = "Its stack moves: slow rather than stuck. hangwatch.phase() declares work that may take long."
    if verdict.site is not None and verdict.kind is not Kind.EXITED_RANK:
        summary += f": it is at {verdict.site}"
    return replace(verdict, summary=summary, advice=advice)


def _no_progress(case: _Case) -> None:
    """Every member made the same call and none finishes."""
    stuck: dict[GroupKey, list[int]] = {}
    for rank, sequence in case.graph.stuck.items():
        if rank not in case.explained:
            stuck.setdefault(sequence.group.key, []).append(rank)
    for key, ranks in stuck.items():
        members = case.places[key]
        waiting = [r for r in ranks if members[r].pending]
        since = max((members[r].pending_at or case.now for r in waiting), default=case.now)
        whole = len(waiting) == len(key[2]) and len({members[r].first_unfinished for r in waiting}) == 1
        if not whole or case.now - since < _suspicion(case.limits):
            continue
        sequence = members[waiting[0]]
        _ask_stacks(case, (), set(waiting), since)
        case.verdicts.append(
            Verdict(
                kind=Kind.NO_PROGRESS,
                severity=Severity.ALERT,
                culprits=(),
                waiting=tuple(sorted(waiting)),
                group=sequence.group,
                seq=sequence.first_unfinished,
                calls=_call_of(sequence, waiting[0]),
                since=since,
                due=case.now - since >= case.limits.stall_after,
                summary=f"all {len(waiting)} ranks made the same call and none finishes: {_op(sequence)} "
                f"({words.where(sequence.group, sequence.first_unfinished)})",
                advice="The ranks agree, so look below them: network, device, driver.",
            )
        )
        case.explained |= set(waiting)


def _components(graph: WaitGraph, ends: set[int]) -> list[set[int]]:
    """Ends that hold up some rank in common belong together."""
    found: list[tuple[set[int], set[int]]] = []
    for end in sorted(ends):
        victims = graph.reaching([end])
        joined = {end}
        rest = []
        for other, theirs in found:
            if theirs & victims:
                joined |= other
                victims |= theirs
            else:
                rest.append((other, theirs))
        found = [*rest, (joined, victims)]
    return [joined for joined, _ in found]


def _ask_stacks(case: _Case, culprits: Iterable[int], waiting: Iterable[int], since: float) -> None:
    """Two looks at each culprit, one at some of those that wait."""
    for rank in list(culprits)[:16]:
        process = case.attempt.ranks.get(rank)
        if process is not None and process.alive and not looked_twice(process, since):
            case.requests.append(Request(rank=rank, stacks=True))
    for rank in sorted(waiting)[:_STACKS_OF_WAITING]:
        process = case.attempt.ranks.get(rank)
        if process is not None and process.alive and not any(s.taken_at >= since for s in process.samples):
            case.requests.append(Request(rank=rank, stacks=True))


def _waits(case: _Case, ranks: Iterable[int]) -> tuple[Wait, ...]:
    return tuple(e.wait for r in sorted(ranks) for e in case.graph.edges.get(r, ())[:4])[:_WAITS_SHOWN]


def _waiting_calls(case: _Case, edge: Edge, waiting: set[int]) -> tuple[CallClass, ...]:
    """The call that the culprit has not entered, and who is in it."""
    call = edge.sequence.calls.get(edge.wait.seq)
    if call is None:
        return ()
    members = case.places.get(edge.sequence.group.key, {})
    inside = tuple(r for r in sorted(waiting) if r in members and members[r].entered >= edge.wait.seq)
    return (CallClass(ranks=inside or (edge.wait.rank,), call=call),)


def _call_of(sequence: Sequence | None, rank: int) -> tuple[CallClass, ...]:
    call: Call | None = sequence.calls.get(sequence.first_unfinished) if sequence is not None else None
    return (CallClass(ranks=(rank,), call=call),) if call is not None else ()


def _op(sequence: Sequence) -> str:
    call = sequence.calls.get(sequence.first_unfinished)
    return call.signature.op if call is not None else sequence.op or "a collective"


def _is_init(edge: Edge) -> bool:
    return edge.sequence.kind is SequenceKind.SETUP and edge.wait.seq == 1


def _heard(case: _Case, rank: int) -> float:
    process = case.attempt.ranks.get(rank)
    return min(process.heard_at, process.ended_at or process.heard_at) if process is not None else case.now


def _site(case: _Case, rank: int, since: float) -> Site | None:
    process = case.attempt.ranks.get(rank)
    samples = [s for s in process.samples if s.taken_at >= since and s.main is not None] if process is not None else []
    return site_of(samples[-1].main) if samples else None


def _last_site(process: Process) -> Site | None:
    """Of its newest call: where it was last seen."""
    calls = [c for s in process.sequences.values() if (c := s.calls.get(s.entered)) is not None]
    return max(calls, key=lambda c: -c.entered_s).site if calls else None
