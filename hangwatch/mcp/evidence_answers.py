"""The evidence of an incident: its waits, calls and stacks."""

from __future__ import annotations

from collections.abc import Callable

from hangwatch.report.call_table import format_aligned_call
from hangwatch.report.process_text import merge_waits

from .answers import Document, drop_empty
from .incident_answers import describe_call, describe_stack
from .quoting import Answer, quote_lines, quote_text, shorten_ranks

_MAX_CALLS = 6
_MAX_WAITS = 24
_MAX_ROWS = 24


def describe_waits(incident: Document) -> Answer:
    """Which ranks wait for which, and in which call: one entry for each awaited rank and call."""
    merged = merge_waits(incident)
    waits = [
        {
            "ranks": shorten_ranks(ranks),
            "count": len(ranks),
            "wait_for_rank": awaited,
            "group": quote_text(group),
            "call_number": seq,
        }
        for (awaited, group, seq), ranks in merged[:_MAX_WAITS]
    ]
    answer: Answer = {"incident_id": incident.get("id"), "waits": waits}
    if len(merged) > _MAX_WAITS:
        answer["waits_not_shown"] = len(merged) - _MAX_WAITS
    culprits = incident.get("culprits") or []
    answer["ends_of_the_waits"] = shorten_ranks(culprits) or "none"
    return answer


def describe_calls(incident: Document) -> Answer:
    """The calls that differ, and the last calls of two sides aligned: ``differs`` marks the rows of a
    call that only one side made.
    """
    answer: Answer = {
        "incident_id": incident.get("id"),
        "calls": [describe_call(call) for call in (incident.get("calls") or [])[:_MAX_CALLS]],
    }
    divergence = incident.get("divergence")
    if not divergence:
        return answer
    answer["sides"] = [
        shorten_ranks(side.get("ranks") or []) for side in divergence.get("sides") or []
    ]
    answer["first_difference"] = divergence.get("since_seq")
    rows = divergence.get("rows") or []
    answer["rows"] = [_describe_row(row) for row in rows[-_MAX_ROWS:]]
    return drop_empty(answer)


def _describe_row(row: Document) -> Answer:
    calls = row.get("calls") or []
    cells = []
    for seq, call in zip(row.get("seq") or [], calls, strict=False):
        cells.append("-" if call is None else f"{seq} {format_aligned_call(call)}")
    answer: Answer = {"calls": quote_lines(cells)}
    if any(call is None or call.get("raised") for call in calls):
        answer["differs"] = True
    return answer


def describe_stacks(incident: Document, is_wanted: Callable[[int], bool] | None) -> Answer:
    """The stacks of the ranks that are wanted; of all, the culprits' first, if ``is_wanted`` is None."""
    stacks = [
        describe_stack(stack)
        for stack in incident.get("stacks") or []
        if is_wanted is None or any(map(is_wanted, stack.get("ranks") or []))
    ]
    answer: Answer = {"incident_id": incident.get("id"), "stacks": stacks}
    if not stacks:
        sampled = sorted({r for s in incident.get("stacks") or [] for r in s.get("ranks") or []})
        answer["ranks_with_stacks"] = shorten_ranks(sampled) or "none"
    return answer
