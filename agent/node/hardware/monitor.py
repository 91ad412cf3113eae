"""Reads the sources of a host: once a minute the counters, as a baseline, and everything on request.
A thread of its own does it, so that the node agent's loop never waits for a source.

A request gets what changed since the newest baseline from before the onset of the hang.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hangwatch.model.hardware import Observation, ObservedValue, UnavailableSource, Weight
from hangwatch.protocol.heartbeat import HardwareReply

from .host import Host
from .reader import SOURCES, TIME_LIMIT_S, ReaderProcess, Source, find_absence, read_source

BASELINE_INTERVAL_S = 60.0
_FIRST_BASELINE_S = 2.0  # the delay after the first rank was found, which still imports torch
MAX_BASELINES = 30  # half an hour
MAX_OBSERVATIONS = 128  # the limit of one reply
MAX_WAITING_ORDERS = 8

_Key = tuple[str, str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class HardwareOrder:
    """An order for one reading. Without a request, the reading is the next baseline."""

    pids: tuple[int, ...]
    key: str = ""
    request_id: str = ""
    onset_ns: int = 0


def _make_host(pids: tuple[int, ...]) -> Host:
    return Host.from_environ(os.environ, pids)


class HardwareMonitor:
    """The thread that reads the sources. `take_results` returns the replies to requests, and ``wake``
    is called for each.
    """

    def __init__(
        self,
        wake: Callable[[], None],
        *,
        make_host: Callable[[tuple[int, ...]], Host] = _make_host,
        sources: Sequence[Source] = SOURCES,
        reader: ReaderProcess | None = None,
        interval_s: float = BASELINE_INTERVAL_S,
    ) -> None:
        self._wake = wake
        self._make_host = make_host
        self._sources = sources
        self._reader = reader or ReaderProcess()
        self._interval_ns = int(interval_s * 1e9)
        self._baselines = Baselines()
        # Sources that this host lacks are not tried again for a baseline.
        self._absent: set[str] = set()
        self._next_baseline_ns = 0
        self._orders: queue.Queue[HardwareOrder] = queue.Queue(MAX_WAITING_ORDERS)
        self._results: queue.SimpleQueue[tuple[HardwareReply, int]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def update_baseline(self, pids: tuple[int, ...], now_ns: int) -> None:
        """Has the counters read if that is due. ``pids`` are the live ranks on this host."""
        if not pids:
            return
        if not self._next_baseline_ns:
            self._next_baseline_ns = now_ns + int(_FIRST_BASELINE_S * 1e9)
        if now_ns >= self._next_baseline_ns and self.request_reading(HardwareOrder(pids=pids)):
            self._next_baseline_ns = now_ns + self._interval_ns

    def take_results(self) -> list[tuple[HardwareReply, int]]:
        """The replies that are ready, each with the time at which its reading was taken."""
        return [self._results.get_nowait() for _ in range(self._results.qsize())]

    def request_reading(self, order: HardwareOrder) -> bool:
        """Returns False if too many readings are queued."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run_worker, name="hardware", daemon=True)
            self._thread.start()
        try:
            self._orders.put_nowait(order)
        except queue.Full:
            return False
        return True

    def _run_worker(self) -> None:
        while True:
            order = self._orders.get()
            try:
                self._execute_order(order)
            except Exception as error:  # every request gets a reply, and the thread continues
                reason = f"hangwatch failed to read them: {type(error).__name__}: {error}"
                failed = UnavailableSource(source="all", reason=reason, remedy="please report this")
                self._add_result(order, time.monotonic_ns(), unavailable=(failed,))

    def _execute_order(self, order: HardwareOrder) -> None:
        host = self._make_host(order.pids)
        if not order.request_id:
            counted = [s for s in self._sources if s.has_counters and s.name not in self._absent]
            reading = self._read_sources(counted, host)
            self._absent.update(missing.source for missing in reading.unavailable)
            self._baselines.add_reading(reading)
            return
        reading = self._read_sources(self._sources, host)
        observations = self._baselines.find_changes(reading, order.onset_ns)
        self._add_result(
            order,
            reading.taken_ns,
            observations=observations,
            unavailable=reading.unavailable,
        )

    def _add_result(self, order: HardwareOrder, taken_ns: int, **parts: Any) -> None:
        if order.request_id:
            reply = HardwareReply(key=order.key, request=order.request_id, **parts)
            self._results.put((reply, taken_ns))
            self._wake()

    def _read_sources(self, sources: Sequence[Source], host: Host) -> Reading:
        """Reads these sources. Those that may block are read at the same time, and have one time
        limit together.
        """
        observations: list[Observation] = []
        unavailable: list[UnavailableSource] = []
        give_up_at = time.monotonic() + TIME_LIMIT_S
        absences = [find_absence(source, host) for source in sources]
        unavailable += [absence for absence in absences if absence is not None]
        present = [
            source for source, absence in zip(sources, absences, strict=True) if absence is None
        ]
        blocking = [source for source in present if source.may_block]
        try:
            if blocking:
                self._reader.start_reading(blocking, host)
        except OSError as error:
            reason = f"its reader cannot be started: {error.strerror}"
            unavailable += [
                UnavailableSource(source=source.name, reason=reason) for source in blocking
            ]
            blocking = []
        results = [read_source(source, host) for source in present if not source.may_block]
        taken_ns = time.monotonic_ns()
        if blocking:
            results += self._reader.collect(give_up_at - time.monotonic())
        for found, missing in results:
            observations += found
            unavailable += [missing] if missing else []
        return Reading(
            taken_ns=taken_ns,
            observations=tuple(observations),
            unavailable=tuple(unavailable),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """The results of the sources at one time, on the clock of `time.monotonic_ns`."""

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
        themselves, the weightiest first. They are compared with the newest baseline from before the
        onset, or with the oldest if all are later.
        """
        baseline = self._readings[0][1] if self._readings else {}
        for taken_ns, values in self._readings:
            if taken_ns <= onset_ns:
                baseline = values
        changes: list[Observation] = []
        for observation in reading.observations:
            before = baseline.get(_get_key(observation))
            has_changed = before is not None and before != observation.now
            if observation.weight is Weight.FACT or observation.is_abnormal or has_changed:
                changes.append(replace(observation, before=before if has_changed else None))
        changes.sort(key=lambda observation: list(Weight).index(observation.weight))
        return tuple(changes[:MAX_OBSERVATIONS])


def _get_key(observation: Observation) -> _Key:
    return observation.source, observation.about, observation.what
