"""Ranks that take part in a job and are not recorded: nothing is known of their calls."""

from __future__ import annotations

from hangwatch.model.calls import StreamKind
from hangwatch.model.ranks import Lifecycle
from hangwatch.tracking.attempt import Attempt
from hangwatch.tracking.call_stream import CallStream, GroupState

_FULL_MESH_BACKEND = "gloo"  # a group exists only once all its members are connected


def shows_all_members(attempt: Attempt, group_state: GroupState) -> bool:
    """Whether the members of a group that report show that the others exist: all took part in a
    collective, or had to connect before any of them could continue.
    """
    return has_completed_calls(group_state) or any(
        _FULL_MESH_BACKEND in stream.group.backend
        and stream.kind is StreamKind.COLLECTIVE
        and attempt.processes[member].lifecycle is Lifecycle.INITIALISED
        and not stream.group.foreign
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
