"""What an incident says: which rank, which call, which line and why."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from hangwatch.model.kinds import KINDS, VerdictKind
from hangwatch.report.sites import format_site
from hangwatch.report.text import group_name
from hangwatch.stacks.frames import is_library

from .answers import Document, drop_empty
from .quoting import Answer, SentenceQuoter, quote_line, quote_lines, quote_text, shorten_ranks

_MAX_CALLS = 6
_MAX_PROCESSES = 6
_MAX_HARDWARE = 6
_MAX_FRAMES = 12
_MAX_LIBRARY_FRAMES = 3  # in a row


def summarize_incident(incident: Document) -> Answer:
    """An incident as an item of a list."""
    quoter = SentenceQuoter(incident)
    answer = {
        "incident_id": incident.get("id"),
        "job": quote_text(incident.get("job", "?")),
        "kind": incident.get("kind"),
        "severity": incident.get("severity"),
        "status": incident.get("status"),
        "opened_at": incident.get("opened_at"),
        "summary": quoter.replace_quotes(incident.get("summary", "")),
        "culprits": shorten_ranks(incident.get("culprits") or []),
        "quotes": quoter.list_quotes(),
    }
    return drop_empty(answer)


def explain_incident(incident: Document) -> Answer:
    """Which rank, which call, which line and why, and what to do next."""
    quoter = SentenceQuoter(incident)
    waiting = incident.get("waiting") or []
    group = incident.get("group") or {}
    answer = {
        "incident_id": incident.get("id"),
        "job": quote_text(incident.get("job", "?")),
        "attempt": incident.get("attempt"),
        "kind": incident.get("kind"),
        "kind_means": _find_meaning(incident.get("kind")),
        "severity": incident.get("severity"),
        "status": incident.get("status"),
        "onset_at": incident.get("onset_at"),
        "resolved_at": incident.get("resolved_at"),
        "resolution": incident.get("resolution"),
        "summary": quoter.replace_quotes(incident.get("summary", "")),
        "what_next": quoter.replace_quotes(incident.get("advice", "")),
        "culprits": shorten_ranks(incident.get("culprits") or []) or "none",
        "waiting": shorten_ranks(waiting),
        "waiting_count": len(waiting),
        "group": _describe_group(group),
        "call_number": incident.get("seq"),
        "differing_arguments": list(incident.get("fields") or []),
        "line": _find_line(incident),
        "calls": [describe_call(call) for call in (incident.get("calls") or [])[:_MAX_CALLS]],
        "processes": list(_iter_processes(incident)),
        "culprit_stack": _find_culprit_stack(incident),
        "hardware": [_describe_hardware(o) for o in (incident.get("hardware") or [])][
            :_MAX_HARDWARE
        ],
        "more": list(_iter_more(incident)),
        "quotes": quoter.list_quotes(),
    }
    return drop_empty(answer)


def _find_meaning(kind: object) -> str:
    try:
        return KINDS[VerdictKind(str(kind))].meaning
    except ValueError:  # of a newer server
        return ""


def _describe_group(group: Document) -> Answer:
    ranks = group.get("ranks") or []
    return drop_empty(
        {
            "name": quote_text(group_name(group.get("name", ""), group.get("desc"))),
            "size": len(ranks),
            "ranks": shorten_ranks(ranks),
        }
        if group
        else {}
    )


def _find_line(incident: Document) -> Any:
    """The site of the verdict, else the user's innermost line in the first culprit's stack."""
    site = incident.get("site")
    if site:
        return quote_text(format_site(site))
    for stack in _iter_culprit_stacks(incident):
        for frame in stack.get("frames") or []:
            if not is_library(str(frame.get("file", ""))):
                return quote_text(_format_frame(frame))
    return None


def _iter_culprit_stacks(incident: Document) -> Iterator[Document]:
    culprits = set(incident.get("culprits") or [])
    for stack in incident.get("stacks") or []:
        if not culprits or not culprits.isdisjoint(stack.get("ranks") or []):
            yield stack


def _find_culprit_stack(incident: Document) -> Answer | None:
    return next(map(describe_stack, _iter_culprit_stacks(incident)), None)


def describe_stack(stack: Document) -> Answer:
    """One of an incident's stacks, innermost frame first; runs of library frames are shortened."""
    frames = list(_fold_frames(stack.get("frames") or []))
    return drop_empty(
        {
            "ranks": shorten_ranks(stack.get("ranks") or []),
            "thread": quote_text(stack["thread"]) if stack.get("thread") else None,
            "taken_at": stack.get("taken_at"),
            "frames": quote_lines(frames[:_MAX_FRAMES]) if frames else None,
            "error": quote_text(stack["error"]) if stack.get("error") else None,
        }
    )


def _fold_frames(frames: Iterable[Document]) -> Iterator[str]:
    run = 0
    for frame in frames:
        run = run + 1 if is_library(str(frame.get("file", ""))) else 0
        if run <= _MAX_LIBRARY_FRAMES:
            yield _format_frame(frame)
        elif run == _MAX_LIBRARY_FRAMES + 1:
            yield "…"


def _format_frame(frame: Document) -> str:
    text = frame.get("text")
    return format_site(frame) + (f": {str(text).strip()}" if text else "")


def describe_call(call: Document) -> Answer:
    keys = ("shapes", "dtype", "reduce_op", "root", "peer", "splits")
    answer = {
        "ranks": shorten_ranks(call.get("ranks") or []),
        "op": quote_text(call.get("op", "?")),
        **{key: call.get(key) for key in keys},
        "detail": quote_text(call["detail"]) if call.get("detail") else None,
        "at": quote_text(format_site(call["site"])) if call.get("site") else None,
    }
    return drop_empty(answer)


def _iter_processes(incident: Document) -> Iterator[Answer]:
    for process in (incident.get("processes") or [])[:_MAX_PROCESSES]:
        exception = process.get("exception") or {}
        yield drop_empty(
            {
                "rank": process.get("rank"),
                "host": quote_text(process["host"]) if process.get("host") else None,
                "pid": process.get("pid"),
                "state": process.get("state"),
                "exit_status": process.get("exit_status"),
                "signal": process.get("signal"),
                "exception": {
                    "type": quote_text(exception.get("type", "?")),
                    "message": quote_line(exception.get("message", "")),
                }
                if exception
                else None,
            }
        )


def _describe_hardware(entry: Document) -> Answer:
    keys = ("host", "source", "about", "what", "before", "now", "weight")
    values = {key: entry.get(key) for key in keys if entry.get(key) is not None}
    return {
        key: quote_text(value) if isinstance(value, str) else value for key, value in values.items()
    }


def _iter_more(incident: Document) -> Iterator[str]:
    """Which other tools know more about it."""
    incident_id = incident.get("id")
    if incident_id is None:
        return
    if incident.get("divergence"):
        yield "get_calls: the last calls of both sides, aligned"
    if incident.get("waits"):
        yield "get_wait_graph: which rank waits for which"
    if len(incident.get("stacks") or []) > 1:
        yield "get_stacks: the stacks of other ranks and threads"
