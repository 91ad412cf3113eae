"""What a heartbeat carries only while somebody looks on: calls as they are made, and where a rank
spends its time.

Part of `hangwatch.protocol.heartbeat`. Times are ages in seconds at the moment of sending, as
there.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hangwatch.model.calls import Signature, Site

MAX_RECORDING_S, MAX_RECORDING_HZ, MAX_RECORDING_SAMPLES = 300, 1000, 30_000  # of one recording


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorStats:
    """What the tensors of one call held. None where that is no finite number, as the mean of a
    tensor with a NaN in it.
    """

    mean: float | None = None
    min: float | None = None
    max: float | None = None
    norm: float | None = None
    nonfinite: int = 0  # how many elements are NaN or infinite


@dataclass(frozen=True, slots=True, kw_only=True)
class CallKind:
    """What many calls have in common."""

    signature: Signature
    site: Site | None = None
    blocking: bool | None = None  # see `hangwatch.model.calls.Call`


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedCall:
    uid: int  # of its sequence
    seq: int
    kind: int  # its place in `TraceReply.kinds`
    entered_s: float
    within_s: float | None = (
        None  # it took so long at most; None where it is not known to be complete
    )
    pending: bool = False  # it is known not to be
    raised: bool = False
    values: TensorStats | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceReply:
    """The calls of one process from a record on, oldest first."""

    key: str
    request: str  # the command's id
    upto: int = 0  # the record from which to go on
    missed: int = 0  # records that were overwritten before they were read
    kinds: tuple[CallKind, ...] = ()
    calls: tuple[TracedCall, ...] = ()
    more: bool = False  # there were more calls than could be told at once
    others: tuple[str, ...] = ()  # operations among the records that were not asked for
    error: str | None = None  # why there will be none, with the remedy


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordingReply:
    """Where one process spent its time, or why that is not known; first of all only that the
    recording has begun.
    """

    key: str
    request: str
    begun: bool = False
    seconds: float = 0.0  # how long it was sampled
    profile: str = ""  # see `hangwatch.stacks.profile.pack`
    note: str = ""  # what is less than was asked for
    error: str | None = None  # with the remedy in it


def decode_tensor_stats(data: Mapping[str, Any] | None) -> TensorStats | None:
    """From a recorder's ``{"mean", "min", "max", "norm", "nonfinite"}``; None for None. Raises
    TypeError or ValueError for nonsense.

    JSON has no NaN: what is not finite becomes None.
    """
    if data is None:
        return None

    def finite_or_none(name: str) -> float | None:
        value = data.get(name)
        return None if value is None or not math.isfinite(value) else float(value)

    return TensorStats(
        mean=finite_or_none("mean"),
        min=finite_or_none("min"),
        max=finite_or_none("max"),
        norm=finite_or_none("norm"),
        nonfinite=int(data.get("nonfinite", 0)),
    )
