"""Phrases that the messages of all kinds share: ranks, positions and calls.

MERGED: Messages on ranks that wait, and on those that they wait for.

MERGED: Messages on calls that should agree between ranks and do not.

MERGED: Formats a call with the arguments in question, to compare it with the calls that other ranks made
at the same position.

MERGED: Split sizes that two ranks exchange in an all-to-all.

MERGED: The texts of verdicts: a summary of one sentence, and one or two sentences of advice.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from hangwatch.model.calls import Call, Loss, LossReason, Signature, Site
from hangwatch.model.groups import Group, OutsideMember
from hangwatch.model.ranks import ExceptionInfo, Lifecycle, ThreadStack, format_ranks, iter_runs
from hangwatch.model.verdicts import CallClass, Wait
from hangwatch.report.text import resolve_root_rank
from hangwatch.tracking.process import Process

from .graph.progress import has_stack_changed, has_two_samples, is_busy

_MAX_RUNS_SHOWN = 24  # runs of consecutive ranks
MAX_MESSAGE_LENGTH = 120  # characters of an exception's message


def describe_ranks(ranks: tuple[int, ...]) -> str:
    """``rank 3`` or ``ranks 0, 2-3``; of thousands, the number and the first ones. Members of a foreign
    group that are no ranks of the attempt have names.
    """
    outside = [rank.label for rank in ranks if isinstance(rank, OutsideMember)]
    if outside:
        known = tuple(rank for rank in ranks if rank >= 0)
        phrases = [describe_ranks(known)] if known else []
        return " and ".join([*phrases, *outside[:_MAX_RUNS_SHOWN]])
    runs = list(iter_runs(sorted(set(ranks))))
    if len(runs) > _MAX_RUNS_SHOWN:
        first_ranks: list[int] = []
        for first, last in runs[:_MAX_RUNS_SHOWN]:
            first_ranks += range(first, last + 1)
        return f"{len(ranks)} ranks ({format_ranks(first_ranks)}, …)"
    noun = "ranks" if len(ranks) > 1 else "rank"
    return f"{noun} {format_ranks(ranks)}"


def describe_rank(rank: int) -> str:
    """``rank 3``, or the name of a member of a foreign group that is no rank of the attempt."""
    return rank.label if isinstance(rank, OutsideMember) else f"rank {rank}"


def describe_position(group: Group | None, seq: int | None) -> str:
    """``call 7 of group default_pg``, or only the group if ``seq`` is None."""
    if group is None:
        return ""
    return group.title if seq is None else f"call {seq} of {group.title}"


def describe_loss(rank: int, group: Group, loss: Loss, faults: tuple[str, ...]) -> str:
    """``rank 3's calls of group default_pg are not completely recorded since call 7, because …``;
    ``faults`` are the messages of the rank's recorder.
    """
    fault = f" ({faults[0]})" if faults and loss.reason is LossReason.FAULT else ""
    return (
        f"rank {rank}'s calls of {describe_position(group, None)} are not completely recorded since"
        f" call {loss.from_seq}, because {loss.reason.description}{fault}"
    )


def describe_missed_streams(ranks: tuple[int, ...], faults: tuple[str, ...]) -> str:
    """``faults`` are the messages of the first rank's recorder."""
    reason = f" ({faults[0]})" if faults else ""
    return (
        f"not all groups and channels of {describe_ranks(ranks)} are recorded{reason}, and a wait in"
        " one of the others cannot be seen"
    )


def join_notes(notes: list[str]) -> str:
    """Clauses as sentences."""
    return " ".join(f"{note[0].upper()}{note[1:]}." for note in notes)


def format_call(call: Call | None) -> str:
    """``all_reduce at train.py:41``, as far as it is known."""
    if call is None:
        return "a collective"
    if call.site is None:
        return call.signature.op
    return f"{call.signature.op} at {format_line(call.site)}"


def format_call_short(call: Call) -> str:
    """``all_reduce, train.py:41``."""
    if call.site is None:
        return call.signature.op
    return f"{call.signature.op}, {format_line(call.site)}"


def format_line(site: Site) -> str:
    """``train.py:41``."""
    return f"{site.file.rsplit('/', 1)[-1]}:{site.line}"


def format_exception(exception: ExceptionInfo) -> str:
    """``ValueError: bad batch``."""
    if not exception.message:
        return exception.type
    return f"{exception.type}: {exception.message.splitlines()[0][:MAX_MESSAGE_LENGTH]}"


