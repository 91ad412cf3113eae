"""Messages on ranks that ended, are frozen, or whose host does not report."""

from __future__ import annotations

import signal

from hangwatch.model.calls import Site
from hangwatch.model.groups import Group
from hangwatch.tracking.process import Process
from hangwatch.tracking.process_parts import FreezeReason

from .common import describe_position, describe_ranks, format_exception, format_waiter_count

_CRASH_SIGNALS = (
    signal.SIGSEGV,
    signal.SIGBUS,
    signal.SIGABRT,
    signal.SIGFPE,
    signal.SIGILL,
)


def describe_exit(process: Process) -> str:
    """How a process ended: ``was killed by SIGKILL`` or ``exited with status 1``."""
    end = process.exit
    if end is None:
        return "is alive"
    if process.exception is not None:  # it came before whatever ended the process
        return f"raised {format_exception(process.exception)}"
    if end.signal:
        return f"was killed by {get_signal_name(end.signal)}"
    if end.exit_status is None:
        return "vanished"
    return f"exited with status {end.exit_status}"


def describe_death(process: Process) -> str:
    """The summary for a rank that ended."""
    summary = f"rank {process.rank} {describe_exit(process)}"
    if process.exception is None or process.exception.site is None:
        return summary
    return f"{summary} at {process.exception.site}"


def describe_timeout(process: Process, is_by_watchdog: bool) -> str:
    """How a rank ended after it had waited for too long."""
    if is_by_watchdog:
        return f"rank {process.rank} was ended by its watchdog (SIGABRT)"
    return f"the call timed out on rank {process.rank}"


def get_signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def format_dead_rank_advice(
    process: Process, independent_failures: tuple[Process, ...] | None
) -> str:
    """``independent_failures`` are other ranks with an exception that may be unrelated; None if it
    is not known whether there are any.
    """
    if process.exception is not None:
        return _format_exception_advice(independent_failures)
    end = process.exit
    if end is not None and end.signal == signal.SIGKILL:
        return (
            "SIGKILL usually comes from the kernel's out-of-memory killer or from scancel: check"
            " dmesg and the host's memory."
        )
    if end is not None and end.signal in _CRASH_SIGNALS:
        return (
            "It crashed in native code: check its last lines on stderr, and enable core files"
            " (ulimit -c unlimited)."
        )
    if end is not None and end.signal is None and end.exit_status is None:
        return "Its node agent could not read its exit status: check its launcher's log."
    return "Check its last lines on stderr: it ended before the other ranks."


def _format_exception_advice(independent_failures: tuple[Process, ...] | None) -> str:
    if independent_failures is None:
        return "Its exception came first."
    if not independent_failures:
        return "Its exception came first; the errors of other ranks are consequences of it."
    types = {p.exception.type for p in independent_failures if p.exception is not None}
    raised = types.pop() if len(types) == 1 else "exceptions"
    ranks = describe_ranks(tuple(p.rank for p in independent_failures))
    return f"Its exception came first; {ranks} also raised {raised}, which may be unrelated."


def describe_exited_ranks(
    ranks: tuple[int, ...], has_ended: bool, waiter_count: int, op: str, group: Group, seq: int
) -> str:
    have = "have" if len(ranks) > 1 else "has"
    did = "finished" if has_ended else "destroyed the process group"
    return (
        f"{describe_ranks(ranks)} {have} {did} while {format_waiter_count(waiter_count)} in {op}"
        f" ({describe_position(group, seq)})"
    )


def format_exited_rank_advice(are_several: bool) -> str:
    they = "they" if are_several else "it"
    return (
        f"The others made one more call than {they} did: look for uneven data or a loop that ends"
        " early."
    )


def describe_frozen_ranks(
    ranks: tuple[int, ...],
    reason: FreezeReason | None,
    state: str,
    waiter_count: int,
    op: str,
    *,
    has_stack: bool,
    last_site: Site | None,
) -> tuple[str, str]:
    """The summary and the advice. ``state`` is the process state in /proc; ``last_site`` is the line
    of the newest recorded call, which stands in for a stack.
    """
    condition, advice = _describe_freeze(reason, state, len(ranks) > 1)
    if reason is FreezeReason.GIL_HELD and not has_stack:
        after = "" if last_site is None else f", which was at {last_site}"
        advice = (
            "No Python code can run there, and no stack is known: look for a native call after the"
            f" newest recorded call{after}."
        )
    summary = f"{describe_ranks(ranks)} {condition}; {format_waiter_count(waiter_count)} in {op}"
    return summary, advice


def _describe_freeze(reason: FreezeReason | None, state: str, are_several: bool) -> tuple[str, str]:
    be, pronoun = ("are", "them") if are_several else ("is", "it")
    if reason is FreezeReason.STOPPED and state == "t":
        return f"{be} stopped by a debugger", f"Detach the debugger that traces {pronoun}."
    if reason is FreezeReason.STOPPED:
        return f"{be} stopped (SIGSTOP or job control)", f"Resume {pronoun} with kill -CONT."
    if reason is FreezeReason.UNINTERRUPTIBLE:
        blocked = "They are blocked" if are_several else "It is blocked"
        advice = f"{blocked} in the kernel: check disks, network file systems and drivers."
        return f"{be} in uninterruptible sleep", advice
    stacks_show = "their stacks show" if are_several else "its stack shows"
    return (
        f"{be} running native code that holds the GIL",
        f"No Python code can run there: {stacks_show} which native call does not return.",
    )


def describe_lost_node(
    host: str, ranks: tuple[int, ...], waiter_count: int, op: str
) -> tuple[str, str]:
    """The summary and the advice."""
    summary = (
        f"host {host} with {describe_ranks(ranks)} no longer reports;"
        f" {format_waiter_count(waiter_count)} in {op}"
    )
    advice = "Check that the host is up and its network works. Its last known state is shown here."
    return summary, advice
