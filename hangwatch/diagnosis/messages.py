"""The texts that several rules share: on ranks, positions, calls and waits, and on calls that should be
the same on all ranks and are not.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection

from hangwatch.model.calls import GRAPH_REPLAY, Call, Signature, Site
from hangwatch.model.groups import Group, OutsideMember
from hangwatch.model.ranks import ExceptionInfo, Ranks, ThreadStack, format_ranks
from hangwatch.model.verdicts import CallClass, Wait
from hangwatch.report.text import resolve_root_rank

_MAX_RUNS_SHOWN = 24  # runs of consecutive ranks
MAX_MESSAGE_LENGTH = 120  # characters of an exception's message
_MAX_WAITS_SHOWN = 4
PHASE_HINT = "hangwatch.phase() declares work that may take long."
# The forms of a word for one rank and for several. A phrase comes before its single words.
_PLURALS = {
    "Its process runs": "Their processes run",
    "its device": "their devices",
    "its stack": "their stacks",
    "Its stack": "Their stacks",
    "its": "their",
    "it": "they",
    "It": "They",
    "is": "are",
    "has": "have",
    "does": "do",
    "expects": "expect",
    "shows": "show",
    "waits": "wait",
    "works": "work",
}
_SINGULARS = re.compile(rf"\b({'|'.join(_PLURALS)})\b")

Messages = tuple[str, str]  # the summary and the advice of a verdict
_TensorShapes = tuple[tuple[tuple[int, ...], ...], bool]  # the known shapes, and whether all are


def describe_ranks(ranks: Ranks) -> str:
    """``rank 3`` or ``ranks 0, 2-3``, or the number and the first ones of thousands. Members of a foreign
    group that are not ranks of the attempt have names.
    """
    outside = [rank.label for rank in ranks if isinstance(rank, OutsideMember)]
    if outside:
        known = tuple(rank for rank in ranks if rank >= 0)
        phrases = [describe_ranks(known)] if known else []
        return " and ".join([*phrases, *outside[:_MAX_RUNS_SHOWN]])
    runs = format_ranks(ranks).split(", ")
    if len(runs) > _MAX_RUNS_SHOWN:
        return f"{len(ranks)} ranks ({', '.join(runs[:_MAX_RUNS_SHOWN])}, …)"
    noun = "ranks" if len(ranks) > 1 else "rank"
    return f"{noun} {', '.join(runs)}"


def describe_ranks_with(ranks: Ranks, verb: str) -> str:
    """``rank 3 has``, or ``ranks 0, 2-3 have``."""
    return f"{describe_ranks(ranks)} {pluralize(verb, ranks)}"


def pluralize(text: str, ranks: Collection[int]) -> str:
    """A text about one rank, with its verbs and pronouns in the plural if there are several.

    >>> pluralize("It has stopped: its stack shows where", (0, 2))
    'They have stopped: their stacks show where'
    """
    if len(ranks) < 2:
        return text
    return _SINGULARS.sub(lambda singular: _PLURALS[singular[0]], text)


def describe_position(group: Group | None, seq: int | None) -> str:
    """``call 7 of group default_pg``, or only the group if ``seq`` is None."""
    if group is None:
        return ""
    return group.title if seq is None else f"call {seq} of {group.title}"


def join_notes(notes: list[str]) -> str:
    """The clauses as sentences."""
    return " ".join(f"{note[0].upper()}{note[1:]}." for note in notes)


def format_call(call: Call | None, joint: str = " at ") -> str:
    """``all_reduce at train.py:41``, as far as it is known."""
    if call is None:
        return "a collective"
    if call.site is None:
        return call.signature.title
    return f"{call.signature.title}{joint}{format_line(call.site)}"


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
    """The advice for stuck calls; ``are_equal``: the calls of all members were compared."""
    if are_equal:
        return "The calls match, so check the network, the devices and their drivers."
    return "No difference between the calls is known: check the network, the devices and their drivers."


def describe_deadlock(
    ranks: Ranks, cycle: list[tuple[Wait, str]], common_ranks: Collection[int] = ()
) -> Messages:
    """The summary, with the first waits of the cycle and the operations that the waiting ranks are in, and
    the advice. ``common_ranks`` are those that are on every cycle.
    """
    other_ends = {"send": "the recv of ", "recv": "the send of "}
    waits = []
    for wait, op in cycle[:_MAX_WAITS_SHOWN]:
        awaited = f"{other_ends.get(op, '')}{describe_ranks((wait.on_rank,))}"
        waits.append(f"{describe_ranks((wait.rank,))} waits for {awaited} in {op}")
    if len(cycle) > _MAX_WAITS_SHOWN:
        waits.append("and so on")
    summary = f"{describe_ranks(ranks)} wait for each other: {'; '.join(waits)}"
    general = "look for calls that one of them makes in a different order than its peers, or skips."
    advice = f"No rank on the cycle can continue: {general}"
    if 0 < len(common_ranks) < len(ranks):
        first = describe_ranks(tuple(sorted(common_ranks)))
        advice = f"Every cycle of waits includes {first}: start there, and {general}"
    return summary, advice


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
    ranks: Ranks,
    op: str,
    group: Group | None,
    seq: int | None,
    waiter_count: int,
    waiter: int | None = None,
    ranks_inside: Ranks = (),
) -> str:
    """The summary for ranks that have not entered a call.

    ``waiter`` is the rank at the other end if the call is a send or a receive. ``ranks_inside`` are the
    waiting ranks that are known to be in the call itself.
    """
    if waiter is None:
        missing = f"entered {op}"
    elif op.startswith("recv"):
        missing = f"sent what {describe_ranks((waiter,))} waits to receive"
    else:
        missing = f"received what {describe_ranks((waiter,))} sends"
    waiting = format_waiter_count(waiter_count)
    if 0 < len(ranks_inside) < waiter_count:
        elsewhere = waiter_count - len(ranks_inside)
        inside = describe_ranks_with(ranks_inside, "waits")
        waiting = f"{inside}, and {elsewhere} more in other calls"
    subject = describe_ranks_with(ranks, "has")
    position = describe_position(group, seq)
    return f"{subject} not {missing} ({position}), for which {waiting}"


def format_more_calls(other_count: int) -> str:
    """The end of a summary that names one of several calls."""
    if not other_count:
        return ""
    return f", and {other_count} more such call{'s' if other_count > 1 else ''}"


def describe_unfinished_message(rank: int, op: str, peer: str, is_receive: bool) -> str:
    """A send or a receive that does not finish although the other end was called."""
    did = "sent" if is_receive else "called recv"
    return f"rank {rank} does not finish {op}, although {peer} has {did}"


def describe_mismatch(
    outliers: Ranks,
    calls: tuple[CallClass, ...],
    differing_fields: tuple[str, ...],
    group: Group,
    seq: int,
    last_equal: int = 0,
) -> str:
    """What the outliers called, and what the other ranks called. If no calls are known, only that
    they differ at some call after ``last_equal`` and up to ``seq``.
    """
    signatures = [call_class.call.signature for call_class in calls]
    outlier_texts = []
    other_texts = []
    for call_class in calls:
        signature = call_class.call.signature
        arguments = [_format_argument(signature, n, signatures, group) for n in differing_fields]
        shown = ", ".join(filter(None, arguments))
        if signature.op == GRAPH_REPLAY:
            text = f"{describe_ranks(call_class.ranks)} {_describe_replay(signature, signatures)}"
        else:
            call = f"{signature.op}({shown})" if shown else signature.op
            text = f"{describe_ranks(call_class.ranks)} called {call}"
        if set(call_class.ranks).issubset(outliers):
            outlier_texts.append(text)
        else:
            other_texts.append(text)
    position = describe_position(group, seq)
    if not other_texts and len(outlier_texts) < 2:
        return _describe_inexact_mismatch(outliers, group, position, seq, last_equal)
    if not other_texts:
        return f"{' and '.join(outlier_texts)} ({position})"
    theirs = "; ".join(outlier_texts)
    if not theirs:
        theirs = f"{describe_ranks(outliers)} called something else"
    return f"{theirs} where {', '.join(other_texts)} ({position})"


def _describe_replay(signature: Signature, all_signatures: list[Signature]) -> str:
    """The predicate of ranks that replayed a CUDA graph. Different graphs that look the same are shown with
    their hashes.
    """
    titles = [other.title for other in all_signatures]
    if titles.count(signature.title) > 1 and signature.detail is not None:
        return f"replayed a CUDA graph with {signature.detail}"
    return f"replayed {signature.title.removeprefix('the replay of ')}"


def _describe_inexact_mismatch(
    outliers: Ranks, group: Group, position: str, seq: int, last_equal: int
) -> str:
    """The summary where hashes differ and the first different call, or its content, is unknown."""
    if len(outliers) == len(group.ranks):
        subject = f"the calls of {describe_ranks(outliers)} differ from each other"
    else:
        subject = f"the calls of {describe_ranks(outliers)} differ from those of the other ranks"
    if seq == last_equal + 1:
        return f"{subject} at {position}; what was called there is not known"
    return f"{subject} {describe_lost_calls(position, last_equal)}"


def describe_lost_calls(position: str, last_equal: int) -> str:
    """Between which calls two sides began to differ, if the records that would show it are lost."""
    since = f", and after call {last_equal}" if last_equal else ""
    return (
        f"at or before {position}{since}; the records of the calls in between could not be fetched"
    )


def _format_argument(
    signature: Signature, name: str, all_signatures: list[Signature], group: Group
) -> str:
    """An argument that differs between the signatures."""
    if name == "shape":
        return _format_shape(signature, all_signatures)
    if name == "root":
        return f"root {resolve_root_rank(signature.root, group.ranks)}"
    if name == "splits" and signature.splits is not None:
        return (
            f"sending {list(signature.splits[0])}, expecting {list(signature.splits[1])} elements"
        )
    if name == "dtype":
        return f"dtype {signature.dtype}"
    if name == "reduce_op":
        return f"reduce op {signature.reduce_op}"
    return str(signature.detail) if name == "detail" else ""


def _format_shape(signature: Signature, all_signatures: list[Signature]) -> str:
    """The shape of one tensor, or a list's length and its first tensor that differs in size."""
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
