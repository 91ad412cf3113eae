"""The two clocks that the server reads, as a parameter."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone

_CROCKFORD = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"


@dataclass(frozen=True, slots=True, kw_only=True)
class Clock:
    """``monotonic`` in seconds orders what happens here; ``wall`` dates it for people."""

    monotonic: Callable[[], float] = time.monotonic
    wall: Callable[[], datetime] = lambda: datetime.now(timezone.utc)

    def date(self, at: float) -> datetime:
        """A moment of the monotonic clock as a date, to the millisecond."""
        moment = self.wall() - timedelta(seconds=self.monotonic() - at)
        return moment.replace(microsecond=moment.microsecond // 1000 * 1000)

    def monotonic_at(self, moment: datetime) -> float:
        """The monotonic clock's time at that moment."""
        return self.monotonic() - (self.wall() - moment).total_seconds()


def ulid(wall: datetime) -> str:
    """A new ULID: 48 bits of milliseconds and 80 random bits in Crockford's base 32, so that ids sort
    by time. Layout: github.com/ulid/spec.
    """
    number = (int(wall.timestamp() * 1000) & ((1 << 48) - 1)) << 80 | secrets.randbits(80)
    return "".join(_CROCKFORD[number >> shift & 31] for shift in range(125, -1, -5))
