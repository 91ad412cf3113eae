"""Which devices other devices wait for, from how far each one came in the collectives of its groups.

A device that is inside a collective waits for the members whose devices have not come to it. The
ends of these chains are causes, across groups as well: a device that other devices wait for, and
that itself waits for none.

Where a backend does not record starts, the call that a device is in is taken to be the first one
that it has not completed, in the order in which its host queued the calls.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from hangwatch.model.device import DeviceProgress


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DeviceGroup:
    """The collectives of one process group. ``members`` are those whose counters are known."""

    ranks: tuple[int, ...]
    members: Mapping[int, DeviceProgress]

    @property
    def records_starts(self) -> bool:
        return all(progress.started is not None for progress in self.members.values())

    @property
    def has_unknown_members(self) -> bool:
        return len(self.members) < len(self.ranks)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DeviceWait:
    """Devices in the same call of a group, and the members that have not come to it."""

    group: DeviceGroup
    call: int  # by the backend's counters
    waiters: frozenset[int]
    awaited: frozenset[int]


@dataclass(slots=True, kw_only=True)
class DeviceHang:
    """``culprits`` are the ranks whose devices lag. ``stalled_groups`` have all their devices in one
    call that none of them completes. ``host_ends`` are ranks whose hosts have not made the call;
    their devices have nothing to do. ``uncertain_ends`` may themselves wait for a device whose
    counters are unknown. ``cycle`` are devices that wait for each other.
    """

    waits: list[DeviceWait]
    culprits: set[int] = field(default_factory=set)
    stalled_groups: list[DeviceGroup] = field(default_factory=list)
    host_ends: set[int] = field(default_factory=set)
    uncertain_ends: set[int] = field(default_factory=set)
    cycle: set[int] = field(default_factory=set)

    def find_waiters_of(self, targets: Iterable[int]) -> set[int]:
        """The ranks whose devices wait for those of ``targets``, directly or through others."""
        goals = set(targets)
        reached = set(goals)
        has_grown = True
        while has_grown:
            has_grown = False
            for wait in self.waits:
                if not reached.isdisjoint(wait.awaited) and not reached.issuperset(wait.waiters):
                    reached |= wait.waiters
                    has_grown = True
        return reached - goals

    def find_direct_waiters_of(self, targets: Iterable[int]) -> set[int]:
        """The ranks whose devices are in a call that the devices of some ``targets`` have not reached."""
        goals = set(targets)
        waiters = [wait.waiters for wait in self.waits if not goals.isdisjoint(wait.awaited)]
        return set().union(*waiters) - goals


class DeviceGraph:
    """The devices of a job at one moment.

    ``fronts`` has, for each rank, the groups in which its device has uncompleted calls, in the order
    in which the host queued the first of these.
    """

    def __init__(
        self, groups: Sequence[DeviceGroup], fronts: Mapping[int, Sequence[DeviceGroup]]
    ) -> None:
        self._groups = groups
        self._fronts = fronts
        self._furthest = {
            id(group): max((p.completed for p in group.members.values()), default=-1)
            for group in groups
        }

    def find_hang(self) -> DeviceHang:
        """Who waits for whom, and which devices are the ends of the chains."""
        waits = [wait for group in self._groups for wait in self._find_waits(group)]
        hang = DeviceHang(waits=waits)
        waiters: set[int] = set()
        awaited: set[int] = set()
        for wait in waits:
            waiters |= wait.waiters
            awaited |= wait.awaited
        ends = awaited - waiters
        for rank in sorted(ends):
            self._classify_end(hang, rank, waiters)
        if waits and not ends:
            hang.cycle = _find_cycle_ranks(waits)
        if not waits:
            hang.stalled_groups = [group for group in self._groups if self._is_stalled(group)]
        return hang

    def _find_waits(self, group: DeviceGroup) -> list[DeviceWait]:
        waiters_by_call: dict[int, set[int]] = {}
        for rank, progress in group.members.items():
            if self._is_inside(group, rank):
                waiters_by_call.setdefault(progress.completed + 1, set()).add(rank)
        waits = []
        for call, waiters in waiters_by_call.items():
            awaited = {rank for rank in group.members if not self._may_have_come(group, rank, call)}
            if awaited:
                wait = DeviceWait(
                    group=group, call=call, waiters=frozenset(waiters), awaited=frozenset(awaited)
                )
                waits.append(wait)
        return waits

    def _is_inside(self, group: DeviceGroup, rank: int) -> bool:
        """Whether its device is in a collective of the group, as far as is known."""
        progress = group.members[rank]
        if not progress.is_behind_host:
            return False
        if progress.started is not None:
            return progress.started > progress.completed
        return self._is_front(group, rank)

    def _is_front(self, group: DeviceGroup, rank: int) -> bool:
        front = self._fronts.get(rank, ())
        return bool(front) and front[0] is group

    def _may_have_come(self, group: DeviceGroup, rank: int, call: int) -> bool:
        """Whether its device has begun the call, or may have."""
        progress = group.members[rank]
        if progress.completed >= call:
            return True
        if progress.enqueued < call:
            return False
        if progress.started is not None:
            return progress.started >= call
        return progress.completed == call - 1 and self._is_front(group, rank)

    def _classify_end(self, hang: DeviceHang, rank: int, waiters: set[int]) -> None:
        front = self._fronts.get(rank, ())
        if not front:
            hang.host_ends.add(rank)
            return
        inside = [group for group in front if self._is_inside(group, rank)]
        if not inside:  # it records starts, and has begun no call
            hang.culprits.add(rank)
            return
        group = inside[0]
        progress = group.members[rank]
        if progress.completed < self._furthest[id(group)]:
            hang.culprits.add(rank)
        elif group.has_unknown_members:
            hang.uncertain_ends.add(rank)
        elif progress.started is not None:
            if group not in hang.stalled_groups:
                hang.stalled_groups.append(group)
        else:
            hang.culprits |= self._find_equals(group, progress.completed) - waiters

    def _find_equals(self, group: DeviceGroup, completed: int) -> set[int]:
        """The members that are before or in the same call: which of them is stuck is unknown."""
        return {
            rank
            for rank, progress in group.members.items()
            if progress.completed == completed and self._is_front(group, rank)
        }

    def _is_stalled(self, group: DeviceGroup) -> bool:
        """Whether all members are in one call, or before it without a known difference."""
        members = group.members
        if not members or group.has_unknown_members:
            return False
        calls = {progress.completed for progress in members.values()}
        return len(calls) == 1 and all(self._is_inside(group, rank) for rank in members)


def _find_cycle_ranks(waits: Sequence[DeviceWait]) -> set[int]:
    """The ranks that remain after all those for which no remaining rank waits are left out."""
    remaining: set[int] = set()
    for wait in waits:
        remaining |= wait.waiters
    while True:
        awaited: set[int] = set()
        for wait in waits:
            if not remaining.isdisjoint(wait.waiters):
                awaited |= wait.awaited
        if remaining <= awaited:
            return remaining
        remaining &= awaited
