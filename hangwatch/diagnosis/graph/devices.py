"""Which devices other devices wait for, from how far each one came in the collectives of its groups.

A device that is inside a collective waits for the members whose devices have not come to it. The
ends of these chains are causes, across groups as well: a device that other devices wait for, and
that itself waits for none.

Where a backend does not record starts, the call that a device is in is taken to be the first one
that it has not completed, in the order in which its host queued the calls.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import inf

from hangwatch.model.groups import GroupKey
from hangwatch.model.limits import READING_DELAY_S
from hangwatch.model.operators import OPERATIONS
from hangwatch.model.verdicts import CallClass, DeviceProgress, Wait
from hangwatch.tracking.attempt import Attempt
from hangwatch.tracking.call_stream import CallStream, StreamsByRank
from hangwatch.tracking.process import Process

from ..call_classes import list_equal_callers
from .edges import WaitEdge, WaiterIndex, can_communicate, get_op_name

_MAX_DISTINCT_COUNTS = 2

ProgressByRank = Mapping[int, DeviceProgress]


@dataclass(frozen=True, kw_only=True, eq=False)
class DeviceGroup:
    """The collectives of one process group. ``members`` are those whose counters are known."""

    ranks: tuple[int, ...]
    members: ProgressByRank
    streams: StreamsByRank = field(default_factory=dict)  # one for each member that reports

    @property
    def records_starts(self) -> bool:
        return all(progress.started is not None for progress in self.members.values())

    @property
    def has_unknown_members(self) -> bool:
        return len(self.members) < len(self.ranks)

    @cached_property
    def furthest(self) -> int:
        """The last call that some device has completed."""
        return max(progress.completed for progress in self.members.values())

    def get_seq(self, rank: int) -> int:
        """The sequence number of the first call that the rank's device has not completed."""
        stream, progress = self.streams[rank], self.members[rank]
        if stream.completed is not None:
            return stream.first_unfinished
        uncounted = _count_uncounted_calls(stream, progress)
        # A host that is inside its newest call, as with a full launch queue, is counted one call behind.
        if uncounted - self.least_uncounted == 1:
            uncounted = self.least_uncounted
        return max(progress.completed + uncounted + 1, 1)

    @cached_property
    def least_uncounted(self) -> int:
        """The least number of calls of a member that the backend does not count."""
        streams = self.streams
        return min(_count_uncounted_calls(streams[r], p) for r, p in self.members.items())

    def get_op(self, rank: int) -> str:
        return get_op_name(self.streams[rank], self.get_seq(rank))

    def get_call(self, rank: int) -> tuple[CallClass, ...]:
        """The first call that its device has not completed, if known, with ranks that made it."""
        seq = self.get_seq(rank)
        call = self.streams[rank].calls.get(seq)
        if call is None:
            return ()
        return (CallClass(ranks=list_equal_callers(self.streams, rank, seq), call=call),)

    def make_wait(self, rank: int, on_rank: int) -> Wait:
        name, seq = self.streams[rank].group.name, self.get_seq(rank)
        awaited = self.streams[on_rank]
        if awaited.loss is None:
            # A device is not further than the hosts: it may be in a replay of a CUDA graph, which the
            # backend does not count, before the call.
            seq = min(seq, awaited.entered + 1)
        return Wait(rank=rank, on_rank=on_rank, group=name, seq=seq)

    def get_queue_key(self, rank: int) -> tuple[float, ...]:
        """Sorts the groups of a rank by the first call that the device has not completed.

        If it is not recorded when that was made: of groups that are used in turn, the one with more
        uncompleted calls comes first; with as many, the one whose newest call is older.
        """
        stream, progress = self.streams[rank], self.members[rank]
        if stream.pending_at is not None:
            return (stream.pending_at,)
        return progress.completed - progress.enqueued, stream.entered_at


@dataclass(slots=True, eq=False)
class DeviceWait:
    """Devices in the same call of a group, and the members that have not come to it."""

    group: DeviceGroup
    call: int  # numbered by the backend's counters
    waiters: set[int]
    awaited: set[int]


