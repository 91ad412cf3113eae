"""Rebuilds a job's state from Flight Recorder dumps, as heartbeats would have built it: each rank's
position in each of its process groups. Pure.

Calls are never matched by their position in a ring. Collectives are matched by their number in the
group, sends and receives as `channels` describes.
"""

from __future__ import annotations

from hangwatch.model.backends import COALESCED_END_BACKENDS
from hangwatch.model.ranks import Lifecycle
from hangwatch.protocol import heartbeat
from hangwatch.tracking.attempt import Attempt
from hangwatch.tracking.process import Process
from hangwatch.tracking.process_parts import ProcessActivity, ReportTimes

from .channels import fill_channels
from .collectives import fill_collectives
from .group_members import DumpsByRank, collect_groups, describe_contradictions
from .offline_job import LAST_SEEN_S, OfflineJob


def build_job(dumps: DumpsByRank, name: str) -> OfflineJob:
    """The state of the job at the time of the dumps."""
    groups = collect_groups(dumps)
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
    job = OfflineJob(attempt=attempt, notes=list(describe_contradictions(dumps)))
    job.completion_backends = _find_completion_backends(dumps)
    job.p2p_groups = {name for dump in dumps.values() for name, _ in dump.p2p_calls}
    for group, uses in groups:
        for rank in fill_collectives(job, group, uses, dumps):
            job.assumed_groups.setdefault(rank, set()).add(group.name)
        fill_channels(attempt, group, uses, dumps)
    for process in attempt.processes.values():
        process.refresh_streams()
        for stream in process.streams.values():
            attempt.track_calls(process, stream, stream.calls.values())
        attempt.update_suspects(process)
    return job


def _find_completion_backends(dumps: DumpsByRank) -> set[str]:
    """The backends that report completion: those that did so for some call, and those known to,
    in case the first call hangs.
    """
    backends = set(COALESCED_END_BACKENDS)
    for dump in dumps.values():
        for calls in (dump.calls, dump.p2p_calls):
            for use, records in calls.items():
                if any(record.started for record in records):
                    backends.add(dump.backends[use])
    return backends
