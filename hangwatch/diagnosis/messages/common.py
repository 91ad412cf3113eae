"""Phrases that the messages of all kinds share: ranks, positions and calls."""

from __future__ import annotations

import re

from hangwatch.model.calls import Call, Site
from hangwatch.model.groups import Group, OutsideMember
from hangwatch.model.losses import Loss, LossReason
from hangwatch.model.ranks import ExceptionInfo, format_ranks, iter_runs

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
