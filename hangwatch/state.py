"""What the server knows of a job, built from heartbeats in whatever order they come. Pure: the time is passed in.

All times are seconds on one monotonic clock, the caller's.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from hangwatch import wire
from hangwatch.checks import Checks
from hangwatch.clocks import DRIFT
from hangwatch.types import (
    FROZEN_AFTER,
    STANDING,
    STILL,
    STOPPED,
    Call,
    Ended,
    Group,
    GroupKey,
    Lifecycle,
    Raised,
    SequenceKind,
    ThreadStack,
    unpack_ranks,
)

CHECKPOINTS_KEPT, CHECKPOINTS_SPARE = 64, 16  # of a sequence, and how many more there may be for a while
AGREED_KEPT = 4 * CHECKPOINTS_KEPT, 4  # of a group, and for each member more
CALLS_KEPT = 256
SAMPLES_KEPT = 4
REMEMBERED_KEPT = 1000  # jobs
FORGOTTEN_KEPT = 1 << 17  # processes that may still be spoken of
FIRST_SUSPECTS = 64  # ranks of a job that are suspected at a time: while there are no more, each may be where it began
IDLE = 1.0  # seconds without CPU: a thread that waits
PRESSING_FOR = 15.0  # seconds
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

    def pressing(self, now: float) -> bool:
        """Its members made different calls; of a large group each one's next word decides only at first."""
        return self.doubted and (len(self.key[2]) <= FIRST_SUSPECTS or now - self.doubted_at < PRESSING_FOR)

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


@dataclass(slots=True, kw_only=True)
class Process:
    """One training process, the present holder of its rank or a former one."""

    key: str
    host: str
    agent: str = ""  # the node agent that speaks for it
    identity: wire.Identity
    started_at: float
    heard_at: float  # until when all that is known of it was so
    getting_on_at: float = 0.0  # when no more was told of it than that it gets on: its place may be further than what is known
    told_at: float = 0.0  # when it was last spoken of itself
    lifecycle: Lifecycle = Lifecycle.ALIVE
    step: int | None = None
    phase: str | None = None
    phase_at: float = 0.0
    phase_limit: float | None = None
    pulse_at: float | None = None
    state: str = "?"
    state_at: float = 0.0  # since when it is in this state
    idle_at: float = 0.0  # when the main thread last used the CPU
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
    samples: list[Sample] = field(default_factory=list)  # newest last
    held: tuple[float, float] = (0.0, 0.0)  # since when it stood in the last call that it stood in, and when that was heard to be over
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
        """When it was last heard of, in any way."""
        return max(self.heard_at, self.getting_on_at)

    @property
    def got_on_at(self) -> float:
        """When it last made a call or one was seen to be complete: until then, or a little less, it was not stuck."""
        return max(self.getting_on_at, max((max(s.entered_at, s.finished_at) for s in self.sequences.values()), default=0.0))

    @property
    def held_up(self) -> tuple[float, float]:
        """From when until when, at most, it stood in the last call that it stood in and that is over: by a later call it had gone on."""
        began, heard = self.held
        return began, min([heard, *(s.entered_at for s in self.sequences.values() if s.entered_at > began + STANDING)])

    def settle(self) -> None:
        """Brings `unfinished` and `blocked_in` up to date, once its sequences are."""
        self.unfinished = tuple([s for s in self.sequences.values() if s.completed is None or s.completed < s.entered])
        self.blocked_in = tuple([s for s in self.unfinished if s.blocks]) if self.unfinished else ()

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
    senders: set[int] = field(default_factory=set)  # ranks that told the arguments of a send
    uneven: dict[GroupKey, None] = field(default_factory=dict)  # groups of which some call was told that says how much goes to whom
    concurrent: dict[GroupKey, None] = field(default_factory=dict)  # groups that two threads of one rank use at the same time
    checks: Checks = field(default_factory=Checks)
    _teams: dict[GroupKey, Team] = field(default_factory=dict)
    _groups: dict[tuple[str, str, str, str, int], Group] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """How many ranks it has, heard of or not."""
        return max(self.world_size, len(self.ranks))

    @property
    def over(self) -> bool:
        """Every process that was ever heard of has ended."""
        return bool(self.ranks) and all(p.ended is not None for p in self.ranks.values())

    def heard(self, now: float) -> None:
        if now - self.heard_at > DEAF_AFTER:
            self.back_at = now
        self.heard_at = max(now, self.heard_at)

    def group(self, told: wire.SequenceIdentity) -> Group:
        """The one object for a group, however many members tell of it."""
        by = (told.name, told.desc, told.ranks, told.backend, told.generation)
        if (known := self._groups.get(by)) is None:
            members = unpack_ranks(told.ranks)
            known = Group(name=told.name, desc=told.desc, ranks=members, backend=told.backend, generation=told.generation)
            self._groups[by] = known
        return known

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
        self.suspects.discard(rank)
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

    def doubt(self, team: Team) -> None:
        """Members of a group made different calls."""
        team.doubted, team.doubted_at = True, self.heard_at
        self.doubted.add(team.key)

    def tell(self, sequence: Sequence, pairs: tuple[tuple[int, int], ...]) -> None:
        """Notes running hashes of a collective's calls; the two ends of a channel need not make equal ones."""
        team = sequence.team
        if pairs and team is not None and not team.tell(sequence, pairs) and not team.doubted and first_conflict(team.members):
            self.doubt(team)


