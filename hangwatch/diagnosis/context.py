"""The state of one diagnosis of an attempt: the facts, the verdicts so far, and the evidence to
request; and the questions about ranks and calls that several rules have.

One of them is whether a rank failed because a peer was absent, by the message of its exception or by
how it was ended: such a failure is a consequence and not a cause.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import islice

from hangwatch.model.calls import Call, Site, StreamKind
from hangwatch.model.groups import Group, GroupKey
from hangwatch.model.limits import MIN_REFRESH_S, Limits
from hangwatch.model.ranks import ThreadStack
from hangwatch.model.verdicts import CallClass, Verdict, Wait
from hangwatch.stacks.frames import find_user_site
from hangwatch.tracking.attempt import Attempt
from hangwatch.tracking.call_stream import CallStream, CallWindow
from hangwatch.tracking.process import FreezeReason, Process, StackSample

from .call_classes import list_equal_callers
from .graph.edges import WaitEdge
from .graph.graph import WaitGraph
from .graph.progress import has_two_samples

# The signals by which a user or a launcher stops a process: an end that is no failure by itself.
TERMINATION_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
MAX_CULPRIT_STACKS = 16
_MAX_WAITER_STACKS = 4  # the ranks that only wait and are sampled
# A rough limit: if there seem to be dozens of hangs, as when a job ends and some hosts have not
# reported yet, they are sampled in turn.
_MAX_STACK_REQUESTS = 64
_MAX_WAITS = 64
_MAX_WAITS_PER_RANK = 4
# The types that torch raises if a peer is absent; on gloo only RuntimeError. A TimeoutError comes
# from the script and is a cause.
PEER_ERROR_TYPES = re.compile(r"^(RuntimeError|Dist\w*Error)$")
_LOST_PEER_MESSAGE = re.compile(
    r"gloo/transport|connection (reset|closed|aborted|refused)|broken pipe|remote (process|peer)"
    r"|communicator was aborted",
    re.IGNORECASE,
)
# Messages of gloo, of its monitored barrier, and of NCCL's watchdog.
_TIMEOUT_MESSAGE = re.compile(
    r"timed out waiting \d+ms for (recv|send)|monitoredBarrier (in|after) \d+|collective operation"
    r" timeout",
    re.I,
)
# Messages of a store. They belong to a call only while groups are set up: otherwise the script
# itself may wait for a key.
_SETUP_TIMEOUT_MESSAGE = re.compile(
    r"(wait|barrier) timeout after|timed out after .* waiting for clients|timeout waiting for key",
    re.I,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class EvidenceRequest:
    """Evidence that the diagnosis needs from one rank's node agent: either its stacks, or what
    changed on its host ``since`` then, or the calls of one stream from number ``from_seq`` to number
    ``to_seq`` at multiples of ``step``.
    """

    rank: int
    stacks: bool = False
    hardware: bool = False
    since: float = field(default=0.0, compare=False)
    stream_uid: int = 0
    from_seq: int = 0
    to_seq: int = 0
    step: int = 1

    @classmethod
    def for_calls(cls, rank: int, stream: CallStream, window: CallWindow) -> EvidenceRequest:
        return cls(
            rank=rank,
            stream_uid=stream.uid,
            from_seq=window.first,
            to_seq=window.last,
            step=window.step,
        )


@dataclass(slots=True)
class DiagnosisContext:
    """What the rules share while one attempt is diagnosed once."""

    attempt: Attempt
    now: float
    limits: Limits
    streams_by_group: dict[GroupKey, dict[int, CallStream]]
    graph: WaitGraph
    explained_ranks: set[int] = field(default_factory=set)  # ranks that a verdict covers
    # Explained ranks that would stay blocked even if all other ranks entered their calls.
    deadlocked_ranks: set[int] = field(default_factory=set)
    verdicts: list[Verdict] = field(default_factory=list)
    requests: list[EvidenceRequest] = field(default_factory=list)

    def accuse(
        self, verdict: Verdict, explains: Iterable[int] | None = (), *, samples: bool = False
    ) -> None:
        """Records a verdict. It explains its culprits, the ranks that wait and those of ``explains``: no
        later rule accuses one of these. If ``explains`` is None, it explains no wait. ``samples``
        says whether to request stacks of these ranks.
        """
        self.verdicts.append(verdict)
        if explains is not None:
            self.explained_ranks.update(verdict.culprits, verdict.waiting, explains)
        if samples:
            request_stacks(self, verdict.culprits, verdict.waiting, verdict.began_at)

    def find_waiting_devices(self, culprits: Iterable[int]) -> set[int]:
        """The unexplained ranks whose devices wait for the culprits: so do their hosts, sooner or later."""
        devices = self.graph.devices
        return (
            set() if devices is None else devices.find_waiters_of(culprits) - self.explained_ranks
        )


def is_quiet(attempt: Attempt) -> bool:
    """Whether a full diagnosis would find nothing due and request no evidence."""
    return (
        not attempt.suspects
        and not attempt.diverged_groups
        and attempt.checks.is_quiet
        and not attempt.list_outside_waits()
    )


def request_stacks(
    context: DiagnosisContext,
    culprits: Iterable[int],
    waiting: Iterable[int],
    since: float,
    *,
    are_moving: bool = False,
) -> None:
    """Requests two samples of each culprit since it last made progress, and one of some of the
    ranks that wait. ``are_moving``: the culprits may be elsewhere by now, so that they are sampled
    again whenever the newest sample covers less than half of the time.
    """
    if sum(request.stacks for request in context.requests) >= _MAX_STACK_REQUESTS:
        return
    for process in iter_alive(context, list(culprits)[:MAX_CULPRIT_STACKS]):
        is_due = not has_two_samples(process, max(since, process.last_advanced_at))
        if are_moving and not is_due:
            newest_at = max(sample.taken_at for sample in process.samples)
            is_due = context.now - newest_at > max(MIN_REFRESH_S, newest_at - since)
        if is_due:
            context.requests.append(EvidenceRequest(rank=process.rank, stacks=True))
    for process in iter_alive(context, sorted(waiting)[:_MAX_WAITER_STACKS]):
        needed_since = max(since, process.last_advanced_at)
        if all(sample.taken_at < needed_since for sample in process.samples):
            context.requests.append(EvidenceRequest(rank=process.rank, stacks=True))


def iter_alive(context: DiagnosisContext, ranks: Iterable[int]) -> Iterator[Process]:
    """The processes of the ranks that are alive."""
    for rank in ranks:
        process = context.attempt.processes.get(rank)
        if process is not None and process.is_alive:
            yield process


def select_waits(
    context: DiagnosisContext, ranks: Iterable[int], first: Iterable[WaitEdge] = ()
) -> tuple[Wait, ...]:
    """Some of the waits of the ranks, starting with those of ``first``."""
    selected = dict.fromkeys(edge.wait for edge in first)
    edges = (
        edge
        for rank in sorted(ranks)
        for edge in islice(context.graph.iter_edges(rank), _MAX_WAITS_PER_RANK)
    )
    selected.update(dict.fromkeys(edge.wait for edge in islice(edges, _MAX_WAITS)))
    return tuple(islice(selected, _MAX_WAITS))


def find_missing_call(
    context: DiagnosisContext, edge: WaitEdge, waiting: set[int]
) -> tuple[CallClass, ...]:
    """The call that the culprit has not entered, and the waiting ranks that are known to have made it."""
    call = edge.stream.calls.get(edge.seq)
    if call is None:
        return ()
    inside: list[int] = []
    if edge.stream.peer is None:
        members = context.streams_by_group.get(edge.group.key, {})
        callers = list_equal_callers(members, edge.wait.rank, edge.seq)
        inside = [rank for rank in callers if rank in waiting]
    ranks = tuple(inside) or (edge.wait.rank,)
    return (CallClass(ranks=ranks, call=_add_peer(call, edge.stream)),)


def get_newest_call(stream: CallStream | None, rank: int) -> tuple[CallClass, ...]:
    """The newest call of a rank's stream, if it is known."""
    if stream is None or stream.entered not in stream.calls:
        return ()
    call = stream.calls[stream.entered]
    return (CallClass(ranks=(rank,), call=_add_peer(call, stream)),)


