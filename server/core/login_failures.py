"""Limits how many wrong tokens may be tried at the login."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

MAX_FAILURES, FAILURE_WINDOW_S = 10, 300.0  # from one address
_MAX_KEPT_ADDRESSES = 10_000


@dataclass(slots=True)
class LoginFailures:
    """The times of recent wrong tokens, by address."""

    _failed_at: dict[str, deque[float]] = field(default_factory=dict)

    def wait_s(self, address: str, now: float) -> float:
        """Seconds until another attempt is accepted."""
        times = self._failed_at.get(address, deque())
        while times and now - times[0] >= FAILURE_WINDOW_S:
            times.popleft()
        return FAILURE_WINDOW_S - (now - times[0]) if len(times) >= MAX_FAILURES else 0.0

    def add_failure(self, address: str, now: float) -> None:
        self._failed_at.setdefault(address, deque(maxlen=MAX_FAILURES)).append(now)
        while len(self._failed_at) > _MAX_KEPT_ADDRESSES:
            del self._failed_at[next(iter(self._failed_at))]
