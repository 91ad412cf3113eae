"""The state of one training process, as reported by its node agent."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from hangwatch.model.groups import Group
from hangwatch.model.limits import FROZEN_AFTER_S, MIN_WAIT_S, NOT_RUNNING_STATES
from hangwatch.model.ranks import ExceptionInfo, ExitInfo, Lifecycle
from hangwatch.model.threads import ThreadStack
from hangwatch.protocol import heartbeat

from .call_stream import CallStream

IDLE_AFTER_S = 1.0  # a thread that used no CPU for this long is waiting

# Longer than py-spy stops a process while it samples a stack.
STOPPED_AFTER_S = 1.5


class FreezeReason(str, enum.Enum):
    """Why a live process runs no Python."""

    STOPPED = "stopped"
    UNINTERRUPTIBLE = "uninterruptible"
    GIL_HELD = "gil held"


@dataclass(slots=True, kw_only=True)
class StackSample:
    """The stacks of a process at one moment. ``taken_at`` is on the server's monotonic clock."""

    request: str
    source: str
    taken_at: float
    native: bool = False
    threads: tuple[ThreadStack, ...] = ()
    error: str | None = None

    @property
    def main_thread(self) -> ThreadStack | None:
        return next((t for t in self.threads if t.main), self.threads[0] if self.threads else None)

    @property
    def gil_holder(self) -> ThreadStack | None:
        return next((t for t in self.threads if t.holds_gil and t.pid is None), None)


