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
    instance_counts: dict[str, int] = {}
    for dump in dumps.values():
        for name, nth in dump.group_instances:
            instance_counts[name] = max(instance_counts.get(name, 0), nth + 1)
    reported: dict[str, set[tuple[int, ...]]] = {}
    users: dict[str, set[int]] = {}
    for rank, dump in dumps.items():
        for name, ranks in dump.groups.items():
            reported.setdefault(name, set()).add(ranks)
        for name, _ in dump.group_instances:
            users.setdefault(name, set()).add(rank)
    groups: dict[GroupKey, tuple[Group, dict[int, GroupInstance]]] = {}
    for rank, dump in dumps.items():
        uses = sorted(dump.group_instances)
        own_counts = {name: nth + 1 for name, nth in uses}
        for name, nth in uses:
            generation = nth + 1 + (instance_counts[name] - own_counts[name] if dump.wrapped else 0)
            desc = dump.descriptions[name]
            ranks = dump.groups.get(name) or _infer_members(
                rank, desc, reported.get(name, ()), users[name], dumps
            )
            group = Group(
                name=name,
                desc=desc,
                ranks=ranks,
                backend=dump.backends[name, nth],
                generation=generation,
            )
            groups.setdefault(group.key, (group, {}))[1][rank] = (name, nth)
    return list(groups.values())


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
    reported: dict[str, set[tuple[int, ...]]] = {}
    for dump in dumps.values():
        for name, ranks in dump.groups.items():
            reported.setdefault(name, set()).add(ranks)
    for name, members in sorted(reported.items()):
        if len(members) > 1:
            own_lists = {r: dump.groups[name] for r, dump in dumps.items() if name in dump.groups}
            contradicted = tuple(
                rank
                for rank, own_list in own_lists.items()
                if any(rank in ranks and ranks != own_list for ranks in members)
            )
            if contradicted:
                yield (
                    f"{messages.describe_ranks(contradicted)} and other ranks list different members"
                    f" for group {name}: were groups created in a different order?"
                )
