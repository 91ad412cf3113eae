"""Messages on ranks that wait, and on those that they wait for."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from hangwatch.diagnosis.graph.progress import has_stack_changed, has_two_samples, is_busy
from hangwatch.model.groups import Group
from hangwatch.model.ranks import Lifecycle
from hangwatch.model.threads import ThreadStack
from hangwatch.model.verdicts import Wait
from hangwatch.tracking.process import Process

from .common import describe_position, describe_rank, describe_ranks, format_waiter_count

_MAX_WAITS_SHOWN = 4
PHASE_HINT = "hangwatch.phase() declares work that may take long."
SLOW_NOT_STUCK_ADVICE = f"That makes progress: slow rather than stuck. {PHASE_HINT}"
NO_STACK_ADVICE = (
    "Check what it does after that call; with a longer timeout there is time to sample its stack."
)
OUTSIDE_ADVICE = (
    "The group numbers its members by itself: look at the program at its other end, which may be at"
    " work."
)
DIFFERENT_MASTERS_ADVICE = "MASTER_ADDR and MASTER_PORT must be the same on every rank."


def describe_deadlock(ranks: tuple[int, ...], cycle: list[tuple[Wait, str]]) -> str:
    """Each wait of the cycle with the operation that the waiting rank is in; of a long cycle, the
    first ones.
    """
    waits = [_describe_cycle_wait(wait, op) for wait, op in cycle[:_MAX_WAITS_SHOWN]]
    if len(cycle) > _MAX_WAITS_SHOWN:
        waits.append("and so on")
    return f"{describe_ranks(ranks)} wait for each other: {'; '.join(waits)}"


def _describe_cycle_wait(wait: Wait, op: str) -> str:
    other_ends = {"send": "recv", "recv": "send"}
    if op in other_ends:
        other_end = f"the {other_ends[op]} of {describe_rank(wait.on_rank)}"
        return f"{describe_rank(wait.rank)} waits for {other_end} in {op}"
    return f"{describe_rank(wait.rank)} waits for {describe_rank(wait.on_rank)} in {op}"


def format_deadlock_advice(common_ranks: tuple[int, ...], component: Collection[int]) -> str:
    """``common_ranks`` are the ranks that are on every cycle of the ``component``."""
    general = "look for calls that one of them makes in a different order than its peers, or skips."
    if common_ranks and len(common_ranks) < len(component):
        return (
            f"Every cycle of waits includes {describe_ranks(common_ranks)}: start there, and"
            f" {general}"
        )
    return f"No rank on the cycle can continue: {general}"


def describe_blocking_thread(subject: str, thread: ThreadStack | None) -> str:
    """The subject of a sentence on what blocks a rank.

    ``subject`` is the rank, as ``it`` or ``Rank 3``. If a thread other than the main one holds the
    GIL, that thread is named instead: ``its thread codec``.
    """
    if thread is None or thread.main or not thread.holds_gil:
        return subject
    possessive = f"{subject}s" if subject.lower() == "it" else f"{subject}'s"
    return f"{possessive} thread {thread.thread}"


def describe_not_entered(
    ranks: tuple[int, ...],
    op: str,
    group: Group | None,
    seq: int | None,
    waiter_count: int,
    waiter: int | None = None,
    ranks_inside: tuple[int, ...] = (),
) -> str:
    """The summary for ranks that have not entered a call.

    ``waiter`` is the rank at the other end if the call is a send or a receive. Of the waiting
    ranks, ``ranks_inside`` are known to be in the call itself.
    """
    have = "have" if len(ranks) > 1 else "has"
    if waiter is None:
        missing = f"entered {op}"
    elif op.startswith("recv"):
        missing = f"sent what {describe_rank(waiter)} waits to receive"
    else:
        missing = f"received what {describe_rank(waiter)} sends"
    waiting = format_waiter_count(waiter_count)
    if 0 < len(ranks_inside) < waiter_count:
        wait = "waits" if len(ranks_inside) == 1 else "wait"
        elsewhere = waiter_count - len(ranks_inside)
        waiting = f"{describe_ranks(ranks_inside)} {wait}, and {elsewhere} more in other calls"
    position = describe_position(group, seq)
    return f"{describe_ranks(ranks)} {have} not {missing} ({position}), for which {waiting}"


def format_stack_advice(are_several: bool) -> str:
    if are_several:
        return "Their stacks show what they do instead of joining the others."
    return "Its stack shows what it does instead of joining the others."


def describe_slow_ranks(
    ranks: tuple[int, ...], phase: str | None, waiter_count: int, op: str
) -> str:
    are, them = ("are", "them") if len(ranks) > 1 else ("is", "it")
    in_phase = f" in its phase {phase!r}" if phase else ""
    waiters = format_waiter_count(waiter_count)
    return (
        f"{describe_ranks(ranks)} {are} still working{in_phase} while {waiters} for {them} in {op}"
    )


def format_slow_rank_advice(process: Process, since: float, is_in_phase: bool) -> str:
    """The reason why the rank counts as slow and not as stuck."""
    if is_in_phase:
        return "Its script declared this phase: it may take until the limit of the phase."
    if has_stack_changed(process, since):
        return f"Its stack changes: slow rather than stuck. {PHASE_HINT}"
    if is_busy(process):
        where = " in the same function in every sample" if has_two_samples(process, since) else ""
        return f"It uses the CPU{where}: a long computation, or a loop that waits. {PHASE_HINT}"
    return f"It made progress elsewhere in the meantime: slow rather than stuck. {PHASE_HINT}"


def describe_not_started(ranks: tuple[int, ...], waiter_count: int, op: str) -> str:
    waiters = format_waiter_count(waiter_count)
    return f"{describe_ranks(ranks)} never started, for which {waiters} in {op}"


def describe_different_masters(ranks_by_address: Iterable[tuple[str, list[int]]]) -> str:
    """Ranks that cannot find each other in init_process_group, by the address that they use."""
    return "; ".join(
        f"{describe_ranks(tuple(ranks))} expect the master at {address}"
        for address, ranks in ranks_by_address
    )


def describe_not_initialized(ranks: tuple[int, ...], was_destroyed: bool, waiter_count: int) -> str:
    again = " again" if was_destroyed else ""
    waiters = format_waiter_count(waiter_count)
    return f"{describe_ranks(ranks)} never reached init_process_group{again}, in which {waiters}"


def format_startup_advice(absent_processes: Mapping[int, Process | None]) -> str:
    """Advice for all absent ranks; if their reasons differ, for the most basic reason."""
    not_reporting = tuple(rank for rank, p in absent_processes.items() if p is None)
    if not_reporting:
        return _format_unknown_ranks_advice(not_reporting, len(absent_processes))
    lifecycles = {p.lifecycle for p in absent_processes.values() if p is not None}
    if len(absent_processes) > 1:
        subject, run, have, possessive = "Their processes", "run", "have", "their"
        they_have, they_do, stacks_show = "They have", "they do", "their stacks show"
    else:
        subject, run, have, possessive = "Its process", "runs", "has", "its"
        they_have, they_do, stacks_show = "It has", "it does", "its stack shows"
    if Lifecycle.ALIVE in lifecycles:
        return (
            f"{subject} {run} but {have} not imported torch: check what {they_do} before that"
            " (downloads, imports from a slow disk)."
        )
    if Lifecycle.DESTROYED in lifecycles:
        return (
            f"{they_have} destroyed {possessive} process groups and not called init_process_group"
            f" again: {stacks_show} what {they_do} instead."
        )
    return (
        f"{subject} {run} but {have} not called init_process_group: {stacks_show} what {they_do}"
        " instead."
    )


def describe_unwatched_ranks(ranks: tuple[int, ...], op: str, waiter_count: int) -> str:
    are, they = ("are", "they") if len(ranks) > 1 else ("is", "it")
    return (
        f"{format_waiter_count(waiter_count)} in {op} for {describe_ranks(ranks)}, which {are} not"
        f" watched: whether {they} made the call is not known"
    )


def format_unwatched_advice(reason: str) -> str:
    """``reason`` is why a rank is not recorded, with its remedy; empty if that is unknown."""
    if reason:
        return f"Nothing is recorded of that process: {reason}."
    return (
        "Other calls that need all ranks were completed, so the process exists, and it does not"
        " report: pass HANGWATCH_URL to every rank and install hangwatch into the Python of each;"
        " `hangwatch doctor` on its host reports what is wrong there."
    )


def _format_unknown_ranks_advice(not_reporting: tuple[int, ...], absent_count: int) -> str:
    if len(not_reporting) < absent_count:
        subject = describe_ranks(not_reporting).capitalize()
    else:
        subject = "They" if absent_count > 1 else "It"
    return (
        f"{subject} never reported: check that as many processes were started as WORLD_SIZE says,"
        " that every node started, and that every node can reach HANGWATCH_URL. The launcher's log"
        " may say more."
    )


def format_more_calls(other_count: int) -> str:
    """The end of a summary that names one of several calls."""
    if not other_count:
        return ""
    return f", and {other_count} more such call{'s' if other_count > 1 else ''}"


def describe_unfinished_message(rank: int, op: str, peer: str, is_receive: bool) -> str:
    """A send or a receive that does not finish although the other end was called."""
    did = "sent" if is_receive else "called recv"
    return f"rank {rank} does not finish {op}, although {peer} has {did}"
