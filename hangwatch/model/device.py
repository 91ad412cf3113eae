"""How far the device of one rank has come in the collectives of one process group."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceProgress:
    """The counters that a backend keeps of one process group, on one rank.

    They count the backend's own collectives: a coalesced block counts once. So they may be compared
    between the members of a group, but not with a `CallStream`'s sequence numbers. All three are
    the number of the last collective, -1 if there is none.

    Source: ``pg_status`` of PyTorch's Flight Recorder (torch/csrc/distributed/c10d/FlightRecorder.hpp).
    """

    enqueued: int  # the host has queued it
    # The device has begun it. None: the backend does not record starts, as NCCL without
    # TORCH_NCCL_ENABLE_TIMING=1.
    started: int | None
    completed: int
    read_at: float  # when the counters were read, in seconds on the server's monotonic clock
    source: str = "flight recorder"

    @property
    def is_behind_host(self) -> bool:
        """Whether the host has queued collectives that the device has not completed."""
        return self.completed < self.enqueued


@dataclass(frozen=True, slots=True, kw_only=True)
class DevicePosition:
    """The device progress of one rank in one group, as evidence of an incident."""

    rank: int
    group: str  # its name
    enqueued: int
    started: int | None = None
    completed: int
    source: str = "flight recorder"
    age_s: float = 0.0  # of the counters, when they became evidence

    @property
    def counters(self) -> tuple[int, int | None, int]:
        return self.enqueued, self.started, self.completed
