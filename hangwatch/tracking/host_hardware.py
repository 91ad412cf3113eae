"""What a host reported of its hardware for one attempt. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace

from hangwatch.model.hardware import Observation, UnavailableSource
from hangwatch.protocol.hardware import HardwareReply

MAX_OBSERVATIONS_KEPT = 128  # of a host
MAX_TEXT_CHARS = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class HostHardware:
    """The newest reading."""

    taken_at: float
    observations: tuple[Observation, ...]
    unavailable: tuple[UnavailableSource, ...]


def make_host_hardware(reply: HardwareReply, now: float) -> HostHardware:
    """From a reply that was received at ``now``. What exceeds the limits is left out."""
    return HostHardware(
        taken_at=now - max(0.0, reply.taken_s),
        observations=tuple(_limit_texts(o) for o in reply.observations[:MAX_OBSERVATIONS_KEPT]),
        unavailable=tuple(_limit_gap(gap) for gap in reply.unavailable[:MAX_OBSERVATIONS_KEPT]),
    )


def _limit_gap(gap: UnavailableSource) -> UnavailableSource:
    return UnavailableSource(
        source=gap.source[:MAX_TEXT_CHARS],
        reason=gap.reason[:MAX_TEXT_CHARS],
        remedy=gap.remedy[:MAX_TEXT_CHARS],
    )


def _limit_texts(observation: Observation) -> Observation:
    now, before = observation.now, observation.before
    return replace(
        observation,
        source=observation.source[:MAX_TEXT_CHARS],
        about=observation.about[:MAX_TEXT_CHARS],
        what=observation.what[:MAX_TEXT_CHARS],
        now=now[:MAX_TEXT_CHARS] if isinstance(now, str) else now,
        before=before[:MAX_TEXT_CHARS] if isinstance(before, str) else before,
    )
