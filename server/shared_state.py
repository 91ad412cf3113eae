"""The state that the parts of the server share: what heartbeats build up, what is concluded from it,
and what was requested.

Everything here is changed on the event loop's thread only. A large attempt is read in another
thread, while its heartbeats are queued, so that the state does not change meanwhile.
"""

from __future__ import annotations

import asyncio

from hangwatch.tracking.attempt import Attempt
from hangwatch.tracking.fleet import Fleet

from .core.clock import Clock, ulid
from .core.events import EventLog
from .core.load import Load
from .core.supervision import Counters, FailureLog
from .incidents.registry import IncidentRecord, IncidentRegistry
from .ingest.command_queue import CommandQueue
from .ondemand.dumps import DumpRegistry
from .ondemand.recordings import RecordingRegistry
from .ondemand.traces import TraceRegistry
from .performance.totals import PerformanceTotals


class SharedState:
    """Passed to every part of the server in place of ten arguments."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.fleet = Fleet()  # the jobs, their attempts and processes
        self.agents = self.fleet.agents
        self.performance = PerformanceTotals()
        self.incidents = IncidentRegistry(clock=clock)
        self.commands = CommandQueue(clock=clock)  # what node agents should do
        self.dumps = DumpRegistry(clock=clock, command_queue=self.commands)
        self.recordings = RecordingRegistry(clock=clock, command_queue=self.commands)
        self.traces = TraceRegistry(clock=clock, command_queue=self.commands)
        self.events = EventLog(run_id=ulid(clock.wall()))  # what API clients and pages follow
        self.load = Load()
        self.counters = Counters()
        self.failures = FailureLog()  # errors in work that continues with the next job or incident
        # A heartbeat that may change a verdict arrived since the last round of the diagnosis.
        self.has_changes = asyncio.Event()

    def now(self) -> float:
        """Seconds on the monotonic clock."""
        return self.clock.monotonic()

    def awaits_stacks(self, record: IncidentRecord, attempt: Attempt) -> bool:
        """Whether some culprit's stack was requested and has not arrived."""
        ranks_with_stack = {rank for entry in record.incident.stacks for rank in entry.ranks}
        return any(
            process.rank not in ranks_with_stack
            and process.is_alive
            and self.commands.awaits_stacks(process)
            for process in attempt.find_processes(record.incident.culprits)
        )
