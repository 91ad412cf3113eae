"""The requests that the server sends to a node agent with its reply to a heartbeat, and two kinds of
replies to them: traced calls and sampled profiles.

Times are ages in seconds at the time of sending, as in `hangwatch.protocol.heartbeat`.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from hangwatch.model.bounds import Finite, Name
from hangwatch.model.calls import Signature, Site

# Limits of one recording.
MAX_RECORDING_S, MAX_RECORDING_HZ, MAX_RECORDING_SAMPLES = 300, 1000, 30_000


class CommandKind(str, enum.Enum):
    """The requests that a server can send to a node agent."""

    STACKS = "stacks"
    CALLS = "calls"
    ABORT = "abort"  # end this process
    TRACE = "trace"
    RECORD = "record"
    HARDWARE = "hardware"  # what the host knows of its links and devices
    KERNELS = "kernels"  # what the devices of this process execute; only if `gpu_stacks` allows it


def allows_abort(on_hang: str) -> bool:
    """Whether this value of HANGWATCH_ON_HANG lets the server end the job's processes. Only the job's
    owner can allow it: a server's order alone ends nothing.
    """
    return on_hang.strip().lower() == "abort"


@dataclass(frozen=True, kw_only=True)
class Command:
    id: str
    kind: CommandKind
    key: str
    native: bool = False  # STACKS, RECORD: include native frames
    device: bool = False  # STACKS: find out whether the calling thread waits for its device
    uid: int = 0  # CALLS: the stream
    from_seq: int = 0  # CALLS: omit calls before this sequence number
    to_seq: int = 0  # CALLS: omit calls after this one
    step: int = 1  # CALLS: only multiples of this power of two
    max_calls: int = 64  # CALLS, TRACE: the maximum number of calls; the newest are sent
    after: int = 0  # TRACE: index of the first record; -1: only new records
    op: str = ""  # TRACE: only this operation
    values: bool = False  # TRACE: include tensor statistics where the recorder has them
    last: bool = False  # TRACE: include unfinished calls, since no request will follow
    seconds: int = 0  # RECORD
    rate: int = 0  # RECORD: samples per second
    gil: bool = False  # RECORD: only threads that hold the GIL
    since_s: float = 0.0  # HARDWARE: age of the condition, whose changes are wanted
    whole_job: bool = False  # HARDWARE: include what examines all ranks of the job
    stops: str = ""  # RECORD: stop the recording of the command with this id, start none


@dataclass(frozen=True, kw_only=True)
class CommandReply:
    """The part that all replies to commands have."""

    key: Name  # the process that the command names
    request: str  # the command's id


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorStats:
    """Statistics of the finite values in a call's tensors; None where the result is not finite."""

    mean: Finite | None = None
    min: Finite | None = None
    max: Finite | None = None
    norm: Finite | None = None
    nonfinite: int = 0  # number of elements that are NaN or infinite


@dataclass(frozen=True, slots=True, kw_only=True)
class CallKind:
    """The properties that many calls share, sent once."""

    signature: Signature
    site: Site | None = None
    blocking: bool | None = None  # see `hangwatch.model.calls.Call`


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedCall:
    uid: int  # the stream
    seq: int
    kind: int  # index in `TraceReply.kinds`
    entered_s: float
    within_s: float | None = None  # upper bound of its duration; None if completion is not known
    pending: bool = False  # the call is known to be unfinished
    raised: bool = False
    values: TensorStats | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceReply(CommandReply):
    """The calls of one process, starting at the requested record, oldest first."""

    upto: int = 0  # index of the next record to request
    missed: int = 0  # records that were overwritten before they were read
    kinds: tuple[CallKind, ...] = ()
    calls: tuple[TracedCall, ...] = ()
    more: bool = False  # more calls are available than fit in one reply
    others: tuple[str, ...] = ()  # operations in the records that the request excluded
    error: str | None = None  # why no calls are available, with the remedy


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordingReply(CommandReply):
    """The profile of one process, or an error. A first reply only confirms the start."""

    begun: bool = False
    seconds: float = 0.0  # duration of the sampling
    profile: str = ""  # see `hangwatch.stacks.profile.pack_profile`
    note: str = ""  # what was requested and the recording lacks
    error: str | None = None  # includes the remedy
