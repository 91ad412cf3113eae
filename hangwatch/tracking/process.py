"""What is known of one training process."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from hangwatch.model.groups import Group
from hangwatch.model.limits import FROZEN_AFTER, STANDING, STILL
from hangwatch.model.ranks import Ended, Lifecycle, Raised
from hangwatch.model.threads import ThreadStack
from hangwatch.protocol import heartbeat

from .call_stream import Sequence

IDLE = 1.0  # seconds without CPU: a thread that waits


STOPPED_AFTER = 1.5  # seconds, longer than py-spy stops a process to look at its stack


class Frozen(str, enum.Enum):
    """Why a live process runs no Python."""

    STOPPED = "stopped"
    UNINTERRUPTIBLE = "uninterruptible"
    GIL_HELD = "gil held"


@dataclass(slots=True, kw_only=True)
class Sample:
    """Stacks of a process at one moment."""

    request: str
    source: str
    taken_at: float
    native: bool = False
    threads: tuple[ThreadStack, ...] = ()
    error: str | None = None

    @property
    def main(self) -> ThreadStack | None:
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
    identity: heartbeat.Identity
    started_at: float
    heard_at: float  # until when all that is known of it was so
    heard_before: float = 0.0  # when it was heard the time before, in any way
    getting_on_at: float = 0.0  # when no more was told of it than that it gets on: its place may be further than what is known
    refused_at: float = 0.0  # when its node agent spoke last and was not heard: it runs, but where it is was not taken in
    told_at: float = 0.0  # when it was last spoken of itself
    lifecycle: Lifecycle = Lifecycle.ALIVE
    step: int | None = None
    phase: str | None = None
    phase_at: float = 0.0
    phase_limit: float | None = None
    pulse_at: float | None = None
    state: str = "?"
    state_at: float = 0.0  # since when it is in this state
    idle_at: float = 0.0  # when the main thread last used the CPU or waited for one
    cpu_s: float = 0.0
    ended: Ended | None = None
    ended_at: float | None = None
    raised: Raised | None = None
    raised_at: float | None = None
    dropped: int = 0
    overflows: int = 0
    faults: tuple[str, ...] = ()
    sequences: dict[int, Sequence] = field(default_factory=dict)
    unfinished: tuple[Sequence, ...] = ()  # those with a call of which it was not told that it is over
    blocked_in: tuple[Sequence, ...] = ()  # those of them in whose newest call the thread that made it sits
    newest_at: float = 0.0  # when it last made a call
    samples: list[Sample] = field(default_factory=list)  # newest last
    # Since when it stood, or may have stood unheard, in the last call that it stood in, and when that was heard to be over.
    held: tuple[float, float] = (0.0, 0.0)
    shares: bool = False  # two threads of it made calls on one group at the same time
    gone: bool = False  # its agent has reported all there is

    @property
    def rank(self) -> int:
        return self.identity.rank

    @property
    def alive(self) -> bool:
        return self.ended is None

    @property
    def lived_at(self) -> float:
        """The last sign of its node agent."""
        return max(self.heard_at, self.getting_on_at, self.refused_at)

    @property
    def got_on_at(self) -> float:
        """When it last made a call or one was seen to be complete: until then, or a little less, it was not stuck."""
        return max(self.getting_on_at, max((max(s.entered_at, s.finished_at) for s in self.sequences.values()), default=0.0))

    @property
    def newest(self) -> Sequence | None:
        """Where it made its last call."""
        made = [s for s in self.sequences.values() if s.entered]
        return max(made, key=lambda s: (s.entered_at, s.pending), default=None)

    @property
    def held_up(self) -> tuple[float, float]:
        """From when until when, at most, it stood in the last call that it stood in and that is over: by a later call it had gone on."""
        began, heard = self.held
        return began, min([heard, *(s.entered_at for s in self.sequences.values() if s.entered_at > began + STANDING)])

    def has_left(self, group: Group) -> bool:
        """It will not come to ``group``: it is about to end or has, or has destroyed the groups of that world or of a later one."""
        if not self.alive or self.lifecycle > Lifecycle.DESTROYED:
            return True
        if self.lifecycle < Lifecycle.DESTROYED:
            return False
        worlds = {(s.group.world, s.group.generation) for s in self.sequences.values() if not s.group.declared}
        return group.declared or not worlds or any(w == group.world and g >= group.generation for w, g in worlds)

    def settle(self) -> None:
        """Brings `newest_at`, `unfinished` and `blocked_in` up to date, once its sequences are."""
        self.newest_at = max([s.entered_at for s in self.sequences.values()], default=0.0)
        self.unfinished = tuple([s for s in self.sequences.values() if s.completed is None or s.completed < s.entered])
        self.blocked_in = tuple([s for s in self.unfinished if s.blocks]) if self.unfinished else ()

    @property
    def unable(self) -> bool:
        """By its last word it may be unable to come to a call: it has left, or may be frozen."""
        if self.ended is not None or self.lifecycle >= Lifecycle.DESTROYED or self.state in STILL:
            return True
        return self.pulse_at is not None and self.heard_at - self.pulse_at >= FROZEN_AFTER

    @property
    def stands(self) -> bool:
        """By its last word it has been in a call for a while, or two threads of it share a group."""
        for s in self.unfinished:
            stands = s.entered in s.calls or (s.entered and self.heard_at - s.entered_at >= STANDING)
            if stands and (s.completed is not None or s.team is None or s.team.behind(s)):
                return True
        return self.shares

    def frozen(self, now: float) -> Frozen | None:
        """Why it cannot run Python, for as long as that cannot be mere chance; where it is not heard, as of the last word."""
        if self.state in STILL:
            lasted = min(now, self.heard_at) - self.state_at
            if self.state != "D" and lasted >= STOPPED_AFTER:
                return Frozen.STOPPED
            if self.state == "D" and lasted >= FROZEN_AFTER:
                return Frozen.UNINTERRUPTIBLE
        # Its recorder's thread runs ten times a second, and its agent tells of that every second.
        silent = self.pulse_at is not None and self.heard_at - self.pulse_at >= FROZEN_AFTER
        return Frozen.GIL_HELD if silent and self.alive and self.lifecycle < Lifecycle.EXITING else None
