"""The waits, the devices and the processes of an incident as terminal text."""

from __future__ import annotations

import signal
from collections.abc import Iterator

from .flight_files import format_flight_file
from .sites import Document, format_site
from .text import (
    PLAIN_PAINT,
    TERMINAL_COLUMNS,
    Paint,
    clean_text,
    group_name,
    name_ranks,
    truncate_start,
    wrap_text,
)


def format_waits(document: Document) -> Iterator[str]:
    """Which ranks wait for which, and in which call: one line for each awaited rank and call."""
    for (awaited, group, seq), ranks in merge_waits(document):
        verb = "waits" if len(ranks) == 1 else "wait"
        yield from wrap_text(
            f"{name_ranks(ranks)} {verb} for rank {awaited} in call {seq} of group {group}"
        )


def merge_waits(document: Document) -> list[tuple[tuple[int, str, int], set[int]]]:
    """The awaited rank, the group's name to show and the number of each awaited call, with the ranks
    that wait there; sorted.
    """
    group = document.get("group") or {}
    named = {clean_text(group.get("name")): group_name(group.get("name"), group.get("desc"))}
    waiters: dict[tuple[int, str, int], set[int]] = {}
    for wait in document.get("waits") or []:
        call = (wait.get("for", -1), clean_text(wait.get("group", "")), wait.get("seq", 0))
        waiters.setdefault(call, set()).add(wait.get("rank", -1))
    return [
        ((awaited, named.get(name, name), seq), ranks)
        for (awaited, name, seq), ranks in sorted(waiters.items())
    ]


def format_devices(document: Document) -> Iterator[str]:
    """How far the devices have come: one line for all ranks of a group in the same position."""
    group = document.get("group") or {}
    named = {clean_text(group.get("name")): group_name(group.get("name"), group.get("desc"))}
    ranks_by_position: dict[tuple[str, int, int, int], set[int]] = {}
    for device in document.get("device") or []:
        started = device.get("started")
        position = (
            clean_text(device.get("group", "")),
            device.get("completed", -1),
            -1 if started is None else max(0, started),
            device.get("enqueued", -1),
        )
        ranks_by_position.setdefault(position, set()).add(device.get("rank", -1))
    for (name, completed, started, enqueued), ranks in sorted(ranks_by_position.items()):
        begun = "" if started < 0 else f"begun {started} and "
        yield from wrap_text(
            f"{name_ranks(ranks)}: the device has {begun}completed {max(0, completed)} of"
            f" {max(0, enqueued)} queued collectives of group {named.get(name, name)}"
        )


def format_processes(document: Document, paint: Paint = PLAIN_PAINT) -> Iterator[str]:
    """The states of the culprits' processes, or how they ended."""
    for process in document.get("processes") or []:
        where = f" on {clean_text(process['host'])}" if process.get("host") else ""
        yield (
            f"rank {process.get('rank')}: process {process.get('pid', '?')}{where}"
            f" {_describe_condition(process)}"
        )
        exception = process.get("exception")
        if exception:
            type_name = clean_text(exception.get("type", "exception"))
            text = f"{type_name}: {clean_text(exception.get('message', ''))}"
            yield from (paint.as_error(line) for line in wrap_text(text, indent="  "))
            if exception.get("site"):
                site = format_site(exception["site"])
                yield f"  at {truncate_start(site, TERMINAL_COLUMNS - 5)}"
        if process.get("flight_file"):
            yield from format_flight_file(process["flight_file"])


_STATE_NAMES = {
    "R": "running",
    "S": "sleeping",
    "D": "in uninterruptible sleep",
    "T": "stopped",
    "t": "traced",
    "Z": "ended",
    "I": "idle",
}


def _describe_condition(process: Document) -> str:
    if process.get("signal") is not None:
        return f"ended by {_get_signal_name(process['signal'])}"
    if process.get("exit_status") is not None:
        return f"exited with status {clean_text(process['exit_status'])}"
    state = clean_text(process.get("state") or "?")
    if state not in _STATE_NAMES:
        return "is in an unknown state"
    return f"is {_STATE_NAMES[state]} (state {state})"


def _get_signal_name(number: object) -> str:
    try:
        return signal.Signals(int(str(number))).name
    except ValueError:  # a real-time signal has no name
        return f"signal {clean_text(number)}"
