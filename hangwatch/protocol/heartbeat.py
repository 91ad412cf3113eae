"""What node agents and the server say to each other, over ``POST /api/v1/heartbeats``.

A heartbeat speaks for all ranks of one host. It holds only what changed since the last one that the
server acknowledged; a server that does not know a process (it was restarted, or the heartbeat was
lost) answers ``resync`` and gets everything. Times are ages in seconds at the moment of sending,
never readings of a clock that would have to agree with another.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
from dataclasses import dataclass
from typing import Any

from hangwatch.model.calls import Call, StreamKind
from hangwatch.model.ranks import ExceptionInfo, ExitInfo
from hangwatch.model.threads import ThreadStack

from .live import MAX_RECORDING_HZ, MAX_RECORDING_S, RecordingReply, TraceReply

PROTOCOL_VERSION = 1
URGENT_PRIORITY = (
    "u=1"  # the header Priority (RFC 9218) of a heartbeat that should not wait for others
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessIdentity:
    """Who a training process is. Told once, and again after a resync or when it changes."""

    job: str
    restart: int = 0  # the launcher's count of restarts
    rank: int
    world_size: int
    local_rank: int | None = None
    pid: int
    start_ticks: int
    python: str = ""
    torch: str = ""
    program: str = ""  # the script, as started
    started_s: float = 0.0  # age of the process
    master: str = ""  # MASTER_ADDR:MASTER_PORT, where it meets the others
    # HANGWATCH_ON_HANG in its environment: by anything but "abort" the job's owner refuses to have
    # it ended
    on_hang: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
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


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamUpdate:
    uid: int  # the process's own number for it
    identity: StreamIdentity | None = None  # the first time
    entered: int
    completed: int | None = None
    chain: int = 0
    op: str = ""  # of the newest call
    entered_s: float = 0.0  # age of the newest call
    pending_s: float | None = None  # age of the oldest unfinished one
    # Running hash at the newest multiples of the smallest power of two that gives at most
    # `CHECKPOINTS` of them since the last heartbeat: coarser steps are multiples of finer ones, so
    # any two ranks report positions in common.
    checkpoints: tuple[tuple[int, int], ...] = ()
    shared: tuple[
        Call, ...
    ] = ()  # once, where two threads make calls at the same time: one's last call, and the other's
    calls: tuple[
        Call, ...
    ] = ()  # the unfinished ones, once they stand for a second; the last ones, of an ended process


MAX_CHECKPOINTS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class NonfiniteReport:
    """A call in which numbers were not finite. ``first`` is the first one of the run of calls of
    its kind that it belongs to.
    """

    uid: int
    seq: int
    nan: int = 0
    inf: int = 0
    output: bool = False  # in its result, and not in what this rank put in
    scaled: bool = False  # under loss scaling
    first: int = 0
    rounds: int = 0  # of training, for which the run lasts
    at_s: float = 0.0  # its age
    call: Call | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessUpdate:
    key: str  # "PID-STARTTICKS": unique on its host, whatever happens to the pid
    identity: ProcessIdentity | None = None
    lifecycle: int = 0  # see `hangwatch.model.ranks.Lifecycle`
    step: int | None = None
    phase: str | None = None
    phase_s: float = 0.0
    phase_limit_s: float | None = None
    pulse_s: float | None = None  # since Python last ran there; None without a ring
    state: str = "?"  # of the main thread, as /proc has it: R, S, D, T, t, Z, ...
    idle_s: float = 0.0  # since the main thread last used the CPU or waited for one
    cpu_s: float = 0.0  # the whole process's CPU time
    ended: ExitInfo | None = None
    ended_s: float = 0.0
    raised: ExceptionInfo | None = None
    raised_s: float = 0.0
    dropped: int = 0
    faults: tuple[str, ...] = ()
    sequences: tuple[StreamUpdate, ...] = ()
    checksums: tuple[
        tuple[int, int, int, int], ...
    ] = ()  # of sampled calls: uid, seq, running hash after it, CRC-32 of its result
    nonfinite: tuple[NonfiniteReport, ...] = ()
    # calls in 16 bits or under loss scaling that carried an Inf, as of the last of `nonfinite`
    overflows: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StackReply:
    """The stacks of one process, or why there are none."""

    key: str
    request: str  # the command's id
    source: str  # "py-spy" or "faulthandler"
    taken_s: float = 0.0
    native: bool = False
    threads: tuple[ThreadStack, ...] = ()
    error: str | None = None  # with the remedy in it


@dataclass(frozen=True, slots=True, kw_only=True)
class CallsReply:
    """The last calls of one sequence, oldest first."""

    key: str
    request: str
    uid: int
    calls: tuple[Call, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class AbortReply:
    """What became of an order to end a process. ``signal`` was sent to it; where it was not,
    ``ended`` or ``error`` says why.
    """

    key: str
    request: str
    signal: int | None = None
    ended: ExitInfo | None = None  # how it ended, once it has
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentCost:
    """What the node agent itself takes of its host."""

    cpu_s: float  # since its start, with the helpers that it ran
    memory: int  # bytes
    dropped: int = 0  # answers that were too many to keep


@dataclass(frozen=True, slots=True, kw_only=True)
class CallTotals:
    """The calls of one operation and size class, since the last time. See
    `hangwatch.performance.distributions`.
    """

    op: str
    size: int  # class
    calls: int
    bytes: int
    latency: tuple[
        tuple[int, int], ...
    ] = ()  # buckets of a `Distribution`: of the calls that told when they were over
    longest_us: int = 0


# seq; when it was entered, how long after the call before it, and how long it took, in µs (-1: not
# known); operation, size class, size in bytes (-1: not the same for all). Moments are on the
# agent's own clock: `Performance.clock` says how far the server's is ahead.
CallSample = tuple[int, int, int, int, str, int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamPerformance:
    key: str  # of the process
    uid: int  # of the sequence
    totals: tuple[CallTotals, ...] = ()
    samples: tuple[
        CallSample, ...
    ] = ()  # the same calls on every rank: see `hangwatch.performance.distributions.sample`
    missed: int = 0  # calls that the ring had lost before they were read


@dataclass(frozen=True, slots=True, kw_only=True)
class PerformanceReport:
    number: int  # counts what an agent says of it, from 1: the same again is the same
    clock: tuple[float, float] | None = (
        None  # between which seconds the server's clock is ahead of the agent's
    )
    sequences: tuple[StreamPerformance, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    version: int = PROTOCOL_VERSION
    host: str
    agent: str  # a new one for each node agent process
    number: int  # counts this agent's heartbeats, from 1
    full: bool = False  # everything known, not only what changed
    # all processes get on, and where they are is not told this time, or of few sequences only
    brief: bool = False
    sent_s: float | None = (
        None  # on the agent's own clock: only differences count, to tell what was long on its way
    )
    processes: tuple[ProcessUpdate, ...] = ()
    gone: tuple[str, ...] = ()  # processes this agent will say no more of
    samples: tuple[StackReply, ...] = ()
    calls: tuple[CallsReply, ...] = ()
    aborts: tuple[AbortReply, ...] = ()
    traces: tuple[TraceReply, ...] = ()
    recordings: tuple[RecordingReply, ...] = ()
    cost: AgentCost | None = None  # once in a while
    performance: PerformanceReport | None = None  # every few seconds, where calls were made


class CommandKind(str, enum.Enum):
    """All that a server can ask of a node agent."""

    STACKS = "stacks"
    CALLS = "calls"
    ABORT = "abort"  # end this process
    TRACE = "trace"
    RECORD = "record"


def refuses_abort(on_hang: str) -> bool:
    """Whether a job with this HANGWATCH_ON_HANG must not be ended: the word of its owner wins, and
    any other word is a no.
    """
    return on_hang.strip().lower() not in ("", "abort")


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    id: str
    ask: CommandKind
    key: str
    native: bool = False  # STACKS, RECORD: with native frames
    uid: int = 0  # CALLS: of which sequence
    from_seq: int = 0  # CALLS: leave out earlier ones
    most: int = 64
    after: int = 0  # TRACE: from which record on; -1: from now on
    op: str = ""  # TRACE: only this operation
    values: bool = False  # TRACE: with the tensors' values, where the recorder noted them
    last: bool = False  # TRACE: unfinished calls too, since nobody will ask again
    seconds: int = 0  # RECORD
    rate: int = 0  # RECORD: samples a second
    gil: bool = False  # RECORD: only what holds the GIL
    ends: str = (
        ""  # RECORD: the id of the command whose recording ends now, instead of beginning one
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class HeartbeatReply:
    interval_s: float = 0.5  # until the next heartbeat; the server spreads its load with it
    news_s: float | None = (
        # within which what is rare is told all the same; None: it is told at the next heartbeat
        None
    )
    details_s: float | None = (
        # for which it need not be told where processes are that get on; None: it is told at each
        # heartbeat
        None
    )
    urgent: bool = False  # the next heartbeat is waited for, so that it is
    resync: bool = False
    commands: tuple[Command, ...] = ()
    clock_s: float | None = None  # the server's own, when it answered: only differences count


_PLAIN_TYPES = frozenset((int, float, str, bool, type(None)))


def encode_message(message: Any) -> Any:
    """A message as JSON-ready data; fields that hold their default are left out."""
    kind = type(message)
    if kind in _PLAIN_TYPES:  # nearly all of a heartbeat
        return message
    if isinstance(message, (tuple, list)):
        return [item if type(item) in _PLAIN_TYPES else encode_message(item) for item in message]
    if dataclasses.is_dataclass(kind):
        return {
            name: encode_message(value)
            for name, default in _field_defaults(kind)
            if (value := getattr(message, name)) != default
        }
    return message.value if isinstance(message, enum.Enum) else message


@functools.cache
def _field_defaults(kind: type) -> tuple[tuple[str, Any], ...]:
    """Names and defaults, `dataclasses.MISSING` where there is none: no value equals that."""
    return tuple((f.name, f.default) for f in dataclasses.fields(kind))


def decode_reply(data: dict[str, Any]) -> HeartbeatReply:
    """The server's answer. Raises KeyError, TypeError or ValueError where it is none."""
    return HeartbeatReply(
        interval_s=min(60.0, max(0.05, float(data.get("interval_s", 0.5)))),
        news_s=min(60.0, max(0.0, float(data["news_s"])))
        if data.get("news_s") is not None
        else None,
        details_s=min(600.0, max(0.0, float(data["details_s"])))
        if data.get("details_s") is not None
        else None,
        urgent=bool(data.get("urgent", False)),
        resync=bool(data.get("resync", False)),
        clock_s=float(data["clock_s"]) if data.get("clock_s") is not None else None,
        commands=tuple(
            Command(
                id=str(c["id"]),
                ask=CommandKind(c["ask"]),
                key=str(c["key"]),
                native=bool(c.get("native", False)),
                uid=int(c.get("uid", 0)),
                from_seq=int(c.get("from_seq", 0)),
                most=min(2048, int(c.get("most", 64))),
                after=int(c.get("after", 0)),
                op=str(c.get("op", "")),
                values=bool(c.get("values", False)),
                last=bool(c.get("last", False)),
                seconds=min(MAX_RECORDING_S, int(c.get("seconds", 0))),
                rate=min(MAX_RECORDING_HZ, int(c.get("rate", 0))),
                gil=bool(c.get("gil", False)),
                ends=str(c.get("ends", "")),
            )
            for c in data.get("commands", ())
        ),
    )
