"""Rebuilds a job's state from Flight Recorder dumps, as heartbeats would have built it: its process
groups, and each rank's position in each of them. Pure.

Calls are never matched by their position in a ring. Collectives are matched by their number in the
group. Sends and receives are matched by their order on a channel if both rings reach back to its
beginning, otherwise from the first unfinished one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from hangwatch.diagnosis.messages import describe_ranks
from hangwatch.model.calls import Call, Signature, StreamKind
from hangwatch.model.groups import COALESCED_END_BACKENDS, Group, GroupKey
from hangwatch.model.ranks import Lifecycle
from hangwatch.protocol import heartbeat
from hangwatch.tracking.attempt import Attempt
from hangwatch.tracking.call_stream import CallStream
from hangwatch.tracking.process import Process, ProcessActivity, ReportTimes

from .calls import FlightRecord, GroupInstance
from .collectives import (
    CALLS_AFTER,
    CALLS_BEFORE,
    LAST_SEEN_S,
    DumpsByRank,
    OfflineJob,
    add_stream,
    count_completed,
    fill_collectives,
    find_unfinished,
)
from .entries import MAX_DUMP_RANKS


def build_job(dumps: DumpsByRank, name: str) -> OfflineJob:
    """The state of the job at the time of the dumps."""
    groups = _collect_groups(dumps)
    member_ranks = {rank for group, _ in groups for rank in group.ranks}
    ranks = sorted(member_ranks.union(dumps))
    attempt = Attempt(
        job=name, number=0, opened_at=0.0, world_size=len(ranks), last_seen_at=LAST_SEEN_S
    )
    for rank in ranks:
        identity = heartbeat.ProcessIdentity(
            job=name, rank=rank, world_size=len(ranks), pid=0, start_ticks=0
        )
        attempt.processes[rank] = Process(
            key=str(rank),
            host="?",
            identity=identity,
            started_at=0.0,
            reports=ReportTimes(last_seen_at=LAST_SEEN_S, updated_at=LAST_SEEN_S),
            activity=ProcessActivity(state="S"),
            lifecycle=Lifecycle.INITIALISED,
        )
    job = OfflineJob(attempt=attempt, notes=list(_describe_contradictions(dumps)))
    # The backends that are known to report completion, in case the first call hangs, and each that
    # did so for some call
    job.completion_backends = set(COALESCED_END_BACKENDS)
    for dump in dumps.values():
        for instance, records in (*dump.calls.items(), *dump.p2p_calls.items()):
            if any(record.started for record in records):
                job.completion_backends.add(dump.backends[instance])
    job.p2p_groups = {name for dump in dumps.values() for name, _ in dump.p2p_calls}
    for group, uses in groups:
        for rank in fill_collectives(job, group, uses, dumps):
            job.assumed_groups.setdefault(rank, set()).add(group.name)
        _fill_channels(attempt, group, uses, dumps)
    for process in attempt.processes.values():
        process.refresh_streams()
        for stream in process.streams.values():
            attempt.track_calls(process, stream, stream.calls.values())
        attempt.update_suspects(process)
    return job


def _collect_groups(dumps: DumpsByRank) -> list[tuple[Group, dict[int, GroupInstance]]]:
    """Every process group that some rank used, with each rank's name for it.

    If no dump lists the members, they are the ranks that used the group; for the default group,
    all ranks. A name that is reused after its group was destroyed is another group: such groups are
    counted from the first, or from the last if the ring has lost the first.
    """
    instance_counts: dict[str, int] = {}  # the highest number of groups of a name on one rank
    for dump in dumps.values():
        for name, index in dump.group_instances:
            instance_counts[name] = max(instance_counts.get(name, 0), index + 1)
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


def _collect_reported_members(dumps: DumpsByRank) -> dict[str, set[tuple[int, ...]]]:
    """The different lists of members that dumps have, by the group's name."""
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


def _describe_contradictions(dumps: DumpsByRank) -> Iterable[str]:
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
                f"{describe_ranks(tuple(contradicted))} and other ranks list different"
                f" members for group {name}: were groups created in a different order?"
            )


def _fill_channels(
    attempt: Attempt, group: Group, uses: Mapping[int, GroupInstance], dumps: DumpsByRank
) -> None:
    """Adds the sends and receives of a group, by channel. A receive from any source counts only if
    every ring reaches back to the beginning.
    """
    records_by_end = _collect_messages(group, uses, dumps)
    is_group_complete = all(_is_complete(dumps, rank) for rank in group.ranks)
    for (kind, rank, peer), records in records_by_end.items():
        is_any_source = peer < 0
        if is_any_source and (kind is StreamKind.SEND or not is_group_complete):
            continue
        opposite_kind = StreamKind.RECV if kind is StreamKind.SEND else StreamKind.SEND
        peer_records = records_by_end.get((opposite_kind, peer, rank), [])
        is_complete = is_group_complete or (_is_complete(dumps, rank) and _is_complete(dumps, peer))
        stream = add_stream(attempt, rank, kind, group, peer)
        _fill_channel(stream, records, peer_records, is_complete, dumps[rank].reports_starts)
        if not peer_records and peer in attempt.processes and peer not in dumps:
            mirrored = add_stream(attempt, peer, opposite_kind, group, rank)
            mirrored.entered = mirrored.completed = stream.completed or 0


def _collect_messages(
    group: Group, uses: Mapping[int, GroupInstance], dumps: DumpsByRank
) -> dict[tuple[StreamKind, int, int], list[FlightRecord]]:
    """The submitted sends and receives by kind, rank and peer; the peer is -1 for a receive from
    any source.
    """
    records_by_end: dict[tuple[StreamKind, int, int], list[FlightRecord]] = {}
    for rank, use in uses.items():
        for record in dumps[rank].p2p_calls.get(use, ()):
            if record.never_submitted or record.peer is None or record.peer >= len(group.ranks):
                continue
            peer = group.ranks[record.peer] if record.peer >= 0 else -1
            end = (StreamKind(record.signature.op), rank, peer)
            records_by_end.setdefault(end, []).append(record)
    return records_by_end


def _is_complete(dumps: DumpsByRank, rank: int) -> bool:
    """Whether the rank's ring reaches back to its beginning."""
    return rank in dumps and not dumps[rank].wrapped


def _fill_channel(
    stream: CallStream,
    records: list[FlightRecord],
    peer_records: list[FlightRecord],
    is_complete: bool,
    reports_starts: bool,
) -> None:
    pending, opposite = find_unfinished(records), find_unfinished(peer_records)
    completed = count_completed(records)
    counted = records if is_complete else records[completed:]
    stream.completed = completed if is_complete else 0
    stream.op = stream.kind.value
    # If the calls are counted from the first unfinished ones, the two ends certainly refer to the
    # same message only after both have started it.
    is_same_message = is_complete or (
        pending is not None and opposite is not None and pending.started and opposite.started
    )
    for seq, record in enumerate(counted, 1):
        if -CALLS_BEFORE < seq - stream.completed <= CALLS_AFTER:
            signature = record.signature if is_same_message else Signature(op=stream.kind.value)
            stream.add_call(
                Call(
                    seq=seq,
                    signature=signature,
                    site=record.site,
                    blocking=True if seq > stream.completed else None,
                )
            )
    # A call that the device has queued but not started counts as not entered.
    queued = pending is None or (
        reports_starts and not pending.started and opposite is not None and opposite.started
    )
    stream.entered = stream.completed + (not queued)
    stream.pending_at = None if queued else 0.0
