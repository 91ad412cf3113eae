"""What is known of one run of a job."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from hangwatch.model.calls import Call, Signature, Site, StreamKind
from hangwatch.model.groups import Group, GroupKey, unpack_ranks
from hangwatch.protocol import heartbeat

from .call_stream import CallStream, GroupState
from .checks import CheckResults
from .process import Process

INTERNED_KEPT = 4096  # signatures, and sites, of a job's calls


ALL_SILENT_AFTER_S = (
    15.0  # seconds without a word of anybody, longer than two heartbeats of one host are ever apart
)


@dataclass(slots=True, kw_only=True)
class Attempt:
    """One run of a job: a restart by the launcher, or by hand under the same name, is another."""

    job: str
    number: int
    opened_at: float
    restart: int = 0
    world_size: int = 0
    processes: dict[int, Process] = field(default_factory=dict)
    last_seen_at: float = 0.0
    # when it was first heard again after nobody was: until then, silence said nothing of a single
    # host
    resumed_at: float = 0.0
    streams_by_group: dict[GroupKey, dict[int, CallStream]] = field(
        default_factory=dict
    )  # per process group, each member's place in it
    diverged_groups: set[GroupKey] = field(
        default_factory=set
    )  # groups whose members told different running hashes
    suspects: set[int] = field(
        default_factory=set
    )  # ranks of which the last word was not that all is well
    unable_ranks: set[int] = field(
        default_factory=set
    )  # of these, who has left or may be frozen: a diagnosis need not look for such elsewhere
    sender_ranks: set[int] = field(default_factory=set)  # ranks that told the arguments of a send
    uneven_groups: dict[GroupKey, None] = field(
        default_factory=dict
    )  # groups of which some call was told that says how much goes to whom
    concurrent_groups: dict[GroupKey, None] = field(
        default_factory=dict
    )  # groups that two threads of one rank use at the same time
    checks: CheckResults = field(default_factory=CheckResults)
    _alive_rank: int = (
        0  # a rank of which the process had not ended when somebody looked; -1: there was none
    )
    _group_states: dict[GroupKey, GroupState] = field(default_factory=dict)
    _groups_by_identity: dict[tuple[str, str, str, str, int, int], Group] = field(
        default_factory=dict
    )
    _signatures: dict[Signature, Signature] = field(default_factory=dict)
    _sites: dict[Site, Site] = field(default_factory=dict)

    @property
    def rank_count(self) -> int:
        """How many ranks it has, heard of or not."""
        return max(self.world_size, len(self.processes))

    @property
    def is_finished(self) -> bool:
        """Every process that was ever heard of has ended."""
        witness = self.processes.get(self._alive_rank)
        if self._alive_rank >= 0 and (
            witness is None or witness.exit is not None
        ):  # else there is no need to look at 100,000
            self._alive_rank = next(
                (rank for rank, process in self.processes.items() if process.exit is None), -1
            )
        return bool(self.processes) and self._alive_rank < 0

    def mark_seen(self, now: float) -> None:
        if now - self.last_seen_at > ALL_SILENT_AFTER_S:
            self.resumed_at = now
        self.last_seen_at = max(now, self.last_seen_at)

    def intern_group(self, identity: heartbeat.StreamIdentity) -> Group:
        """The one object for a group, however many members tell of it."""
        by = (
            identity.name,
            identity.desc,
            identity.ranks,
            identity.backend,
            identity.generation,
            identity.world,
        )
        if (known := self._groups_by_identity.get(by)) is None:
            members = unpack_ranks(identity.ranks)
            known = Group(
                name=identity.name,
                desc=identity.desc,
                ranks=members,
                backend=identity.backend,
                generation=identity.generation,
                world_size=identity.world,
            )
            self._groups_by_identity[by] = known
        return known

    def intern_call(self, call: Call) -> Call:
        """The call, with one object for a signature and a site, however many ranks make it: these
        are most of what it takes.
        """
        for known in (self._signatures, self._sites):
            if len(known) >= INTERNED_KEPT:
                known.clear()
        site = None if call.site is None else self._sites.setdefault(call.site, call.site)
        return replace(
            call, signature=self._signatures.setdefault(call.signature, call.signature), site=site
        )

    def add_stream(self, process: Process, stream: CallStream) -> None:
        """A process, present or former, uses a sequence of calls for the first time."""
        process.streams[stream.uid] = stream
        if self.processes.get(process.rank) is process and stream.kind in (
            StreamKind.COLLECTIVE,
            StreamKind.SETUP,
        ):
            key = stream.group.key
            if (team := self._group_states.get(key)) is None:
                team = self._group_states[key] = GroupState(key=key)
                self.streams_by_group[key] = team.members
            team.members[process.rank] = stream
            stream.group_state = team

    def assign_rank(self, process: Process | None, rank: int) -> None:
        """``process`` holds a rank from now on, or nobody does."""
        self._alive_rank = rank
        self.suspects.discard(rank)
        self.unable_ranks.discard(rank)
        self.sender_ranks.discard(rank)
        former = self.processes.pop(rank, None)
        if former is not None:  # what it told is not to be held against another's calls
            self.checks = CheckResults()
        for team in (
            [s.group_state for s in former.streams.values() if s.group_state is not None]
            if former is not None
            else ()
        ):
            if rank in team.members:  # but for a group that it has twice
                team.remove_member(rank)
            if not team.members:
                self._group_states.pop(team.key, None)
                self.streams_by_group.pop(team.key, None)
                self.diverged_groups.discard(team.key)
                self.uneven_groups.pop(team.key, None)
                self.concurrent_groups.pop(team.key, None)
        if process is not None:
            self.processes[rank] = process

    def update_suspects(self, process: Process) -> None:
        """Brings `suspects` and `unable` up to date, once all is taken in that was told of a
        process.
        """
        rank = process.identity.rank
        if self.processes.get(rank) is process:
            unable = process.is_unable
            (self.unable_ranks.add if unable else self.unable_ranks.discard)(rank)
            (self.suspects.add if unable or process.is_blocked else self.suspects.discard)(rank)

    def waits_on(self, rank: int, peer: int) -> bool:
        """It is suspected, and is in a send to another rank or a receive from it."""
        process = self.processes.get(rank) if rank in self.suspects else None
        return process is not None and any(s.peer == peer for s in process.unfinished_streams)

    def track_calls(self, process: Process, stream: CallStream, calls: Iterable[Call]) -> None:
        """Notes where there are calls that must fit others, now that these are known."""
        if self.processes.get(process.rank) is not process:
            return
        if stream.kind is StreamKind.SEND:
            self.sender_ranks.add(process.rank)
        team = stream.group_state
        if (
            team is not None
            and not team.has_uneven_splits
            and any(call.signature.splits is not None for call in calls)
        ):
            team.has_uneven_splits = True
            self.uneven_groups[team.key] = None

    def mark_diverged(self, group_state: GroupState, seq: int) -> None:
        """Members of a group made different calls, at ``seq`` for the first time."""
        group_state.diverged, group_state.diverged_at, group_state.diverged_seq = (
            True,
            self.last_seen_at,
            seq,
        )
        self.diverged_groups.add(group_state.key)

    @property
    def awaits_calls(self) -> bool:
        """Some group parted, and what was asked of its members is not known yet."""
        return any(self._group_states[key].awaits_calls for key in self.diverged_groups)

    def record_hashes(self, stream: CallStream, pairs: tuple[tuple[int, int], ...]) -> None:
        """Notes running hashes of a collective's calls; the two ends of a channel need not make
        equal ones.
        """
        team = stream.group_state
        if (
            pairs
            and team is not None
            and not team.record_hashes(stream, pairs)
            and not team.diverged
            and (seq := find_first_conflict(team.members))
        ):
            self.mark_diverged(team, seq)


def find_first_conflict(members: dict[int, CallStream]) -> int:
    """The smallest known position at which two members' hashes differ; 0 where none do."""
    told = set().union(
        *[sequence.reported_hashes for sequence in members.values()]
    )  # of 100,000 members a few dozen pairs, in 50 ms
    seen: dict[int, int] = {}
    return min([seq for seq, value in told if seen.setdefault(seq, value) != value], default=0)