def _add_peer(call: Call, stream: CallStream) -> Call:
    return call if stream.peer is None else replace(call, peer=stream.peer)


def find_newest_sample(process: Process, since: float) -> StackSample | None:
    """The newest sample of a rank's stacks since a wait for it began. After an exception because of absent
    peers, its stack no longer shows what delayed it.
    """
    until = float("inf")
    if process.exception_at is not None and has_peer_error(process):
        until = process.exception_at
    for sample in reversed(process.samples):
        if since <= sample.taken_at <= until and sample.threads:
            return sample
    return None


def find_blocking_thread(
    context: DiagnosisContext,
    process: Process,
    sample: StackSample,
    group: Group | None,
    since: float,
) -> ThreadStack | None:
    """The thread that keeps a rank from its call in ``group``: the one that makes its calls there
    or, if no thread can run Python, the one that holds the GIL.
    """
    caller = process.find_caller(sample, group, since)
    if process.freeze_reason(context.now) is FreezeReason.GIL_HELD:
        return sample.gil_holder or caller
    return caller


def find_blocking_user_thread(
    context: DiagnosisContext, ranks: Iterable[int], since: float, group: Group
) -> tuple[int, ThreadStack] | None:
    """The first rank whose blocking thread is on a line of the user's code, and that thread."""
    for rank in ranks:
        process = context.attempt.processes.get(rank)
        sample = find_newest_sample(process, since) if process is not None else None
        if process is None or sample is None:
            continue
        thread = find_blocking_thread(context, process, sample, group, since)
        if thread is not None and find_user_site(thread) is not None:
            return rank, thread
    return None


