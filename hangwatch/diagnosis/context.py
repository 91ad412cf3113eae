"""One attempt of a job while it is being looked at: what is known, what was concluded, what is
still to be asked for.
"""

from __future__ import annotations

import signal
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from itertools import islice

from hangwatch.diagnosis.graph.graph import WaitEdge, WaitGraph
from hangwatch.diagnosis.graph.progress import has_two_samples
from hangwatch.model.calls import Call, Site
from hangwatch.model.groups import GroupKey
from hangwatch.model.limits import Limits
from hangwatch.model.threads import ThreadStack
from hangwatch.model.verdicts import CallClass, Verdict, Wait
from hangwatch.stacks.frames import find_user_site
from hangwatch.tracking.attempt import Attempt
from hangwatch.tracking.call_stream import CallStream
from hangwatch.tracking.process import Process, StackSample
from hangwatch.tracking.process_parts import FreezeReason

from .peer_errors import has_peer_error

TERMINATION_SIGNALS = (
    signal.SIGTERM,
    signal.SIGINT,
    signal.SIGHUP,
)  # somebody asked the process to stop: not by itself a failure
MAX_CULPRIT_STACKS = 16
_MAX_WAITER_STACKS = 4  # of those only waiting, this many are looked at
# about: where dozens of hangs seem to be there, as one ends and not all hosts were heard, they have
# their turns
_MAX_STACK_REQUESTS = 64
_MAX_WAITS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class EvidenceRequest:
    """Evidence that the diagnosis would like to have from one rank's node agent."""

    rank: int
    stacks: bool = False
    stream_uid: int = 0  # else: the calls of this sequence, from `from_seq` on
    from_seq: int = 0


@dataclass(slots=True)
class DiagnosisContext:
    """One attempt, looked at once."""

    attempt: Attempt
    now: float
    limits: Limits
    streams_by_group: dict[GroupKey, dict[int, CallStream]]
    graph: WaitGraph
    explained_ranks: set[int] = field(default_factory=set)  # ranks whose trouble has a verdict
    deadlocked_ranks: set[int] = field(
        default_factory=set
    )  # of these, those whom nobody else's coming would help
    verdicts: list[Verdict] = field(default_factory=list)
    requests: list[EvidenceRequest] = field(default_factory=list)


def get_suspicion_delay_s(limits: Limits) -> float:
    """When to begin gathering evidence, in time for two looks before the verdict is due."""
    return max(limits.stall_after_s / 2, limits.stall_after_s - 10.0)


def request_stacks(
    context: DiagnosisContext, culprits: Iterable[int], waiting: Iterable[int], since: float
) -> None:
    """Two looks at each culprit since it last got on, one at some of those that wait."""
    if sum(request.stacks for request in context.requests) >= _MAX_STACK_REQUESTS:
        return
    for rank in list(culprits)[:MAX_CULPRIT_STACKS]:
        process = context.attempt.processes.get(rank)
        if (
            process is not None
            and process.is_alive
            and not has_two_samples(process, max(since, process.last_advanced_at))
        ):
            context.requests.append(EvidenceRequest(rank=rank, stacks=True))
    for rank in sorted(waiting)[:_MAX_WAITER_STACKS]:
        process = context.attempt.processes.get(rank)
        if (
            process is not None
            and process.is_alive
            and not any(s.taken_at >= max(since, process.last_advanced_at) for s in process.samples)
        ):
            context.requests.append(EvidenceRequest(rank=rank, stacks=True))


def select_waits(
    context: DiagnosisContext, ranks: Iterable[int], first: Iterable[WaitEdge] = ()
) -> tuple[Wait, ...]:
    """Some of the waits of some ranks, and those that must be ``first`` among them."""
    shown = dict.fromkeys(edge.wait for edge in first)
    shown |= dict.fromkeys(
        islice(
            (e.wait for r in sorted(ranks) for e in islice(context.graph.iter_edges(r), 4)),
            _MAX_WAITS,
        )
    )
    return tuple(islice(shown, _MAX_WAITS))