def update_waiter_count(summary: str, before: int, now: int) -> str:
    """The summary of a verdict with ``before`` waiting ranks, for one with ``now``.

    >>> update_waiter_count("rank 1 has not entered barrier, for which 1 rank waits", 1, 2)
    'rank 1 has not entered barrier, for which 2 ranks wait'
    """
    return re.sub(
        rf"\b{re.escape(format_waiter_count(before))}\b", format_waiter_count(now), summary
    )


def format_waiter_count(count: int) -> str:
    return f"{count} rank waits" if count == 1 else f"{count} ranks wait"


def format_lower_layers_advice(*, are_equal: bool) -> str:
    """``are_equal``: the calls of all members were compared."""
    if are_equal:
        return "The calls match, so check the network, the devices and their drivers."
    return "No difference between the calls is known: check the network, the devices and their drivers."


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


GROUP_MISMATCH_ADVICE = (
    "Process groups must be created in the same order, with the same members, on every rank."
)
MISMATCH_ADVICE = (
    "Every rank of a group must make the same calls in the same order: compare the two lines."
)
PAIR_MISMATCH_ADVICE = "What one rank sends is not what the other expects: compare the two lines."
WRONG_TAG_ADVICE = "The tags of a send and its receive must be equal: compare the two lines."
REORDERED_TAGS_ADVICE = (
    "The two ranks have used these tags before: look for a place where one of them uses its tags in"
    " a different order."
)
SWALLOWED_EXCEPTION_ADVICE = (
    "Look at that exception: code that catches an exception of a collective must bring all ranks"
    " back to the same call."
)


def describe_mismatch(
    outliers: tuple[int, ...],
    calls: tuple[CallClass, ...],
    differing_fields: tuple[str, ...],
    group: Group,
    seq: int,
    last_equal: int = 0,
) -> str:
    """What the outliers called, and what the other ranks called. Without calls, only that they differ
    at some call after ``last_equal`` and up to ``seq``.
    """
    outlier_calls = [c for c in calls if set(c.ranks) <= set(outliers)]
    other_calls = [c for c in calls if not set(c.ranks) <= set(outliers)]
    position = describe_position(group, seq)
    if not calls or (not other_calls and len(outlier_calls) < 2):
        return _describe_inexact_mismatch(outliers, group, position, seq, last_equal)
    all_calls = [c.call for c in calls]

    def describe_class(call_class: CallClass) -> str:
        call = format_call_arguments(call_class.call, differing_fields, all_calls, group)
        return f"{describe_ranks(call_class.ranks)} called {call}"

    if not other_calls:
        return f"{' and '.join(map(describe_class, outlier_calls))} ({position})"
    theirs = "; ".join(map(describe_class, outlier_calls))
    if not theirs:
        theirs = f"{describe_ranks(outliers)} called something else"
    return f"{theirs} where {', '.join(map(describe_class, other_calls))} ({position})"


def _describe_inexact_mismatch(
    outliers: tuple[int, ...], group: Group, position: str, seq: int, last_equal: int
) -> str:
    """The running hashes differ, and which call was the first to differ, or what it was, is unknown."""
    if len(outliers) == len(group.ranks):
        subject = f"the calls of {describe_ranks(outliers)} differ from each other"
    else:
        subject = f"the calls of {describe_ranks(outliers)} differ from those of the other ranks"
    if seq == last_equal + 1:
        return f"{subject} at {position}; what was called there is not known"
    since = f", and after call {last_equal}" if last_equal else ""
    return (
        f"{subject} at or before {position}{since}; the records of the calls in between could not be"
        " fetched"
    )


def format_new_tag_advice(new_tag: int | None) -> str:
    """The advice where the two ranks have used only the other of the two tags before."""
    return (
        f"The two ranks have not used tag {new_tag} before, unlike the other one: either it is wrong,"
        " or one of them uses its tags in a different order."
    )


def describe_pair_mismatch(
    outliers: tuple[int, ...], exchange: SplitExchange, op: str, group: Group, seq: int
) -> str:
    """What one rank of an all-to-all sends to another and what the other one expects, starting with
    the outlier.
    """
    sender, receiver = exchange.sender, exchange.receiver
    if receiver in outliers:
        exchanged = (
            f"rank {receiver} expects {_format_elements(exchange.expected)} from rank {sender},"
            f" which sends {_format_count(exchange.sent)}"
        )
    else:
        exchanged = (
            f"rank {sender} sends {_format_elements(exchange.sent)} to rank {receiver}, which"
            f" expects {_format_count(exchange.expected)}"
        )
    summary = f"{exchanged} ({op}, {describe_position(group, seq)})"
    if {sender, receiver}.issuperset(outliers):
        return summary
    return f"{summary}; the sizes of {describe_ranks(outliers)} have the most conflicts"


