"""What is known of one run of a job."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from hangwatch.model.calls import Call, SequenceKind, Signature, Site
from hangwatch.model.groups import Group, GroupKey, unpack_ranks
from hangwatch.protocol import heartbeat

from .call_stream import Sequence, Team
from .checks import Checks
from .process import Process

SHARED_KEPT = 4096  # signatures, and sites, of a job's calls


DEAF_AFTER = 15.0  # seconds without a word of anybody, longer than two heartbeats of one host are ever apart


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

    def group(self, told: heartbeat.SequenceIdentity) -> Group:
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
