"""Decides which attempt of its job a new process belongs to. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from hangwatch.protocol import heartbeat

from .attempt import Attempt
from .process import Process

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
