"""One attempt of a job while it is being looked at: what is known, what was concluded, what is
still to be asked for.
"""

from __future__ import annotations

import signal
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from itertools import islice

from hangwatch.diagnosis.graph.graph import Edge, WaitGraph
from hangwatch.diagnosis.graph.progress import looked_twice
from hangwatch.diagnosis.rules.complaints import complains
from hangwatch.model.calls import Call, Site
from hangwatch.model.groups import GroupKey
from hangwatch.model.limits import Limits
from hangwatch.model.threads import ThreadStack
from hangwatch.model.verdicts import CallClass, Verdict, Wait
from hangwatch.stacks.frames import find_user_site
from hangwatch.tracking.attempt import Attempt
from hangwatch.tracking.call_stream import CallStream
from hangwatch.tracking.process import FreezeReason, Process, StackSample

POLITE = (
    signal.SIGTERM,
    signal.SIGINT,
    signal.SIGHUP,
)  # somebody asked the process to stop: not by itself a failure
STACKS_OF_CULPRITS = 16
_STACKS_OF_WAITING = 4  # of those only waiting, this many are looked at
# about: where dozens of hangs seem to be there, as one ends and not all hosts were heard, they have
# their turns
_STACKS_AT_ONCE = 64
_WAITS_SHOWN = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """Evidence that the diagnosis would like to have from one rank's node agent."""

    rank: int
    stacks: bool = False
    uid: int = 0  # else: the calls of this sequence, from `from_seq` on
    from_seq: int = 0


@dataclass(slots=True)
class Case:
    """One attempt, looked at once."""

    attempt: Attempt
    now: float
    limits: Limits
    places: dict[GroupKey, dict[int, CallStream]]
    graph: WaitGraph
    explained: set[int] = field(default_factory=set)  # ranks whose trouble has a verdict
    deadlocked: set[int] = field(
        default_factory=set
    )  # of these, those whom nobody else's coming would help
    verdicts: list[Verdict] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)


def suspicion(limits: Limits) -> float:
    """When to begin gathering evidence, in time for two looks before the verdict is due."""
    return max(limits.stall_after_s / 2, limits.stall_after_s - 10.0)


def ask_stacks(case: Case, culprits: Iterable[int], waiting: Iterable[int], since: float) -> None:
    """Two looks at each culprit since it last got on, one at some of those that wait."""
    if sum(request.stacks for request in case.requests) >= _STACKS_AT_ONCE:
        return
    for rank in list(culprits)[:STACKS_OF_CULPRITS]:
        process = case.attempt.processes.get(rank)
        if (
            process is not None
            and process.is_alive
            and not looked_twice(process, max(since, process.last_advanced_at))
        ):
            case.requests.append(Request(rank=rank, stacks=True))
    for rank in sorted(waiting)[:_STACKS_OF_WAITING]:
        process = case.attempt.processes.get(rank)
        if (
            process is not None
            and process.is_alive
            and not any(s.taken_at >= max(since, process.last_advanced_at) for s in process.samples)
        ):
            case.requests.append(Request(rank=rank, stacks=True))


def waits(case: Case, ranks: Iterable[int], first: Iterable[Edge] = ()) -> tuple[Wait, ...]:
    """Some of the waits of some ranks, and those that must be ``first`` among them."""
    shown = dict.fromkeys(edge.wait for edge in first)
    shown |= dict.fromkeys(
        islice(
            (e.wait for r in sorted(ranks) for e in islice(case.graph.edges(r), 4)), _WAITS_SHOWN
        )
    )
    return tuple(islice(shown, _WAITS_SHOWN))


def waiting_calls(case: Case, edge: Edge, waiting: set[int]) -> tuple[CallClass, ...]:
    """The call that the culprit has not entered, and who is in it."""
    call = edge.sequence.calls.get(edge.wait.seq)
    if call is None:
        return ()
    members = case.places.get(edge.sequence.group.key, {}) if edge.sequence.peer is None else {}
    inside = tuple(
        r for r in sorted(waiting) if r in members and members[r].entered >= edge.wait.seq
    )
    return (CallClass(ranks=inside or (edge.wait.rank,), call=_with_peer(call, edge.sequence)),)


def call_of(sequence: CallStream | None, rank: int) -> tuple[CallClass, ...]:
    """Its newest call."""
    call: Call | None = sequence.calls.get(sequence.entered) if sequence is not None else None
    return (
        (CallClass(ranks=(rank,), call=_with_peer(call, sequence)),)
        if call is not None and sequence is not None
        else ()
    )


def _with_peer(call: Call, sequence: CallStream) -> Call:
    return call if sequence.peer is None else replace(call, peer=sequence.peer)


def op_of(sequence: CallStream, seq: int | None = None) -> str:
    """What its call ``seq`` is, else its newest."""
    call = sequence.calls.get(sequence.entered if seq is None else seq)
    return call.signature.op if call is not None else sequence.op or "a collective"


def seen_last(process: Process, since: float) -> StackSample | None:
    """The newest look at its stacks since then."""
    return next(reversed(seen(process, since)), None)


def thread_of(case: Case, process: Process, sample: StackSample) -> ThreadStack | None:
    """The thread that keeps a rank from its call: its main thread; where none can run Python, the
    one that holds the GIL.
    """
    held = process.freeze_reason(case.now) is FreezeReason.GIL_HELD
    return (sample.gil_holder if held else None) or sample.main_thread


def kept_by(case: Case, ranks: Iterable[int], since: float) -> tuple[int, ThreadStack] | None:
    """Of some ranks, the first of which a thread that keeps it is on a line of the user's, with
    that thread.
    """
    for process in filter(None, map(case.attempt.processes.get, ranks)):
        sample = seen_last(process, since)
        thread = thread_of(case, process, sample) if sample is not None else None
        if thread is not None and find_user_site(thread) is not None:
            return process.rank, thread
    return None


def last_site(process: Process, by: float = float("inf")) -> Site | None:
    """Of the newest call that it had made by then: where it was last seen."""
    last = process.newest_stream
    call = last.calls.get(last.entered - (last.entered_at > by)) if last is not None else None
    return call.site if call is not None else None


def seen(process: Process, since: float) -> list[StackSample]:
    """Its stacks since a wait for it began. What it does once it has failed for want of those who
    waited is not what kept it.
    """
    until = (
        process.exception_at
        if process.exception_at is not None and complains(process)
        else float("inf")
    )
    return [
        s for s in process.samples if since <= s.taken_at <= until and s.main_thread is not None
    ]


def known_until(case: Case, rank: int) -> float:
    """When its present state was last told: no wait of it is older than that is known."""
    process = case.attempt.processes.get(rank)
    return (
        min(case.now, process.last_seen_at)
        if process is not None and process.exit is None
        else case.now
    )


def node_mates(case: Case, ranks: Iterable[int]) -> list[int]:
    """All silent ranks of the nodes of some of them."""
    agents = {case.attempt.processes[r].agent for r in ranks}
    return [r for r in case.graph.silent if case.attempt.processes[r].agent in agents]


def heard(case: Case, rank: int) -> float:
    process = case.attempt.processes.get(rank)
    return (
        min(process.last_seen_at, process.exited_at or process.last_seen_at)
        if process is not None
        else case.now
    )