class DeviceGraph:
    """Which devices of an attempt wait for which ones at one moment, and the ends of these chains.

    ``fronts`` has, for each rank, the groups in which its device has uncompleted calls, in the order
    in which the host queued the first of these. ``culprits`` are the ranks whose devices lag.
    ``stalled_groups`` have all their devices in one call that none of them completes. ``host_ends``
    are ranks whose hosts have not made the call; their devices have nothing to do.
    ``uncertain_ends`` may themselves wait for a device whose counters are unknown. ``cycle`` are
    devices that wait for each other.
    """

    def __init__(
        self,
        groups: Sequence[DeviceGroup],
        fronts: Mapping[int, Sequence[DeviceGroup]],
        processes: Mapping[int, Process],
    ) -> None:
        self.fronts = fronts
        self.culprits: set[int] = set()
        self.stalled_groups: list[DeviceGroup] = []
        self.host_ends: set[int] = set()
        self.uncertain_ends: set[int] = set()
        self.cycle: set[int] = set()
        self._processes = processes
        self.waits = [wait for group in groups for wait in self._find_waits(group)]
        self._index = WaiterIndex([(wait.waiters, wait.awaited) for wait in self.waits])
        waiters: set[int] = set()
        ends: set[int] = set()
        for wait in self.waits:
            waiters |= wait.waiters
            ends |= wait.awaited
        ends -= waiters
        for rank in sorted(ends):
            self._classify_end(rank, waiters)
        if not ends:
            self.cycle = self._find_cycle(waiters)
        if self.waits:
            return
        for group in groups:
            # Whether all members are in one call, or before it without a known difference.
            counts = {progress.completed for progress in group.members.values()}
            is_one_call = len(counts) == 1 and not group.has_unknown_members
            if is_one_call and all(self._is_inside(group, rank) for rank in group.members):
                self.stalled_groups.append(group)

    def _find_waits(self, group: DeviceGroup) -> Iterator[DeviceWait]:
        waiters_by_call = defaultdict(set)
        for rank, progress in group.members.items():
            if self._is_inside(group, rank):
                waiters_by_call[progress.completed + 1].add(rank)
        for call, waiters in waiters_by_call.items():
            awaited = {rank for rank in group.members if not self._may_have_come(group, rank, call)}
            if awaited:
                yield DeviceWait(group, call, waiters, awaited)

    def _find_cycle(self, waiters: set[int]) -> set[int]:
        """The ``waiters`` that remain after all those for which no remaining one waits are left out."""
        while True:
            awaited = set()
            for wait in self.waits:
                if not waiters.isdisjoint(wait.waiters):
                    awaited |= wait.awaited
            if waiters <= awaited:
                return waiters
            waiters = waiters & awaited

    def _is_inside(self, group: DeviceGroup, rank: int) -> bool:
        """Whether a rank's device is in a collective of the group, as far as is known."""
        return self._may_have_come(group, rank, group.members[rank].completed + 1)

    def _get_front(self, rank: int) -> DeviceGroup | None:
        """The group of the first call that a rank's device has not completed."""
        fronts = self.fronts.get(rank)
        return fronts[0] if fronts else None

    def _may_have_come(self, group: DeviceGroup, rank: int, call: int) -> bool:
        """Whether a rank's device has begun the call, or may have."""
        progress = group.members[rank]
        if progress.completed >= call:
            return True
        if progress.enqueued < call:
            return False
        if progress.started is not None:
            return progress.started >= call
        return progress.completed == call - 1 and self._get_front(rank) is group

    def _classify_end(self, rank: int, waiters: set[int]) -> None:
        front = self.fronts.get(rank, ())
        if not front:
            self.host_ends.add(rank)
            return
        group = next((group for group in front if self._is_inside(group, rank)), None)
        if group is None:  # the backend records starts, and the device has begun no call
            self.culprits.add(rank)
            return
        progress = group.members[rank]
        if progress.completed < group.furthest:
            self.culprits.add(rank)
        elif group.has_unknown_members:
            self.uncertain_ends.add(rank)
        elif progress.started is None:
            # Which of the members before or in the same call is stuck is unknown.
            for other, its_progress in group.members.items():
                is_equal = its_progress.completed == progress.completed
                if is_equal and other not in waiters and self._get_front(other) is group:
                    self.culprits.add(other)
        elif group not in self.stalled_groups:
            self.stalled_groups.append(group)

    def find_waiters_of(self, targets: Iterable[int]) -> set[int]:
        """The ranks whose devices wait for those of ``targets``, directly or through others."""
        return self._index.find_waiters_of(targets)

    def find_direct_waiters_of(self, targets: set[int]) -> set[int]:
        """The ranks whose devices are in a call that the devices of some ``targets`` have not reached."""
        waiters = [wait.waiters for wait in self.waits if not targets.isdisjoint(wait.awaited)]
        return set().union(*waiters) - targets

    def list_waits(self, culprits: Collection[int]) -> Iterator[Wait]:
        """The waits of devices for those of the ``culprits``."""
        for wait in self.waits:
            for on_rank in sorted(wait.awaited.intersection(culprits)):
                for rank in sorted(wait.waiters):
                    yield wait.group.make_wait(rank, on_rank)

    def find_longest_wait(self, culprits: Collection[int]) -> WaitEdge | None:
        """The longest wait of a device for a host of the ``culprits`` that has not made the call."""
        waits = []
        for wait in self.waits:
            group = wait.group
            awaited = wait.awaited.intersection(culprits)
            hosts = [rank for rank in awaited if group.members[rank].enqueued < wait.call]
            if hosts:
                since = self.get_unchanged_since(wait.waiters)
                waits.append((since, min(wait.waiters), min(hosts), group))
        if not waits:
            return None
        _, rank, on_rank, group = min(waits, key=lambda item: item[:3])
        return WaitEdge(wait=group.make_wait(rank, on_rank), stream=group.streams[rank])

    def get_unchanged_since(self, ranks: Iterable[int]) -> float:
        """The time since which none of the ranks' devices began or completed a call."""
        return max([p.device_changed_at for p in self._select_processes(ranks)], default=0.0)

    def get_unchanged_s(self, ranks: Iterable[int]) -> float:
        """How long no device began or completed a call, as of the oldest of the last readings."""
        ranks = list(ranks)
        known_until = min([p.device_read_at for p in self._select_processes(ranks)], default=0.0)
        return known_until - self.get_unchanged_since(ranks)

    def get_waited_s(self, ranks: Iterable[int]) -> float:
        """How long their devices have been in, or before, the calls that their hosts wait for.

        More exact than `get_unchanged_s`: a host that waits for its device continues as soon as the
        device does, and hosts report more often than counters are read.
        """
        ranks = list(ranks)
        processes = [self._processes[rank] for rank in ranks]
        since = self.get_unchanged_since(ranks)
        newest_call_at = max(process.newest_call_at for process in processes)
        if newest_call_at > since:
            return self.get_unchanged_s(ranks)
        known_until = min(map(get_still_until, processes))
        # The first reading after the last call shows when the device was seen, not when it changed.
        if since <= newest_call_at + READING_DELAY_S:
            since = newest_call_at
        return known_until - since

    def find_stuck_ranks(self) -> set[int]:
        """The culprits without those whose devices may be in a send or a receive."""
        return {rank for rank in self.culprits if not self._may_be_in_message(rank)}

    def _may_be_in_message(self, rank: int) -> bool:
        """Whether a rank's device may be in a send or a receive, whose peer is unknown here. Hosts run
        ahead of their devices: only a completed collective that was queued later shows that it is not.
        """
        front = self._get_front(rank)
        if front is not None and front.members[rank].completed < front.furthest:
            spec = OPERATIONS.get(front.get_op(rank))
            if spec is not None and spec.is_mutual_wait:
                return False  # the call that others have completed and its device has not
        process = self._processes[rank]
        streams = process.streams.values()
        messages = [stream for stream in streams if stream.peer is not None and stream.entered]
        if any(stream.is_pending for stream in messages):
            return True
        if all(stream.completed is not None for stream in messages):
            return False
        if process.message_mark is not None:
            for uid, queued_count in process.message_mark.enqueued.items():
                stream = process.streams.get(uid)
                device = None if stream is None else stream.device
                if device is not None and device.completed > queued_count:
                    return False
        return True

    def _select_processes(self, ranks: Iterable[int]) -> list[Process]:
        """Not every rank of a group need have a process: a member of a foreign group may be no rank."""
        return [self._processes[rank] for rank in ranks if rank in self._processes]


