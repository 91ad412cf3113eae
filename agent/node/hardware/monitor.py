"""Reads the sources of a host: once a minute the counters, as a baseline, and everything on request.
A thread of its own does it, so that the node agent's loop never waits for a source.

A request gets what changed since the newest baseline from before the onset of the hang.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from hangwatch.model.hardware import Observation, UnavailableSource, Weight
from hangwatch.protocol.commands import Command
from hangwatch.protocol.heartbeat import HardwareReply

from ..system.runtime import OrderWorker
from .host import Host
from .reader import SOURCES, ReaderProcess, Reading, Source

BASELINE_INTERVAL_S = 60.0
_FIRST_BASELINE_S = 2.0  # the delay after the first rank was found, which still imports torch
MAX_BASELINES = 30  # half an hour
MAX_OBSERVATIONS = 128  # the limit of one reply
MAX_WAITING_ORDERS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class HardwareOrder:
    """An order for one reading. Without a command, the reading is the next baseline."""

    pids: tuple[int, ...]
    command: Command | None = None
    onset_ns: int = 0


class HardwareMonitor(OrderWorker[HardwareOrder, tuple[HardwareReply, int]]):
    """The thread that reads the sources. Each reply has the time at which it was read."""

    def __init__(
        self,
        wake: Callable[[], None],
        *,
        make_host: Callable[[tuple[int, ...]], Host] = Host.from_environ,
        sources: Sequence[Source] = SOURCES,
        reader: ReaderProcess | None = None,
        interval_s: float = BASELINE_INTERVAL_S,
    ) -> None:
        super().__init__("hardware", wake, max_waiting=MAX_WAITING_ORDERS)
        self._make_host = make_host
        self._sources = sources
        self._reader = reader or ReaderProcess()
        self._interval_ns = int(interval_s * 1e9)
        # A change can be found although it took a while to suspect a hang.
        self._baselines: deque[Reading] = deque(maxlen=MAX_BASELINES)
        # Sources that this host lacks are not tried again for a baseline.
        self._absent: set[str] = set()
        self._next_baseline_ns = 0
        self._job_findings = Reading(taken_ns=0)

    def update_baseline(self, pids: tuple[int, ...], now_ns: int) -> None:
        """Has the counters read if that is due. ``pids`` are the live ranks on this host."""
        if not pids:
            return
        if not self._next_baseline_ns:
            self._next_baseline_ns = now_ns + int(_FIRST_BASELINE_S * 1e9)
        if now_ns >= self._next_baseline_ns and self.submit_order(HardwareOrder(pids=pids)):
            self._next_baseline_ns = now_ns + self._interval_ns

    def execute_order(self, order: HardwareOrder) -> tuple[HardwareReply, int] | None:
        host = self._make_host(order.pids)
        command = order.command
        if command is None:
            counted = [s for s in self._sources if s.has_counters and s.name not in self._absent]
            reading = self._reader.read_sources(counted, host)
            self._absent.update(missing.source for missing in reading.unavailable)
            self._baselines.append(reading)
            return None
        sources = [s for s in self._sources if command.whole_job or not s.examines_job]
        reading = self._reader.read_sources(sources, host)
        if command.whole_job:
            self._keep_job_findings(reading)
        elif self._job_findings.taken_ns >= order.onset_ns:
            reading = self._add_job_findings(reading)
        reply = HardwareReply(
            key=command.key,
            request=command.id,
            observations=find_changes(reading, self._baselines, order.onset_ns),
            unavailable=reading.unavailable,
        )
        return reply, reading.taken_ns

    def _keep_job_findings(self, reading: Reading) -> None:
        names = [source.name for source in self._sources if source.examines_job]
        found = [item for item in reading.observations if item.source in names]
        self._job_findings = Reading(taken_ns=reading.taken_ns, observations=tuple(found))

    def _add_job_findings(self, reading: Reading) -> Reading:
        """Adds what was found out about the whole job, which is not done again for one hang."""
        age_s = (reading.taken_ns - self._job_findings.taken_ns) / 1e9
        found = [replace(item, age_s=age_s) for item in self._job_findings.observations]
        return replace(reading, observations=(*reading.observations, *found))

    def explain_failure(self, order: HardwareOrder, error: str) -> tuple[HardwareReply, int] | None:
        if order.command is None:
            return None
        reason = f"hangwatch failed to read them: {error}"
        failed = UnavailableSource(source="all", reason=reason, remedy="please report this")
        return refuse_reading(order.command, failed), time.monotonic_ns()


def refuse_reading(command: Command, problem: UnavailableSource) -> HardwareReply:
    """The reply where no source can be read."""
    return HardwareReply(key=command.key, request=command.id, unavailable=(problem,))


def find_changes(
    reading: Reading, baselines: Iterable[Reading], onset_ns: int
) -> tuple[Observation, ...]:
    """The observations that changed since before ``onset_ns``, or that are abnormal or facts by
    themselves, the weightiest first. They are compared with the newest baseline from before the
    onset, or with the oldest if all are later.
    """
    compared: tuple[Observation, ...] | None = None
    for earlier in baselines:
        if compared is None or earlier.taken_ns <= onset_ns:
            compared = earlier.observations
    values = {_get_key(observation): observation.now for observation in compared or ()}
    changes = []
    for observation in reading.observations:
        before = values.get(_get_key(observation))
        if before is not None and before != observation.now:
            changes.append(replace(observation, before=before))
        elif observation.weight is Weight.FACT or observation.is_abnormal:
            changes.append(observation)
    changes.sort(key=lambda observation: list(Weight).index(observation.weight))
    return tuple(changes[:MAX_OBSERVATIONS])


def _get_key(observation: Observation) -> tuple[str, str, str]:
    return observation.source, observation.about, observation.what
