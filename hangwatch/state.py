"""What is known of a job: its processes, their places in sequences of calls, what of that is suspicious. Pure: the time is passed in.

All times are seconds on one monotonic clock, the caller's.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from hangwatch import wire
from hangwatch.checks import Checks
from hangwatch.types import (
    FROZEN_AFTER,
    STANDING,
    STILL,
    Call,
    Ended,
    Group,
    GroupKey,
    Lifecycle,
    Raised,
    SequenceKind,
    Signature,
    Site,
    ThreadStack,
    unpack_ranks,
)

CHECKPOINTS_KEPT, CHECKPOINTS_SPARE = 64, 16  # of a sequence, and how many more there may be for a while
AGREED_KEPT = CHECKPOINTS_KEPT, 4  # of a group, and for each member more
SHARED_KEPT = 4096  # signatures, and sites, of a job's calls
FIRST_SUSPECTS = 64  # ranks of a job that are suspected at a time: while there are no more, each may be where it began
IDLE = 1.0  # seconds without CPU: a thread that waits
SIDES_ASKED, SIDES_FOR = 4, 15.0  # that are asked for the calls in which a group parts, and for how many seconds after it did
STOPPED_AFTER = 1.5  # seconds, longer than py-spy stops a process to look at its stack
DEAF_AFTER = 15.0  # seconds without a word of anybody, longer than two heartbeats of one host are ever apart


class Frozen(str, enum.Enum):
    """Why a live process runs no Python."""

    STOPPED = "stopped"
    UNINTERRUPTIBLE = "uninterruptible"
    GIL_HELD = "gil held"


@dataclass(slots=True, kw_only=True)
class Sequence:
    """One rank's place in one sequence of calls."""

    uid: int
    kind: SequenceKind
    group: Group
    peer: int | None = None
    tag: int | None = None
    entered: int = 0
    completed: int | None = None
    chain: int = 0
    op: str = ""
    entered_at: float = 0.0
    pending_at: float | None = None
    moved_at: float = 0.0  # when its newest call was entered, as of when it last got further: by then the earlier ones were over
    finished_at: float = 0.0  # when it was last told that some call is complete: at the latest then
    grew: tuple[int, float] = (0, 0.0)  # of a channel whose other end stood: the calls it had when last told of more, and when that was
    told: list[tuple[int, int]] = field(default_factory=list)  # positions and the running hashes there, the newest last
    calls: dict[int, Call] = field(default_factory=dict)  # those whose arguments are known
    shared: tuple[Call, ...] = ()  # where two threads make calls at the same time: one's last call, and the other's
    shared_at: float = 0.0
    fetched_to: int = 0  # calls were fetched when this many had been entered
    team: Team | None = None  # of a collective's group

    @property
    def pending(self) -> bool:
        """Some call of it is unfinished, as far as completion can be told."""
        return self.completed is not None and self.completed < self.entered

    @property
    def blocks(self) -> bool:
        """Its newest call is synchronous and unfinished: the thread that made it sits in it."""
        newest = self.calls.get(self.entered)
        return self.pending and newest is not None and newest.blocking is True

    @property
    def checkpoints(self) -> dict[int, int]:
        """The running hashes that it told, by position. Made anew each time: a list of what all members share takes a tenth of the room."""
        return dict(self.told)

    @property
    def first_unfinished(self) -> int:
        """The call it would wait in: where completion is unknown, the newest."""
        return self.entered if self.completed is None else self.completed + 1


