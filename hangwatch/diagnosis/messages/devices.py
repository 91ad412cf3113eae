"""Messages on devices that lag, and on calls that all devices are in."""

from __future__ import annotations

from hangwatch.model.groups import Group

from .common import (
    describe_position,
    describe_ranks,
    format_lower_layers_advice,
    format_waiter_count,
)

_TIMING_HINT = (
    "TORCH_NCCL_ENABLE_TIMING=1 (from torch 2.15 on, with TORCH_DIST_USE_NCCL2=0) would show which"
    " devices have begun the call."
)

WATCHDOG_ADVICE = (
    "The watchdog's message in the rank's log says which call did not complete, how long it took, and"
    " which error the network reported."
)
STILL_DEVICES_ADVICE = (
    "Each send has its receive, and each collective all its members, so check the network, the devices"
    " and their drivers (nvidia-smi, dmesg). A device may be stuck before one of these calls."
)


COMMUNICATOR_ADVICE = (
    "The backend connects the ranks in the first call of a group. If it usually takes less time, check"
    " that all hosts reach each other on the same network (NCCL_SOCKET_IFNAME, NCCL_IB_HCA, firewalls);"
    " NCCL_DEBUG=INFO shows what it chose."
)


def describe_communicator(ranks: tuple[int, ...], position: str) -> str:
    return f"{describe_ranks(ranks)} connect to each other and do not finish: {position}"


def describe_still_devices(
    ranks: tuple[int, ...], ends: tuple[int, ...], first: int, op: str, position: str
) -> str:
    """``first`` is the rank whose newest call is ``op``; ``ends`` are the ranks whose devices hold up
    all others, if that is known.
    """
    verb, devices = ("wait", "their devices") if len(ranks) > 1 else ("waits", "its device")
    summary = (
        f"{describe_ranks(ranks)} {verb} for {devices}, and no device finishes what is queued: rank"
        f" {first}'s last call is {op} ({position})"
    )
    if 0 < len(ends) < len(ranks):
        summary += f"; the others wait for {describe_ranks(ends)}"
    return summary


def describe_stuck_devices(
    ranks: tuple[int, ...],
    op: str,
    group: Group,
    seq: int,
    waiter_count: int,
    *,
    is_begun: bool | None,
    is_behind: bool,
) -> str:
    """The summary. ``is_begun`` is None where starts are not recorded; ``is_behind``: other members'
    devices have completed the call.
    """
    have = "have" if len(ranks) > 1 else "has"
    devices_have = "their devices have" if len(ranks) > 1 else "its device has"
    verb = "begun" if is_begun is False else "completed"
    summary = (
        f"{describe_ranks(ranks)} {have} queued {op} ({describe_position(group, seq)}), but"
        f" {devices_have} not {verb} it"
    )
    if is_behind:
        summary += ", as other devices have"
    return f"{summary}; {format_waiter_count(waiter_count)}"


def format_stuck_device_advice(ranks: tuple[int, ...], *, records_starts: bool) -> str:
    their, have = ("their", "have") if len(ranks) > 1 else ("its", "has")
    advice = (
        f"Check what {their} device{'s' if len(ranks) > 1 else ''} {have} to do before that call: a"
        " kernel that does not end, or a stream that waits for an event; and the GPU itself"
        " (nvidia-smi, dmesg)."
    )
    if records_starts or len(ranks) == 1:
        return advice
    return f"{advice} Any of them may be the one that is stuck: {_TIMING_HINT}"


def format_stalled_device_advice(*, records_starts: bool, are_equal: bool) -> str:
    """``are_equal``: the calls of all members were compared."""
    if records_starts and are_equal:
        return "Every device has begun the call, so check the network between them and its drivers."
    advice = format_lower_layers_advice(are_equal=are_equal)
    if records_starts:
        return advice
    return f"{advice} A device may be stuck before the call: {_TIMING_HINT}"
