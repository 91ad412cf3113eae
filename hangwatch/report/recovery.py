"""What --on-hang abort makes of an incident, in words: pure, from the API's JSON documents, read as
leniently as `render` reads them.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from .text import clean_text, name_ranks

Document = Mapping[str, Any]


def format_recovery(document: Document) -> str:
    """How it stands; empty where no rank was ever to be ended."""
    found = document.get("recovery") or {}
    state, who = found.get("state"), name_ranks(found.get("ranks") or [])
    which = (
        f"{clean_text(found.get('number', '?'))} of at most {clean_text(found.get('limit', '?'))}"
        " such incidents of this job"
    )
    if state == "withheld":
        return f"No rank is ended: {clean_text(found.get('why') or '?')}."
    if state == "done" or any(
        end.get("result") in ("ended", "failed") for end in found.get("ends") or []
    ):
        told = "; ".join(format_outcomes(found.get("ends") or []))
        return f"{told[:1].upper()}{told[1:]} ({which})."
    if state in ("planned", "announced", "ordered") and document.get("status") != "open":
        return (
            "Nobody was ended:"
            f" {'the job went on' if document.get('resolution') == 'progress' else 'the job ended'}"
            " before."
        )
    be = "is" if len(found.get("ranks") or []) == 1 else "are"
    if state == "planned":
        return (
            f"Unless the job moves, {who} {be} to be ended at {format_clock(found.get('due_at'))}"
            f" at the earliest ({which})."
        )
    if state in ("announced", "ordered"):
        return f"{who[:1].upper()}{who[1:]} {be} being ended ({which})."
    return ""


def format_outcomes(ends: Sequence[Document]) -> Iterator[str]:
    """What became of the ranks, those together that fared alike."""
    alike: dict[tuple[str, str], list[int]] = {}
    for end in ends:
        alike.setdefault((str(end.get("result")), _describe_end(end)), []).append(
            end.get("rank", -1)
        )
    for (result, detail), ranks in alike.items():
        one, who = len(ranks) == 1, name_ranks(ranks)
        yield {
            "ended": f"{who} {'was' if one else 'were'} ended by {detail}",
            "gone": f"{who} had ended before",
            "left": (
                f"{who} {'was' if one else 'were'} left alone, as the job moved or was not heard"
            ),
            "failed": f"{who} could not be ended: {detail}",
        }.get(result, f"{who} {'is' if one else 'are'} being ended")


def iter_recovery_events(document: Document) -> Iterator[tuple[str, str]]:
    """For a history: RFC 3339 times and what happened then."""
    found = document.get("recovery") or {}
    who, ends = name_ranks(found.get("ranks") or []), found.get("ends") or []
    if found.get("state") == "withheld":
        yield (
            str(found["planned_at"]),
            f"hangwatch leaves the job alone: {clean_text(found.get('why') or '?')}",
        )
    elif found.get("planned_at"):
        yield (
            str(found["planned_at"]),
            (
                f"hangwatch was to end {who}, unless the job moved by"
                f" {format_clock(found.get('due_at'))}"
            ),
        )
    if found.get("announced_at"):
        yield str(found["announced_at"]), f"hangwatch announced that it ends {who}"
    by_time: dict[str, list[Document]] = {}
    for end in ends:
        at = end.get("ended_at") or found.get("done_at") or end.get("ordered_at")
        by_time.setdefault(str(at), []).append(end)
    for at, together in by_time.items():
        pids = ", ".join(
            f"pid {clean_text(end.get('pid', '?'))} on {clean_text(end.get('host', '?'))}"
            for end in together[:4]
        )
        more = f" and {len(together) - 4} more" if len(together) > 4 else ""
        yield at, f"{'; '.join(format_outcomes(together))} ({pids}{more})"


def format_clock(stamp: object) -> str:
    """``18:40:05 UTC`` of an RFC 3339 time in UTC."""
    return f"{clean_text(str(stamp))[11:19]} UTC"


def _describe_end(end: Document) -> str:
    if end.get("error"):
        return clean_text(end["error"])
    number = end.get("signal")
    try:
        return signal.Signals(int(str(number))).name
    except ValueError:
        return "" if number is None else f"signal {clean_text(number)}"
