"""Ranks that take part in a job and are not recorded: nothing is known of their calls."""

from __future__ import annotations

from hangwatch.model.calls import StreamKind
from hangwatch.model.ranks import Lifecycle
from hangwatch.tracking.attempt import Attempt
from hangwatch.tracking.call_stream import CallStream, GroupState

_FULL_MESH_BACKEND = "gloo"  # a group exists only once all its members are connected


def is_unwatched(attempt: Attempt, rank: int, group_state: GroupState | None) -> bool:
    """Whether the rank is known to exist, and its calls are not recorded. ``group_state`` is that of
    a group in which others wait for it.
    """
    process = attempt.processes.get(rank)
    if process is not None:
        return bool(process.identity.unrecorded)
    if group_state is None:
        return False
    return has_completed_calls(group_state) or any(
        _FULL_MESH_BACKEND in stream.group.backend
        and stream.kind is StreamKind.COLLECTIVE
        and attempt.processes[member].lifecycle is Lifecycle.INITIALISED
        for member, stream in group_state.members.items()
    )


def has_completed_calls(group_state: GroupState) -> bool:
    """Whether a collective of the group is complete: all members took part in it."""
    return any(_has_completed_call(stream) for stream in group_state.members.values())


def _has_completed_call(stream: CallStream) -> bool:
    if stream.kind is not StreamKind.COLLECTIVE:
        return False
    if stream.device is not None:
        return stream.device.completed > 0
    return (stream.completed or 0) > 0
