"""The parts of a process's state: when it was reported, whether it runs, its declared phase, its
unfinished calls, and what its recorder failed to record.

Times (``_at``) are in seconds on the server's monotonic clock.

MERGED: What a host reported of its hardware for one attempt. Pure.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, replace

from hangwatch.model.hardware import Observation, UnavailableSource
from hangwatch.model.limits import FROZEN_AFTER_S, NOT_RUNNING_STATES
from hangwatch.protocol.heartbeat import HardwareReply

from .call_stream import CallStream

# Longer than py-spy stops a process while it samples a stack.
STOPPED_AFTER_S = 1.5


class FreezeReason(str, enum.Enum):
    """Why a live process runs no Python."""

    STOPPED = "stopped"
    UNINTERRUPTIBLE = "uninterruptible"
    GIL_HELD = "gil held"


@dataclass(slots=True, kw_only=True)
class ReportTimes:
    """When the server received reports about a process."""

    last_seen_at: float  # everything known of it was still true at this time
    previously_seen_at: float = 0.0  # the time of the heartbeat before the last, of any kind
    # The last terse heartbeat. It reports progress without positions: the process may be further
    # than its streams show.
    last_progress_at: float = 0.0
    # The last heartbeat that the server refused: the process runs, its positions are not updated.
    last_refused_at: float = 0.0
    updated_at: float = 0.0  # the last heartbeat with an update of this process

    @property
    def agent_seen_at(self) -> float:
        """When its node agent last sent a heartbeat, accepted or not."""
        return max(self.last_seen_at, self.last_progress_at, self.last_refused_at)


@dataclass(slots=True, kw_only=True)
class ProcessActivity:
    """Whether a process runs, as the kernel and the recorder's thread show it."""

    state: str = "?"  # one letter, as in /proc/PID/stat
    state_since: float = 0.0
    pulse_at: float | None = None  # when the recorder's thread last ran Python
    # When the main thread or that of the newest call last used a CPU or was ready to run.
    last_active_at: float = 0.0
    cpu_s: float = 0.0

    def find_kernel_reason(self, now: float) -> FreezeReason | None:
        """Why the kernel does not let it run, if that has lasted too long to be chance."""
        if self.state not in NOT_RUNNING_STATES:
            return None
        duration = now - self.state_since
        if self.state != "D" and duration >= STOPPED_AFTER_S:
            return FreezeReason.STOPPED
        if self.state == "D" and duration >= FROZEN_AFTER_S:
            return FreezeReason.UNINTERRUPTIBLE
        return None

    def has_lost_pulse(self, now: float) -> bool:
        """Whether the recorder's thread, which runs ten times a second, has not run for too long.
        The node agent reports its last run every second.
        """
        return self.pulse_at is not None and now - self.pulse_at >= FROZEN_AFTER_S


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """A phase that the training script declared with `hangwatch.phase`."""

    name: str
    began_at: float
    limit_s: float | None = None


@dataclass(slots=True, kw_only=True)
class OpenCalls:
    """The streams in which a process has unfinished calls, and when it last waited in a call."""

    unfinished_streams: tuple[CallStream, ...] = ()  # with a call not reported as complete
    blocked_streams: tuple[CallStream, ...] = ()  # of these, see `CallStream.blocks_thread`
    # The last interval in which it was blocked in a call: from when it was, or may have been,
    # blocked until its completion was reported.
    last_blocked: tuple[float, float] = (0.0, 0.0)
    has_concurrent_calls: bool = False  # two threads made calls on one group at the same time


@dataclass(frozen=True, slots=True)
class MessageMark:
    """The counters of the device when they were first read after the newest send or receive. What is
    queued beyond them was queued after that message.
    """

    message_at: float  # when the host queued it
    enqueued: Mapping[int, int]  # by stream uid; empty: they were not read since


@dataclass(frozen=True, slots=True)
class RecorderHealth:
    """What the recorder in a process failed to record. Immutable, so that processes share one."""

    dropped: int = 0  # calls and streams that were not recorded, and whose place is not known
    faults: tuple[str, ...] = ()  # messages about its own errors


HEALTHY_RECORDER = RecorderHealth()


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
