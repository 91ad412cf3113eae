"""What a verdict says to people: one sentence for what happened, one or two for where to look."""

from __future__ import annotations

import signal
from collections.abc import Collection, Sequence

from hangwatch.diagnosis.graph.progress import has_stack_changed, has_two_samples, is_busy
from hangwatch.model.calls import Call
from hangwatch.model.groups import Group
from hangwatch.model.ranks import ExceptionInfo, Lifecycle, find_runs, format_ranks
from hangwatch.model.threads import ThreadStack
from hangwatch.model.verdicts import CallClass, Wait
from hangwatch.tracking.process import FreezeReason, Process

from .call_arguments import format_call_arguments
from .split_sizes import SplitExchange

_MAX_RUNS_SHOWN = 24  # unbroken ones
_MAX_WAITS_SHOWN = 4


def describe_ranks(ranks: tuple[int, ...]) -> str:
    """``rank 3`` or ``ranks 0, 2-3``; of thousands the first, and how many they are."""
    found = find_runs(sorted(set(ranks)))
    if len(found) > _MAX_RUNS_SHOWN:
        first = format_ranks(rank for a, b in found[:_MAX_RUNS_SHOWN] for rank in range(a, b + 1))
        return f"{len(ranks)} ranks ({first}, …)"
    return f"rank{'s' if len(ranks) > 1 else ''} {format_ranks(ranks)}"


def describe_position(group: Group | None, seq: int | None) -> str:
    if group is None:
        return ""
    name = group.desc if group.desc not in ("", "undefined") else f"group {group.name}"
    of = f"group {name}" if not name.startswith("group ") else name
    return f"call {seq} of {of}" if seq is not None else of


def format_call(call: Call | None) -> str:
    """``all_reduce at train.py:41``, as far as it is known."""
    if call is None:
        return "a collective"
    return call.signature.op + (
        f" at {call.site.file.rsplit('/', 1)[-1]}:{call.site.line}" if call.site is not None else ""
    )


def describe_mismatch(
    outliers: tuple[int, ...],
    calls: tuple[CallClass, ...],
    differing_fields: tuple[str, ...],
    group: Group,
    seq: int,
) -> str:
    """Who called what where the others called something else."""
    theirs = [c for c in calls if set(c.ranks) <= set(outliers)]
    others = [c for c in calls if not set(c.ranks) <= set(outliers)]
    if not calls or (not others and len(theirs) < 2):
        return (
            f"{describe_ranks(outliers)} parted from the rest in the calls up to"
            f" {describe_position(group, seq)}"
        )
    made = {
        id(c): (
            f"{describe_ranks(c.ranks)} called"
            f" {format_call_arguments(c.call, differing_fields, [c.call for c in calls], group)}"
        )
        for c in calls
    }
    if not others:
        return " and ".join(made[id(c)] for c in theirs) + f" ({describe_position(group, seq)})"
    left = (
        "; ".join(made[id(c)] for c in theirs)
        or f"{describe_ranks(outliers)} called something else"
    )
    right = ", ".join(made[id(c)] for c in others)
    return f"{left} where {right} ({describe_position(group, seq)})"


def describe_pair_mismatch(
    outliers: tuple[int, ...], exchange: SplitExchange, op: str, group: Group, seq: int
) -> str:
    """What one rank of an all-to-all sends to another and what that one expects, told of whichever
    is to blame.
    """
    sent, expected = _format_elements(exchange.sent), _format_elements(exchange.expected)
    if exchange.receiver in outliers:
        told = (
            f"rank {exchange.receiver} expects {expected} from rank {exchange.sender}, which sends"
            f" {sent.split()[0]}"
        )
    else:
        told = (
            f"rank {exchange.sender} sends {sent} to rank {exchange.receiver}, which expects"
            f" {expected.split()[0]}"
        )
    more = (
        ""
        if {exchange.sender, exchange.receiver}.issuperset(outliers)
        else f"; {describe_ranks(outliers)} fit the others least"
    )
    return f"{told} ({op}, {describe_position(group, seq)}){more}"


def _format_elements(count: float) -> str:
    return f"{count:.12g} element{'s' if count != 1 else ''}"


