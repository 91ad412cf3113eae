"""What is known of one training process."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from hangwatch.model.groups import Group
from hangwatch.model.limits import FROZEN_AFTER_S, MIN_WAIT_S, NOT_RUNNING_STATES
from hangwatch.model.ranks import ExceptionInfo, ExitInfo, Lifecycle
from hangwatch.model.threads import ThreadStack
from hangwatch.protocol import heartbeat

from .call_stream import CallStream

IDLE_AFTER_S = 1.0  # seconds without CPU: a thread that waits


STOPPED_AFTER_S = 1.5  # seconds, longer than py-spy stops a process to look at its stack


class FreezeReason(str, enum.Enum):
    """Why a live process runs no Python."""

    STOPPED = "stopped"
    UNINTERRUPTIBLE = "uninterruptible"
    GIL_HELD = "gil held"


@dataclass(slots=True, kw_only=True)
class StackSample:
    """Stacks of a process at one moment."""

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
    """One training process, the present holder of its rank or a former one."""

    key: str
    host: str
    agent: str = ""  # the node agent that speaks for it
    identity: heartbeat.ProcessIdentity
    started_at: float
    last_seen_at: float  # until when all that is known of it was so
    previously_seen_at: float = 0.0  # when it was heard the time before, in any way
    # when no more was told of it than that it gets on: its place may be further than what is known
    last_progress_at: float = 0.0
    # when its node agent spoke last and was not heard: it runs, but where it is was not taken in
    last_refused_at: float = 0.0
    reported_at: float = 0.0  # when it was last spoken of itself
    lifecycle: Lifecycle = Lifecycle.ALIVE
    step: int | None = None
    phase: str | None = None
    phase_began_at: float = 0.0
    phase_limit_s: float | None = None
    pulse_at: float | None = None
    state: str = "?"
    state_since: float = 0.0  # since when it is in this state
    last_active_at: float = 0.0  # when the main thread last used the CPU or waited for one
    cpu_s: float = 0.0
    exit: ExitInfo | None = None
    exited_at: float | None = None
    exception: ExceptionInfo | None = None
    exception_at: float | None = None
    dropped: int = 0
    overflows: int = 0
    faults: tuple[str, ...] = ()
    streams: dict[int, CallStream] = field(default_factory=dict)
    unfinished_streams: tuple[
        CallStream, ...
    ] = ()  # those with a call of which it was not told that it is over
    blocked_streams: tuple[
        CallStream, ...
    ] = ()  # those of them in whose newest call the thread that made it sits
    newest_call_at: float = 0.0  # when it last made a call
    samples: list[StackSample] = field(default_factory=list)  # newest last
    # Since when it stood, or may have stood unheard, in the last call that it stood in, and when
    # that was heard to be over.
    last_blocked: tuple[float, float] = (0.0, 0.0)
    has_concurrent_calls: bool = False  # two threads of it made calls on one group at the same time
    finished_reporting: bool = False  # its agent has reported all there is

    @property
    def rank(self) -> int:
        return self.identity.rank

    @property
    def is_alive(self) -> bool:
        return self.exit is None

    @property
    def agent_seen_at(self) -> float:
        """The last sign of its node agent."""
        return max(self.last_seen_at, self.last_progress_at, self.last_refused_at)

    @property
    def last_advanced_at(self) -> float:
        """When it last made a call or one was seen to be complete: until then, or a little less, it
        was not stuck.
        """
        return max(
            self.last_progress_at,
            max(
                (max(s.entered_at, s.last_completion_at) for s in self.streams.values()),
                default=0.0,
            ),
        )

    @property
    def newest_stream(self) -> CallStream | None:
        """Where it made its last call."""
        made = [s for s in self.streams.values() if s.entered]
        return max(made, key=lambda s: (s.entered_at, s.is_pending), default=None)

    @property
    def blocked_interval(self) -> tuple[float, float]:
        """From when until when, at most, it stood in the last call that it stood in and that is
        over: by a later call it had gone on.
        """
        began, heard = self.last_blocked
        return began, min(
            [
                heard,
                *(s.entered_at for s in self.streams.values() if s.entered_at > began + MIN_WAIT_S),
            ]
        )

    def has_left(self, group: Group) -> bool:
        """It will not come to ``group``: it is about to end or has, or has destroyed the groups of
        that world or of a later one.
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
        """Brings `newest_at`, `unfinished` and `blocked_in` up to date, once its sequences are."""
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
        """By its last word it may be unable to come to a call: it has left, or may be frozen."""
        if (
            self.exit is not None
            or self.lifecycle >= Lifecycle.DESTROYED
            or self.state in NOT_RUNNING_STATES
        ):
            return True
        return self.pulse_at is not None and self.last_seen_at - self.pulse_at >= FROZEN_AFTER_S

    @property
    def is_blocked(self) -> bool:
        """By its last word it has been in a call for a while, or two threads of it share a group."""
        for s in self.unfinished_streams:
            stands = s.entered in s.calls or (
                s.entered and self.last_seen_at - s.entered_at >= MIN_WAIT_S
            )
            if stands and (
                s.completed is not None
                or s.group_state is None
                or s.group_state.has_member_behind(s)
            ):
                return True
        return self.has_concurrent_calls

    def freeze_reason(self, now: float) -> FreezeReason | None:
        """Why it cannot run Python, for as long as that cannot be mere chance; where it is not
        heard, as of the last word.
        """
        if self.state in NOT_RUNNING_STATES:
            lasted = min(now, self.last_seen_at) - self.state_since
            if self.state != "D" and lasted >= STOPPED_AFTER_S:
                return FreezeReason.STOPPED
            if self.state == "D" and lasted >= FROZEN_AFTER_S:
                return FreezeReason.UNINTERRUPTIBLE
        # Its recorder's thread runs ten times a second, and its agent tells of that every second.
        silent = self.pulse_at is not None and self.last_seen_at - self.pulse_at >= FROZEN_AFTER_S
        return (
            FreezeReason.GIL_HELD
            if silent and self.is_alive and self.lifecycle < Lifecycle.EXITING
            else None
        )