def _format_elements(count: float) -> str:
    return f"{_format_count(count)} element{'s' if count != 1 else ''}"


def _format_count(count: float) -> str:
    return f"{count:.12g}"


def describe_tag_mismatch(
    receiver: int,
    awaited_tag: int | None,
    sender: int,
    sent_tag: int | None,
    group: Group,
    is_blocked: bool,
) -> str:
    """``is_blocked``: the sender is still in that call. The message names no call number, since
    those of a channel are not those of the group.
    """
    verb = "sends" if is_blocked else "sent"
    return (
        f"rank {receiver} waits to receive tag {awaited_tag} from rank {sender}, which {verb} tag"
        f" {sent_tag} ({describe_position(group, None)})"
    )


_TensorShapes = tuple[tuple[tuple[int, ...], ...], bool]  # the known shapes, and whether all are
_ARGUMENT_LABELS = {"dtype": "dtype", "reduce_op": "reduce op"}


def format_call_arguments(
    call: Call, differing_fields: Sequence[str], all_calls: Sequence[Call], group: Group
) -> str:
    """The operation with the arguments that differ between ``all_calls``."""
    all_signatures = [other.signature for other in all_calls]
    arguments = [
        _format_argument(call.signature, name, all_signatures, group) for name in differing_fields
    ]
    shown = [argument for argument in arguments if argument]
    return f"{call.signature.op}({', '.join(shown)})" if shown else call.signature.op


def _format_argument(
    signature: Signature, name: str, all_signatures: list[Signature], group: Group
) -> str:
    if name == "shape":
        return _format_shape(signature, all_signatures)
    if name == "root":
        return f"root {resolve_root_rank(signature.root, group.ranks)}"
    if name == "splits" and signature.splits is not None:
        return (
            f"sending {list(signature.splits[0])}, expecting {list(signature.splits[1])} elements"
        )
    if name in _ARGUMENT_LABELS:
        return f"{_ARGUMENT_LABELS[name]} {getattr(signature, name)}"
    return str(signature.detail) if name == "detail" else ""


def _format_shape(signature: Signature, all_signatures: list[Signature]) -> str:
    """The shape of a single tensor; of a list, its length and the first tensor whose size differs
    between the calls.
    """
    if all(len(other.shapes) <= 1 for other in all_signatures):
        return "shape " + " ".join(str(list(shape)) for shape in signature.shapes)
    shapes, is_complete = _list_tensor_shapes(signature)
    if is_complete:
        count = f"{len(shapes)} tensor{'s' if len(shapes) != 1 else ''}"
    else:
        count = f"more than {len(shapes)} tensors"
    lists = [_list_tensor_shapes(other) for other in all_signatures]
    index = _find_first_difference(lists)
    if index is not None:
        if index >= len(shapes):
            return count
        return f"{count}, number {index + 1} of shape {list(shapes[index])}"
    if any(is_other_complete for _, is_other_complete in lists):
        return count
    return f"{count}, of which the first {len(shapes)} agree"


def _list_tensor_shapes(signature: Signature) -> _TensorShapes:
    """The known shapes, and whether these are all. The last shape of a truncated list is empty, like
    that of a scalar.
    """
    shapes = signature.shapes
    if not shapes or shapes[-1] != () or sum(map(math.prod, shapes)) == signature.numel:
        return shapes, True
    return shapes[:-1], False


def _find_first_difference(lists: list[_TensorShapes]) -> int | None:
    """The index of the first tensor whose number of elements differs. Calls are compared by these,
    since a view with another shape is allowed.
    """
    for index in range(max(len(shapes) for shapes, _ in lists)):
        sizes: set[int | None] = set()
        for shapes, is_complete in lists:
            if index < len(shapes):
                sizes.add(math.prod(shapes[index]))
            elif is_complete:
                sizes.add(None)
        if len(sizes) > 1:
            return index
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitExchange:
    """What one rank of an all-to-all sends to another one, and what the receiver expects from it,
    in elements.
    """

    sender: int
    receiver: int
    sent: float
    expected: float
