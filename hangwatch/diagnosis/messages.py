"""What a verdict says to people: one sentence for what happened, one or two for where to look."""

from __future__ import annotations

import signal
from collections.abc import Collection, Sequence

from hangwatch.diagnosis.graph.progress import busy, looked_twice, stack_moves
from hangwatch.diagnosis.rules.pairwise import Exchange
from hangwatch.model.calls import Call
from hangwatch.model.groups import Group
from hangwatch.model.ranks import ExceptionInfo, Lifecycle, find_runs, format_ranks
from hangwatch.model.threads import ThreadStack
from hangwatch.model.verdicts import CallClass, Wait
from hangwatch.tracking.process import FreezeReason, Process

from .call_arguments import called

_RUNS_SHOWN = 24  # unbroken ones
_WAITS_SHOWN = 4


def those(ranks: tuple[int, ...]) -> str:
    """``rank 3`` or ``ranks 0, 2-3``; of thousands the first, and how many they are."""
    found = find_runs(sorted(set(ranks)))
    if len(found) > _RUNS_SHOWN:
        first = format_ranks(rank for a, b in found[:_RUNS_SHOWN] for rank in range(a, b + 1))
        return f"{len(ranks)} ranks ({first}, …)"
    return f"rank{'s' if len(ranks) > 1 else ''} {format_ranks(ranks)}"


def where(group: Group | None, seq: int | None) -> str:
    if group is None:
        return ""
    name = group.desc if group.desc not in ("", "undefined") else f"group {group.name}"
    of = f"group {name}" if not name.startswith("group ") else name
    return f"call {seq} of {of}" if seq is not None else of


def called_at(call: Call | None) -> str:
    """``all_reduce at train.py:41``, as far as it is known."""
    if call is None:
        return "a collective"
    return call.signature.op + (
        f" at {call.site.file.rsplit('/', 1)[-1]}:{call.site.line}" if call.site is not None else ""
    )


def mismatch(
    odd: tuple[int, ...],
    calls: tuple[CallClass, ...],
    fields: tuple[str, ...],
    group: Group,
    seq: int,
) -> str:
    """Who called what where the others called something else."""
    theirs = [c for c in calls if set(c.ranks) <= set(odd)]
    others = [c for c in calls if not set(c.ranks) <= set(odd)]
    if not calls or (not others and len(theirs) < 2):
        return f"{those(odd)} parted from the rest in the calls up to {where(group, seq)}"
    made = {
        id(c): f"{those(c.ranks)} called {called(c.call, fields, [c.call for c in calls], group)}"
        for c in calls
    }
    if not others:
        return " and ".join(made[id(c)] for c in theirs) + f" ({where(group, seq)})"
    left = "; ".join(made[id(c)] for c in theirs) or f"{those(odd)} called something else"
    right = ", ".join(made[id(c)] for c in others)
    return f"{left} where {right} ({where(group, seq)})"


def unfit(odd: tuple[int, ...], pair: Exchange, op: str, group: Group, seq: int) -> str:
    """What one rank of an all-to-all sends to another and what that one expects, told of whichever
    is to blame.
    """
    sent, expected = _elements(pair.sent), _elements(pair.expected)
    if pair.receiver in odd:
        told = (
            f"rank {pair.receiver} expects {expected} from rank {pair.sender}, which sends"
            f" {sent.split()[0]}"
        )
    else:
        told = (
            f"rank {pair.sender} sends {sent} to rank {pair.receiver}, which expects"
            f" {expected.split()[0]}"
        )
    more = (
        ""
        if {pair.sender, pair.receiver}.issuperset(odd)
        else f"; {those(odd)} fit the others least"
    )
    return f"{told} ({op}, {where(group, seq)}){more}"


def _elements(count: float) -> str:
    return f"{count:.12g} element{'s' if count != 1 else ''}"


def ended(process: Process) -> str:
    """How a process ended: ``was killed by SIGKILL`` or ``exited with status 1``."""
    end = process.exit
    if end is None:
        return "is alive"
    if process.exception is not None:  # whatever ended it came after
        return f"raised {exception(process.exception)}"
    if end.signal:
        return f"was killed by {signal_name(end.signal)}"
    if end.exit_status is None:
        return "vanished"
    return f"exited with status {end.exit_status}"


