"""The devices of an attempt as its call streams show them: how far each one came, which of a
rank's groups its device is in first, and for how long nothing changed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace

from hangwatch.diagnosis.call_classes import list_equal_callers
from hangwatch.diagnosis.graph.devices import DeviceGraph, DeviceGroup, DeviceHang, DeviceWait
from hangwatch.diagnosis.graph.graph import WaitEdge
from hangwatch.model.device import DeviceProgress
from hangwatch.model.groups import GroupKey
from hangwatch.model.operators import OPERATIONS
from hangwatch.model.ranks import Lifecycle
from hangwatch.model.verdicts import CallClass, Wait
from hangwatch.tracking.attempt import Attempt
from hangwatch.tracking.call_stream import CallStream
from hangwatch.tracking.process import Process

READING_DELAY_S = 3.0  # counters that are behind are read and reported at least this often

_MAX_DISTINCT_COUNTS = 2


@dataclass(slots=True, kw_only=True, eq=False)
class DeviceView:
    """``fronts`` has, by rank, the groups with uncompleted calls, as `DeviceGraph` needs them."""

    hang: DeviceHang
    fronts: Mapping[int, list[DeviceGroup]]
    _processes: Mapping[int, Process]
    _streams: Mapping[int, Mapping[int, CallStream]]  # by the identity of the group, and rank

    def get_stream(self, group: DeviceGroup, rank: int) -> CallStream:
        return self._streams[id(group)][rank]

    def get_seq(self, group: DeviceGroup, rank: int) -> int:
        """The sequence number of the first call that its device has not completed."""
        return get_first_unfinished(self.get_stream(group, rank), group.members[rank])

    def get_op(self, group: DeviceGroup, rank: int) -> str:
        stream = self.get_stream(group, rank)
        call = stream.calls.get(self.get_seq(group, rank))
        return call.signature.op if call is not None else stream.op or "a collective"

    def get_call(self, group: DeviceGroup, rank: int) -> tuple[CallClass, ...]:
        """The first call that its device has not completed, if its arguments are known, with the ranks
        that are known to have made it.
        """
        seq = self.get_seq(group, rank)
        streams = self._streams[id(group)]
        call = streams[rank].calls.get(seq)
        if call is None:
            return ()
        return (CallClass(ranks=list_equal_callers(streams, rank, seq), call=call),)

    def find_longest_wait(self, culprits: Collection[int]) -> WaitEdge | None:
        """The longest wait of a device for a host of the ``culprits`` that has not made the call."""
        waits: list[tuple[float, int, int, DeviceWait]] = []
        for wait in self.hang.waits:
            members = wait.group.members
            on_ranks = [
                r for r in wait.awaited.intersection(culprits) if members[r].enqueued < wait.call
            ]
            if on_ranks:
                since = self.get_unchanged_since(wait.waiters)
                waits.append((since, min(wait.waiters), min(on_ranks), wait))
        if not waits:
            return None
        _, rank, on_rank, wait = min(waits, key=lambda item: item[:3])
        stream = self.get_stream(wait.group, rank)
        seq = self.get_seq(wait.group, rank)
        device_wait = Wait(rank=rank, on_rank=on_rank, group=stream.group.name, seq=seq)
        return WaitEdge(wait=device_wait, stream=stream)

    def get_unchanged_since(self, ranks: Iterable[int]) -> float:
        """Since when none of their devices began or completed a call."""
        return max([p.device_changed_at for p in self._select_processes(ranks)], default=0.0)

    def get_unchanged_s(self, ranks: Iterable[int]) -> float:
        """How long this is known to last: until the oldest of the ranks' last readings."""
        ranks = list(ranks)
        known_until = min([p.device_read_at for p in self._select_processes(ranks)], default=0.0)
        return known_until - self.get_unchanged_since(ranks)

    def get_waited_s(self, ranks: Iterable[int]) -> float:
        """How long their devices have been in, or before, the calls that their hosts wait for.

        More exact than `get_unchanged_s`: a host that waits for its device goes on as soon as the
        device does, and hosts report more often than counters are read.
        """
        ranks = list(ranks)
        since = self.get_unchanged_since(ranks)
        newest_call_at = max(self._processes[rank].newest_call_at for rank in ranks)
        if newest_call_at > since:
            return self.get_unchanged_s(ranks)
        known_until = min(get_still_until(self._processes[rank]) for rank in ranks)
        # The first reading after the last call shows when the device was seen, not when it changed.
        if since <= newest_call_at + READING_DELAY_S:
            since = newest_call_at
        return known_until - since

    def find_stuck_ranks(self) -> set[int]:
        """The culprits of the hang without those whose devices may be in a send or a receive."""
        return {rank for rank in self.hang.culprits if not self._may_be_in_message(rank)}

    def _may_be_in_message(self, rank: int) -> bool:
        """Whether its device may be in a send or a receive, whose peer is unknown here. Hosts run ahead
        of their devices: only a completed collective that was queued later shows that it is not.
        """
        if self._is_in_completed_call(rank):
            return False
        process = self._processes[rank]
        messages = [s for s in process.streams.values() if s.peer is not None and s.entered]
        if any(stream.is_pending for stream in messages):
            return True
        if all(stream.completed is not None for stream in messages):
            return False
        mark = process.message_mark
        queued = {} if mark is None else mark.enqueued
        return not any(
            stream.device is not None and stream.device.completed > queued[stream.uid]
            for stream in process.streams.values()
            if stream.uid in queued
        )

    def _is_in_completed_call(self, rank: int) -> bool:
        """Whether other members have completed the call that its device has not, in which all members
        wait for each other.
        """
        fronts = self.fronts.get(rank)
        if not fronts:
            return False
        group = fronts[0]
        completed = group.members[rank].completed
        spec = OPERATIONS.get(self.get_op(group, rank))
        is_behind = any(other.completed > completed for other in group.members.values())
        return is_behind and spec is not None and spec.is_mutual_wait

    def _select_processes(self, ranks: Iterable[int]) -> list[Process]:
        return [self._processes[rank] for rank in ranks if rank in self._processes]


