"""Messages on calls that should agree between ranks and do not."""

from __future__ import annotations

from hangwatch.diagnosis.split_sizes import SplitExchange
from hangwatch.model.groups import Group
from hangwatch.model.verdicts import CallClass

from .call_arguments import format_call_arguments
from .common import describe_position, describe_ranks

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