def exception(raised: ExceptionInfo) -> str:
    """``ValueError: bad batch``."""
    return raised.type + (f": {raised.message.splitlines()[0][:120]}" if raised.message else "")


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def frozen(why: FreezeReason | None, state: str, many: bool) -> tuple[str, str]:
    """What holds it, or ``many``, and what to do."""
    be, it = ("are", "them") if many else ("is", "it")
    if why is FreezeReason.STOPPED and state == "t":
        return f"{be} stopped by a debugger", f"Somebody traces {it}: detach the debugger."
    if why is FreezeReason.STOPPED:
        return f"{be} stopped (SIGSTOP or job control)", f"kill -CONT lets {it} go on."
    if why is FreezeReason.UNINTERRUPTIBLE:
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


def deadlock(ranks: tuple[int, ...], cycle: list[tuple[Wait, str]]) -> str:
    """Each wait of the ``cycle`` with the call that the waiting rank is in; of a long one the
    first.
    """
    told = [
        f"rank {wait.rank} waits for rank {wait.on_rank} in {op}"
        for wait, op in cycle[:_WAITS_SHOWN]
    ]
    return (
        f"{those(ranks)} wait for one another:"
        f" {'; '.join(told)}{'; and so on' if len(cycle) > _WAITS_SHOWN else ''}"
    )


def deadlock_advice(through: tuple[int, ...], knot: Collection[int]) -> str:
    """``through`` are the ranks that every cycle of the ``knot`` leads through."""
    general = (
        "look for calls that one of them makes in another order than its peers, or leaves out."
    )
    if through and len(through) < len(knot):
        return f"Every cycle of waits leads through {those(through)}: begin there, and {general}"
    return f"No rank on the cycle can go on: {general}"


def tags(
    receiver: int, awaited: int | None, sender: int, sent: int | None, group: Group, blocked: bool
) -> str:
    """``blocked``: the sender is still in that call. It is the group's, but one of a channel: its
    number would not tell it in the group.
    """
    verb = "sends" if blocked else "sent"
    return (
        f"rank {receiver} waits to receive tag {awaited} from rank {sender}, which {verb} tag"
        f" {sent} ({where(group, None)})"
    )


WRONG_TAG = "The tags of a send and its receive must be equal: compare the two lines."
TAGS_MIXED_UP = (
    "These tags were in use between the two before: look for where one of them uses its tags in"
    " another order."
)


def keeper(rank: str, thread: ThreadStack | None) -> str:
    """``rank`` itself, as in ``it`` or ``Rank 3``; where another thread than the main one holds the
    GIL, that: ``its thread codec``.
    """
    if thread is None or thread.main or not thread.holds_gil:
        return rank
    return (
        f"{rank}s thread {thread.thread}"
        if rank.lower() == "it"
        else f"{rank}'s thread {thread.thread}"
    )


DECLARES = "hangwatch.phase() declares work that may take long."
WORKS_BEHIND = f"That works: slow rather than stuck. {DECLARES}"