def describe_exit(process: Process) -> str:
    """How a process ended: ``was killed by SIGKILL`` or ``exited with status 1``."""
    end = process.exit
    if end is None:
        return "is alive"
    if process.exception is not None:  # whatever ended it came after
        return f"raised {format_exception(process.exception)}"
    if end.signal:
        return f"was killed by {get_signal_name(end.signal)}"
    if end.exit_status is None:
        return "vanished"
    return f"exited with status {end.exit_status}"


def format_exception(exception: ExceptionInfo) -> str:
    """``ValueError: bad batch``."""
    return exception.type + (
        f": {exception.message.splitlines()[0][:120]}" if exception.message else ""
    )


def get_signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def describe_freeze(reason: FreezeReason | None, state: str, many: bool) -> tuple[str, str]:
    """What holds it, or ``many``, and what to do."""
    be, it = ("are", "them") if many else ("is", "it")
    if reason is FreezeReason.STOPPED and state == "t":
        return f"{be} stopped by a debugger", f"Somebody traces {it}: detach the debugger."
    if reason is FreezeReason.STOPPED:
        return f"{be} stopped (SIGSTOP or job control)", f"kill -CONT lets {it} go on."
    if reason is FreezeReason.UNINTERRUPTIBLE:
        held = (
            f"The kernel holds {it}: look at the disk, network file system or driver that"
            f" {'they wait' if many else 'it waits'} for."
        )
        return f"{be} in uninterruptible sleep", held
    shows = "their stacks show" if many else "its stack shows"
    return (
        f"run{'' if many else 's'} native code that keeps the GIL",
        f"No Python can run there: {shows} which call into native code does not return.",
    )


def describe_deadlock(ranks: tuple[int, ...], cycle: list[tuple[Wait, str]]) -> str:
    """Each wait of the ``cycle`` with the call that the waiting rank is in; of a long one the
    first.
    """
    told = [
        f"rank {wait.rank} waits for rank {wait.on_rank} in {op}"
        for wait, op in cycle[:_MAX_WAITS_SHOWN]
    ]
    return (
        f"{describe_ranks(ranks)} wait for one another:"
        f" {'; '.join(told)}{'; and so on' if len(cycle) > _MAX_WAITS_SHOWN else ''}"
    )


def format_deadlock_advice(common_ranks: tuple[int, ...], component: Collection[int]) -> str:
    """``through`` are the ranks that every cycle of the ``knot`` leads through."""
    general = (
        "look for calls that one of them makes in another order than its peers, or leaves out."
    )
    if common_ranks and len(common_ranks) < len(component):
        return (
            f"Every cycle of waits leads through {describe_ranks(common_ranks)}: begin there, and"
            f" {general}"
        )
    return f"No rank on the cycle can go on: {general}"


def describe_tag_mismatch(
    receiver: int, awaited: int | None, sender: int, sent: int | None, group: Group, blocked: bool
) -> str:
    """``blocked``: the sender is still in that call. It is the group's, but one of a channel: its
    number would not tell it in the group.
    """
    verb = "sends" if blocked else "sent"
    return (
        f"rank {receiver} waits to receive tag {awaited} from rank {sender}, which {verb} tag"
        f" {sent} ({describe_position(group, None)})"
    )


WRONG_TAG_ADVICE = "The tags of a send and its receive must be equal: compare the two lines."
REORDERED_TAGS_ADVICE = (
    "These tags were in use between the two before: look for where one of them uses its tags in"
    " another order."
)


def describe_blocking_thread(subject: str, thread: ThreadStack | None) -> str:
    """``rank`` itself, as in ``it`` or ``Rank 3``; where another thread than the main one holds the
    GIL, that: ``its thread codec``.
    """
    if thread is None or thread.main or not thread.holds_gil:
        return subject
    return (
        f"{subject}s thread {thread.thread}"
        if subject.lower() == "it"
        else f"{subject}'s thread {thread.thread}"
    )


PHASE_HINT = "hangwatch.phase() declares work that may take long."
SLOW_NOT_STUCK_ADVICE = f"That works: slow rather than stuck. {PHASE_HINT}"