def get_still_until(process: Process) -> float:
    """Until when its host, which waits for its device, is known to have made no further call."""
    read_at = process.device_read_at
    last_seen_at = process.reports.last_seen_at
    if last_seen_at - read_at > READING_DELAY_S:
        return read_at
    return max(read_at, last_seen_at)


def build_device_view(attempt: Attempt, ended: Collection[int] = ()) -> DeviceView | None:
    """None where no backend reports how far devices are.

    A rank that has left queues no further call; of those in ``ended``, the last counters show also where
    their devices were.
    """
    processes = attempt.processes
    groups: list[DeviceGroup] = []
    streams: dict[int, dict[int, CallStream]] = {}
    pending: dict[int, list[tuple[tuple[float, ...], DeviceGroup]]] = {}
    left_ranks = {rank for rank in attempt.unable_ranks if not _is_running(processes[rank])}
    for key in attempt.device_groups:
        group_streams = attempt.streams_by_group.get(key, {})
        members = {r: s.device for r, s in group_streams.items() if s.device is not None}
        for rank in left_ranks.difference(ended).intersection(members):
            members[rank] = replace(members[rank], completed=members[rank].enqueued)
        if not members or _counts_messages(attempt, members, key):
            continue
        ranks = next(iter(group_streams.values())).group.ranks
        group = DeviceGroup(ranks=ranks, members=_level_stale_counters(members, group_streams))
        groups.append(group)
        streams[id(group)] = group_streams
        for rank, progress in group.members.items():
            if progress.completed < progress.enqueued:
                order = _get_front_order(group_streams[rank], progress)
                pending.setdefault(rank, []).append((order, group))
    if not groups:
        return None
    fronts: dict[int, list[DeviceGroup]] = {}
    for rank, ordered in pending.items():
        ordered.sort(key=lambda item: item[0])
        fronts[rank] = [group for _, group in ordered]
    return DeviceView(
        hang=DeviceGraph(groups, fronts).find_hang(),
        fronts=fronts,
        _processes=processes,
        _streams=streams,
    )


def _is_running(process: Process) -> bool:
    return process.is_alive and process.lifecycle < Lifecycle.DESTROYED


def _level_stale_counters(
    members: Mapping[int, DeviceProgress], streams: Mapping[int, CallStream]
) -> Mapping[int, DeviceProgress]:
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
    are_too_far_apart = highest - min(completed) > 1 and not _has_lagged(members, streams, highest)
    are_stale = are_most_behind or are_too_far_apart or len(set(completed)) > _MAX_DISTINCT_COUNTS
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


def _has_lagged(
    members: Mapping[int, DeviceProgress], streams: Mapping[int, CallStream], highest: int
) -> bool:
    """Whether the counters of all members that are behind did not change while those of others did:
    readings that are that far apart show different times.
    """
    furthest_at = max(
        streams[rank].device_changed_at
        for rank, progress in members.items()
        if progress.completed == highest
    )
    return all(
        furthest_at - streams[rank].device_changed_at > READING_DELAY_S
        for rank, progress in members.items()
        if progress.completed < highest
    )


def _counts_messages(
    attempt: Attempt, members: Mapping[int, DeviceProgress], key: GroupKey
) -> bool:
    """Whether the group's counters may include sends and receives, which members make differently.

    Where completion of messages is known, as in dumps, the counters were taken without them.
    """
    if key not in attempt.message_groups:
        return False
    for rank in members:
        for stream in attempt.processes[rank].streams.values():
            if stream.peer is not None and stream.completed is None and stream.group.key == key:
                return True
    return False


def _get_front_order(stream: CallStream, progress: DeviceProgress) -> tuple[float, ...]:
    """Sorts a rank's groups by the first call that its device has not completed.

    Where it is not recorded when that call was made: of groups that are used in turn, the one with
    more uncompleted calls comes first; with as many, the one whose newest call is older.
    """
    if stream.pending_at is not None:
        return (stream.pending_at,)
    return (progress.completed - progress.enqueued, stream.entered_at)


def get_first_unfinished(stream: CallStream, progress: DeviceProgress) -> int:
    """By sequence number. The backend may count fewer calls: a coalesced block counts once."""
    if stream.completed is not None:
        return stream.first_unfinished
    return max(stream.entered - (progress.enqueued - progress.completed) + 1, 1)
