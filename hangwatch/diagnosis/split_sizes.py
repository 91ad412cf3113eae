"""Split sizes that two ranks exchange in an all-to-all."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitExchange:
    """What one rank of an all-to-all sends to another one, and what the receiver expects from it,
    in elements.
    """

    sender: int
    receiver: int
    sent: float
    expected: float
