"""The requests that the server sends to a node agent with its reply to a heartbeat."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class CommandKind(str, enum.Enum):
    """The requests that a server can send to a node agent."""

    STACKS = "stacks"
    CALLS = "calls"
    ABORT = "abort"  # end this process
    TRACE = "trace"
    RECORD = "record"
    HARDWARE = "hardware"  # what the host knows of its links and devices


def allows_abort(on_hang: str) -> bool:
    """Whether this value of HANGWATCH_ON_HANG lets the server end the job's processes. Only the job's
    owner can allow it: a server's order alone ends nothing.
    """
    return on_hang.strip().lower() == "abort"


@dataclass(frozen=True, kw_only=True)
class Command:
    id: str
    ask: CommandKind
    key: str
    native: bool = False  # STACKS, RECORD: with native frames
    uid: int = 0  # CALLS: the stream
    from_seq: int = 0  # CALLS: omit calls before this sequence number
    to_seq: int = 0  # CALLS: and those after this one; 0: up to the newest
    step: int = 1  # CALLS: only multiples of this power of two
    most: int = 64  # CALLS, TRACE: the maximum number of calls; the newest are sent
    after: int = 0  # TRACE: index of the first record; -1: only new records
    op: str = ""  # TRACE: only this operation
    values: bool = False  # TRACE: include tensor statistics where the recorder has them
    last: bool = False  # TRACE: include unfinished calls, since no request will follow
    seconds: int = 0  # RECORD
    rate: int = 0  # RECORD: samples per second
    gil: bool = False  # RECORD: only threads that hold the GIL
    since_s: float = 0.0  # HARDWARE: age of the condition, whose changes are wanted
    ends: str = ""  # RECORD: stop the recording of the command with this id, start none
