"""The state of one diagnosis of an attempt: the facts, the verdicts so far, and the evidence to
request; and the questions about ranks and calls that several rules have.

One of them is whether a rank failed because a peer was absent, by the message of its exception or by
how it was ended: such a failure is a consequence and not a cause.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from math import inf

from hangwatch.model.calls import Call, Site, StreamKind
from hangwatch.model.groups import Group
from hangwatch.model.kinds import Severity, VerdictKind
from hangwatch.model.limits import (
    MIN_REFRESH_S,
    PAUSE_FACTOR,
    SECOND_SAMPLE_S,
    UNTIMED_GRACE_S,
    Limits,
)
from hangwatch.model.ranks import Ranks, ThreadStack
from hangwatch.model.verdicts import CallClass, Verdict, Wait
from hangwatch.tracking.attempt import Attempt
from hangwatch.tracking.call_stream import CallStream, CallWindow, StreamsByRank
from hangwatch.tracking.process import FreezeReason, Process, StackSample

from .call_classes import list_equal_callers
from .graph.edges import WaitEdge
from .graph.graph import WaitGraph
from .graph.progress import (
    awaits_remote_call,
    find_working_threads,
    has_settled,
    has_stack_changed,
    has_two_samples,
    is_busy,
    is_spinning,
    is_transferring,
    list_remote_executions_since,
    list_samples_since,
    needs_device_sample,
    waits_for_device,
    works_on_remote_call,
)

# The signals by which a user or a launcher stops a process, which is not a failure by itself.
TERMINATION_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
MAX_CULPRIT_STACKS = 16
_MAX_WAITER_STACKS = 4  # the ranks that only wait and are sampled
_MAX_CALLED_STACKS = 64  # the ranks that are sampled because one of them may execute a remote call
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
    """Evidence that the diagnosis needs from one rank's node agent: either its stacks, or the kernels
    on its devices, or what changed on its host ``since`` then, or the calls of one stream from number
    ``from_seq`` to number ``to_seq`` at multiples of ``step``.
    """

    rank: int
    stacks: bool = False
    device: bool = False  # the stacks, and whether the device holds the calling thread
    kernels: bool = False
    hardware: bool = False
    whole_job: bool = False  # the hardware, and what one host finds out about all ranks
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
    graph: WaitGraph
    explained_ranks: set[int] = field(default_factory=set)  # ranks that a verdict covers
    # Explained ranks that would stay blocked even if all other ranks entered their calls.
    deadlocked_ranks: set[int] = field(default_factory=set)
    verdicts: list[Verdict] = field(default_factory=list)
    requests: list[EvidenceRequest] = field(default_factory=list)
    pause_note: str = ""  # why a job in which no rank makes calls is not suspected

    @property
    def processes(self) -> dict[int, Process]:
        return self.attempt.processes

    def accuse(
        self, verdict: Verdict, explains: Iterable[int] | None = (), *, samples: bool = False
    ) -> None:
        """Records a verdict. It explains its culprits, the ranks that wait and those of ``explains``: no
        later rule accuses any of them. If ``explains`` is None, it explains no wait. With ``samples``,
        stacks of its culprits and of ranks that wait are requested.
        """
        self.verdicts.append(verdict)
        if explains is not None:
            self.explained_ranks.update(verdict.involved_ranks, explains)
        if samples:
            self.request_stacks(verdict.culprits, verdict.waiting, verdict.began_at)

    def request_stack(self, rank: int, *, device: bool = False) -> None:
        self.requests.append(EvidenceRequest(rank=rank, stacks=True, device=device))

    def request_calls(self, rank: int, stream: CallStream, window: CallWindow) -> None:
        """Requests calls of a rank's stream, unless its node agent has already sent what it has of them."""
        if not stream.has_answered(window):
            self.requests.append(EvidenceRequest.for_calls(rank, stream, window))

    def get_members(self, group: Group) -> StreamsByRank:
        """The streams of a group's members, by rank."""
        return self.attempt.streams_by_group.get(group.key, {})

    def request_stacks(
        self,
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
        if sum(request.stacks for request in self.requests) >= _MAX_STACK_REQUESTS:
            return
        for process in self.iter_alive(list(culprits)[:MAX_CULPRIT_STACKS]):
            is_due = not has_two_samples(process, max(since, process.last_advanced_at))
            if are_moving and not is_due:
                newest_at = max(sample.taken_at for sample in process.samples)
                is_due = self.now - newest_at > max(MIN_REFRESH_S, newest_at - since)
            if is_due:
                self.request_stack(process.rank)
        for process in self.iter_alive(sorted(waiting)[:_MAX_WAITER_STACKS]):
            needed_since = max(since, process.last_advanced_at)
            if all(sample.taken_at < needed_since for sample in process.samples):
                self.request_stack(process.rank)

    def list_called_samples_due(self, caller: Process, since: float) -> list[int]:
        """The other ranks whose stacks are needed to know whether they execute a remote call that this rank
        may wait for, and whether that makes progress. Empty if it waits for no such call.
        """
        if not awaits_remote_call(caller, since):
            return []
        others = (rank for rank in sorted(self.processes) if rank != caller.rank)
        due = []
        for other in self.iter_alive(islice(others, _MAX_CALLED_STACKS)):
            samples = list_samples_since(other, since)
            is_due = not samples or self.now - samples[-1].taken_at >= self.limits.stall_after_s
            if not is_due and list_remote_executions_since(other, since):
                is_due = not has_two_samples(other, since)
            if is_due:
                due.append(other.rank)
        return due

    def list_working_callees(self, caller: Process, since: float) -> Ranks:
        """The other ranks that work on a remote call while this rank waits for one: it may be that one."""
        if not awaits_remote_call(caller, since):
            return ()
        others = (process for process in self.processes.values() if process is not caller)
        return tuple(sorted(other.rank for other in others if works_on_remote_call(other, since)))

    def request_device_evidence(self, culprits: Iterable[int], since: float) -> None:
        """Requests what shows whether culprits that use the CPU wait for their devices: two samples that
        are examined for that, just before and when a verdict is due. Their threads are paused for that,
        if only for microseconds, so it is requested only where two samples show one line.
        """
        early_s = max(self.limits.suspicion_delay_s, self.limits.stall_after_s - SECOND_SAMPLE_S)
        for process in self.iter_alive(list(culprits)[:MAX_CULPRIT_STACKS]):
            still_since = max(since, process.last_advanced_at)
            if self.get_state_known_until(process.rank) - still_since < early_s:
                continue
            if self.is_in_phase(process) or not is_spinning(process, still_since):
                continue
            if needs_device_sample(process, still_since):
                self.request_stack(process.rank, device=True)

    def find_waiting_devices(self, culprits: Iterable[int]) -> set[int]:
        """The unexplained ranks whose devices wait for the culprits: so do their hosts, sooner or later."""
        return self.graph.devices.find_waiters_of(culprits) - self.explained_ranks

    def iter_alive(self, ranks: Iterable[int]) -> Iterator[Process]:
        """The processes of the ranks that are alive."""
        for process in self.attempt.find_processes(ranks):
            if process.is_alive:
                yield process

    def select_waits(
        self, ranks: Iterable[int], first: Iterable[WaitEdge] = ()
    ) -> tuple[Wait, ...]:
        """Some of the waits of the ranks, starting with those of ``first``."""
        waits = chain.from_iterable(
            islice(self.graph.iter_waits(rank), _MAX_WAITS_PER_RANK) for rank in sorted(ranks)
        )
        selected = dict.fromkeys([edge.wait for edge in first])
        selected.update(dict.fromkeys(islice(waits, _MAX_WAITS)))
        return tuple(selected)[:_MAX_WAITS]

    def select_waits_for(
        self, culprits: Collection[int], waiting: Collection[int], edge: WaitEdge
    ) -> tuple[Wait, ...]:
        """Some of the waits for the ``culprits``; ``edge`` is one of these waits. If a device waits in it,
        the other devices' waits are shown as well: their hosts are in later calls.
        """
        device_waits = tuple(self.graph.devices.list_waits(culprits))
        if edge.wait not in device_waits:
            return self.select_waits(waiting)
        others = {*waiting} - {wait.rank for wait in device_waits}
        return (*device_waits, *self.select_waits(others))[:_MAX_WAITS]

    def find_missing_call(self, edge: WaitEdge, waiting: set[int]) -> tuple[CallClass, ...]:
        """The call that the culprit has not entered, and the waiting ranks that are known to have made it. If
        a host that runs ahead of its device has not reported it, it is requested.
        """
        call = edge.stream.calls.get(edge.seq)
        if call is None:
            if edge.seq < edge.stream.entered and edge.wait.rank in self.processes:
                self.request_calls(edge.wait.rank, edge.stream, CallWindow(edge.seq, edge.seq))
            return ()
        caller = edge.wait.rank
        ranks: Ranks = (caller,)
        if edge.stream.peer is None:
            equal = list_equal_callers(self.get_members(edge.group), caller, edge.seq)
            ranks = tuple(rank for rank in equal if rank in waiting) or ranks
        return (CallClass(ranks=ranks, call=_add_peer(call, edge.stream)),)

    def find_blocking_thread(
        self, process: Process, group: Group | None, since: float
    ) -> ThreadStack | None:
        """The thread that keeps a rank from its call in ``group``, in its newest sample since then: the one
        that makes its calls there or, if no thread can run Python, the one that holds the GIL.
        """
        sample = find_newest_sample(process, since)
        if sample is None:
            return None
        caller = process.find_caller(sample, group, since)
        if process.freeze_reason(self.now) is FreezeReason.GIL_HELD:
            return sample.gil_holder or caller
        return caller

    def get_state_known_until(self, rank: int) -> float:
        """The time of the last report of a rank's state: a wait is known to last until then."""
        process = self.processes.get(rank)
        if process is None or process.exit is not None:
            return self.now
        return min(self.now, process.reports.last_seen_at)

    def find_silent_node_mates(self, ranks: Iterable[int]) -> list[int]:
        """All silent ranks of the nodes on which ``ranks`` run."""
        processes = self.processes
        agents = {processes[rank].agent for rank in ranks}
        return [rank for rank in self.graph.silent_ranks if processes[rank].agent in agents]

    def get_last_seen_at(self, rank: int) -> float:
        """The time of a rank's last report, or of its end if that was earlier."""
        process = self.processes[rank]
        last_seen_at = process.reports.last_seen_at
        return min(last_seen_at, process.exited_at or last_seen_at)

    def get_unable_kind(self, rank: int) -> VerdictKind | None:
        """The kind for a rank that cannot enter the call, because it has left or is frozen; else None."""
        if rank not in self.attempt.unable_ranks:
            return None
        process = self.processes[rank]
        for blocked in self.graph.iter_waits_for(rank):
            if process.has_left(blocked.stream.group):
                return VerdictKind.EXITED_RANK
        return VerdictKind.FROZEN_RANK if process.freeze_reason(self.now) is not None else None

    def get_settle_s(self, ended: Iterable[Process]) -> float:
        """How long the end of ranks must be the only one in a job before it is taken for the cause of waits."""
        limits = self.limits
        if any(process.is_interrupted for process in ended):
            return limits.stall_after_s
        return limits.settle_s

    def get_start_severity(self, began_at: float) -> Severity:
        """That of a delay of the start since then: imports, image pulls, launchers and the connections of
        thousands of ranks take long without a fault.
        """
        is_late = self.now - began_at >= self.limits.startup_after_s
        return Severity.ALERT if is_late else Severity.WARNING

    def is_in_phase(self, process: Process) -> bool:
        """Whether a rank is in a phase that it declared, within the phase's time limit."""
        if process.phase is None:
            return False
        limit_s = process.phase.limit_s or self.limits.slow_limit_s
        return self.now - process.phase.began_at < limit_s

    def is_working(self, rank: int, since: float) -> bool:
        """Whether the rank, or what it waits for on its host, makes progress."""
        process = self.processes[rank]
        if process.has_raised:
            return False
        if rank in self.graph.released_ranks or self.is_in_phase(process):
            return True
        # A rank that makes calls elsewhere is not stuck before it has been in its own code as long.
        known_until = self.get_state_known_until(rank)
        if known_until - process.last_advanced_at < self.limits.stall_after_s:
            return True
        # A rank may also use the CPU to wait for its device, whose kernel hardly ends if it takes this long.
        is_overdue = known_until - since >= self.limits.stall_after_s + UNTIMED_GRACE_S
        if is_busy(process) and not (is_overdue and waits_for_device(process, since)):
            return True
        if self.shows_progress(process, since):
            return True
        return bool(self.list_working_callees(process, since))

    def shows_progress(self, process: Process, since: float) -> bool:
        """Whether samples since then show that a rank, or what it waits for on its host, makes progress."""
        if is_transferring(process, since) or find_working_threads(process, since):
            return True
        has_moved = has_stack_changed(process, since)
        return has_moved and not has_settled(process, since, self.limits.stall_after_s)


def is_quiet(attempt: Attempt, now: float, limits: Limits) -> bool:
    """Whether a full diagnosis would find nothing due and request no evidence."""
    return (
        not attempt.suspects
        and not attempt.diverged_groups
        and not attempt.diverged_channels
        and attempt.checks.is_quiet
        and not has_paused(attempt, now, limits)
        and not attempt.list_outside_waits()
    )


def get_pause_limit_s(attempt: Attempt, limits: Limits) -> float:
    """The time without calls that is longer than what is usual for this job."""
    return max(limits.stall_after_s, PAUSE_FACTOR * attempt.longest_pause_s)


def has_paused(attempt: Attempt, now: float, limits: Limits) -> bool:
    """Whether no rank has made a call for so long that the stacks of all ranks should be known."""
    sampling_s = limits.stall_after_s - limits.suspicion_delay_s
    paused_s = now - max(attempt.newest_call_at, attempt.opened_at)
    return paused_s >= get_pause_limit_s(attempt, limits) - sampling_s


def get_newest_call(stream: CallStream, rank: int) -> tuple[CallClass, ...]:
    """The newest call of a rank's stream, if it is known."""
    call = stream.calls.get(stream.entered)
    return () if call is None else (CallClass(ranks=(rank,), call=_add_peer(call, stream)),)


def _add_peer(call: Call, stream: CallStream) -> Call:
    return call if stream.peer is None else replace(call, peer=stream.given_peer)


def find_newest_sample(process: Process, since: float) -> StackSample | None:
    """The newest sample of a rank's stacks since a wait for it began. After an exception because of absent
    peers, its stack no longer shows what delayed it.
    """
    samples = list_samples_since(process, since)
    if process.exception_at is not None and has_peer_error(process):
        samples = [sample for sample in samples if sample.taken_at <= process.exception_at]
    return samples[-1] if samples else None


def find_last_site(process: Process, by: float = inf) -> Site | None:
    """The line of the newest call that the process had entered ``by`` then."""
    stream = process.newest_stream
    if stream is None:
        return None
    seq = stream.entered - 1 if stream.entered_at > by else stream.entered
    call = stream.calls.get(seq)
    return call.site if call is not None else None


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
