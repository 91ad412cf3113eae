"""One rank's position in one stream of calls, and what the members of a group have in common."""

from __future__ import annotations

from dataclasses import dataclass, field

from hangwatch.model.calls import Call, SequenceKind
from hangwatch.model.groups import Group, GroupKey

CHECKPOINTS_KEPT, CHECKPOINTS_SPARE = 64, 16  # of a sequence, and how many more there may be for a while


AGREED_KEPT = CHECKPOINTS_KEPT, 4  # of a group, and for each member more


FIRST_SUSPECTS = 64  # ranks of a job that are suspected at a time: while there are no more, each may be where it began


SIDES_ASKED, SIDES_FOR = 4, 15.0  # that are asked for the calls in which a group parts, and for how many seconds after it did


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
