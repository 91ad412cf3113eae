"""Decides which attempt of its job a new process belongs to. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from hangwatch.model.ranks import Lifecycle
from hangwatch.protocol import heartbeat

from .attempt import Attempt, is_known_address
from .process import Process

# An attempt whose node agents are silent for longer may have been replaced by another one.
SUCCEEDED_SILENT_S = 3.0
# The worlds of one job that run at the same time: more of them count as attempts of the first one.
MAX_WORLDS = 32

# After this long without a heartbeat of its node agent, another one may report a process: node agents
# of large jobs report every 20 to 30 seconds.
OWNER_SILENT_S = 45.0


@dataclass(frozen=True, slots=True, kw_only=True)
class FormerAttempt:
    """The last attempt of a job without attempts in memory: the next one's number follows it."""

    number: int
    restart: int
    last_seen_at: float
    is_finished: bool

    @classmethod
    def from_attempt(cls, attempt: Attempt) -> FormerAttempt:
        return cls(
            number=attempt.number,
            restart=attempt.restart,
            last_seen_at=attempt.last_seen_at,
            is_finished=attempt.is_finished,
        )


def is_owned_by_other(process: Process, beat: heartbeat.Heartbeat, now: float) -> bool:
    """Whether the node agent of another owner reports the process, and has done so until now."""
    return (
        process.agent != beat.agent
        and process.owner not in ("", get_owner(beat))
        and process.is_alive
        and now - process.reports.agent_seen_at <= OWNER_SILENT_S
    )


def choose_job_name(
    attempts: Collection[Attempt],
    former_attempts: Mapping[str, FormerAttempt],
    identity: heartbeat.ProcessIdentity,
    now: float,
) -> str:
    """The job that a new process belongs to: the one that it names, or JOB/ADDRESS:PORT for a further
    world of ranks, which runs under the same name at the same time.

    ``attempts`` are the latest attempts of the job and of its further worlds, ``former_attempts``
    those that were known before the server was restarted. Ranks of one world have one rendezvous. Another
    world replaces one of which a process has ended, as restarts do, or stands beside it.
    """
    job, address = identity.job, identity.master
    further_name = f"{job}/{address}"
    if not is_known_address(address):
        return job
    for attempt in attempts:
        if address in attempt.addresses and not is_held_by_other_world(attempt, identity):
            return attempt.job
    former = former_attempts.get(further_name)
    if former is not None and not former.is_finished:
        return further_name
    if all(address not in attempt.addresses for attempt in attempts):
        for attempt in attempts:
            if not attempt.addresses or (
                attempt.processes.get(identity.rank) is None
                and attempt.world_size == identity.world_size
                and not attempt.is_finished
            ):
                return attempt.job  # a rank that is late, or that has another address by mistake
    if all(attempt.is_finished for attempt in attempts):
        return job
    replaceable = [a for a in attempts if _may_be_replaced(a, identity, now)]
    if not replaceable and len(attempts) < MAX_WORLDS:
        return further_name
    preferred = max(
        replaceable or attempts,
        key=lambda a: (
            bool(a.ended_ranks),
            a.world_size == identity.world_size,
            a.last_seen_at,
            a.job == job,
        ),
    )
    return preferred.job


def is_held_by_other_world(attempt: Attempt, identity: heartbeat.ProcessIdentity) -> bool:
    """Whether the rank of a new process belongs to a running process with another rendezvous."""
    holder = attempt.processes.get(identity.rank)
    return (
        holder is not None
        and holder.is_alive
        and holder.lifecycle is Lifecycle.INITIALISED
        and is_known_address(holder.identity.master)
        and holder.identity.master != identity.master
    )


def _may_be_replaced(attempt: Attempt, identity: heartbeat.ProcessIdentity, now: float) -> bool:
    """Whether a process of another world may be the first of a later attempt, or the attempt has no
    world yet.
    """
    return (
        bool(attempt.ended_ranks)
        or attempt.is_finished
        or not attempt.has_initialised
        or identity.restart > attempt.restart
        or now - attempt.last_seen_at > SUCCEEDED_SILENT_S
    )


def get_owner(beat: heartbeat.Heartbeat) -> str:
    return beat.owner or beat.agent


def accepts_process(
    attempt: Attempt, host: str, identity: heartbeat.ProcessIdentity, started_at: float
) -> bool:
    """Whether a new process belongs to the latest attempt of its job. If not, the job was restarted:
    by its launcher, after the attempt finished, or while the holder of the rank is another process.
    """
    if identity.restart > attempt.restart:
        return False
    holder = attempt.processes.get(identity.rank)
    if holder is not None and (holder.exit is not None or holder.host != host):
        return False
    if not attempt.is_finished:
        return True
    # A job can fail before all of its ranks are first reported: a process that started before the
    # last known exit belongs to the same attempt.
    last_exit_at = max(process.exited_at or 0.0 for process in attempt.processes.values())
    return started_at <= last_exit_at


def choose_attempt_number(
    latest: Attempt | None,
    former: FormerAttempt | None,
    identity: heartbeat.ProcessIdentity,
    started_at: float,
) -> int:
    """The number for a new `Attempt` object of a process that the latest attempt does not accept.

    It is the number of the attempt known before the server was restarted, if the process belongs to
    that one; else the next free number.
    """
    if latest is not None:
        return max(identity.restart, latest.number + 1)
    if former is None:
        return identity.restart
    continues_former = (
        not former.is_finished
        and identity.restart == former.restart
        and started_at <= former.last_seen_at
    )
    return former.number if continues_former else max(identity.restart, former.number + 1)