@dataclass(slots=True, kw_only=True)
class Process:
    """One training process, the current holder of its rank or a former one.

    Times (``_at``) are in seconds on the server's monotonic clock.
    """

    key: str
    host: str
    agent: str = ""  # the node agent that reports it
    identity: heartbeat.ProcessIdentity
    started_at: float
    last_seen_at: float  # everything known of it was still true at this time
    previously_seen_at: float = 0.0  # the time of the heartbeat before the last, of any kind
    # The last terse heartbeat. It reports progress without positions: the process may be further
    # than its streams show.
    last_progress_at: float = 0.0
    # The last heartbeat that the server refused: the process runs, its positions are not updated.
    last_refused_at: float = 0.0
    reported_at: float = 0.0  # the last heartbeat with an update of this process
    lifecycle: Lifecycle = Lifecycle.ALIVE
    step: int | None = None
    phase: str | None = None
    phase_began_at: float = 0.0
    phase_limit_s: float | None = None
    pulse_at: float | None = None
    state: str = "?"
    state_since: float = 0.0
    last_active_at: float = 0.0  # when the main thread last used a CPU or was ready to run
    cpu_s: float = 0.0
    exit: ExitInfo | None = None
    exited_at: float | None = None
    exception: ExceptionInfo | None = None
    exception_at: float | None = None
    dropped: int = 0
    overflows: int = 0
    faults: tuple[str, ...] = ()
    # The environment variable that makes the backend report the device's progress; empty if it
    # does, or cannot.
    device_variable: str = ""
    streams: dict[int, CallStream] = field(default_factory=dict)
    unfinished_streams: tuple[CallStream, ...] = ()  # with a call not reported as complete
    blocked_streams: tuple[CallStream, ...] = ()  # of these, see `CallStream.blocks_thread`
    newest_call_at: float = 0.0  # when it last entered a call
    samples: list[StackSample] = field(default_factory=list)  # newest last
    # The last interval in which it was blocked in a call: from when it was, or may have been,
    # blocked until its completion was reported.
    last_blocked: tuple[float, float] = (0.0, 0.0)
    has_concurrent_calls: bool = False  # two threads made calls on one group at the same time
    finished_reporting: bool = False  # its agent has reported all there is

    @property
    def rank(self) -> int:
        return self.identity.rank

    @property
    def is_alive(self) -> bool:
        return self.exit is None

    @property
    def agent_seen_at(self) -> float:
        """When its node agent last sent a heartbeat, accepted or not."""
        return max(self.last_seen_at, self.last_progress_at, self.last_refused_at)

    @property
    def last_advanced_at(self) -> float:
        """When it last entered a call or a completion was reported: it was not blocked before."""
        return max(
            self.last_progress_at,
            max(
                (max(s.entered_at, s.last_completion_at) for s in self.streams.values()),
                default=0.0,
            ),
        )

    @property
    def newest_stream(self) -> CallStream | None:
        """The stream of its newest call; None before the first call."""
        used = [s for s in self.streams.values() if s.entered]
        return max(used, key=lambda s: (s.entered_at, s.is_pending), default=None)

    @property
    def blocked_interval(self) -> tuple[float, float]:
        """The longest possible (start, end) of the last completed blocking wait.

        A call that was entered later proves that the wait had ended by then.
        """
        began, reported = self.last_blocked
        later_calls = [
            s.entered_at for s in self.streams.values() if s.entered_at > began + MIN_WAIT_S
        ]
        return began, min([reported, *later_calls])

    def has_left(self, group: Group) -> bool:
        """Whether it will make no more calls on ``group``: it is exiting or has exited, or it
        destroyed the groups of the same world generation or a later one.
        """
        if not self.is_alive or self.lifecycle > Lifecycle.DESTROYED:
            return True
        if self.lifecycle < Lifecycle.DESTROYED:
            return False
        worlds = {
            (s.group.world_size, s.group.generation)
            for s in self.streams.values()
            if not s.group.is_declared
        }
        return (
            group.is_declared
            or not worlds
            or any(w == group.world_size and g >= group.generation for w, g in worlds)
        )

    def refresh_streams(self) -> None:
        """Updates `newest_call_at`, `unfinished_streams` and `blocked_streams` from `streams`."""
        self.newest_call_at = max([s.entered_at for s in self.streams.values()], default=0.0)
        self.unfinished_streams = tuple(
            [s for s in self.streams.values() if s.completed is None or s.completed < s.entered]
        )
        self.blocked_streams = (
            tuple([s for s in self.unfinished_streams if s.blocks_thread])
            if self.unfinished_streams
            else ()
        )

    @property
    def is_unable(self) -> bool:
        """Whether, by the last report, it has left or may be frozen and so may enter no call."""
        if (
            self.exit is not None
            or self.lifecycle >= Lifecycle.DESTROYED
            or self.state in NOT_RUNNING_STATES
        ):
            return True
        return self.pulse_at is not None and self.last_seen_at - self.pulse_at >= FROZEN_AFTER_S

    @property
    def is_blocked(self) -> bool:
        """Whether, by the last report, it has been in a call for at least `MIN_WAIT_S` that others
        have not completed, or two of its threads use one group.
        """
        for s in self.unfinished_streams:
            # Node agents report an unfinished call's arguments only after `MIN_WAIT_S`.
            has_waited = s.entered in s.calls or (
                s.entered and self.last_seen_at - s.entered_at >= MIN_WAIT_S
            )
            if has_waited and (
                s.completed is not None
                or s.group_state is None
                or s.group_state.has_member_behind(s)
            ):
                return True
        return self.has_concurrent_calls

    def freeze_reason(self, now: float) -> FreezeReason | None:
        """Why it cannot run Python, if that has lasted too long to be chance; None otherwise.

        Without current heartbeats, the answer is that of the last report.
        """
        if self.state in NOT_RUNNING_STATES:
            duration = min(now, self.last_seen_at) - self.state_since
            if self.state != "D" and duration >= STOPPED_AFTER_S:
                return FreezeReason.STOPPED
            if self.state == "D" and duration >= FROZEN_AFTER_S:
                return FreezeReason.UNINTERRUPTIBLE
        # The recorder's thread runs ten times a second; the node agent reports that each second.
        has_no_pulse = (
            self.pulse_at is not None and self.last_seen_at - self.pulse_at >= FROZEN_AFTER_S
        )
        if has_no_pulse and self.is_alive and self.lifecycle < Lifecycle.EXITING:
            return FreezeReason.GIL_HELD
        return None