def first_conflict(members: dict[int, Sequence]) -> int:
    """The smallest known position at which two members' hashes differ; 0 where none do."""
    seen: dict[int, int] = {}
    conflicts = [
        seq for sequence in members.values() for seq, value in sequence.checkpoints.items() if seen.setdefault(seq, value) != value
    ]
    return min(conflicts, default=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Remembered:
    """The last attempt of a job that is not in memory: numbers go on from it."""

    number: int
    restart: int
    heard_at: float
    over: bool


@dataclass(slots=True)
class Fleet:
    """Every job. `apply` is the only way in."""

    attempts: dict[tuple[str, int], Attempt] = field(default_factory=dict)
    processes: dict[tuple[str, str], tuple[Process, Attempt]] = field(default_factory=dict)  # by (host, key)
    remembered: dict[str, Remembered] = field(default_factory=dict)  # by job
    _numbers: dict[str, int] = field(default_factory=dict)  # the last heartbeat of each agent
    # The processes that each agent speaks for, as `processes` has them.
    _told_by: dict[str, dict[tuple[str, str], tuple[Process, Attempt]]] = field(default_factory=dict)
    _apart: dict[str, tuple[float, float]] = field(default_factory=dict)  # by agent: its clock from this one, at the least, and when
    _forgotten: dict[tuple[str, str], None] = field(default_factory=dict)  # alive by their last word, of attempts that were dropped

    def latest(self, job: str) -> Attempt | None:
        mine = [a for (name, _), a in self.attempts.items() if name == job]
        return max(mine, key=lambda a: a.number) if mine else None

    def apply(self, beat: wire.Heartbeat, now: float) -> bool:
        """Takes a heartbeat in. False asks for a resync: it spoke of a process or a sequence that is not known here.

        A heartbeat that comes again, or after a later one of the same agent, changes nothing but is no error.
        """
        if beat.number <= self._numbers.get(beat.agent, 0):
            return True
        self._numbers[beat.agent] = beat.number
        now = self._dated(beat, now)
        self._heard(beat, now)
        complete = True
        for update in beat.processes:
            if (beat.host, update.key) not in self._forgotten:
                complete &= self._process(beat, update, now) if not beat.brief else self._places(beat.host, update, now)
        for sample in beat.samples:
            self._sample(beat.host, sample, now)
        for reply in beat.calls:
            self._calls(beat.host, reply)
        for key in beat.gone:
            if (held := self.processes.get((beat.host, key))) is not None:
                held[0].gone = True
        if not beat.brief:
            self._judge(beat.agent)
        return complete

    def _judge(self, agent: str) -> None:
        for process, attempt in self._told_by.get(agent, {}).values():
            if attempt.ranks.get(process.rank) is process and suspicious(process):
                attempt.suspects.add(process.rank)
            elif process.rank in attempt.suspects and attempt.ranks[process.rank] is process:
                attempt.suspects.discard(process.rank)

    def _dated(self, beat: wire.Heartbeat, now: float) -> float:
        """When a heartbeat was sent: it took longer than the agent's quickest by so much, give or take the clocks' drift."""
        if beat.sent_s is None:
            return now
        apart = now - beat.sent_s
        least, at = self._apart.get(beat.agent, (apart, now))
        least = min(apart, least + DRIFT * (now - at))
        self._apart[beat.agent] = (least, now)
        return beat.sent_s + least

    def _heard(self, beat: wire.Heartbeat, now: float) -> None:
        """The node agent is alive: all that it said before still holds, or its processes have got further."""
        for process, attempt in self._told_by.get(beat.agent, {}).values():
            if process.ended is None:
                if beat.brief:
                    process.getting_on_at = now
                else:
                    process.heard_at = now
                if attempt.heard_at != now:
                    attempt.heard(now)

    def forget(self, attempt: Attempt) -> None:
        """Drops an attempt; its processes are dropped by `dismantle`."""
        self.attempts.pop((attempt.job, attempt.number), None)
        if self.latest(attempt.job) is None:
            self.remembered[attempt.job] = Remembered(
                number=attempt.number, restart=attempt.restart, heard_at=attempt.heard_at, over=attempt.over
            )
            while len(self.remembered) > REMEMBERED_KEPT:
                del self.remembered[next(iter(self.remembered))]

    def dismantle(self, attempt: Attempt, most: int) -> bool:
        """Drops some of a forgotten attempt's processes: for 100,000 at once it takes long. False once there are none left.

        They are taken apart: what refers to one another would stay until the garbage collector looks at all that there is.
        """
        for _ in range(min(most, len(attempt.ranks))):
            self._drop(attempt.ranks.popitem()[1])
        if attempt.ranks:
            return True
        for former in [process for process, held in self.processes.values() if held is attempt]:
            self._drop(former)
        while len(self._forgotten) > FORGOTTEN_KEPT:
            del self._forgotten[next(iter(self._forgotten))]
        return False

    def _drop(self, process: Process) -> None:
        at = (process.host, process.key)
        self._told_by.get(process.agent, {}).pop(at, None)
        self.processes.pop(at, None)
        if process.alive:
            self._forgotten[at] = None
        for sequence in process.sequences.values():
            if sequence.team is not None:
                sequence.team.members.clear()
                sequence.team = None
        process.sequences.clear()

    def pressing(self, agent: str) -> bool:
        """What it says next may decide. It speaks for a process that is stopped, for which py-spy may be to blame; for one of the first
        that wait, or the last that do not; for one of two that wait for each other; or for one whose calls part from the others'.
        """
        for process, attempt in self._told_by.get(agent, {}).values():
            if not attempt.suspects and not attempt.doubted:
                continue
            waits = process.rank in attempt.suspects
            if waits and (process.state in STOPPED or len(attempt.suspects) <= FIRST_SUSPECTS):
                return True
            if waits and any(s.peer is not None and attempt.waits_on(s.peer, process.rank) for s in process.unfinished):
                return True
            if not waits and 2 * len(attempt.suspects) > len(attempt.ranks):
                return True
            if attempt.doubted and any(s.team is not None and s.team.pressing(attempt.heard_at) for s in process.sequences.values()):
                return True
        return False

    def facing(self, agent: str) -> Iterator[tuple[Process, Attempt]]:
        """Its processes that seem to wait for ranks that wait for them, where no stack tells yet whether they do."""
        for process, attempt in self._told_by.get(agent, {}).values():
            if process.rank not in attempt.suspects or process.told_at - process.idle_at < IDLE:
                continue
            mutual = any(s.peer is not None and attempt.waits_on(s.peer, process.rank) for s in process.unfinished)
            if mutual and not any(sample.taken_at >= process.got_on_at for sample in process.samples):
                yield process, attempt

    def done(self, agent: str) -> bool:
        """All processes that a node agent spoke for have ended, or are forgotten."""
        return all(process.ended is not None for process, _ in self._told_by.get(agent, {}).values())

    def forget_agent(self, agent: str) -> None:
        """Drops what tells a repeated heartbeat of an agent that has left."""
        self._numbers.pop(agent, None)
        self._told_by.pop(agent, None)
        self._apart.pop(agent, None)

    def _process(self, beat: wire.Heartbeat, update: wire.ProcessUpdate, now: float) -> bool:
        held = self.processes.get((beat.host, update.key))
        if held is not None and update.identity is not None and held[0].identity.rank != update.identity.rank:
            held[1].hold(None, held[0].rank)  # it told its rank before init_process_group gave it another
            held = None
        if held is None:
            if update.identity is None:
                return False
            held = self._register(beat.host, update.key, update.identity, now)
        process, attempt = held
        if update.identity is not None:
            process.identity = update.identity
            attempt.world_size = max(attempt.world_size, update.identity.world_size)
        if process.agent != beat.agent:
            at = (beat.host, update.key)
            self._told_by.get(process.agent, {}).pop(at, None)
            self._told_by.setdefault(beat.agent, {})[at] = held
            process.agent = beat.agent
        process.heard_at = process.told_at = now
        if attempt.heard_at != now:
            attempt.heard(now)
        if update.lifecycle != process.lifecycle:
            process.lifecycle = Lifecycle(min(max(update.lifecycle, 0), int(Lifecycle.EXITING)))
        process.step = update.step
        process.phase, process.phase_limit = update.phase, update.phase_limit_s
        process.phase_at = now - update.phase_s
        process.pulse_at = None if update.pulse_s is None else now - update.pulse_s
        if process.state != update.state:
            process.state, process.state_at = update.state, now
        process.idle_at = now - update.idle_s
        process.cpu_s = update.cpu_s
        process.dropped, process.faults = update.dropped, update.faults
        if update.raised is not None and process.raised is None:
            process.raised, process.raised_at = update.raised, now - update.raised_s
        if update.ended is not None and process.ended is None:
            process.ended, process.ended_at = update.ended, now - update.ended_s
        complete = True
        for part in update.sequences:
            complete &= _sequence(attempt, process, part, now)
        if update.sequences:
            process.settle()
        if (update.checksums or update.nonfinite) and attempt.ranks.get(process.rank) is process:
            process.overflows = max(process.overflows, update.overflows)
            attempt.checks.take(process, update, now)
        return complete

    def _places(self, host: str, update: wire.ProcessUpdate, now: float) -> bool:
        """Some of a process's places, of one that gets on: it is further in others."""
        held = self.processes.get((host, update.key))
        if held is None:
            return False
        complete = True
        for part in update.sequences:
            complete &= _sequence(held[1], held[0], part, now)
        held[0].settle()
        return complete

    def _register(self, host: str, key: str, identity: wire.Identity, now: float) -> tuple[Process, Attempt]:
        """Gives a new process its place: in the latest attempt, unless it began after that one was over or its rank is taken."""
        attempt = self.latest(identity.job)
        started_at = now - identity.started_s
        if attempt is not None:
            holder = attempt.ranks.get(identity.rank)
            restarted = identity.restart > attempt.restart
            replaced = holder is not None and (holder.ended is not None or holder.host != host)
            # A job can fail faster than it is first told of: its ranks may all be dead and still be one attempt.
            after = attempt.over and started_at > max(p.ended_at or 0.0 for p in attempt.ranks.values())
            if after or restarted or replaced:
                attempt = None
        if attempt is None:
            number = self._number(identity, started_at)
            attempt = Attempt(job=identity.job, number=number, restart=identity.restart, opened_at=now)
            self.attempts[(identity.job, number)] = attempt
        process = Process(key=key, host=host, identity=identity, started_at=started_at, heard_at=now)
        attempt.hold(process, identity.rank)
        self.processes[(host, key)] = (process, attempt)
        return process, attempt

    def _number(self, identity: wire.Identity, started_at: float) -> int:
        """Of a new attempt; or of the one that was known before the server was started again, where the process was part of it."""
        last = self.latest(identity.job)
        if last is not None:
            return max(identity.restart, last.number + 1)
        known = self.remembered.pop(identity.job, None)
        if known is None:
            return identity.restart
        goes_on = not known.over and identity.restart == known.restart and started_at <= known.heard_at
        return known.number if goes_on else max(identity.restart, known.number + 1)

    def _sample(self, host: str, sample: wire.Sample, now: float) -> None:
        if (held := self.processes.get((host, sample.key))) is None:
            return
        process = held[0]
        process.samples.append(
            Sample(
                request=sample.request,
                source=sample.source,
                taken_at=now - sample.taken_s,
                native=sample.native,
                threads=sample.threads,
                error=sample.error,
            )
        )
        del process.samples[:-SAMPLES_KEPT]

    def _calls(self, host: str, reply: wire.CallsReply) -> None:
        held = self.processes.get((host, reply.key))
        sequence = held[0].sequences.get(reply.uid) if held else None
        if held is None or sequence is None:
            return
        _learn(held[1], held[0], sequence, reply.calls)
        held[0].settle()
        sequence.fetched_to = max(sequence.fetched_to, max((c.seq for c in reply.calls), default=0))


def _sequence(attempt: Attempt, process: Process, update: wire.SequenceUpdate, now: float) -> bool:
    sequence = process.sequences.get(update.uid)
    known = sequence is not None
    if sequence is None:
        told = update.identity
        if told is None:
            return False
        sequence = Sequence(uid=update.uid, kind=told.kind, group=attempt.group(told), peer=told.peer, tag=told.tag)
        attempt.add(process, sequence)
    before, finished = sequence.first_unfinished, sequence.completed or 0
    entered, completed, chain = update.entered, update.completed, update.chain
    entered_at = now - update.entered_s
    sequence.entered, sequence.completed, sequence.chain, sequence.entered_at = entered, completed, chain, entered_at
    if update.op:
        sequence.op = update.op
    if (entered if completed is None else completed + 1) > before:
        sequence.moved_at = entered_at
    if known and completed is not None and completed > finished:  # else it may be long since: the server may have come up amid a hang
        sequence.finished_at = now
        if before in sequence.calls and sequence.pending_at is not None:
            process.held = sequence.pending_at, now
    sequence.pending_at = None if update.pending_s is None else now - update.pending_s
    if sequence.team is not None and (chain or update.checkpoints):
        pairs = update.checkpoints
        attempt.tell(sequence, (*pairs, (entered, chain)) if entered and chain and (not pairs or pairs[-1][0] != entered) else pairs)
        if len(sequence.told) > CHECKPOINTS_KEPT + CHECKPOINTS_SPARE:
            del sequence.told[:-CHECKPOINTS_KEPT]
    if update.calls:
        _learn(attempt, process, sequence, update.calls)
    if update.shared and not sequence.shared:
        sequence.shared, sequence.shared_at = update.shared, now - update.shared[-1].entered_s
        process.shares = True
        team = sequence.team
        if team is not None and team.members.get(process.rank) is sequence:  # and not of a process whose rank another has
            attempt.concurrent[team.key] = None
    return True


def _learn(attempt: Attempt, process: Process, sequence: Sequence, calls: tuple[Call, ...]) -> None:
    for call in calls:
        sequence.calls[call.seq] = call
    attempt.learn(process, sequence, calls)
    attempt.tell(sequence, tuple([(call.seq, call.chain) for call in calls if call.chain]))
    if len(sequence.calls) > CALLS_KEPT:
        for seq in sorted(sequence.calls)[:-CALLS_KEPT]:
            del sequence.calls[seq]


def suspicious(process: Process) -> bool:
    """Its last word was not that all is well: it has left or may be frozen, or has been in a call for a while."""
    if process.ended is not None or process.lifecycle >= Lifecycle.DESTROYED or process.state in STILL:
        return True
    if process.pulse_at is not None and process.heard_at - process.pulse_at >= FROZEN_AFTER:
        return True
    for s in process.unfinished:
        stands = s.entered in s.calls or (s.entered and process.heard_at - s.entered_at >= STANDING)
        if stands and (s.completed is not None or s.team is None or s.team.behind(s)):
            return True
    return process.shares