def format_dead_rank_advice(
    process: Process, independent_failures: tuple[Process, ...] | None
) -> str:
    """``alone`` are others with an exception that need not follow from its own; None where that is
    not known.
    """
    end = process.exit
    if process.exception is not None and independent_failures:
        kinds = {p.exception.type for p in independent_failures if p.exception is not None}
        what = kinds.pop() if len(kinds) == 1 else "exceptions"
        return (
            "Its exception came first;"
            f" {describe_ranks(tuple(p.rank for p in independent_failures))} raised {what}, too,"
            " which need not follow from it."
        )
    if process.exception is not None:
        return "Its exception came first" + (
            "; what other ranks report is what followed from it."
            if independent_failures is not None
            else "."
        )
    if end is not None and end.signal == signal.SIGKILL:
        return (
            "SIGKILL is most often the kernel's out-of-memory killer or somebody's scancel: look at"
            " dmesg and at the host's memory."
        )
    if end is not None and end.signal in (
        signal.SIGSEGV,
        signal.SIGBUS,
        signal.SIGABRT,
        signal.SIGFPE,
        signal.SIGILL,
    ):
        return (
            "Native code ended it: look at its last lines on stderr, and let it write a core file"
            " (ulimit -c unlimited)."
        )
    if end is not None and end.signal is None and end.exit_status is None:
        return "Its node agent could not read its exit status: look at its launcher's log."
    return "Look at its last lines on stderr: it ended before the others."


def describe_death(process: Process) -> str:
    """The whole sentence for a rank that ended."""
    site = process.exception.site if process.exception is not None else None
    return f"rank {process.rank} {describe_exit(process)}" + (
        f" at {site}" if site is not None else ""
    )


def format_slow_rank_advice(process: Process, since: float, in_phase: bool) -> str:
    """By what it is that it counts as slow: others than these never looked to be stuck."""
    if in_phase:
        return "Its script declared this phase: it may take as long as its limit says."
    if has_stack_changed(process, since):
        return f"Its stack moves: slow rather than stuck. {PHASE_HINT}"
    if is_busy(process):
        where = " in the same function at every look" if has_two_samples(process, since) else ""
        return f"It uses the CPU{where}: a long computation, or a loop that waits. {PHASE_HINT}"
    return f"It got on elsewhere meanwhile: slow rather than stuck. {PHASE_HINT}"


NO_STACK_ADVICE = (
    "Look at what it does after that call; with a longer time-out there is time to look at its"
    " stack."
)
LOWER_LAYERS_ADVICE = "The ranks agree, so look below them: network, device, driver."


def format_stack_advice(many: bool) -> str:
    return (
        f"{'Their stacks show what they do' if many else 'Its stack shows what it does'} instead of"
        " joining the others."
    )


def format_exited_rank_advice(many: bool) -> str:
    return (
        f"The others made a call more than {'they' if many else 'it'} did: look for uneven data or"
        " a loop that ends early."
    )


def describe_exited_ranks(
    ranks: tuple[int, ...], has_ended: bool, count: int, op: str, group: Group, seq: int
) -> str:
    has = "have" if len(ranks) > 1 else "has"
    done = f"{has} finished" if has_ended else f"{has} destroyed the process group"
    return (
        f"{describe_ranks(ranks)} {done} while {format_waiter_count(count)} in {op}"
        f" ({describe_position(group, seq)})"
    )


def format_waiter_count(count: int) -> str:
    return f"{count} rank{'s wait' if count != 1 else ' waits'}"


def describe_not_entered(
    ranks: tuple[int, ...],
    op: str,
    group: Group | None,
    seq: int | None,
    count: int,
    waiter: int | None = None,
    inside: tuple[int, ...] = (),
) -> str:
    """Of a send or a receive, what is missing is the other end of what rank ``waiter`` is in.

    Of the ``count`` that wait, those ``inside`` are known to be in the call itself.
    """
    have = "have" if len(ranks) > 1 else "has"
    ends = (
        f"sent what rank {waiter} waits to receive"
        if op.startswith("recv")
        else f"received what rank {waiter} sends"
    )
    missing = f"entered {op}" if waiter is None else ends
    wait = format_waiter_count(count)
    if 0 < len(inside) < count:
        wait = (
            f"{describe_ranks(inside)} wait{'s' if len(inside) == 1 else ''}, and"
            f" {count - len(inside)} more in other calls"
        )
    return (
        f"{describe_ranks(ranks)} {have} not {missing} ({describe_position(group, seq)}), for which"
        f" {wait}"
    )


def format_call_short(call: Call) -> str:
    """``all_reduce, train.py:41``."""
    site = call.site
    return (
        call.signature.op
        if site is None
        else f"{call.signature.op}, {site.file.rsplit('/', 1)[-1]}:{site.line}"
    )


