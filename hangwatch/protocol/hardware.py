"""The part of a heartbeat that says what the host knows: sent on request only."""

from __future__ import annotations

from dataclasses import dataclass

from hangwatch.model.hardware import Observation, UnavailableSource


@dataclass(frozen=True, kw_only=True)
class HardwareReply:
    """What changed on the host since before the hang, and what is abnormal."""

    key: str  # of the process whose command this answers
    request: str  # the command's id
    taken_s: float = 0.0  # age of the reading
    observations: tuple[Observation, ...] = ()
    unavailable: tuple[UnavailableSource, ...] = ()
