"""Readings of all sources, and what changed between two of them. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from hangwatch.model.hardware import Observation, ObservedValue, UnavailableSource, Weight

MAX_BASELINES = 30  # one a minute
MAX_OBSERVATIONS = 128  # in one reply

_Key = tuple[str, str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What the sources said at one time, on the clock of `time.monotonic_ns`."""

    taken_ns: int
    observations: tuple[Observation, ...] = ()
    unavailable: tuple[UnavailableSource, ...] = ()


@dataclass(slots=True)
class Baselines:
    """Earlier readings, so that a change can be found although it took a while to suspect a hang."""

    _readings: deque[tuple[int, Mapping[_Key, ObservedValue]]] = field(
        default_factory=lambda: deque(maxlen=MAX_BASELINES)
    )

    def add_reading(self, reading: Reading) -> None:
        values = {_get_key(observation): observation.now for observation in reading.observations}
        self._readings.append((reading.taken_ns, values))

    def find_changes(self, reading: Reading, onset_ns: int) -> tuple[Observation, ...]:
        """The observations that changed since before ``onset_ns``, or that are abnormal or facts by
        themselves, the weightiest first.
        """
        before = self._choose_baseline(onset_ns)
        changes = sorted(
            _compare(reading.observations, before),
            key=lambda observation: list(Weight).index(observation.weight),
        )
        return tuple(changes[:MAX_OBSERVATIONS])

    def _choose_baseline(self, onset_ns: int) -> Mapping[_Key, ObservedValue]:
        """The newest reading from before the onset, or the oldest if all are later."""
        earlier = [values for taken_ns, values in self._readings if taken_ns <= onset_ns]
        if earlier:
            return earlier[-1]
        return self._readings[0][1] if self._readings else {}


def _compare(
    observations: Iterable[Observation], before: Mapping[_Key, ObservedValue]
) -> Iterator[Observation]:
    for observation in observations:
        earlier = before.get(_get_key(observation))
        has_changed = earlier is not None and earlier != observation.now
        if observation.weight is Weight.FACT or observation.is_abnormal or has_changed:
            yield replace(observation, before=earlier if has_changed else None)


def _get_key(observation: Observation) -> _Key:
    return observation.source, observation.about, observation.what
