"""What a rank's Flight Recorder file says about its unfinished calls. torch's watchdog writes the
file when a collective times out.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class UnfinishedCall:
    """The first collective of a group that had not completed when the file was written."""

    group: str
    desc: str = ""
    seq: int
    op: str
    shapes: tuple[tuple[int, ...], ...] = ()  # of the inputs
    state: str = ""  # as torch writes it: "scheduled" or "started"
    waited_s: float  # from its call to the writing of the file
    timeout_s: float | None = None

    @property
    def has_timed_out(self) -> bool:
        return self.timeout_s is not None and self.waited_s >= self.timeout_s


@dataclass(frozen=True, slots=True, kw_only=True)
class FlightFile:
    """A file of one rank, on the rank's host. ``error`` says why it could not be read."""

    path: str
    calls: tuple[UnfinishedCall, ...] = ()  # the one that waited longest is first
    error: str | None = None
