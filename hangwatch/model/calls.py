"""Recorded calls: their signatures and positions in a stream, the hashes by which ranks are compared,
and the losses after which they cannot be.

The hash of a signature is equal in every process. A rank that failed to record a call counts fewer
calls than its peers, so that from there on neither its numbers nor its running hashes can be compared
with theirs.
"""

from __future__ import annotations

import enum
import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

from .bounds import Hash64
from .operators import OPERATIONS, MustMatch

JsonObject = dict[str, Any]
IntLists = tuple[tuple[int, ...], ...]
Splits = tuple[tuple[int, ...], tuple[int, ...]]

UINT64_MASK = (1 << 64) - 1
UNKNOWN_OP = "?"  # the operation of a call whose signature is lost
GRAPH_REPLAY = "graph_replay"  # the operation of a replay of a CUDA graph with collectives
_MESSAGE = "message"  # what is hashed for the operation of both ends of a channel
ANY_SOURCE = -1  # the peer of a receive that takes a message of any rank
_FIRST_INVALID_PEER = -(1 << 32)  # the peer for the argument 0, see `encode_invalid_peer`
CHAIN_BASE = 0x9E3779B97F4A7C15  # 2**64 / golden ratio: odd, with evenly distributed bits
_CHAIN_BASE_INVERSE = pow(CHAIN_BASE, -1, 1 << 64)


class StreamKind(str, enum.Enum):
    """The kind of a stream of calls, which determines the calls it must match."""

    COLLECTIVE = "collective"  # the calls of one process group, equal on every member
    # init_process_group, new_group, destroy_process_group: equal on every rank of a world.
    SETUP = "setup"
    SEND = "send"  # sends to one peer with one tag; each matches one receive of the peer
    RECV = "recv"


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """A location in source code."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.file.rsplit('/', 1)[-1]}:{self.line} in {self.function}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Signature:
    """The arguments of a call that may differ from those of another rank.

    ``shapes`` are those of the tensors named in `hangwatch.model.operators`; a long list is
    truncated and ends with an empty shape. ``agree`` is the 64-bit hash of the arguments that must
    be equal on every rank of the group.
    """

    op: str
    shapes: IntLists = ()
    dtype: str | None = None
    reduce_op: str | None = None
    root: int | None = None
    # Elements (sent to, received from) each member; a single number means an even split. With a root, the
    # list of each member is on the root, and the other members have a single number on one side.
    splits: Splits | None = None
    # Anything else that must be equal, such as the ranks of a group that is being created.
    detail: str | None = None
    numel: int = 0
    agree: Hash64 = 0

    @property
    def title(self) -> str:
        """The operation as texts call it.

        >>> Signature(op=GRAPH_REPLAY, detail="2 collectives (all_reduce), hash 1f").title
        'the replay of a CUDA graph with 2 collectives (all_reduce)'
        """
        if self.op != GRAPH_REPLAY:
            return self.op
        contents, _, _ = (self.detail or "").partition(", hash ")
        return f"the replay of a CUDA graph{' with ' if contents else ''}{contents}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One recorded call. ``seq`` is its sequence number, from 1, in its stream on one rank."""

    seq: int
    signature: Signature
    site: Site | None = None
    chain: Hash64 = 0  # running hash of the stream after this call; 0 if unknown
    entered_s: float = 0.0  # the age of the call in seconds when it was read
    duration_s: float | None = None  # None while it is not known to be complete
    blocking: bool | None = None  # the calling thread waits in it; None if torch does not say
    thread: int = 0  # the operating system's id of the thread that made it
    peer: int | None = None  # the global rank of a point-to-point call's peer
    raised: bool = False  # the call raised an exception
    # The call that raised an exception before it communicated, and would have had this number.
    preceded_by: Call | None = None


class LossReason(enum.IntEnum):
    """Why a call was not recorded. The numbers are part of the ring's layout and of heartbeats."""

    UNKNOWN = 0  # also any other number, which only a newer writer knows
    FAULT = 1  # the recorder itself failed
    RAISED = 2  # a call raised an exception, before or after it communicated
    LATE = 3  # recording began, or began again, after calls were made
    UNREADABLE = 4  # the ring could not be read for a time; the server's own reason

    @classmethod
    def _missing_(cls, value: object) -> LossReason:
        return cls.UNKNOWN

    @property
    def description(self) -> str:
        """A clause that follows "because"."""
        return _DESCRIPTIONS[self]


_DESCRIPTIONS = {
    LossReason.UNKNOWN: "its recorder lost calls",
    LossReason.FAULT: "its recorder failed to record a call",
    LossReason.RAISED: "a call raised an exception, and whether it communicated is not known",
    LossReason.UNREADABLE: "its ring could not be read",
    LossReason.LATE: "its recorder was not active from the beginning",
}


