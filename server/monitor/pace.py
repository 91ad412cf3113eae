"""How fast a job trains, from samples of its step number."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

SAMPLE_INTERVAL_S = 1.0  # seconds
MAX_SAMPLES = 60
MIN_SPAN_S = 2.0  # seconds between the first and last sample, for a rate


@dataclass(slots=True)
class Pace:
    """The pace of one attempt. Times are the monotonic clock's."""

    _samples: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=MAX_SAMPLES))

    def record_step(self, step: int | None, now: float) -> None:
        if step is not None and (
            not self._samples or now - self._samples[-1][0] >= SAMPLE_INTERVAL_S
        ):
            self._samples.append((now, step))

    @property
    def steps_per_s(self) -> float | None:
        """Over the last minute at most; None while too little is known."""
        if not self._samples or (span := self._samples[-1][0] - self._samples[0][0]) < MIN_SPAN_S:
            return None
        return max(0.0, (self._samples[-1][1] - self._samples[0][1]) / span)