def find_missing_call(
    context: DiagnosisContext, edge: WaitEdge, waiting: set[int]
) -> tuple[CallClass, ...]:
    """The call that the culprit has not entered, and who is in it."""
    call = edge.stream.calls.get(edge.wait.seq)
    if call is None:
        return ()
    members = (
        context.streams_by_group.get(edge.stream.group.key, {}) if edge.stream.peer is None else {}
    )
    inside = tuple(
        r for r in sorted(waiting) if r in members and members[r].entered >= edge.wait.seq
    )
    return (CallClass(ranks=inside or (edge.wait.rank,), call=_add_peer(call, edge.stream)),)


def get_newest_call(stream: CallStream | None, rank: int) -> tuple[CallClass, ...]:
    """Its newest call."""
    call: Call | None = stream.calls.get(stream.entered) if stream is not None else None
    return (
        (CallClass(ranks=(rank,), call=_add_peer(call, stream)),)
        if call is not None and stream is not None
        else ()
    )


def _add_peer(call: Call, stream: CallStream) -> Call:
    return call if stream.peer is None else replace(call, peer=stream.peer)


def get_op_name(stream: CallStream, seq: int | None = None) -> str:
    """What its call ``seq`` is, else its newest."""
    call = stream.calls.get(stream.entered if seq is None else seq)
    return call.signature.op if call is not None else stream.op or "a collective"


def find_newest_sample(process: Process, since: float) -> StackSample | None:
    """The newest look at its stacks since then."""
    return next(reversed(select_samples(process, since)), None)


def find_blocking_thread(
    context: DiagnosisContext, process: Process, sample: StackSample
) -> ThreadStack | None:
    """The thread that keeps a rank from its call: its main thread; where none can run Python, the
    one that holds the GIL.
    """
    held = process.freeze_reason(context.now) is FreezeReason.GIL_HELD
    return (sample.gil_holder if held else None) or sample.main_thread


def find_blocking_user_thread(
    context: DiagnosisContext, ranks: Iterable[int], since: float
) -> tuple[int, ThreadStack] | None:
    """Of some ranks, the first of which a thread that keeps it is on a line of the user's, with
    that thread.
    """
    for process in filter(None, map(context.attempt.processes.get, ranks)):
        sample = find_newest_sample(process, since)
        thread = find_blocking_thread(context, process, sample) if sample is not None else None
        if thread is not None and find_user_site(thread) is not None:
            return process.rank, thread
    return None


def find_last_site(process: Process, by: float = float("inf")) -> Site | None:
    """Of the newest call that it had made by then: where it was last seen."""
    last = process.newest_stream
    call = last.calls.get(last.entered - (last.entered_at > by)) if last is not None else None
    return call.site if call is not None else None


def select_samples(process: Process, since: float) -> list[StackSample]:
    """Its stacks since a wait for it began. What it does once it has failed for want of those who
    waited is not what kept it.
    """
    until = (
        process.exception_at
        if process.exception_at is not None and has_peer_error(process)
        else float("inf")
    )
    return [
        s for s in process.samples if since <= s.taken_at <= until and s.main_thread is not None
    ]


def get_state_known_until(context: DiagnosisContext, rank: int) -> float:
    """When its present state was last told: no wait of it is older than that is known."""
    process = context.attempt.processes.get(rank)
    return (
        min(context.now, process.reports.last_seen_at)
        if process is not None and process.exit is None
        else context.now
    )


def find_silent_node_mates(context: DiagnosisContext, ranks: Iterable[int]) -> list[int]:
    """All silent ranks of the nodes of some of them."""
    agents = {context.attempt.processes[r].agent for r in ranks}
    return [r for r in context.graph.silent_ranks if context.attempt.processes[r].agent in agents]


def get_last_seen_at(context: DiagnosisContext, rank: int) -> float:
    process = context.attempt.processes.get(rank)
    return (
        min(process.reports.last_seen_at, process.exited_at or process.reports.last_seen_at)
        if process is not None
        else context.now
    )