@dataclass(slots=True, kw_only=True)
class Team:
    """The members of a process group, each with its place in it, and what they told alike."""

    key: GroupKey
    members: dict[int, Sequence] = field(default_factory=dict)
    agreed: dict[int, tuple[int, int]] = field(default_factory=dict)  # by position: that and the running hash there, as first told
    forgotten: int = 0  # the last position that was dropped from `agreed`
    latest: tuple[tuple[int, int], ...] = ()  # what a member told last that agreed: those on one host tell the same, one after the other
    passed: int = 0  # calls that every member is known to have entered
    laggard: Sequence | None = None  # who had entered no more than that
    # As the attempt keeps them by key, which is as long as the group is large.
    doubted: bool = False
    doubted_at: float = 0.0
    parted_at: int = 0  # the first position at which members told different running hashes, as far as was known then
    sides: dict[int, Sequence] = field(default_factory=dict)  # by the hash there: the member that was asked for its calls
    uneven: bool = False

    def tell(self, sequence: Sequence, pairs: tuple[tuple[int, int], ...]) -> bool:
        """Notes a member's running hashes, by position. False where another member may have told another one."""
        if pairs == self.latest:
            sequence.told += self.latest
            return True
        alike, agreed, noted = True, self.agreed, []
        for pair in pairs:
            known = agreed.setdefault(pair[0], pair)
            if known[1] != pair[1] or (known is pair and pair[0] <= self.forgotten):
                known, alike = pair, False
            noted.append(known)  # the very object that is there: all members tell the same ones
        sequence.told += noted
        self.latest = tuple(noted) if alike else ()
        if len(agreed) > (kept := AGREED_KEPT[0] + AGREED_KEPT[1] * len(self.key[2])):
            for seq in list(agreed)[: kept // 2]:
                self.forgotten = max(self.forgotten, seq)
                del agreed[seq]
        return alike

    def behind(self, sequence: Sequence) -> bool:
        """Some member is not known to have entered the newest call of ``sequence``."""
        if sequence.entered <= self.passed:
            return False
        if len(self.members) < len(self.key[2]):
            return True
        if self.laggard is None or self.laggard.entered >= sequence.entered:
            self.laggard = min(self.members.values(), key=lambda s: s.entered)
            self.passed = self.laggard.entered
        return sequence.entered > self.passed

    @property
    def pressing(self) -> bool:
        """Its members made different calls, and they are so few that what each of them says next may decide."""
        return self.doubted and len(self.key[2]) <= FIRST_SUSPECTS

    def new_side(self, sequence: Sequence, now: float) -> bool:
        """A member's calls should be asked for: the group parted just now, and it is the first heard since with its hash there."""
        if not self.doubted or len(self.sides) >= SIDES_ASKED or now - self.doubted_at > SIDES_FOR:
            return False
        value = sequence.checkpoints.get(self.parted_at)
        if value is None or value in self.sides:
            return False
        self.sides[value] = sequence
        return True

    @property
    def awaits_calls(self) -> bool:
        """Some of those that were asked for their calls have not answered."""
        return any(sequence.fetched_to < self.parted_at for sequence in self.sides.values())

    def leave(self, rank: int) -> None:
        """Its place is another process's from now on, whose calls begin anew."""
        self.members.pop(rank).team = None
        self.passed, self.laggard = 0, None


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
    identity: wire.Identity
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


@dataclass(slots=True, kw_only=True)
class Attempt:
    """One run of a job: a restart by the launcher, or by hand under the same name, is another."""

    job: str
    number: int
    opened_at: float
    restart: int = 0
    world_size: int = 0
    ranks: dict[int, Process] = field(default_factory=dict)
    heard_at: float = 0.0
    back_at: float = 0.0  # when it was first heard again after nobody was: until then, silence said nothing of a single host
    places: dict[GroupKey, dict[int, Sequence]] = field(default_factory=dict)  # per process group, each member's place in it
    doubted: set[GroupKey] = field(default_factory=set)  # groups whose members told different running hashes
    suspects: set[int] = field(default_factory=set)  # ranks of which the last word was not that all is well
    unable: set[int] = field(default_factory=set)  # of these, who has left or may be frozen: a diagnosis need not look for such elsewhere
    senders: set[int] = field(default_factory=set)  # ranks that told the arguments of a send
    uneven: dict[GroupKey, None] = field(default_factory=dict)  # groups of which some call was told that says how much goes to whom
    concurrent: dict[GroupKey, None] = field(default_factory=dict)  # groups that two threads of one rank use at the same time
    checks: Checks = field(default_factory=Checks)
    _alive: int = 0  # a rank of which the process had not ended when somebody looked; -1: there was none
    _teams: dict[GroupKey, Team] = field(default_factory=dict)
    _groups: dict[tuple[str, str, str, str, int, int], Group] = field(default_factory=dict)
    _signatures: dict[Signature, Signature] = field(default_factory=dict)
    _sites: dict[Site, Site] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """How many ranks it has, heard of or not."""
        return max(self.world_size, len(self.ranks))

    @property
    def over(self) -> bool:
        """Every process that was ever heard of has ended."""
        witness = self.ranks.get(self._alive)
        if self._alive >= 0 and (witness is None or witness.ended is not None):  # else there is no need to look at 100,000
            self._alive = next((rank for rank, process in self.ranks.items() if process.ended is None), -1)
        return bool(self.ranks) and self._alive < 0

    def heard(self, now: float) -> None:
        if now - self.heard_at > DEAF_AFTER:
            self.back_at = now
        self.heard_at = max(now, self.heard_at)

    def group(self, told: wire.SequenceIdentity) -> Group:
        """The one object for a group, however many members tell of it."""
        by = (told.name, told.desc, told.ranks, told.backend, told.generation, told.world)
        if (known := self._groups.get(by)) is None:
            members = unpack_ranks(told.ranks)
            known = Group(
                name=told.name, desc=told.desc, ranks=members, backend=told.backend, generation=told.generation, world=told.world
            )
            self._groups[by] = known
        return known

    def shared(self, call: Call) -> Call:
        """The call, with one object for a signature and a site, however many ranks make it: these are most of what it takes."""
        for known in (self._signatures, self._sites):
            if len(known) >= SHARED_KEPT:
                known.clear()
        site = None if call.site is None else self._sites.setdefault(call.site, call.site)
        return replace(call, signature=self._signatures.setdefault(call.signature, call.signature), site=site)

    def add(self, process: Process, sequence: Sequence) -> None:
        """A process, present or former, uses a sequence of calls for the first time."""
        process.sequences[sequence.uid] = sequence
        if self.ranks.get(process.rank) is process and sequence.kind in (SequenceKind.COLLECTIVE, SequenceKind.SETUP):
            key = sequence.group.key
            if (team := self._teams.get(key)) is None:
                team = self._teams[key] = Team(key=key)
                self.places[key] = team.members
            team.members[process.rank] = sequence
            sequence.team = team

    def hold(self, process: Process | None, rank: int) -> None:
        """``process`` holds a rank from now on, or nobody does."""
        self._alive = rank
        self.suspects.discard(rank)
        self.unable.discard(rank)
        self.senders.discard(rank)
        former = self.ranks.pop(rank, None)
        if former is not None:  # what it told is not to be held against another's calls
            self.checks = Checks()
        for team in [s.team for s in former.sequences.values() if s.team is not None] if former is not None else ():
            if rank in team.members:  # but for a group that it has twice
                team.leave(rank)
            if not team.members:
                self._teams.pop(team.key, None)
                self.places.pop(team.key, None)
                self.doubted.discard(team.key)
                self.uneven.pop(team.key, None)
                self.concurrent.pop(team.key, None)
        if process is not None:
            self.ranks[rank] = process

    def judge(self, process: Process) -> None:
        """Brings `suspects` and `unable` up to date, once all is taken in that was told of a process."""
        rank = process.identity.rank
        if self.ranks.get(rank) is process:
            unable = process.unable
            (self.unable.add if unable else self.unable.discard)(rank)
            (self.suspects.add if unable or process.stands else self.suspects.discard)(rank)

    def waits_on(self, rank: int, peer: int) -> bool:
        """It is suspected, and is in a send to another rank or a receive from it."""
        process = self.ranks.get(rank) if rank in self.suspects else None
        return process is not None and any(s.peer == peer for s in process.unfinished)

    def learn(self, process: Process, sequence: Sequence, calls: Iterable[Call]) -> None:
        """Notes where there are calls that must fit others, now that these are known."""
        if self.ranks.get(process.rank) is not process:
            return
        if sequence.kind is SequenceKind.SEND:
            self.senders.add(process.rank)
        team = sequence.team
        if team is not None and not team.uneven and any(call.signature.splits is not None for call in calls):
            team.uneven = True
            self.uneven[team.key] = None

    def doubt(self, team: Team, seq: int) -> None:
        """Members of a group made different calls, at ``seq`` for the first time."""
        team.doubted, team.doubted_at, team.parted_at = True, self.heard_at, seq
        self.doubted.add(team.key)

    @property
    def awaits_calls(self) -> bool:
        """Some group parted, and what was asked of its members is not known yet."""
        return any(self._teams[key].awaits_calls for key in self.doubted)

    def tell(self, sequence: Sequence, pairs: tuple[tuple[int, int], ...]) -> None:
        """Notes running hashes of a collective's calls; the two ends of a channel need not make equal ones."""
        team = sequence.team
        if pairs and team is not None and not team.tell(sequence, pairs) and not team.doubted and (seq := first_conflict(team.members)):
            self.doubt(team, seq)


def first_conflict(members: dict[int, Sequence]) -> int:
    """The smallest known position at which two members' hashes differ; 0 where none do."""
    told = set().union(*[sequence.told for sequence in members.values()])  # of 100,000 members a few dozen pairs, in 50 ms
    seen: dict[int, int] = {}
    return min([seq for seq, value in told if seen.setdefault(seq, value) != value], default=0)