def find_last_site(process: Process, by: float = float("inf")) -> Site | None:
    """The line of the newest call that the process had entered ``by`` then."""
    stream = process.newest_stream
    if stream is None:
        return None
    entered_later = stream.entered_at > by
    call = stream.calls.get(stream.entered - 1 if entered_later else stream.entered)
    return call.site if call is not None else None


def get_state_known_until(context: DiagnosisContext, rank: int) -> float:
    """The time of the last report of a rank's state: a wait is known to last until then."""
    process = context.attempt.processes.get(rank)
    if process is None or process.exit is not None:
        return context.now
    return min(context.now, process.reports.last_seen_at)


def find_silent_node_mates(context: DiagnosisContext, ranks: Iterable[int]) -> list[int]:
    """All silent ranks of the nodes on which ``ranks`` run."""
    processes = context.attempt.processes
    agents = {processes[rank].agent for rank in ranks}
    return [rank for rank in context.graph.silent_ranks if processes[rank].agent in agents]


def get_last_seen_at(context: DiagnosisContext, rank: int) -> float:
    """The time of a rank's last report, or of its end if that was earlier."""
    process = context.attempt.processes.get(rank)
    if process is None:
        return context.now
    return min(process.reports.last_seen_at, process.exited_at or process.reports.last_seen_at)


def has_timed_out(process: Process) -> bool:
    """Whether the process raised an exception because its last call took too long."""
    exception, last = process.exception, process.newest_stream
    if exception is None or last is None or not PEER_ERROR_TYPES.search(exception.type):
        return False
    if _TIMEOUT_MESSAGE.search(exception.message):
        return True
    is_setup = last.kind is StreamKind.SETUP
    return is_setup and _SETUP_TIMEOUT_MESSAGE.search(exception.message) is not None


def was_ended_by_watchdog(process: Process) -> bool:
    """Whether the process was aborted while its device had collectives to complete, as torch's watchdog
    does after a timeout or an error of the network. A rank whose device had completed all aborted by
    itself.
    """
    end = process.exit
    if end is None or end.signal != signal.SIGABRT or process.exception is not None:
        return False
    devices = [stream.device for stream in process.streams.values()]
    return any(device is not None and device.is_behind_host for device in devices)


def has_peer_error(process: Process) -> bool:
    """Whether its exception, or its end by its watchdog, shows that a peer was absent or left."""
    if was_ended_by_watchdog(process):
        return True
    exception = process.exception
    if exception is not None and _LOST_PEER_MESSAGE.search(exception.message):
        return True
    return has_timed_out(process)