def get_still_until(process: Process) -> float:
    """The time until which a host that waits for its device is known to have made no further call."""
    read_at = process.device_read_at
    last_seen_at = process.reports.last_seen_at
    if last_seen_at - read_at > READING_DELAY_S:
        return read_at
    return max(read_at, last_seen_at)


def build_device_graph(attempt: Attempt, ended: Collection[int] = ()) -> DeviceGraph:
    """Builds the graph of an attempt's devices; empty where no backend reports how far they are.

    A rank that has left queues no further call. The last counters of the ranks in ``ended`` still show
    where their devices were.
    """
    processes = attempt.processes
    groups = []
    fronts = defaultdict(list)
    left_ranks = {rank for rank in attempt.unable_ranks if not can_communicate(processes[rank])}
    left_ranks.difference_update(ended)
    for key in attempt.device_groups:
        group_streams = attempt.streams_by_group.get(key, {})
        members = {r: s.device for r, s in group_streams.items() if s.device is not None}
        for rank in left_ranks.intersection(members):
            members[rank] = replace(members[rank], completed=members[rank].enqueued)
        if not members or _counts_messages(attempt, key, members):
            continue
        group = DeviceGroup(
            ranks=next(iter(group_streams.values())).group.ranks,
            members=_level_stale_counters(members, group_streams),
            streams=group_streams,
        )
        groups.append(group)
        for rank, progress in group.members.items():
            if progress.is_behind_host:
                fronts[rank].append(group)
    for rank, behind in fronts.items():
        behind.sort(key=lambda group: group.get_queue_key(rank))
    return DeviceGraph(groups, fronts, processes)


