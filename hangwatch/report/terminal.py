"""A verdict as lines of text for a terminal of 80 columns: pure, from the API's JSON documents.

Everything that a job says of itself (names of functions, files, messages) is untrusted: `clean`
takes out what could drive a terminal. Documents are read leniently, since the server may be newer
than this.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

from hangwatch.model.kinds import select_kinds
from hangwatch.stacks.frames import is_library

from . import recovery
from .text import (
    PLAIN_PAINT,
    TERMINAL_COLUMNS,
    Paint,
    clean_text,
    format_age,
    group_name,
    name_ranks,
    resolve_root_rank,
    seconds_since,
    truncate_end,
    truncate_start,
    wrap_text,
)

Document = Mapping[str, Any]

# Why an incident is over: the API's word for it, and people's.
RESOLUTIONS = {
    "progress": "the job went on",
    "ended": "the job ended",
    "restarted": "a later attempt of the job runs",
    "unheard": "nobody has spoken for the job for a day",
    "aborted": "the job ended, as hangwatch had ended ranks of it",
}

_KINDS_WITHOUT_SITE = select_kinds(lambda spec: not spec.has_culprit_line)
_FUNCTION_WIDTH = 26  # columns for a function's name
_MAX_LIBRARY_RUN = 3  # more library frames than this in a row become one line
_MAX_COLUMNS = 3  # calls shown side by side

_INSTALL_PREFIX = re.compile(r"^.*(?:/(?:site|dist)-packages|/lib(?:64)?/python3[.\d]*)/")


def format_incident(
    document: Document, now: datetime, paint: Paint = PLAIN_PAINT, full: bool = False
) -> Iterator[str]:
    """One incident: the verdict, the advice, the calls side by side, stacks, waits and processes.
    `full` folds nothing.
    """
    yield from format_headline(document, now, paint)
    told = format_summary(document)
    yield from (paint.bold(line) for line in wrap_text(told))
    if (site := document.get("site")) and f":{site.get('line')}" not in told:
        yield paint.bold(f"at {_format_site(site)}")
    if why := RESOLUTIONS.get(str(document.get("resolution"))):
        yield f"It was over: {why}."
    for paragraph in (document.get("advice"), recovery.format_recovery(document)):
        if paragraph:
            yield ""
            yield from wrap_text(paragraph)
    called = (format_calls(document, paint), format_divergence(document, paint))
    for section in (
        *called,
        format_stacks(document, paint, full),
        format_waits(document),
        format_processes(document, paint),
    ):
        for i, line in enumerate(section):
            if i == 0:
                yield ""
            yield line


def format_summary(document: Document) -> str:
    """The verdict, with the line that its one culprit is at, where it lives and the summary does
    not say that already.
    """
    told, site = clean_text(document.get("summary") or ""), document.get("site")
    if (
        not site
        or len(document.get("culprits") or []) != 1
        or document.get("kind") in _KINDS_WITHOUT_SITE
    ):
        return told
    at = f"{clean_text(site.get('file', '?')).rsplit('/', 1)[-1]}:{clean_text(site.get('line'))}"
    return (
        told if at in told else f"{told}: it is at {at} in {clean_text(site.get('function', '?'))}"
    )


def format_headline(document: Document, now: datetime, paint: Paint = PLAIN_PAINT) -> Iterator[str]:
    """Severity, kind, job, age and id, in one line or, where that is too long, in two."""
    severity, status = (
        clean_text(document.get("severity", "alert")),
        clean_text(document.get("status", "open")),
    )
    parts = [
        clean_text(document.get("kind", "?")),
        f"job {truncate_end(clean_text(document.get('job', '?')), TERMINAL_COLUMNS // 2)}",
    ]
    if document.get("attempt"):
        parts.append(f"attempt {clean_text(document['attempt'])}")
    onset, resolved = (
        seconds_since(document.get("onset_at"), now),
        seconds_since(document.get("resolved_at"), now),
    )
    if onset is None:
        parts.append(status)
    elif status == "open":
        parts.append(f"open for {format_age(onset)}")
    else:
        parts.append(
            f"{status}, began {format_age(onset)} ago"
            + (f", lasted {format_age(onset - resolved)}" if resolved is not None else "")
        )
    colour = (
        paint.as_success
        if status != "open"
        else paint.as_error
        if severity == "alert"
        else paint.as_warning
    )
    text, name = f"  {' · '.join(parts)}", clean_text(document.get("id", ""))
    together = len(severity) + len(text) + 2 + len(name) <= TERMINAL_COLUMNS
    yield colour(severity.upper()) + text + (f"  {paint.dim(name)}" if name and together else "")
    if name and not together:
        yield paint.dim(name)


def format_calls(document: Document, paint: Paint = PLAIN_PAINT) -> Iterator[str]:
    """What the ranks called, a column for each class of equal calls; rows that part the classes are
    marked with ``≠``.
    """
    classes = document.get("calls") or []
    if not classes:
        return
    group = document.get("group") or {}
    where = f" of group {group_name(group.get('name'), group.get('desc'))}" if group else ""
    counted = document.get("seq") is not None and not any(
        c.get("peer") is not None for c in classes
    )  # else by channel, not by group
    yield paint.bold(f"Call {document['seq']}{where}" if counted else f"Calls{where}")
    ranks = group.get("ranks") or []
    classes = [
        {**c, "root": resolve_root_rank(c.get("root"), ranks)} for c in classes
    ]  # as in the summary
    differing = set(document.get("fields") or [])
    for start in range(0, len(classes), _MAX_COLUMNS):
        if start:
            yield ""
        yield from _format_call_table(classes[start : start + _MAX_COLUMNS], differing, paint)


_CALL_ROWS = {
    "op": "op",
    "shape": "shapes",
    "dtype": "dtype",
    "reduce_op": "reduce_op",
    "root": "root",
    "peer": "peer",
    "splits": "splits",
}


def _format_call_table(
    classes: Sequence[Document], differing_fields: set[str], paint: Paint
) -> Iterator[str]:
    label = 11
    column = (TERMINAL_COLUMNS - 2 - label) // len(classes) - 2
    yield _format_row(
        "",
        "",
        [paint.bold(_pad_text(name_ranks(c.get("ranks") or []), column)) for c in classes],
        label,
    )
    rows = {
        label: [_format_value(c.get(key)) for c in classes] for label, key in _CALL_ROWS.items()
    }
    rows["detail"] = [_format_value(c.get("detail")) for c in classes]
    for name, values in rows.items():
        if not any(values):
            continue
        marked = name in differing_fields
        cells = [_pad_text(value or "-", column) for value in values]
        yield _format_row(
            "≠" if marked else "",
            name,
            [paint.as_error(cell) if marked else cell for cell in cells],
            label,
        )
    if any(c.get("site") for c in classes):
        sites = [c.get("site") or {} for c in classes]
        yield _format_row(
            "",
            "at",
            [
                _pad_text(
                    truncate_start(_format_site(s, with_function=False), column) if s else "-",
                    column,
                )
                for s in sites
            ],
            label,
        )
        yield _format_row(
            "", "in", [_pad_text(clean_text(s.get("function", "-")), column) for s in sites], label
        )


def format_divergence(document: Document, paint: Paint = PLAIN_PAINT) -> Iterator[str]:
    """The last calls of both sides aligned; what only one side made is marked with ``≠``."""
    found = document.get("divergence")
    if not found:
        return
    group = found.get("group") or {}
    yield paint.bold(f"Calls of group {group_name(group.get('name'), group.get('desc'))}, aligned")
    column = (TERMINAL_COLUMNS - 2) // 2 - 1
    sides = [name_ranks(side.get("ranks") or []) for side in found.get("sides") or []]
    yield "  " + "  ".join(paint.bold(_pad_text(side, column)) for side in sides).rstrip()
    for row in found.get("rows") or []:
        if row.get("omitted"):
            yield paint.dim(f"  … {clean_text(row['omitted'])} more that agree")
        pairs = list(zip(row.get("seq") or [], row.get("calls") or [], strict=False))
        parted = any(call is None or call.get("raised") for _, call in pairs)
        cells = [
            _pad_text(
                "-" if call is None else f"{clean_text(seq)} {_format_aligned_call(call)}", column
            )
            for seq, call in pairs
        ]
        yield (
            ("≠ " if parted else "  ")
            + "  ".join(paint.as_error(cell) if parted else cell for cell in cells)
        ).rstrip()


def _format_aligned_call(call: Document) -> str:
    """``all_reduce train.py:41 [64]``."""
    site = call.get("site")
    at = (
        f"{clean_text(site.get('file', '?')).rsplit('/', 1)[-1]}:{clean_text(site.get('line', '?'))}"
        if site
        else ""
    )
    parts = (
        clean_text(call.get("op", "?")),
        "raised" if call.get("raised") else "",
        at,
        _format_value(call.get("shapes")),
    )
    return " ".join(part for part in parts if part)


def _format_row(mark: str, name: str, cells: Sequence[str], label_width: int) -> str:
    return f"{mark:2}{name:{label_width}}{'  '.join(cells)}".rstrip()


def _pad_text(text: str, width: int) -> str:
    return f"{truncate_end(text, width):{width}}"


def _format_value(value: object) -> str:
    if isinstance(value, (list, tuple)):
        inner = (
            (
                f"[{', '.join(clean_text(n) for n in part)}]"
                if isinstance(part, (list, tuple))
                else clean_text(part)
            )
            for part in value
        )
        return " ".join(inner)
    return "" if value is None else clean_text(value)


def format_stacks(
    document: Document, paint: Paint = PLAIN_PAINT, full: bool = False
) -> Iterator[str]:
    """The stacks in the document's order (culprits first), innermost frame on top; dumps that
    failed with their remedy.
    """
    culprits = set(document.get("culprits") or [])
    entries = document.get("stacks") or []
    told = [entry for entry in entries if full or not _is_library_thread(entry)]
    for i, entry in enumerate(told):
        if i:
            yield ""
        role = "culprit" if culprits & set(entry.get("ranks") or []) else "waiting"
        yield from format_stack(entry, paint, role=role if culprits else "", full=full)
    if len(told) < len(entries):
        yield paint.dim(
            f"… and {len(entries) - len(told)} more in libraries only: `hangwatch show --full` has"
            " them"
        )


def _is_library_thread(entry: Document) -> bool:
    """Another thread than the main one that runs none of the user's code: a pool, a pin-memory
    thread, our own.
    """
    files = [str(frame.get("file", "")) for frame in entry.get("frames") or []]
    return (
        bool(files)
        and entry.get("thread") not in (None, "MainThread")
        and all(map(is_library, files))
        and not entry.get("error")
    )


def format_stack(
    entry: Document, paint: Paint = PLAIN_PAINT, role: str = "", full: bool = False
) -> Iterator[str]:
    """One stack. The user's frames are marked with ``>`` and bold, the others dim and, unless
    `full`, folded.
    """
    parts = [
        paint.bold(name_ranks(entry.get("ranks") or [])),
        role,
        clean_text(entry.get("thread") or ""),
        clean_text(entry.get("source") or ""),
    ]
    yield " · ".join(part for part in parts if part)
    if entry.get("error"):
        yield from (paint.as_warning(line) for line in wrap_text(entry["error"], indent="  ! "))
    for run in _split_frame_runs(entry.get("frames") or []):
        library = is_library(str(run[0].get("file", "")))
        shown = run if full or not library or len(run) <= _MAX_LIBRARY_RUN else run[:1]
        for frame in shown:
            line = _format_frame(frame, "  " if library else "> ")
            yield paint.dim(line) if library else paint.bold(line)
            if frame.get("text") and not library:
                yield truncate_end(f"      {clean_text(frame['text']).strip()}", TERMINAL_COLUMNS)
        if len(shown) < len(run):
            yield paint.dim(f"    … {len(run) - len(shown)} more frames of libraries")


def merge_equal_stacks(entries: Iterable[Document]) -> list[dict[str, Any]]:
    """Equal stacks of several ranks as one entry with all their ranks, in the order of their first
    appearance.
    """
    found: dict[tuple[object, ...], dict[str, Any]] = {}
    for entry in entries:
        frames = tuple(
            (f.get("function"), f.get("file"), f.get("line")) for f in entry.get("frames") or []
        )
        key = (entry.get("thread"), entry.get("source"), entry.get("error"), frames)
        if key in found:
            found[key]["ranks"] = sorted({*found[key]["ranks"], *(entry.get("ranks") or [])})
        else:
            found[key] = {**entry, "ranks": list(entry.get("ranks") or [])}
    return list(found.values())


def _split_frame_runs(frames: Sequence[Document]) -> Iterator[list[Document]]:
    run: list[Document] = []
    for frame in frames:
        if run and is_library(str(run[0].get("file", ""))) != is_library(
            str(frame.get("file", ""))
        ):
            yield run
            run = []
        run.append(frame)
    if run:
        yield run


def _format_frame(frame: Document, mark: str) -> str:
    function = truncate_end(clean_text(frame.get("function", "?")), _FUNCTION_WIDTH)
    return (
        f"  {mark}{function:{_FUNCTION_WIDTH}} "
        f" {truncate_start(_format_site(frame, with_function=False), TERMINAL_COLUMNS - _FUNCTION_WIDTH - 6)}"
    )


def _format_site(site: Document, with_function: bool = True) -> str:
    file, line = clean_text(site.get("file", "?")), site.get("line")
    known = _INSTALL_PREFIX.sub("", file) + (f":{clean_text(line)}" if line else "")
    return (
        f"{known} in {clean_text(site['function'])}"
        if with_function and site.get("function")
        else known
    )


def format_waits(document: Document) -> Iterator[str]:
    """Who waits for whom, and in which call: one line for each rank that is waited for."""
    edges: dict[tuple[int, str, int], set[int]] = {}
    group = document.get("group") or {}
    named = {clean_text(group.get("name")): group_name(group.get("name"), group.get("desc"))}
    for wait in document.get("waits") or []:
        edges.setdefault(
            (wait.get("for", -1), clean_text(wait.get("group", "")), wait.get("seq", 0)), set()
        ).add(wait.get("rank", -1))
    for (on, where, seq), ranks in sorted(edges.items()):
        verb = "waits" if len(ranks) == 1 else "wait"
        yield from wrap_text(
            f"{name_ranks(ranks)} {verb} for rank {on} in call {seq} of group"
            f" {named.get(where, where)}"
        )


def format_processes(document: Document, paint: Paint = PLAIN_PAINT) -> Iterator[str]:
    """How the culprits' processes are, or how they ended."""
    for process in document.get("processes") or []:
        where = f" on {clean_text(process['host'])}" if process.get("host") else ""
        yield (
            f"rank {process.get('rank')}: process {process.get('pid', '?')}{where}"
            f" {_describe_condition(process)}"
        )
        if raised := process.get("exception"):
            text = (
                f"{clean_text(raised.get('type', 'exception'))}:"
                f" {clean_text(raised.get('message', ''))}"
            )
            yield from (paint.as_error(line) for line in wrap_text(text, indent="  "))
            if raised.get("site"):
                yield f"  at {truncate_start(_format_site(raised['site']), TERMINAL_COLUMNS - 5)}"


_STATE_NAMES = {
    "R": "running",
    "S": "sleeping",
    "D": "in uninterruptible sleep",
    "T": "stopped",
    "t": "traced",
    "Z": "ended",
    "I": "idle",
}


def _describe_condition(process: Document) -> str:
    if (number := process.get("signal")) is not None:
        return f"ended by {_get_signal_name(number)}"
    if (status := process.get("exit_status")) is not None:
        return f"exited with status {clean_text(status)}"
    state = clean_text(process.get("state") or "?")
    return (
        f"is {_STATE_NAMES[state]} (state {state})"
        if state in _STATE_NAMES
        else "is in an unknown state"
    )


def _get_signal_name(number: object) -> str:
    try:
        return signal.Signals(int(str(number))).name
    except ValueError:  # a real-time signal has no name
        return f"signal {clean_text(number)}"
