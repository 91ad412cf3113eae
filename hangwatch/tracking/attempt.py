"""What is known of one run of a job."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from math import inf
from operator import attrgetter
from typing import Any

from hangwatch.model.bounds import limit_texts
from hangwatch.model.calls import Call, Loss, StreamKind, decode_invalid_peer
from hangwatch.model.groups import Group, GroupKey, is_group_address, pack_ranks, unpack_ranks
from hangwatch.model.hardware import Observation, UnavailableSource
from hangwatch.model.ranks import AttemptKey, Ranks
from hangwatch.protocol.heartbeat import HardwareReply, ProcessIdentity, StreamIdentity

from .call_stream import (
    MAX_PINNED_PAIRS,
    MAX_URGENT_SUSPECTS,
    NEWEST_KEPT,
    CallStream,
    DivergenceBounds,
    GroupState,
    Hashes,
    HashHistories,
    HashPair,
    StreamsByRank,
    list_histories,
    merge_hashes,
    thin_hashes,
)
from .checks import CheckResults
from .foreign_groups import ForeignGroups, connect_channel, disconnect_channel, forget_channel
from .process import Process
from .tenants import change_count

MAX_CLOSED_GROUPS = 1024
INTERNED_KEPT = 8192  # signatures and call sites of a job's calls
MAX_TEXT_CHARS = 200

# The whole job counts as silent without a heartbeat for this long, which is longer than the time
# between two heartbeats of one host.
ALL_SILENT_AFTER_S = 15.0

# What a member reports of a group that determines its `Group`.
_get_identity_key = attrgetter("name", "desc", "ranks", "backend", "generation", "world", "foreign")
OrderedGroups = dict[GroupKey, None]  # an ordered set


@dataclass(slots=True)
class _SharedRanks:
    """The ranks of all groups of an attempt that have the same members."""

    ranks: Ranks  # empty if the group is foreign: its ranks become known later
    member_count: int
    group_count: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class HostHardware:
    """The newest reading of a host's hardware."""

    taken_at: float
    observations: tuple[Observation, ...]
    unavailable: tuple[UnavailableSource, ...]

    @classmethod
    def from_reply(cls, reply: HardwareReply, now: float) -> HostHardware:
        """The reading in a reply that was received at ``now``, without what exceeds the limits."""
        return cls(
            taken_at=now - max(0.0, reply.taken_s),
            observations=limit_texts(reply.observations, MAX_TEXT_CHARS),
            unavailable=limit_texts(reply.unavailable, MAX_TEXT_CHARS),
        )