def describe_shift(
    count: int, first: Call | None, last: Call, reference_name: str, verb: str
) -> str:
    """How far a rank is behind another (ahead, where ``count`` is negative), and since when; to go
    on from its name.
    """
    calls = f"{abs(count)} call{'s' if abs(count) > 1 else ''}"
    told = f"{verb} {calls} {'behind' if count > 0 else 'ahead of'} {reference_name} since"
    if first is None:
        return f"{told} call {last.seq} or earlier"
    if first.seq != last.seq:
        return f"{told} one of calls {first.seq}-{last.seq} ({format_call_short(first)})"
    which = (
        "the first that it never made"
        if count > 1
        else "which it never made"
        if count == 1
        else "which the others never made"
    )
    return f"{told} call {first.seq} ({format_call_short(first)}), {which}"


def describe_reordering(call: Call, theirs: Call, reference_name: str) -> str:
    """``theirs`` is where the rank made the call that others made before or after."""
    where = "earlier" if theirs.seq < call.seq else "later"
    return (
        f"made {call.signature.op} {where} than {reference_name}: as call {theirs.seq}"
        f" ({format_call_short(theirs)}) and not {call.seq}"
    )


def describe_omission(calls: Sequence[Call], repeated_call: Call | None) -> str:
    """``calls`` come, by the order of earlier rounds, between the last that all made and the one
    that the rank went on to.

    Where it made that one a moment before as call ``again``, it may as well have gone back to it.
    """
    which = (
        f"call {calls[0].seq}"
        if len(calls) == 1
        else f"{len(calls)} calls from call {calls[0].seq} on"
    )
    return f"left out {which} ({format_call_short(calls[0])})" + (
        f" or made call {repeated_call.seq} again" if repeated_call is not None else ""
    )


def describe_lone_exceptions(calls: Sequence[Call], reference_name: str, verb: str) -> str:
    """``calls`` raised where the others' returned, and the script did more after the first of them;
    to go on from its name.
    """
    behind = f"{len(calls)} call{'s' if len(calls) > 1 else ''} behind {reference_name}"
    return (
        f"{verb} {behind} since call {calls[0].seq} ({format_call_short(calls[0])}), which raised"
        " an exception there, after which its script went on"
    )


def describe_failed_call(call: Call, exception: ExceptionInfo | None) -> str:
    """To go on from the name of whom ``call`` may have ended, with what it raised, where that is
    known.
    """
    return (
        f"failed in call {call.seq} ({format_call_short(call)}) with"
        f" {format_exception(exception) if exception is not None else 'an exception'}"
    )


def describe_lost_node(host: str, ranks: tuple[int, ...], count: int, op: str) -> tuple[str, str]:
    """What is missed, and where to look."""
    return (
        (
            f"nothing is heard of host {host} with {describe_ranks(ranks)};"
            f" {format_waiter_count(count)} in {op}"
        ),
        "Is the host up, and its network? Its last state is what is shown here.",
    )


def format_startup_advice(absent_processes: dict[int, Process | None]) -> str:
    """``absent`` are all that did not come; where it is for several reasons, the advice is about
    the first one's.
    """
    many = len(absent_processes) > 1
    if unheard := tuple(rank for rank, p in absent_processes.items() if p is None):
        of = (
            describe_ranks(unheard)
            if len(unheard) < len(absent_processes)
            else "them"
            if many
            else "it"
        )
        return (
            f"Nothing was ever heard of {of}: were as many processes started as WORLD_SIZE says,"
            " did every node start, and does HANGWATCH_URL reach every one? See the launcher's log"
            " there."
        )
    states = {p.lifecycle for p in absent_processes.values() if p is not None}
    they, run, has, its = (
        ("they do", "Their processes run", "have", "their")
        if many
        else ("it does", "Its process runs", "has", "its")
    )
    stack = f"{its} {'stacks show' if many else 'stack shows'} what {they} instead."
    if Lifecycle.ALIVE in states:
        return (
            f"{run} but {has} not imported torch: see what {they} before (downloads, imports from a"
            " slow disk)."
        )
    if Lifecycle.DESTROYED in states:
        return (
            f"{'They have' if many else 'It has'} destroyed {its} process groups and not called"
            f" init_process_group again: {stack}"
        )
    return f"{run} and {has} not called init_process_group: {stack}"