@dataclass(frozen=True, slots=True)
class Loss:
    """A stream whose numbers and hashes are not certain from call ``from_seq`` on."""

    from_seq: int
    reason: LossReason = LossReason.UNKNOWN


def encode_invalid_peer(argument: int) -> int:
    """The peer of a send or a receive whose argument is no rank of its group. Neither a rank, nor
    `ANY_SOURCE`, nor a member of another job has this number.
    """
    return _FIRST_INVALID_PEER + argument


def decode_invalid_peer(peer: int | None) -> int | None:
    """The argument of which `encode_invalid_peer` made this peer; None for other peers.

    >>> decode_invalid_peer(encode_invalid_peer(-1)), decode_invalid_peer(ANY_SOURCE)
    (-1, None)
    """
    if peer is None or peer >= _FIRST_INVALID_PEER // 2:
        return None
    return peer - _FIRST_INVALID_PEER


def with_agreement_hash(
    signature: Signature, must_match: MustMatch, numels: tuple[int, ...]
) -> Signature:
    """``signature`` with its hash set; ``numels`` are the element counts of its tensors.

    Element counts are compared instead of shapes: backends transfer elements, and a rank may
    legally pass a view of another shape. A send has the hash of the receive that it matches.
    """
    arguments = {
        MustMatch.DTYPE: f"dtype={signature.dtype}",
        MustMatch.SHAPE: f"numels={numels}",
        MustMatch.REDUCE_OP: f"reduce={signature.reduce_op}",
        MustMatch.ROOT: f"root={signature.root}",
    }
    spec = OPERATIONS.get(signature.op)
    operation = _MESSAGE if spec is not None and spec.is_p2p else signature.op
    parts = [operation]
    parts += [text for flag, text in arguments.items() if flag in must_match]
    if signature.detail is not None:
        parts.append(signature.detail)
    digest = hashlib.blake2b("|".join(parts).encode(), digest_size=8).digest()
    return replace(signature, agree=int.from_bytes(digest, "little") or 1)


def extend_chain(previous: int, agreement_hash: int) -> int:
    """The running hash of a stream after a call, from its previous value and the call's hash.

    A polynomial in an odd base modulo 2**64 (Karp and Rabin, 1987): a single differing call always
    changes the result.
    """
    return (previous * CHAIN_BASE + agreement_hash) & UINT64_MASK


def unchain(after: int, agreement_hash: int) -> int:
    """The running hash before a call, from the one after it.

    >>> unchain(extend_chain(5, 7), 7)
    5
    """
    return (after - agreement_hash) * _CHAIN_BASE_INVERSE & UINT64_MASK


def encode_signature(signature: Signature) -> JsonObject:
    """The JSON data in a ring; fields equal to their default are omitted."""
    data = {}
    for field in fields(signature):
        value = getattr(signature, field.name)
        if value != field.default:
            data[field.name] = value
    return data


def _parse_number(value: Any) -> float:
    """Raises ValueError for NaN, which no range excludes, and for infinite numbers."""
    try:
        number = float(value)
    except OverflowError as error:
        raise ValueError("a number that is too large") from error
    if not math.isfinite(number):
        raise ValueError(f"{number} where a number should be")
    return number


def _parse_int(value: Any) -> int:
    return value if type(value) is int else int(_parse_number(value))


def _parse_int_lists(value: Any) -> IntLists:
    return tuple(tuple(map(_parse_int, items)) for items in value)


# The functions that convert a value to the type of a field, by its annotation.
_CONVERTERS: dict[str, Callable[[Any], Any]] = {
    "bool": bool,
    "int": _parse_int,
    "int | None": _parse_int,
    "Rank": _parse_int,
    "RankCount": _parse_int,
    "RestartCount": _parse_int,
    "Hash64": _parse_int,
    "float": _parse_number,
    "float | None": _parse_number,
    "str": str,
    "str | None": str,
    "Name": str,
    "IntLists": _parse_int_lists,
    "Splits | None": lambda sides: _parse_int_lists((sides[0], sides[1])),
}


def decode_fields(kind: type, data: JsonObject) -> JsonObject:
    """The values of a dataclass's simple fields in ``data``, converted to the fields' types. Others
    are left out, and so have their defaults. Raises IndexError, KeyError, TypeError or ValueError for
    malformed data.
    """
    values = {}
    for field in fields(kind):
        convert = _CONVERTERS.get(str(field.type))
        if convert is None or field.name not in data:
            continue
        value = data[field.name]
        if value is not None or field.default is not None:
            values[field.name] = convert(value)
    return values