def _counts_messages(attempt: Attempt, key: GroupKey, members: Iterable[int]) -> bool:
    """Whether the counters may include sends and receives, which members make differently. Where completion
    of messages is known, as in dumps, the counters were taken without them.
    """
    if key not in attempt.message_groups:
        return False
    for rank in members:
        for stream in attempt.processes[rank].streams.values():
            is_uncounted = stream.peer is not None and stream.completed is None
            if is_uncounted and stream.group.key == key:
                return True
    return False


def _level_stale_counters(members: ProgressByRank, streams: StreamsByRank) -> ProgressByRank:
    """The members' counters, or the highest for all where they contradict each other.

    A call completes only after all devices have begun it, so that running devices are at most one
    call apart. After an error of the network, each rank's watchdog stops counting at another call.
    Nor are most members behind a few: a call that some complete was begun by all. A device whose
    counters did not change while those of others did is behind all the same: its GPU may be lost.
    In dumps, whose calls are known to be complete or not, such counters are kept.
    """
    completed = [progress.completed for progress in members.values()]
    highest = max(completed)
    are_most_behind = 2 * completed.count(highest) < len(completed)
    are_stale = are_most_behind or len(set(completed)) > _MAX_DISTINCT_COUNTS
    if highest - min(completed) > 1:
        # Readings that are far apart show different times.
        behind_changed_at = furthest_changed_at = -inf
        for rank, progress in members.items():
            changed_at = streams[rank].device_changed_at
            if progress.completed < highest:
                behind_changed_at = max(behind_changed_at, changed_at)
            else:
                furthest_changed_at = max(furthest_changed_at, changed_at)
        are_stale |= furthest_changed_at - behind_changed_at <= READING_DELAY_S
    if not are_stale:
        return members
    is_timed = any(progress.started is not None for progress in members.values())
    is_live = all(streams[rank].completed is None for rank in members)
    if is_timed or not is_live:
        return members
    return {
        rank: replace(progress, completed=min(highest, progress.enqueued))
        for rank, progress in members.items()
    }


def get_first_unfinished(stream: CallStream) -> int:
    """The first unfinished call's number, by the rank's own counters."""
    progress = stream.device
    if stream.completed is not None or progress is None:
        return stream.first_unfinished
    return max(progress.completed + _count_uncounted_calls(stream, progress) + 1, 1)


def _count_uncounted_calls(stream: CallStream, progress: DeviceProgress) -> int:
    """How many more calls the host made than the backend counted: a coalesced block counts as one. Calls
    that it has made since the counters were read, or is in, are not meant.
    """
    uncounted = stream.entered - progress.enqueued
    maximum = stream.uncounted_calls
    # Each replay of a CUDA graph is another call that is not counted.
    if maximum is None or stream.has_replays:
        return uncounted
    return min(uncounted, maximum)
