"""The messages between node agents and the server, ``POST /api/v1/heartbeats``.

A heartbeat covers all ranks of one host. It holds only what changed since the last one that the
server acknowledged. A server that does not know a process (because it was restarted, or a heartbeat
was lost) replies with ``resync``, and the next heartbeat is complete. Times are ages in seconds at
the time of sending, so that clocks of different hosts need not agree.

The messages have no ``slots``: msgspec fills a dataclass that has a ``__dict__`` more than twice as
fast as one with slots, see `server.ingest.heartbeat_checks`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from hangwatch.model.bounds import (
    Bucket,
    BucketCount,
    Count,
    Hash64,
    MaybeTotal,
    Microseconds,
    Name,
    PositiveSeconds,
    Rank,
    RankCount,
    RestartCount,
    SizeClass,
    Total,
)
from hangwatch.model.calls import Call, StreamKind
from hangwatch.model.hardware import Observation, UnavailableSource
from hangwatch.model.incidents import FlightFile
from hangwatch.model.kernels import Kernels
from hangwatch.model.ranks import ExceptionInfo, ExitInfo, ThreadStack

from .commands import Command, CommandReply, RecordingReply, TraceReply

PROTOCOL_VERSION = 1
HEARTBEAT_PATH = "/api/v1/heartbeats"
COMMANDS_PATH = "/api/v1/commands"
PROOF_PATH = "/api/v1/proof"  # a reply to this proves that the server knows the token
# The Priority header (RFC 9218) of a heartbeat that the server should process before others.
URGENT_PRIORITY = "u=1"
MAX_CHECKPOINTS = 8
MAX_CLOCK_DRIFT = 2e-4  # seconds per second between two clocks: twice the error of a bad crystal


@dataclass(frozen=True, kw_only=True)
class ProcessIdentity:
    """The identity of a training process. Sent once, and again after a resync or a change."""

    job: Name
    restart: RestartCount = 0  # the launcher's restart count
    rank: Rank
    world_size: RankCount
    local_rank: int | None = None
    pid: int
    start_ticks: int
    python: str = ""
    torch: str = ""
    program: str = ""  # the script, as started
    started_s: float = field(default=0.0, compare=False)  # age of the process
    master: str = ""  # MASTER_ADDR:MASTER_PORT, its rendezvous address
    on_hang: str = ""  # HANGWATCH_ON_HANG in its environment; see `allows_abort`
    gpu_stacks: bool = False  # HANGWATCH_GPU_STACKS in its environment lets cuda-gdb attach to it
    unrecorded: str = ""  # why its calls cannot be recorded, with the remedy; empty if they can


@dataclass(frozen=True, kw_only=True)
class StreamIdentity:
    kind: StreamKind
    name: str
    desc: str
    ranks: str  # see `hangwatch.model.groups.pack_ranks`
    backend: str = ""
    generation: int = 1
    world: int = 0
    peer: int | None = None
    tag: int | None = None
    # The identity, on all members, of a group that numbers its members by itself, and the number of
    # this process. ``ranks`` and ``peer`` are then such numbers, too.
    foreign: str = ""
    number: int = -1

    @property
    def members_key(self) -> str:
        """The groups of an attempt with the same key have the same members. The numbers in a foreign group
        are no ranks, and mean other processes in another one.
        """
        return f"{self.ranks} of {self.foreign}" if self.foreign else self.ranks


class StreamUpdate(NamedTuple):
    """The position in one stream. Its JSON is an array, in this order, without the last fields that have
    their defaults: it takes half the bytes of an object, and is decoded 2.5 times as fast, which counts
    because a heartbeat has many.
    """

    uid: int  # unique within the process
    entered: Count
    completed: Count | None = None
    entered_s: float = 0.0  # age of the newest call
    op: str = ""  # the operation of the newest call
    chain: Hash64 = 0
    # (sequence number, running hash) at the multiples of a power of two: the smallest power that
    # gives at most `MAX_CHECKPOINTS` since the last heartbeat. Multiples of a coarser step are also
    # multiples of a finer one, so any two ranks report positions in common.
    checkpoints: tuple[tuple[int, Hash64], ...] = ()
    pending_s: float | None = None  # age of the oldest unfinished call
    # Unfinished calls that are older than a second; of an exited process, its last calls.
    calls: tuple[Call, ...] = ()
    identity: StreamIdentity | None = None  # the first update has it
    # Sent once, when two threads make calls at the same time: the last call of each.
    shared: tuple[Call, ...] = ()


@dataclass(frozen=True, kw_only=True)
class NonfiniteReport:
    """A call with NaN or infinite values. Consecutive calls of this kind form a run."""

    uid: int
    seq: int
    nan: int = 0
    inf: int = 0
    output: bool = False  # the values are in the result, but not in this rank's input
    scaled: bool = False  # loss scaling is on
    first: int = 0  # sequence number of the first call of the run
    rounds: int = 0  # length of the run in training rounds
    at_s: float = 0.0  # age of the call
    call: Call | None = None


@dataclass(frozen=True, kw_only=True)
class DeviceStatus:
    """How far the device has come in the collectives of one stream's group, by the backend's own
    counters; see `hangwatch.model.verdicts`.
    """

    uid: int  # the group's stream of collectives
    enqueued: int = -1
    started: int | None = None  # None: the backend does not record starts
    completed: int = -1
    read_s: float = 0.0  # age of the counters


@dataclass(frozen=True, kw_only=True)
class ProcessUpdate:
    key: Name  # "PID-STARTTICKS": unique on its host even if the pid is reused
    identity: ProcessIdentity | None = None
    lifecycle: int = 0  # see `hangwatch.model.ranks.Lifecycle`
    step: int | None = None
    phase: str | None = None
    phase_s: float = 0.0
    phase_limit_s: float | None = None
    pulse_s: float | None = None  # time since Python last ran there; None without a ring
    state: str = "?"  # the main thread's, as in /proc; D if the thread of the newest call is in D
    idle_s: float = 0.0  # time since one of these threads last used a CPU or was ready to run
    cpu_s: float = 0.0  # CPU time of the whole process
    ended: ExitInfo | None = None
    ended_s: float = 0.0
    raised: ExceptionInfo | None = None
    raised_s: float = 0.0
    handling: ExceptionInfo | None = None  # the exception that a thread is handling while it waits
    dropped: Count = 0  # calls and streams that were not recorded, and whose place is not known
    faults: tuple[str, ...] = ()
    opened: Count = 0  # streams that it ever opened
    # (uid, first uncertain call, number of the `hangwatch.model.calls.LossReason`) of each stream that
    # misses a call, sent once.
    losses: tuple[tuple[int, int, int], ...] = ()
    # (uid, call) of each stream in which a reported call later raised an exception, before it
    # communicated: the reports from that call on are void.
    retractions: tuple[tuple[int, int], ...] = ()
    closed: tuple[int, ...] = ()  # streams (uids) that were reported and whose groups are gone
    streams: tuple[StreamUpdate, ...] = ()
    # (uid, seq, running hash after the call, CRC-32 of its result) of sampled calls.
    checksums: tuple[tuple[int, int, Hash64, int], ...] = ()
    nonfinite: tuple[NonfiniteReport, ...] = ()
    # Calls with an Inf in 16-bit data or under loss scaling, as of the last of `nonfinite`.
    overflows: Count = 0
    device: tuple[DeviceStatus, ...] = ()  # the groups whose counters changed or were confirmed
    # NAME=VALUE of the environment variable that makes the backend report the device's progress;
    # empty if it does, or cannot.
    device_setting: str = ""
    flight_file: FlightFile | None = None  # sent for a process that SIGABRT ended


@dataclass(frozen=True, kw_only=True)
class StackReply(CommandReply):
    """The stacks of one process, or an error."""

    source: str  # "py-spy" or "faulthandler"
    taken_s: float = 0.0
    native: bool = False
    threads: tuple[ThreadStack, ...] = ()
    error: str | None = None  # includes the remedy


@dataclass(frozen=True, kw_only=True)
class KernelsReply(CommandReply):
    """The kernels on the devices of one process, or an error."""

    source: str  # "cuda-gdb" or "core dump"
    taken_s: float = 0.0
    kernels: Kernels = ()
    error: str | None = None  # includes the remedy


@dataclass(frozen=True, kw_only=True)
class CallsReply(CommandReply):
    """Calls of one stream, oldest first: those from ``from_seq`` to ``to_seq`` at multiples of ``step``
    that the node agent still has.
    """

    uid: int
    calls: tuple[Call, ...] = ()
    from_seq: int = 0
    to_seq: int = 0
    step: int = 1


@dataclass(frozen=True, kw_only=True)
class AbortReply(CommandReply):
    """The outcome of an abort. Without a ``signal``, ``ended`` or ``error`` gives the reason."""

    signal: int | None = None
    ended: ExitInfo | None = None  # set once the process has exited
    error: str | None = None


@dataclass(frozen=True, kw_only=True)
class HardwareReply(CommandReply):
    """What changed on the host since before the hang, and what is abnormal."""

    taken_s: float = 0.0  # age of the reading
    observations: tuple[Observation, ...] = ()
    unavailable: tuple[UnavailableSource, ...] = ()


@dataclass(frozen=True, kw_only=True)
class AgentCost:
    """The resources that the node agent itself uses on its host."""

    cpu_s: PositiveSeconds  # CPU time since its start, including the helper processes that it ran
    memory: Count  # bytes
    dropped: Count = 0  # replies dropped because the queue was full


@dataclass(frozen=True, kw_only=True)
class CallTotals:
    """The calls of one operation and size class since the last report. See
    `hangwatch.performance.distributions`.
    """

    op: str
    size: SizeClass
    calls: Total
    bytes: Total
    # (bucket, count) of a `DurationHistogram`, for the calls whose completion time is known.
    latency: tuple[tuple[Bucket, BucketCount], ...] = ()
    longest_us: Microseconds = 0


# (sequence number; time of entry, time since the previous call, and duration, all in µs and -1 if
# unknown; operation; size class; size in bytes, -1 if it differs between ranks). Times of entry are
# on the agent's clock: `PerformanceReport.clock` gives the offset of the server's clock.
CallSample = tuple[int, Total, MaybeTotal, Microseconds, str, SizeClass, MaybeTotal]


@dataclass(frozen=True, kw_only=True)
class StreamPerformance:
    key: Name  # the process
    uid: int  # the stream
    totals: tuple[CallTotals, ...] = ()
    # Calls that are the same on every rank: see `hangwatch.ring.sampling.sample_calls`.
    samples: tuple[CallSample, ...] = ()
    missed: Total = 0  # calls that were overwritten in the ring before they were read


@dataclass(frozen=True, kw_only=True)
class PerformanceReport:
    number: Count  # counts an agent's reports, from 1; a repeated number is a duplicate
    # Bounds, in seconds, on how far the server's clock is ahead of the agent's.
    clock: tuple[float, float] | None = None
    streams: tuple[StreamPerformance, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Heartbeat:
    version: int = PROTOCOL_VERSION  # heartbeats without a version have version 1
    host: Name
    agent: Name  # unique per node agent process
    owner: str = ""  # a secret that a node agent shares with its successors
    servers: int = 1  # how many the agent may report to: with several, one may refuse another's job
    number: Count  # counts this agent's heartbeats, from 1
    full: bool = False  # holds everything known, not only what changed
    # All processes make progress, and their positions are left out, or given for few streams only.
    brief: bool = False
    # The time on the agent's clock. Only differences matter: they show how long a heartbeat was delayed.
    sent_s: float | None = None
    processes: tuple[ProcessUpdate, ...] = ()
    gone: tuple[Name, ...] = ()  # processes that this agent will not report again
    samples: tuple[StackReply, ...] = ()
    kernels: tuple[KernelsReply, ...] = ()
    calls: tuple[CallsReply, ...] = ()
    aborts: tuple[AbortReply, ...] = ()
    hardware: tuple[HardwareReply, ...] = ()
    traces: tuple[TraceReply, ...] = ()
    recordings: tuple[RecordingReply, ...] = ()
    cost: AgentCost | None = None  # sent occasionally
    performance: PerformanceReport | None = None  # every few seconds while calls are made


@dataclass(frozen=True, kw_only=True)
class HeartbeatReply:
    interval_s: float = 0.5  # until the next heartbeat, by which the server spreads its load
    # The interval while the host is steady (see `hangwatch.agent.node.schedule`). The
    # agent reports immediately when it stops being steady. None: use `interval_s`.
    steady_s: float | None = None
    # The agent must report rare changes within this time; None: with the next regular heartbeat.
    changes_s: float | None = None
    # The agent may omit the positions of processes that make progress for this long; None: every
    # heartbeat contains them.
    details_s: float | None = None
    urgent: bool = False  # mark the next heartbeat as urgent: a diagnosis waits for it
    # A request for commands (`COMMANDS_PATH`) waits this long until there is one; None: the agent gets
    # commands with the replies to heartbeats alone.
    poll_s: float | None = None
    resync: bool = False  # send everything in the next heartbeat
    commands: tuple[Command, ...] = ()
    # The server's clock at the time of the reply. Only differences matter.
    clock_s: float | None = None


def get_family(job: str) -> str:
    """The job whose ranks started a job, which is named JOB/ADDRESS:PORT; else the job itself. A
    family has one server.

    >>> get_family("run7/127.0.0.1:29500")
    'run7'
    """
    return job.partition("/")[0]


@dataclass(slots=True)
class ClockOffset:
    """Bounds on how many seconds the remote clock is ahead of the local one.

    A message is sent at ``sent_at`` on the local clock and received at ``remote_at`` on the remote one;
    its reply arrives at ``returned_at`` on the local clock. Then the offset lies between
    ``remote_at - returned_at`` and ``remote_at - sent_at``. The tightest bounds of many exchanges are
    kept, as in Cristian, "Probabilistic clock synchronization" (1989) and in NTP's clock filter (RFC
    5905, 10), and widened by the clocks' possible drift since.
    """

    bounds: tuple[float, float] | None = None  # (low, high); None before the first exchange
    _updated_at: float = 0.0  # the last exchange, on the local clock

    def add_exchange(self, sent_at: float, remote_at: float, returned_at: float) -> None:
        """Tightens the bounds by one exchange."""
        low, high = remote_at - returned_at, remote_at - sent_at
        if self.bounds is not None:
            drift = MAX_CLOCK_DRIFT * max(0.0, returned_at - self._updated_at)
            combined_low = max(low, self.bounds[0] - drift)
            combined_high = min(high, self.bounds[1] + drift)
            # Disjoint bounds mean a different clock: the server moved or its host rebooted.
            if combined_low <= combined_high:
                low, high = combined_low, combined_high
        self.bounds = low, high
        self._updated_at = returned_at
