"""Ranks whose node agent does not report. Their last known state is old, but what other ranks
report may show that they are alive. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from hangwatch.model.calls import StreamKind
from hangwatch.model.groups import GroupKey
from hangwatch.tracking.attempt import Attempt
from hangwatch.tracking.call_stream import CallStream


@dataclass(frozen=True, slots=True, kw_only=True)
class Silence:
    """There are no reports since ``began_at``; ``last_alive_at`` is the last sign, also from other
    ranks, that the ranks of the node run.
    """

    began_at: float
    last_alive_at: float
    # The last sign is from well within the silence: only the connection to the server is broken.
    is_proven_alive: bool


def find_silent_ranks(attempt: Attempt, now: float, lost_after_s: float) -> dict[int, Silence]:
    """The ranks without a report for ``lost_after_s`` seconds in which they could have reported."""
    silent_since = _find_silence_starts(attempt, now - lost_after_s)
    if not silent_since:
        return {}
    alive_at_by_agent: dict[str, float] = {}  # the ranks of a node agent share their node
    signs = [
        *_find_collective_signs(attempt.streams_by_group, silent_since),
        *_find_receive_signs(attempt, silent_since),
    ]
    for rank, at in signs:
        agent = attempt.processes[rank].agent
        alive_at_by_agent[agent] = max(at, alive_at_by_agent.get(agent, at))
    silences: dict[int, Silence] = {}
    for rank, began_at in silent_since.items():
        alive_at = alive_at_by_agent.get(attempt.processes[rank].agent, began_at)
        last_alive_at = max(began_at, alive_at)
        silences[rank] = Silence(
            began_at=began_at,
            last_alive_at=last_alive_at,
            is_proven_alive=last_alive_at - began_at > lost_after_s,
        )
    return silences


def _find_silence_starts(attempt: Attempt, before: float) -> dict[int, float]:
    resumed_at = attempt.resumed_at
    if resumed_at > before:
        return {}
    return {
        rank: max(attempt.processes[rank].reports.agent_seen_at, resumed_at)
        for rank in attempt.list_unreported(before)
    }


def _find_collective_signs(
    streams_by_group: Mapping[GroupKey, Mapping[int, CallStream]], silent: Mapping[int, float]
) -> Iterator[tuple[int, float]]:
    """All members of a group are alive at the time when other members complete its calls."""
    for members in streams_by_group.values():
        group_ranks = next(iter(members.values())).group.ranks
        if silent.keys().isdisjoint(group_ranks):
            continue
        advanced_at = [
            stream.advanced_at
            for rank, stream in members.items()
            if rank not in silent and stream.kind is StreamKind.COLLECTIVE
        ]
        if not advanced_at:
            continue
        last_advanced_at = max(advanced_at)
        for rank in group_ranks:
            if rank in silent:
                yield rank, last_advanced_at


def _find_receive_signs(
    attempt: Attempt, silent: Mapping[int, float]
) -> Iterator[tuple[int, float]]:
    """A rank is alive when another rank receives from it."""
    for rank, process in attempt.processes.items():
        if rank in silent:
            continue
        for stream in process.streams.values():
            if stream.kind is StreamKind.RECV and stream.peer is not None and stream.peer in silent:
                yield stream.peer, stream.advanced_at