def dead_advice(process: Process, alone: tuple[Process, ...] | None) -> str:
    """``alone`` are others with an exception that need not follow from its own; None where that is
    not known.
    """
    end = process.exit
    if process.exception is not None and alone:
        kinds = {p.exception.type for p in alone if p.exception is not None}
        what = kinds.pop() if len(kinds) == 1 else "exceptions"
        return (
            f"Its exception came first; {those(tuple(p.rank for p in alone))} raised {what}, too,"
            " which need not follow from it."
        )
    if process.exception is not None:
        return "Its exception came first" + (
            "; what other ranks report is what followed from it." if alone is not None else "."
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


def died(process: Process) -> str:
    """The whole sentence for a rank that ended."""
    site = process.exception.site if process.exception is not None else None
    return f"rank {process.rank} {ended(process)}" + (f" at {site}" if site is not None else "")


def slow_advice(process: Process, since: float, in_phase: bool) -> str:
    """By what it is that it counts as slow: others than these never looked to be stuck."""
    if in_phase:
        return "Its script declared this phase: it may take as long as its limit says."
    if stack_moves(process, since):
        return f"Its stack moves: slow rather than stuck. {DECLARES}"
    if busy(process):
        where = " in the same function at every look" if looked_twice(process, since) else ""
        return f"It uses the CPU{where}: a long computation, or a loop that waits. {DECLARES}"
    return f"It got on elsewhere meanwhile: slow rather than stuck. {DECLARES}"


UNSEEN_ADVICE = (
    "Look at what it does after that call; with a longer time-out there is time to look at its"
    " stack."
)
BELOW_ADVICE = "The ranks agree, so look below them: network, device, driver."


def stack_advice(many: bool) -> str:
    return (
        f"{'Their stacks show what they do' if many else 'Its stack shows what it does'} instead of"
        " joining the others."
    )


def exited_advice(many: bool) -> str:
    return (
        f"The others made a call more than {'they' if many else 'it'} did: look for uneven data or"
        " a loop that ends early."
    )


def exited(ranks: tuple[int, ...], gone: bool, count: int, op: str, group: Group, seq: int) -> str:
    has = "have" if len(ranks) > 1 else "has"
    done = f"{has} finished" if gone else f"{has} destroyed the process group"
    return f"{those(ranks)} {done} while {count_wait(count)} in {op} ({where(group, seq)})"


def count_wait(count: int) -> str:
    return f"{count} rank{'s wait' if count != 1 else ' waits'}"


def not_entered(
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
    wait = count_wait(count)
    if 0 < len(inside) < count:
        wait = (
            f"{those(inside)} wait{'s' if len(inside) == 1 else ''}, and {count - len(inside)} more"
            " in other calls"
        )
    return f"{those(ranks)} {have} not {missing} ({where(group, seq)}), for which {wait}"


def brief(call: Call) -> str:
    """``all_reduce, train.py:41``."""
    site = call.site
    return (
        call.signature.op
        if site is None
        else f"{call.signature.op}, {site.file.rsplit('/', 1)[-1]}:{site.line}"
    )


def shifted(count: int, first: Call | None, last: Call, than: str, verb: str) -> str:
    """How far a rank is behind another (ahead, where ``count`` is negative), and since when; to go
    on from its name.
    """
    calls = f"{abs(count)} call{'s' if abs(count) > 1 else ''}"
    told = f"{verb} {calls} {'behind' if count > 0 else 'ahead of'} {than} since"
    if first is None:
        return f"{told} call {last.seq} or earlier"
    if first.seq != last.seq:
        return f"{told} one of calls {first.seq}-{last.seq} ({brief(first)})"
    which = (
        "the first that it never made"
        if count > 1
        else "which it never made"
        if count == 1
        else "which the others never made"
    )
    return f"{told} call {first.seq} ({brief(first)}), {which}"


def reordered(call: Call, theirs: Call, than: str) -> str:
    """``theirs`` is where the rank made the call that others made before or after."""
    where = "earlier" if theirs.seq < call.seq else "later"
    return (
        f"made {call.signature.op} {where} than {than}: as call {theirs.seq} ({brief(theirs)}) and"
        f" not {call.seq}"
    )


def left_out(calls: Sequence[Call], again: Call | None) -> str:
    """``calls`` come, by the order of earlier rounds, between the last that all made and the one
    that the rank went on to.

    Where it made that one a moment before as call ``again``, it may as well have gone back to it.
    """
    which = (
        f"call {calls[0].seq}"
        if len(calls) == 1
        else f"{len(calls)} calls from call {calls[0].seq} on"
    )
    return f"left out {which} ({brief(calls[0])})" + (
        f" or made call {again.seq} again" if again is not None else ""
    )


def raised_alone(calls: Sequence[Call], than: str, verb: str) -> str:
    """``calls`` raised where the others' returned, and the script did more after the first of them;
    to go on from its name.
    """
    behind = f"{len(calls)} call{'s' if len(calls) > 1 else ''} behind {than}"
    return (
        f"{verb} {behind} since call {calls[0].seq} ({brief(calls[0])}), which raised an exception"
        " there, after which its script went on"
    )


def failed_in(call: Call, raised: ExceptionInfo | None) -> str:
    """To go on from the name of whom ``call`` may have ended, with what it raised, where that is
    known.
    """
    return (
        f"failed in call {call.seq} ({brief(call)}) with"
        f" {exception(raised) if raised is not None else 'an exception'}"
    )


def lost(host: str, ranks: tuple[int, ...], count: int, op: str) -> tuple[str, str]:
    """What is missed, and where to look."""
    return (
        f"nothing is heard of host {host} with {those(ranks)}; {count_wait(count)} in {op}",
        "Is the host up, and its network? Its last state is what is shown here.",
    )


def startup_advice(absent: dict[int, Process | None]) -> str:
    """``absent`` are all that did not come; where it is for several reasons, the advice is about
    the first one's.
    """
    many = len(absent) > 1
    if unheard := tuple(rank for rank, p in absent.items() if p is None):
        of = those(unheard) if len(unheard) < len(absent) else "them" if many else "it"
        return (
            f"Nothing was ever heard of {of}: were as many processes started as WORLD_SIZE says,"
            " did every node start, and does HANGWATCH_URL reach every one? See the launcher's log"
            " there."
        )
    states = {p.lifecycle for p in absent.values() if p is not None}
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
