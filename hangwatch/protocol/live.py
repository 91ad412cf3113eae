"""The parts of a heartbeat that are only sent on request: traced calls and sampled profiles.

Part of `hangwatch.protocol.heartbeat`; as there, times are ages in seconds at the time of sending.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hangwatch.model.calls import Signature, Site

# Limits of one recording.
MAX_RECORDING_S, MAX_RECORDING_HZ, MAX_RECORDING_SAMPLES = 300, 1000, 30_000


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorStats:
    """Statistics of the finite values in one call's tensors. None where the statistic itself is not
    finite.
    """

    mean: float | None = None
    min: float | None = None
    max: float | None = None
    norm: float | None = None
    nonfinite: int = 0  # number of elements that are NaN or infinite


@dataclass(frozen=True, slots=True, kw_only=True)
class CallKind:
    """The properties that many calls share, sent once."""

    signature: Signature
    site: Site | None = None
    blocking: bool | None = None  # see `hangwatch.model.calls.Call`


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedCall:
    uid: int  # of its stream
    seq: int
    kind: int  # index in `TraceReply.kinds`
    entered_s: float
    within_s: float | None = None  # upper bound of its duration; None if completion is not known
    pending: bool = False  # it is known to be unfinished
    raised: bool = False
    values: TensorStats | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceReply:
    """The calls of one process, starting at the requested record, oldest first."""

    key: str
    request: str  # the command's id
    upto: int = 0  # index of the next record to request
    missed: int = 0  # records that were overwritten before they were read
    kinds: tuple[CallKind, ...] = ()
    calls: tuple[TracedCall, ...] = ()
    more: bool = False  # more calls are available than fit in one reply
    others: tuple[str, ...] = ()  # operations in the records that the request excluded
    error: str | None = None  # why no calls are available, with the remedy


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordingReply:
    """The profile of one process, or an error. A first reply only confirms the start."""

    key: str
    request: str
    begun: bool = False
    seconds: float = 0.0  # duration of the sampling
    profile: str = ""  # see `hangwatch.stacks.profile.pack_profile`
    note: str = ""  # in what way the recording falls short of the request
    error: str | None = None  # includes the remedy


def decode_tensor_stats(data: Mapping[str, Any] | None) -> TensorStats | None:
    """Decodes a recorder's ``{"mean", "min", "max", "norm", "nonfinite"}``; None for None.

    Non-finite numbers become None, since JSON cannot represent them. Raises TypeError or ValueError
    for malformed data.
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
