"""Rebuilds a job's state from Flight Recorder dumps, as heartbeats would have built it: its process
groups, and each rank's position in each of them. Pure.

Calls are never matched by their position in a ring. Collectives are matched by their number in the
group. Sends and receives are matched by their order on a channel if both rings reach back to its
beginning, otherwise from the first unfinished one.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from operator import itemgetter

from hangwatch.diagnosis.messages import describe_ranks
from hangwatch.model.calls import Call, Signature, StreamKind
from hangwatch.model.groups import Group, GroupKey, RankTuple
from hangwatch.model.ranks import Lifecycle
from hangwatch.protocol.heartbeat import ProcessIdentity
from hangwatch.tracking.attempt import Attempt
from hangwatch.tracking.process import Process, ProcessActivity, ReportTimes

from .calls import FlightDump, FlightRecord, GroupCalls
from .collectives import (
    CALLS_AFTER,
    CALLS_BEFORE,
    LAST_SEEN_S,
    CallsByRank,
    OfflineJob,
    add_stream,
    fill_collectives,
)
from .entries import MAX_DUMP_RANKS

_JOB_NAME = "dump"
DumpsByRank = Mapping[int, FlightDump]
# The different lists of members that dumps have, by the group's name.
MemberLists = Mapping[str, set[tuple[int, ...]]]


def build_job(dumps: DumpsByRank) -> OfflineJob:
    """The state of the job at the time of the dumps."""
    member_lists = defaultdict(set)
    for dump in dumps.values():
        for name, members in dump.members.items():
            member_lists[name].add(members)
    groups = _collect_groups(dumps, member_lists)
    member_ranks = {rank for group, _ in groups for rank in group.ranks}
    ranks = sorted(member_ranks.union(dumps))
    attempt = Attempt(
        job=_JOB_NAME, number=0, opened_at=0.0, world_size=len(ranks), last_seen_at=LAST_SEEN_S
    )
    for rank in ranks:
        attempt.processes[rank] = Process(
            attempt=attempt,
            key=str(rank),
            host="?",
            identity=ProcessIdentity(
                job=_JOB_NAME, rank=rank, world_size=len(ranks), pid=0, start_ticks=0
            ),
            started_at=0.0,
            reports=ReportTimes(last_seen_at=LAST_SEEN_S, updated_at=LAST_SEEN_S),
            activity=ProcessActivity(state="S"),
            lifecycle=Lifecycle.INITIALISED,
        )
    job = OfflineJob(attempt=attempt, dumps=dumps)
    for dump in dumps.values():
        for (name, _), calls in dump.groups.items():
            if any(record.started for record in calls.records):
                job.completion_backends.add(calls.backend)
            if calls.has_messages:
                job.p2p_groups.add(name)
    job.notes += _describe_contradictions(dumps, member_lists)
    for group, calls_by_rank in groups:
        fill_collectives(job, group, calls_by_rank)
        _fill_channels(job, group, calls_by_rank)
    for process in attempt.processes.values():
        process.refresh_streams()
        for stream in process.streams.values():
            attempt.track_calls(process, stream, stream.calls.values())
        attempt.update_suspects(process)
    return job


def _collect_groups(
    dumps: DumpsByRank, member_lists: MemberLists
) -> list[tuple[Group, dict[int, GroupCalls]]]:
    """Every process group that some rank used, with the calls of each rank.

    If no dump lists the members, they are the ranks that used the group; for the default group,
    all ranks. If only dumps of other ranks list them, there may be several groups of that name: the
    members are those of the only list that has the rank, or the users that are in no list. A name
    that is reused after its group was destroyed is another group: such groups are counted from the
    first, or from the last if the ring has lost the first.
    """
    max_counts: Counter[str] = Counter()  # the highest number of groups of a name on one rank
    users = defaultdict(set)
    for rank, dump in dumps.items():
        for name, index in dump.groups:
            max_counts[name] = max(max_counts[name], index + 1)
            users[name].add(rank)
    groups: dict[GroupKey, tuple[Group, dict[int, GroupCalls]]] = {}
    for rank, dump in dumps.items():
        own_counts = Counter(name for name, _ in dump.groups)
        for (name, index), calls in sorted(dump.groups.items(), key=itemgetter(0)):
            generation = index + 1
            if dump.wrapped:
                generation += max_counts[name] - own_counts[name]
            ranks = dump.members.get(name)
            if not ranks:
                lists = member_lists.get(name, set())
                own_lists = [members for members in lists if rank in members]
                if len(own_lists) == 1:
                    ranks = own_lists[0]
                elif calls.desc == "default_pg":
                    ranks = RankTuple(range(min(max(dumps) + 1, MAX_DUMP_RANKS)))
                else:
                    ranks = RankTuple(sorted(users[name].difference(*lists)))
            group = Group(
                name=name,
                desc=calls.desc,
                ranks=ranks,
                backend=calls.backend,
                generation=generation,
            )
            _, calls_by_rank = groups.setdefault(group.key, (group, {}))
            calls_by_rank[rank] = calls
    return list(groups.values())


def _describe_contradictions(dumps: DumpsByRank, member_lists: MemberLists) -> Iterable[str]:
    """Ranks whose dumps list other members for a group name than the dumps of other ranks do."""
    for name, lists in sorted(member_lists.items()):
        if len(lists) < 2:
            continue
        contradicted = []
        for rank, dump in dumps.items():
            own = dump.members.get(name)
            if own is not None and any(rank in ranks for ranks in lists if ranks != own):
                contradicted.append(rank)
        if contradicted:
            yield (
                f"{describe_ranks(tuple(contradicted))} and other ranks list different members for group"
                f" {name}: were groups created in a different order?"
            )


def _fill_channels(job: OfflineJob, group: Group, calls_by_rank: CallsByRank) -> None:
    """Adds the sends and receives of a group, by channel. A receive from any source counts only if
    every ring reaches back to the beginning.
    """
    attempt, dumps = job.attempt, job.dumps
    # The submitted messages by kind, rank and peer; the peer is -1 for a receive from any source.
    records_by_end = defaultdict(list)
    for rank, calls in calls_by_rank.items():
        for record in calls.messages:
            number = record.peer
            if record.never_submitted or number is None or number >= len(group.ranks):
                continue
            peer = group.ranks[number] if number >= 0 else -1
            end = (StreamKind(record.signature.op), rank, peer)
            records_by_end[end].append(record)
    whole_ranks = {rank for rank, dump in dumps.items() if not dump.wrapped}
    is_group_whole = whole_ranks.issuperset(group.ranks)
    for (kind, rank, peer), records in records_by_end.items():
        is_any_source = peer < 0
        if is_any_source and (kind is StreamKind.SEND or not is_group_whole):
            continue
        opposite_kind = StreamKind.RECV if kind is StreamKind.SEND else StreamKind.SEND
        peer_records = records_by_end.get((opposite_kind, peer, rank), [])
        completed, peer_completed = _count_completed(records), _count_completed(peer_records)
        pending = next(iter(records[completed:]), None)
        opposite = next(iter(peer_records[peer_completed:]), None)
        is_entered = pending is not None
        is_same_message = False
        if pending is not None and opposite is not None:
            # If the calls are counted from the first unfinished ones, the two ends certainly refer
            # to the same message only after both have started it.
            is_same_message = pending.started and opposite.started
            # A call that the device has queued but not started counts as not entered.
            if dumps[rank].reports_starts:
                is_entered = pending.started or not opposite.started
        if is_group_whole or {rank, peer} <= whole_ranks:
            is_same_message = True  # the rings of both ends reach back to the channel's beginning
        else:
            records = records[completed:]
            completed = 0
        stream = add_stream(attempt, rank, kind, group, peer)
        stream.op = kind.value
        stream.completed = completed
        stream.entered = completed + is_entered
        stream.pending_at = 0.0 if is_entered else None
        first = max(0, completed - CALLS_BEFORE)
        for seq, record in enumerate(records[first : completed + CALLS_AFTER], first + 1):
            signature = record.signature if is_same_message else Signature(op=kind.value)
            blocking = True if seq > completed else None
            call = Call(seq=seq, signature=signature, site=record.site, blocking=blocking)
            stream.add_call(call)
        if not peer_records and peer in attempt.processes and peer not in dumps:
            mirrored = add_stream(attempt, peer, opposite_kind, group, rank)
            mirrored.entered = mirrored.completed = completed


def _count_completed(records: list[FlightRecord]) -> int:
    """The number of records up to and including the last completed one. Calls run in order: one
    before that is complete even if its record was never updated.
    """
    return max((count for count, record in enumerate(records, 1) if record.completed), default=0)
