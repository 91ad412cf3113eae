"""How fast a job steps: its step number, noted once in a while."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

EVERY = 1.0  # seconds between two notes
WINDOW = 60  # notes
STILL = 2.0  # the shortest span in seconds from which a rate is told


@dataclass(slots=True)
class Pace:
    """Of one attempt. Times are the monotonic clock's."""

    _notes: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=WINDOW))

    def note(self, step: int | None, now: float) -> None:
        if step is not None and (not self._notes or now - self._notes[-1][0] >= EVERY):
            self._notes.append((now, step))

    @property
    def steps_per_s(self) -> float | None:
        """Over the last minute at most; None while too little is known."""
        if not self._notes or (span := self._notes[-1][0] - self._notes[0][0]) < STILL:
            return None
        return max(0.0, (self._notes[-1][1] - self._notes[0][1]) / span)
