"""The process groups that Flight Recorder dumps mention, and who their members are. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from hangwatch.diagnosis import messages
from hangwatch.model.groups import Group, GroupKey

from .dump_calls import GroupInstance
from .dumps import FlightDump
from .group_tables import MAX_DUMP_RANKS

DumpsByRank = Mapping[int, FlightDump]


def collect_groups(dumps: DumpsByRank) -> list[tuple[Group, dict[int, GroupInstance]]]:
    """Every process group that some rank used, with each rank's name for it.

    If no dump lists the members, they are the ranks that used the group; for the default group,
    all ranks. A name that is reused after its group was destroyed is another group: such groups are
    counted from the first, or from the last if the ring has lost the first.
    """
    instance_counts = _count_instances(dumps)
    reported_members = _collect_reported_members(dumps)
    users: dict[str, set[int]] = {}
    for rank, dump in dumps.items():
        for name, _ in dump.group_instances:
            users.setdefault(name, set()).add(rank)
    groups: dict[GroupKey, tuple[Group, dict[int, GroupInstance]]] = {}
    for rank, dump in dumps.items():
        instances = sorted(dump.group_instances)
        own_counts = {name: index + 1 for name, index in instances}
        for name, index in instances:
            lost_count = instance_counts[name] - own_counts[name] if dump.wrapped else 0
            desc = dump.descriptions[name]
            ranks = dump.groups.get(name) or _infer_members(
                rank, desc, reported_members.get(name, ()), users[name], dumps
            )
            group = Group(
                name=name,
                desc=desc,
                ranks=ranks,
                backend=dump.backends[name, index],
                generation=index + 1 + lost_count,
            )
            _, uses = groups.setdefault(group.key, (group, {}))
            uses[rank] = (name, index)
    return list(groups.values())


def _count_instances(dumps: DumpsByRank) -> dict[str, int]:
    """By name, the highest number of groups that a rank had under it, one after another."""
    counts: dict[str, int] = {}
    for dump in dumps.values():
        for name, index in dump.group_instances:
            counts[name] = max(counts.get(name, 0), index + 1)
    return counts


def _collect_reported_members(dumps: DumpsByRank) -> dict[str, set[tuple[int, ...]]]:
    """By name, the different lists of members that dumps have."""
    members: dict[str, set[tuple[int, ...]]] = {}
    for dump in dumps.values():
        for name, ranks in dump.groups.items():
            members.setdefault(name, set()).add(ranks)
    return members


def _infer_members(
    rank: int,
    description: str,
    reported_members: Iterable[tuple[int, ...]],
    users: set[int],
    dumps: DumpsByRank,
) -> tuple[int, ...]:
    """The members of a group that the rank's own dump does not list."""
    mine = [ranks for ranks in reported_members if rank in ranks]
    if len(mine) == 1:
        return mine[0]
    if description == "default_pg":
        return tuple(range(min(max(dumps) + 1, MAX_DUMP_RANKS)))
    return tuple(
        sorted(other for other in users if not any(other in ranks for ranks in reported_members))
    )


def describe_contradictions(dumps: DumpsByRank) -> Iterable[str]:
    """Ranks whose dumps list other members for a group name than the dumps of other ranks do."""
    for name, member_lists in sorted(_collect_reported_members(dumps).items()):
        if len(member_lists) < 2:
            continue
        contradicted: list[int] = []
        for rank, dump in dumps.items():
            own_list = dump.groups.get(name)
            if own_list is None:
                continue
            if any(rank in ranks and ranks != own_list for ranks in member_lists):
                contradicted.append(rank)
        if contradicted:
            yield (
                f"{messages.describe_ranks(tuple(contradicted))} and other ranks list different"
                f" members for group {name}: were groups created in a different order?"
            )