@dataclass(slots=True, kw_only=True)
class Attempt:
    """One run of a job. A restart, by the launcher or by hand under the same name, is a new one."""

    job: str
    number: int
    opened_at: float
    restart: int = 0
    world_size: int = 0
    processes: dict[int, Process] = field(default_factory=dict)
    reported_job: str = ""  # the name that its processes report; another one if a world runs beside
    has_initialised: bool = False  # some process has reached init_process_group
    # The number of its processes that report each address of a rendezvous, and each size of their world.
    addresses: Counter[str] = field(default_factory=Counter)
    _sizes: Counter[int] = field(default_factory=Counter)
    last_seen_at: float = 0.0
    newest_call_at: float = 0.0  # when any rank last entered a call, or was reported to continue
    longest_pause_s: float = 0.0  # the longest time without calls, see `record_call_time`
    # The time at which heartbeats resumed after the whole job was silent: before that, the silence of
    # a host did not mean that this host was lost.
    resumed_at: float = 0.0
    # The streams of each process group by member rank.
    streams_by_group: dict[GroupKey, StreamsByRank] = field(default_factory=dict)
    # Groups whose members reported different running hashes.
    diverged_groups: set[GroupKey] = field(default_factory=set)
    # Ranks that may be blocked or unable to run, by their last report.
    suspects: set[int] = field(default_factory=set)
    # The suspects that have left or may be frozen. A diagnosis looks for such ranks only here.
    unable_ranks: set[int] = field(default_factory=set)
    # Ranks whose process has raised an exception or exited.
    ended_ranks: set[int] = field(default_factory=set)
    # Ranks with a stream that misses a call.
    lossy_ranks: set[int] = field(default_factory=set)
    # Ranks that may have made calls in streams that are not known: see `Process.misses_streams`.
    incomplete_ranks: set[int] = field(default_factory=set)
    # Ranks that reported the arguments of a send.
    sender_ranks: set[int] = field(default_factory=set)
    # The sends of channels whose two ends reported different running hashes, by the ids of the streams.
    diverged_channels: dict[int, CallStream] = field(default_factory=dict)
    # Ranks with a send or a receive whose peer is no rank of its group.
    misaddressing_ranks: set[int] = field(default_factory=set)
    # Groups with a reported call that has split sizes.
    uneven_groups: OrderedGroups = field(default_factory=dict)
    # Groups in which some member's backend reports how far its device is.
    device_groups: OrderedGroups = field(default_factory=dict)
    # Groups with sends or receives.
    message_groups: set[GroupKey] = field(default_factory=set)
    # Something was reported since the last diagnosis that may decide a verdict without a further wait:
    # a rank that cannot run, different calls, or ranks that wait for each other.
    has_urgent_changes: bool = False
    # Groups that two threads of one rank use at the same time.
    concurrent_groups: OrderedGroups = field(default_factory=dict)
    checks: CheckResults = field(default_factory=CheckResults)
    # The readings that the diagnosis requested, by host.
    hardware: dict[str, HostHardware] = field(default_factory=dict)
    kernels_at: float = 0.0  # when kernels of any rank were last received
    # The time since which all live processes were reported, as of the last search for others.
    _all_reported_since: float = 0.0
    # A rank whose process was alive at the last check; -1 if there was none.
    _alive_rank: int = 0
    _group_states: dict[GroupKey, GroupState] = field(default_factory=dict)
    # The states of foreign groups alone.
    foreign_states: dict[GroupKey, GroupState] = field(default_factory=dict)
    _histories: HashHistories = field(default_factory=HashHistories)
    # The different ranks that its groups have, by `StreamIdentity.members_key`.
    _shared_ranks: dict[str, _SharedRanks] = field(default_factory=dict)
    _member_count: int = 0  # the sum of their member counts
    # All attempts share the foreign groups.
    foreign_groups: ForeignGroups = field(default_factory=ForeignGroups)
    # Groups that are gone on all ranks that reported them, but that not all members reported.
    _closed_groups: dict[GroupKey, GroupState] = field(default_factory=dict)
    # Live processes, here or in another attempt, that reported the rank of another live one, by rank.
    twins: dict[int, Process] = field(default_factory=dict)
    # The owners of the node agents that reported its processes.
    owners: set[str] = field(default_factory=set)
    _groups_by_identity: dict[tuple[str | int, ...], Group] = field(default_factory=dict)
    _interned: dict[Any, Any] = field(default_factory=dict)  # signatures and call sites
    # The key is stored because the server looks attempts up by it for each heartbeat.
    key: AttemptKey = field(init=False)

    def __post_init__(self) -> None:
        self.key = AttemptKey(self.job, self.number)

    @property
    def rank_count(self) -> int:
        """The number of ranks, reporting or not."""
        return max(self.world_size, len(self.processes))

    @property
    def is_of_group(self) -> bool:
        """Whether its ranks are the members of a foreign group, and of no world."""
        return is_group_address(self.job.rpartition("/")[2])

    @property
    def has_different_sizes(self) -> bool:
        """Whether its processes report different sizes of their world."""
        return len(self._sizes) > 1

    @property
    def is_finished(self) -> bool:
        """Whether every known process has exited."""
        witness = self.processes.get(self._alive_rank)
        # One live process is proof enough: all (up to 100,000) are scanned only when it has exited.
        if self._alive_rank >= 0 and (witness is None or witness.exit is not None):
            self._alive_rank = next(
                (rank for rank, process in self.processes.items() if process.exit is None), -1
            )
        return bool(self.processes) and self._alive_rank < 0

    def mark_seen(self, now: float) -> None:
        if now - self.last_seen_at > ALL_SILENT_AFTER_S:
            self.resumed_at = now
        self.last_seen_at = max(now, self.last_seen_at)

    def record_call_time(self, entered_at: float, reported_before: float) -> None:
        """Records that a rank entered a call at that time, or has continued by then. Between its last
        two reports it may have made further calls: the pause lasted at least until the former one.
        """
        if entered_at > self.newest_call_at:
            if self.newest_call_at > 0.0:
                pause_s = min(entered_at, reported_before) - self.newest_call_at
                self.longest_pause_s = max(self.longest_pause_s, pause_s)
            self.newest_call_at = entered_at

    def list_unreported(self, before: float) -> list[int]:
        """The ranks whose live processes no node agent has reported since ``before``."""
        if self._all_reported_since > before:
            return []  # The usual case, since reading the times of 100,000 processes takes 10 ms.
        unreported = []
        oldest_at = inf
        for rank, process in self.processes.items():
            if process.exit is None:
                seen_at = process.reports.agent_seen_at
                oldest_at = min(oldest_at, seen_at)
                if seen_at <= before:
                    unreported.append(rank)
        self._all_reported_since = oldest_at
        return unreported

    def find_processes(self, ranks: Iterable[int]) -> Iterator[Process]:
        """The processes of those of the ranks that are known, in the same order."""
        for rank in ranks:
            if (process := self.processes.get(rank)) is not None:
                yield process

    def has_group_of(self, members_key: str) -> bool:
        """Whether some group of it has these members, see `StreamIdentity.members_key`."""
        return members_key in self._shared_ranks

    def count_members(self) -> int:
        """The members of its world and of its groups, which determine its size in memory. Groups with the
        same members share them.
        """
        return self.world_size + self._member_count

    def join_group(self, process: Process, identity: StreamIdentity) -> Group:
        """Makes a process a member of a group. Returns one shared object for all members that report
        the same group, unless it is a foreign one.
        """
        key = _get_identity_key(identity)
        known = self._groups_by_identity.get(key)
        if known is not None and not identity.foreign:
            return known
        shared = self._shared_ranks.get(identity.members_key)
        ranks: Ranks = ()
        if identity.foreign:
            group = self.foreign_groups.join_group(process, identity)
        else:
            ranks = unpack_ranks(identity.ranks) if shared is None else shared.ranks
            group = Group(
                name=identity.name,
                desc=identity.desc,
                ranks=ranks,
                backend=identity.backend,
                generation=identity.generation,
                world_size=identity.world,
            )
        if known is None:
            self._groups_by_identity[key] = group
            if shared is None:
                shared = _SharedRanks(ranks, len(group.ranks))
                self._shared_ranks[identity.members_key] = shared
                self._member_count += shared.member_count
            shared.group_count += 1
        return group

    def intern_call(self, call: Call) -> Call:
        """Shares a call's signature and site, most of its memory, with equal calls of other ranks."""
        if len(self._interned) >= INTERNED_KEPT:
            self._interned.clear()
        # The shared objects are equal to the call's own, so its value stays the same. Replacing them in
        # place is faster than copying the call.
        for name in ("signature", "site"):
            value = getattr(call, name)
            object.__setattr__(call, name, self._interned.setdefault(value, value))
        return call

    def drop_spare_calls(self) -> int:
        """Drops calls for lack of memory; see `CallStream.drop_spare_calls`. Returns how many."""
        self._interned.clear()
        dropped_count = 0
        for process in self.processes.values():
            for stream in process.streams.values():
                dropped_count += stream.drop_spare_calls()
        return dropped_count

    def add_stream(self, process: Process, stream: CallStream) -> None:
        """Adds a new stream of a process; a former holder of a rank joins no `GroupState`."""
        process.streams[stream.uid] = stream
        process.added_streams += 1
        if stream.peer is not None:
            self.message_groups.add(stream.group.key)
        if process.holds_rank:
            if stream.loss is not None:
                self.lossy_ranks.add(process.rank)
            if decode_invalid_peer(stream.peer) is not None:
                self.misaddressing_ranks.add(process.rank)
            connect_channel(process, stream)
            self._add_to_state(process, stream)

    def _add_to_state(self, process: Process, stream: CallStream) -> None:
        """Makes a stream of collectives one of its `GroupState`."""
        if stream.kind not in (StreamKind.COLLECTIVE, StreamKind.SETUP):
            return
        key = stream.group.key
        state = self._group_states.get(key)
        if state is None:
            state = self._group_states[key] = GroupState(key=key, size=len(key[2]))
            self.streams_by_group[key] = state.members
            if stream.group.foreign:
                self.foreign_states[key] = state
        state.members[process.rank] = stream
        stream.group_state = state
        state.has_losses |= stream.loss is not None

    def replace_group(self, process: Process, stream: CallStream, group: Group) -> None:
        """Gives a stream the group with the members that are known by now."""
        has_moved = group.key != stream.group.key
        if has_moved and stream.group_state is not None:
            self._remove_from_state(process.rank, stream.group_state)
        stream.group = group
        if has_moved and process.holds_rank:
            self._add_to_state(process, stream)

    def list_outside_waits(self) -> list[tuple[int, CallStream, GroupState]]:
        """The processes of other attempts that are blocked in a call of a foreign group, with their
        stream and the state that this attempt has of the group.
        """
        waits = []
        for state in self.foreign_states.values():
            for outside, stream in state.outside.items():
                process = self.foreign_groups.find_outside(outside)
                if process is not None and process.is_alive and process.is_blocked:
                    waits.append((outside, stream, state))
        return waits

    def close_stream(self, process: Process, uid: int) -> None:
        """Removes a stream whose group is gone on its rank. The group is forgotten with its last member:
        until then, others may wait in it for calls that this rank has made, or has not.
        """
        stream = process.streams.get(uid)
        if stream is None:
            return
        stream.is_closed = True
        if stream.group.foreign:  # members of other jobs may still be in it
            return
        del process.streams[uid]
        if stream.peer is not None:
            forget_channel(process, stream)
            if stream.other_end is None or stream.other_end.is_closed:
                self._forget_divergence(stream)
        state = stream.group_state
        if state is None or state.members.get(process.rank) is not stream:
            return
        state.closed_count += 1
        if state.closed_count < len(state.members):
            return
        if len(state.members) == state.size:
            self._forget_group(state)
            return
        self._closed_groups[state.key] = state
        if len(self._closed_groups) > MAX_CLOSED_GROUPS:
            self._forget_group(next(iter(self._closed_groups.values())))

    def _forget_group(self, state: GroupState) -> None:
        self._closed_groups.pop(state.key, None)
        if state.closed_count < len(state.members):
            return  # another member has reported it meanwhile
        for group in {id(s.group): s.group for s in state.members.values()}.values():
            texts = (group.name, group.desc, pack_ranks(group.ranks), group.backend)
            key = (*texts, group.generation, group.world_size, "")
            if self._groups_by_identity.pop(key, None) is not None:
                self._release_ranks(texts[2])
        for stream in state.members.values():
            stream.group_state = None
        self._drop_group_state(state)
        self.device_groups.pop(state.key, None)
        self.message_groups.discard(state.key)

    def _release_ranks(self, members_key: str) -> None:
        shared = self._shared_ranks[members_key]
        shared.group_count -= 1
        if not shared.group_count:
            del self._shared_ranks[members_key]
            self._member_count -= shared.member_count

    def _drop_group_state(self, state: GroupState) -> None:
        key = state.key
        self._group_states.pop(key, None)
        self.foreign_states.pop(key, None)
        self.streams_by_group.pop(key, None)
        self.diverged_groups.discard(key)
        self.uneven_groups.pop(key, None)
        self.concurrent_groups.pop(key, None)

    def assign_rank(self, process: Process | None, rank: int) -> None:
        """Makes ``process`` the holder of a rank, or leaves the rank without one for None."""
        self._alive_rank = rank
        reported_states = (self.suspects, self.unable_ranks, self.ended_ranks)
        reported_calls = (self.sender_ranks, self.misaddressing_ranks)
        for ranks in (*reported_states, *reported_calls, self.incomplete_ranks, self.lossy_ranks):
            ranks.discard(rank)
        former = self.processes.pop(rank, None)
        if former is not None:
            if process is not None and former.is_alive:
                self.twins[rank] = former
            self._count_identity(former.identity, -1)
            # The former process's results must not be compared with the calls of its successor.
            self.checks = CheckResults()
            self.foreign_groups.leave_groups(former)
            for stream in former.streams.values():
                self._forget_divergence(stream)
                disconnect_channel(stream)
                state = stream.group_state
                if state is not None:
                    stream.group_state = None
                    self._remove_from_state(rank, state)
        if process is not None:
            self.processes[rank] = process
            self._count_identity(process.identity, 1)
            self._histories.set_rank_count(len(self.processes))
            self._all_reported_since = min(self._all_reported_since, process.reports.agent_seen_at)

    def replace_identity(self, process: Process, identity: ProcessIdentity) -> None:
        """Gives a process what it reports of itself now. It has the same rank as before."""
        former = process.identity
        process.identity = identity
        if process.holds_rank:
            self._count_identity(former, -1)
            self._count_identity(identity, 1)
            if identity.world_size < former.world_size:
                self.shrink_world()
        self.world_size = max(self.world_size, identity.world_size)

    def shrink_world(self) -> None:
        """Updates `world_size` after a process has joined another world."""
        if self._sizes:
            self.world_size = max(self._sizes)

    def _count_identity(self, identity: ProcessIdentity, change: int) -> None:
        change_count(self._sizes, identity.world_size, change)
        if is_known_address(identity.master):
            change_count(self.addresses, identity.master, change)

    def _remove_from_state(self, rank: int, state: GroupState) -> None:
        if rank in state.members:  # Two streams of a process can belong to the same group.
            state.remove_member(rank)
            if state.diverged:
                self._update_divergence(state)
        if not state.members:
            self._drop_group_state(state)

    def update_suspects(self, process: Process) -> None:
        """Updates `suspects` and the other sets of ranks after a heartbeat of the process."""
        rank = process.identity.rank
        if not process.holds_rank:
            return
        if process.exit is not None or process.exception is not None:
            self.ended_ranks.add(rank)
        if process.misses_streams:
            self.incomplete_ranks.add(rank)
        else:
            self.incomplete_ranks.discard(rank)
        if process.is_unable:
            self.has_urgent_changes |= rank not in self.unable_ranks
            self.unable_ranks.add(rank)
            self.suspects.add(rank)
            return
        self.unable_ranks.discard(rank)
        if process.is_blocked:
            self.suspects.add(rank)
        else:
            self.suspects.discard(rank)

    def track_calls(self, process: Process, stream: CallStream, calls: Iterable[Call]) -> None:
        """Records which rank or group has calls to compare with others: sends and split sizes."""
        state = stream.group_state
        if state is None:
            if stream.kind is StreamKind.SEND and process.holds_rank:
                self.sender_ranks.add(process.rank)
        elif any(call.signature.splits is not None for call in calls):
            self.uneven_groups[state.key] = None

    def record_loss(self, process: Process, stream: CallStream, loss: Loss) -> None:
        """Records from which call on a stream's numbers are uncertain, and revokes conclusions."""
        if stream.loss is not None and stream.loss.from_seq <= loss.from_seq:
            return
        stream.loss = loss
        if process.holds_rank:
            self.lossy_ranks.add(process.rank)
        if stream.group_state is not None:
            stream.group_state.has_losses = True
        self._revoke_hashes(stream, loss.from_seq)

    def retract_calls(self, stream: CallStream, from_seq: int) -> None:
        """Forgets the calls of a stream from a number on: the one with this number was reported, and then
        raised an exception before it communicated. What was concluded from it is revoked, and the next
        call gets its number.
        """
        if any(seq >= from_seq for seq in stream.calls):
            stream.calls = {seq: call for seq, call in stream.calls.items() if seq < from_seq}
        stream.answered = tuple(window for window in stream.answered if window.last < from_seq)
        state = stream.group_state
        if state is not None:
            state.passed_by_all = min(state.passed_by_all, from_seq - 1)
            state.laggard = None
        self._revoke_hashes(stream, from_seq)

    def _revoke_hashes(self, stream: CallStream, from_seq: int) -> None:
        """Forgets the running hashes of a stream from a call on, and a divergence that they showed."""
        stream.reported_hashes = tuple(
            [pair for pair in stream.reported_hashes if pair[0] < from_seq]
        )
        state = stream.group_state
        if state is None:
            self._update_channel_divergence(stream)
            return
        state.forget_references([seq for seq in state.reference_hashes if seq >= from_seq])
        if state.diverged:
            self._update_divergence(state)

    @property
    def awaits_calls(self) -> bool:
        """Whether calls that were requested from members of a diverged group are outstanding."""
        for key in self.diverged_groups:
            sides = self._group_states[key].streams_by_side.values()
            if not all(stream.answered for stream in sides):
                return True
        return False

    def record_hashes(self, stream: CallStream, report: Hashes) -> None:
        """Records running hashes of a stream's calls and detects a divergence between the members of its
        group, or from the other end of its channel. ``report`` is sorted by sequence number. A long one was
        requested: its hashes may be older than those that are known, and no other rank shares it.
        """
        state = stream.group_state
        if stream.loss is not None:  # later hashes cannot be compared with those of other ranks
            report = tuple([pair for pair in report if stream.is_counted(pair[0])])
        if not report:
            return
        if state is None:
            stream.reported_hashes = merge_hashes(stream.reported_hashes, report)
            self._update_channel_divergence(stream)
            return
        if len(report) > NEWEST_KEPT:
            stream.reported_hashes = merge_hashes(stream.reported_hashes, report)
            self._update_divergence(state)
            stream.reported_hashes = thin_hashes(stream.reported_hashes, state.pinned_seqs)
            return
        report = self._histories.share_report(report)
        stream.reported_hashes = self._histories.extend_history(
            stream.reported_hashes, report, state.pinned_seqs
        )
        if state.diverged:
            # Later reports change nothing. In a large group, searching all members for each earlier
            # report would take long: the diagnosis does it once for all.
            _, first_different = state.pinned_seqs
            if state.size > MAX_URGENT_SUSPECTS or report[0][0] >= first_different:
                return
        elif state.match_hashes(report):
            return
        self._update_divergence(state)

    def _forget_divergence(self, stream: CallStream) -> None:
        """Forgets that the ends of a channel differ, as one of them has no peer any more."""
        for end in (stream, stream.other_end):
            self.diverged_channels.pop(id(end), None)

    def _update_channel_divergence(self, stream: CallStream) -> None:
        """Compares the running hashes of the two ends of a channel. They are kept from the last equal one on
        and, after a divergence, up to the first that differs.
        """
        other = stream.other_end
        if other is None:
            stream.reported_hashes = stream.reported_hashes[-NEWEST_KEPT:]
            return
        sending = stream if stream.kind is StreamKind.SEND else other
        ours = stream.hashes_by_seq
        theirs = other.hashes_by_seq
        common = ours.keys() & theirs.keys()
        equal = {seq for seq in common if ours[seq] == theirs[seq]}
        last = min(common - equal, default=inf)
        first = max([seq for seq in equal if seq < last], default=0)
        if last < inf:
            self.has_urgent_changes |= id(sending) not in self.diverged_channels
            self.diverged_channels[id(sending)] = sending
            kept_count = MAX_PINNED_PAIRS
        else:
            self.diverged_channels.pop(id(sending), None)
            kept_count = NEWEST_KEPT
        for end in (stream, other):
            pairs = [pair for pair in end.reported_hashes if first <= pair[0] <= last]
            end.reported_hashes = (*pairs[:1], *pairs[1:][1 - kept_count :])

    def _update_divergence(self, state: GroupState) -> None:
        """Finds where the members of a group began to differ, if they do."""
        before = state.divergence
        found = find_divergence(state.members)
        if found == before:
            return
        state.divergence = found
        if found is None:
            state.streams_by_side.clear()
            self.diverged_groups.discard(state.key)
            return
        state.narrowed_at = self.last_seen_at
        self.has_urgent_changes = True
        if before is None:
            state.diverged_at = self.last_seen_at
            state.diverged_seq = found.first_different
            self.diverged_groups.add(state.key)


def is_known_address(address: str) -> bool:
    """Whether an address of a rendezvous is complete."""
    host, _, port = address.rpartition(":")
    return bool(host and port) or address.startswith("/")


def find_divergence(members: StreamsByRank) -> DivergenceBounds | None:
    """The calls between which the members' running hashes began to differ; None if they do not."""
    histories = list_histories(members.values())
    pairs: set[HashPair] = set().union(*histories)
    seen: dict[int, int] = {}
    conflicts = [seq for seq, value in pairs if seen.setdefault(seq, value) != value]
    if not conflicts:
        return None
    first = min(conflicts)
    # Equal hashes mean that all calls up to there are equal: the members with the same hash of call
    # ``first`` are one side, and what one of them reported holds for all.
    seqs_by_side = defaultdict(set)
    for history in histories:
        value = dict(history).get(first)
        if value is not None:
            seqs_by_side[value].update([seq for seq, _ in history if seq < first])
    common = set.intersection(*seqs_by_side.values())
    return DivergenceBounds(last_equal=max(common, default=0), first_different=first)
