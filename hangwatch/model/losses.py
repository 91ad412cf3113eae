"""Why the calls of a stream are not recorded completely.

A rank that failed to record a call counts fewer calls than its peers, so that its numbers and running
hashes cannot be compared with theirs from there on.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass


class LossReason(enum.IntEnum):
    """The numbers are part of the ring's layout and of heartbeats."""

    UNKNOWN = 0  # of a newer writer
    FAULT = 1  # an error of the recorder's own
    RAISED = 2  # a call raised an exception, before or after it communicated
    LATE = 3  # recording began, or began again, after calls were made
    UNREADABLE = 4  # the ring could not be read for a time; the server's own reason

    @classmethod
    def from_number(cls, number: int) -> LossReason:
        return cls(number) if number in cls._value2member_map_ else cls.UNKNOWN

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
    """From call ``from_seq`` of a stream on, the numbers and hashes of its calls are not certain."""

    from_seq: int
    reason: LossReason = LossReason.UNKNOWN
