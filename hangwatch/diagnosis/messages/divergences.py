"""Messages on how the calls of some ranks diverge from those of others.

Each is a predicate that follows the name of the ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

from hangwatch.model.calls import Call
from hangwatch.model.ranks import ExceptionInfo

from .common import format_call_short, format_exception


def describe_shift(
    count: int, first: Call | None, last: Call, reference_name: str, verb: str
) -> str:
    """How many calls the ranks are behind the reference (ahead of it if ``count`` is negative), and
    since when. ``verb`` is ``has been`` or ``have been``.
    """
    direction = "behind" if count > 0 else "ahead of"
    shift = f"{verb} {_count_calls(abs(count))} {direction} {reference_name} since"
    if first is None:
        return f"{shift} call {last.seq} or earlier"
    if first.seq != last.seq:
        return f"{shift} one of calls {first.seq}-{last.seq} ({format_call_short(first)})"
    pronoun = "they" if verb == "have been" else "it"
    if count > 1:
        which = f"the first that {pronoun} never made"
    elif count == 1:
        which = f"which {pronoun} never made"
    else:
        which = "which the others never made"
    return f"{shift} call {first.seq} ({format_call_short(first)}), {which}"


def describe_reordering(call: Call, counterpart: Call, reference_name: str) -> str:
    """``counterpart`` is the same call as the ranks made it, at another position."""
    when = "earlier" if counterpart.seq < call.seq else "later"
    return (
        f"made {call.signature.op} {when} than {reference_name}: as call {counterpart.seq}"
        f" ({format_call_short(counterpart)}) and not {call.seq}"
    )


def describe_omission(calls: Sequence[Call], repeated_call: Call | None) -> str:
    """``calls`` are those that, by the order of earlier rounds, come before the call that the ranks
    made instead.

    If they made that call shortly before, as ``repeated_call``, they may have repeated it instead.
    """
    first = calls[0]
    which = f"call {first.seq}"
    if len(calls) > 1:
        which = f"{len(calls)} calls from call {first.seq} on"
    omission = f"skipped {which} ({format_call_short(first)})"
    if repeated_call is None:
        return omission
    return f"{omission} or made call {repeated_call.seq} again"


def describe_lone_exceptions(calls: Sequence[Call], reference_name: str, verb: str) -> str:
    """``calls`` raised exceptions where those of the reference returned, and the script went on
    after the first one.
    """
    first = calls[0]
    return (
        f"{verb} {_count_calls(len(calls))} behind {reference_name} since call {first.seq}"
        f" ({format_call_short(first)}), which raised an exception there, after which its script"
        " continued"
    )


def describe_failed_call(call: Call, exception: ExceptionInfo | None) -> str:
    """A call that raised and may have ended the script."""
    raised = "an exception" if exception is None else format_exception(exception)
    return f"failed in call {call.seq} ({format_call_short(call)}) with {raised}"


def _count_calls(count: int) -> str:
    return "1 call" if count == 1 else f"{count} calls"
