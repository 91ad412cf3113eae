"""One rank's position in one stream of calls, and what the members of a group have in common."""

from __future__ import annotations

from dataclasses import dataclass, field

from hangwatch.model.calls import Call, StreamKind
from hangwatch.model.groups import Group, GroupKey

CHECKPOINTS_KEPT, CHECKPOINTS_SPARE = (
    64,
    16,
)  # of a sequence, and how many more there may be for a while


REFERENCE_HASHES_KEPT = CHECKPOINTS_KEPT, 4  # of a group, and for each member more


# ranks of a job that are suspected at a time: while there are no more, each may be where it began
MAX_URGENT_SUSPECTS = 64


MAX_REQUESTED_SIDES, SIDE_REQUEST_WINDOW_S = (
    4,
    15.0,
)  # that are asked for the calls in which a group parts, and for how many seconds after it did


@dataclass(slots=True, kw_only=True)
class CallStream:
    """One rank's place in one sequence of calls."""

    uid: int
    kind: StreamKind
    group: Group
    peer: int | None = None
    tag: int | None = None
    entered: int = 0
    completed: int | None = None
    chain: int = 0
    op: str = ""
    entered_at: float = 0.0
    pending_at: float | None = None
    # when its newest call was entered, as of when it last got further: by then the earlier ones
    # were over
    advanced_at: float = 0.0
    last_completion_at: float = (
        0.0  # when it was last told that some call is complete: at the latest then
    )
    last_growth: tuple[int, float] = (
        0,
        0.0,
        # of a channel whose other end stood: the calls it had when last told of more, and when that
        # was
    )
    reported_hashes: list[tuple[int, int]] = field(
        default_factory=list
    )  # positions and the running hashes there, the newest last
    calls: dict[int, Call] = field(default_factory=dict)  # those whose arguments are known
    concurrent_calls: tuple[
        Call, ...
    ] = ()  # where two threads make calls at the same time: one's last call, and the other's
    concurrent_at: float = 0.0
    fetched_to: int = 0  # calls were fetched when this many had been entered
    group_state: GroupState | None = None  # of a collective's group

    @property
    def is_pending(self) -> bool:
        """Some call of it is unfinished, as far as completion can be told."""
        return self.completed is not None and self.completed < self.entered

    @property
    def blocks_thread(self) -> bool:
        """Its newest call is synchronous and unfinished: the thread that made it sits in it."""
        newest = self.calls.get(self.entered)
        return self.is_pending and newest is not None and newest.blocking is True

    @property
    def hashes_by_seq(self) -> dict[int, int]:
        """The running hashes that it told, by position. Made anew each time: a list of what all
        members share takes a tenth of the room.
        """
        return dict(self.reported_hashes)

    @property
    def first_unfinished(self) -> int:
        """The call it would wait in: where completion is unknown, the newest."""
        return self.entered if self.completed is None else self.completed + 1


@dataclass(slots=True, kw_only=True)
class GroupState:
    """The members of a process group, each with its place in it, and what they told alike."""

    key: GroupKey
    members: dict[int, CallStream] = field(default_factory=dict)
    reference_hashes: dict[int, tuple[int, int]] = field(
        default_factory=dict
    )  # by position: that and the running hash there, as first told
    forgotten_up_to: int = 0  # the last position that was dropped from `agreed`
    latest_hashes: tuple[
        tuple[int, int],
        ...,
        # what a member told last that agreed: those on one host tell the same, one after the other
    ] = ()
    passed_by_all: int = 0  # calls that every member is known to have entered
    laggard: CallStream | None = None  # who had entered no more than that
    # As the attempt keeps them by key, which is as long as the group is large.
    diverged: bool = False
    diverged_at: float = 0.0
    # the first position at which members told different running hashes, as far as was known then
    diverged_seq: int = 0
    streams_by_side: dict[int, CallStream] = field(
        default_factory=dict
    )  # by the hash there: the member that was asked for its calls
    has_uneven_splits: bool = False

    def record_hashes(self, stream: CallStream, pairs: tuple[tuple[int, int], ...]) -> bool:
        """Notes a member's running hashes, by position. False where another member may have told
        another one.
        """
        if pairs == self.latest_hashes:
            stream.reported_hashes += self.latest_hashes
            return True
        alike, agreed, noted = True, self.reference_hashes, []
        for pair in pairs:
            known = agreed.setdefault(pair[0], pair)
            if known[1] != pair[1] or (known is pair and pair[0] <= self.forgotten_up_to):
                known, alike = pair, False
            noted.append(known)  # the very object that is there: all members tell the same ones
        stream.reported_hashes += noted
        self.latest_hashes = tuple(noted) if alike else ()
        if len(agreed) > (
            kept := REFERENCE_HASHES_KEPT[0] + REFERENCE_HASHES_KEPT[1] * len(self.key[2])
        ):
            for seq in list(agreed)[: kept // 2]:
                self.forgotten_up_to = max(self.forgotten_up_to, seq)
                del agreed[seq]
        return alike

    def has_member_behind(self, stream: CallStream) -> bool:
        """Some member is not known to have entered the newest call of ``sequence``."""
        if stream.entered <= self.passed_by_all:
            return False
        if len(self.members) < len(self.key[2]):
            return True
        if self.laggard is None or self.laggard.entered >= stream.entered:
            self.laggard = min(self.members.values(), key=lambda s: s.entered)
            self.passed_by_all = self.laggard.entered
        return stream.entered > self.passed_by_all

    @property
    def is_urgent(self) -> bool:
        """Its members made different calls, and they are so few that what each of them says next
        may decide.
        """
        return self.diverged and len(self.key[2]) <= MAX_URGENT_SUSPECTS

    def register_side(self, stream: CallStream, now: float) -> bool:
        """A member's calls should be asked for: the group parted just now, and it is the first
        heard since with its hash there.
        """
        if (
            not self.diverged
            or len(self.streams_by_side) >= MAX_REQUESTED_SIDES
            or now - self.diverged_at > SIDE_REQUEST_WINDOW_S
        ):
            return False
        value = stream.hashes_by_seq.get(self.diverged_seq)
        if value is None or value in self.streams_by_side:
            return False
        self.streams_by_side[value] = stream
        return True

    @property
    def awaits_calls(self) -> bool:
        """Some of those that were asked for their calls have not answered."""
        return any(
            sequence.fetched_to < self.diverged_seq for sequence in self.streams_by_side.values()
        )

    def remove_member(self, rank: int) -> None:
        """Its place is another process's from now on, whose calls begin anew."""
        self.members.pop(rank).group_state = None
        self.passed_by_all, self.laggard = 0, None
