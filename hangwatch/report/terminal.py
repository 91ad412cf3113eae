"""A verdict as lines of text for a terminal of 80 columns: pure, from the API's JSON documents.

Everything that a job says of itself (names of functions, files, messages) is untrusted: `clean` takes out what could drive a
terminal. Documents are read leniently, since the server may be newer than this.
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
from .text import PLAIN, WIDTH, Paint, age, clean, group_name, member, name_ranks, seconds_since, short, tail, wrapped

Document = Mapping[str, Any]

# Why an incident is over: the API's word for it, and people's.
RESOLUTIONS = {
    "progress": "the job went on",
    "ended": "the job ended",
    "restarted": "a later attempt of the job runs",
    "unheard": "nobody has spoken for the job for a day",
    "aborted": "the job ended, as hangwatch had ended ranks of it",
}

_NOWHERE = select_kinds(lambda spec: not spec.has_culprit_line)
_FUNCTION = 26  # columns for a function's name
_FOLD = 3  # more library frames than this in a row become one line
_COLUMNS = 3  # calls shown side by side

_INSTALLED = re.compile(r"^.*(?:/(?:site|dist)-packages|/lib(?:64)?/python3[.\d]*)/")


def incident(document: Document, now: datetime, paint: Paint = PLAIN, full: bool = False) -> Iterator[str]:
    """One incident: the verdict, the advice, the calls side by side, stacks, waits and processes. `full` folds nothing."""
    yield from headline(document, now, paint)
    told = sentence(document)
    yield from (paint.bold(line) for line in wrapped(told))
    if (site := document.get("site")) and f":{site.get('line')}" not in told:
        yield paint.bold(f"at {_place(site)}")
    if why := RESOLUTIONS.get(str(document.get("resolution"))):
        yield f"It was over: {why}."
    for paragraph in (document.get("advice"), recovery.summary(document)):
        if paragraph:
            yield ""
            yield from wrapped(paragraph)
    called = (calls(document, paint), divergence(document, paint))
    for section in (*called, stacks(document, paint, full), waits(document), processes(document, paint)):
        for i, line in enumerate(section):
            if i == 0:
                yield ""
            yield line


def sentence(document: Document) -> str:
    """The verdict, with the line that its one culprit is at, where it lives and the summary does not say that already."""
    told, site = clean(document.get("summary") or ""), document.get("site")
    if not site or len(document.get("culprits") or []) != 1 or document.get("kind") in _NOWHERE:
        return told
    at = f"{clean(site.get('file', '?')).rsplit('/', 1)[-1]}:{clean(site.get('line'))}"
    return told if at in told else f"{told}: it is at {at} in {clean(site.get('function', '?'))}"


def headline(document: Document, now: datetime, paint: Paint = PLAIN) -> Iterator[str]:
    """Severity, kind, job, age and id, in one line or, where that is too long, in two."""
    severity, status = clean(document.get("severity", "alert")), clean(document.get("status", "open"))
    parts = [clean(document.get("kind", "?")), f"job {short(clean(document.get('job', '?')), WIDTH // 2)}"]
    if document.get("attempt"):
        parts.append(f"attempt {clean(document['attempt'])}")
    onset, resolved = seconds_since(document.get("onset_at"), now), seconds_since(document.get("resolved_at"), now)
    if onset is None:
        parts.append(status)
    elif status == "open":
        parts.append(f"open for {age(onset)}")
    else:
        parts.append(f"{status}, began {age(onset)} ago" + (f", lasted {age(onset - resolved)}" if resolved is not None else ""))
    colour = paint.good if status != "open" else paint.bad if severity == "alert" else paint.warn
    text, name = f"  {' · '.join(parts)}", clean(document.get("id", ""))
    together = len(severity) + len(text) + 2 + len(name) <= WIDTH
    yield colour(severity.upper()) + text + (f"  {paint.dim(name)}" if name and together else "")
    if name and not together:
        yield paint.dim(name)


def calls(document: Document, paint: Paint = PLAIN) -> Iterator[str]:
    """What the ranks called, a column for each class of equal calls; rows that part the classes are marked with ``≠``."""
    classes = document.get("calls") or []
    if not classes:
        return
    group = document.get("group") or {}
    where = f" of group {group_name(group.get('name'), group.get('desc'))}" if group else ""
    counted = document.get("seq") is not None and not any(c.get("peer") is not None for c in classes)  # else by channel, not by group
    yield paint.bold(f"Call {document['seq']}{where}" if counted else f"Calls{where}")
    ranks = group.get("ranks") or []
    classes = [{**c, "root": member(c.get("root"), ranks)} for c in classes]  # as in the summary
    differing = set(document.get("fields") or [])
    for start in range(0, len(classes), _COLUMNS):
        if start:
            yield ""
        yield from _side_by_side(classes[start : start + _COLUMNS], differing, paint)


_ROWS = {"op": "op", "shape": "shapes", "dtype": "dtype", "reduce_op": "reduce_op", "root": "root", "peer": "peer", "splits": "splits"}


def _side_by_side(classes: Sequence[Document], differing: set[str], paint: Paint) -> Iterator[str]:
    label = 11
    column = (WIDTH - 2 - label) // len(classes) - 2
    yield _row("", "", [paint.bold(_pad(name_ranks(c.get("ranks") or []), column)) for c in classes], label)
    rows = {label: [_value(c.get(key)) for c in classes] for label, key in _ROWS.items()}
    rows["detail"] = [_value(c.get("detail")) for c in classes]
    for name, values in rows.items():
        if not any(values):
            continue
        marked = name in differing
        cells = [_pad(value or "-", column) for value in values]
        yield _row("≠" if marked else "", name, [paint.bad(cell) if marked else cell for cell in cells], label)
    if any(c.get("site") for c in classes):
        sites = [c.get("site") or {} for c in classes]
        yield _row("", "at", [_pad(tail(_place(s, function=False), column) if s else "-", column) for s in sites], label)
        yield _row("", "in", [_pad(clean(s.get("function", "-")), column) for s in sites], label)


def divergence(document: Document, paint: Paint = PLAIN) -> Iterator[str]:
    """The last calls of both sides aligned; what only one side made is marked with ``≠``."""
    found = document.get("divergence")
    if not found:
        return
    group = found.get("group") or {}
    yield paint.bold(f"Calls of group {group_name(group.get('name'), group.get('desc'))}, aligned")
    column = (WIDTH - 2) // 2 - 1
    sides = [name_ranks(side.get("ranks") or []) for side in found.get("sides") or []]
    yield "  " + "  ".join(paint.bold(_pad(side, column)) for side in sides).rstrip()
    for row in found.get("rows") or []:
        if row.get("omitted"):
            yield paint.dim(f"  … {clean(row['omitted'])} more that agree")
        pairs = list(zip(row.get("seq") or [], row.get("calls") or [], strict=False))
        parted = any(call is None or call.get("raised") for _, call in pairs)
        cells = [_pad("-" if call is None else f"{clean(seq)} {_aligned(call)}", column) for seq, call in pairs]
        yield (("≠ " if parted else "  ") + "  ".join(paint.bad(cell) if parted else cell for cell in cells)).rstrip()


def _aligned(call: Document) -> str:
    """``all_reduce train.py:41 [64]``."""
    site = call.get("site")
    at = f"{clean(site.get('file', '?')).rsplit('/', 1)[-1]}:{clean(site.get('line', '?'))}" if site else ""
    parts = (clean(call.get("op", "?")), "raised" if call.get("raised") else "", at, _value(call.get("shapes")))
    return " ".join(part for part in parts if part)


def _row(mark: str, name: str, cells: Sequence[str], label: int) -> str:
    return f"{mark:2}{name:{label}}{'  '.join(cells)}".rstrip()


def _pad(text: str, width: int) -> str:
    return f"{short(text, width):{width}}"


def _value(value: object) -> str:
    if isinstance(value, (list, tuple)):
        inner = (f"[{', '.join(clean(n) for n in part)}]" if isinstance(part, (list, tuple)) else clean(part) for part in value)
        return " ".join(inner)
    return "" if value is None else clean(value)


def stacks(document: Document, paint: Paint = PLAIN, full: bool = False) -> Iterator[str]:
    """The stacks in the document's order (culprits first), innermost frame on top; dumps that failed with their remedy."""
    culprits = set(document.get("culprits") or [])
    entries = document.get("stacks") or []
    told = [entry for entry in entries if full or not _beside_the_point(entry)]
    for i, entry in enumerate(told):
        if i:
            yield ""
        role = "culprit" if culprits & set(entry.get("ranks") or []) else "waiting"
        yield from stack(entry, paint, role=role if culprits else "", full=full)
    if len(told) < len(entries):
        yield paint.dim(f"… and {len(entries) - len(told)} more in libraries only: `hangwatch show --full` has them")


def _beside_the_point(entry: Document) -> bool:
    """Another thread than the main one that runs none of the user's code: a pool, a pin-memory thread, our own."""
    files = [str(frame.get("file", "")) for frame in entry.get("frames") or []]
    return bool(files) and entry.get("thread") not in (None, "MainThread") and all(map(is_library, files)) and not entry.get("error")


def stack(entry: Document, paint: Paint = PLAIN, role: str = "", full: bool = False) -> Iterator[str]:
    """One stack. The user's frames are marked with ``>`` and bold, the others dim and, unless `full`, folded."""
    parts = [paint.bold(name_ranks(entry.get("ranks") or [])), role, clean(entry.get("thread") or ""), clean(entry.get("source") or "")]
    yield " · ".join(part for part in parts if part)
    if entry.get("error"):
        yield from (paint.warn(line) for line in wrapped(entry["error"], indent="  ! "))
    for run in _runs_of_frames(entry.get("frames") or []):
        library = is_library(str(run[0].get("file", "")))
        shown = run if full or not library or len(run) <= _FOLD else run[:1]
        for frame in shown:
            line = _frame(frame, "  " if library else "> ")
            yield paint.dim(line) if library else paint.bold(line)
            if frame.get("text") and not library:
                yield short(f"      {clean(frame['text']).strip()}", WIDTH)
        if len(shown) < len(run):
            yield paint.dim(f"    … {len(run) - len(shown)} more frames of libraries")


def merged(entries: Iterable[Document]) -> list[dict[str, Any]]:
    """Equal stacks of several ranks as one entry with all their ranks, in the order of their first appearance."""
    found: dict[tuple[object, ...], dict[str, Any]] = {}
    for entry in entries:
        frames = tuple((f.get("function"), f.get("file"), f.get("line")) for f in entry.get("frames") or [])
        key = (entry.get("thread"), entry.get("source"), entry.get("error"), frames)
        if key in found:
            found[key]["ranks"] = sorted({*found[key]["ranks"], *(entry.get("ranks") or [])})
        else:
            found[key] = {**entry, "ranks": list(entry.get("ranks") or [])}
    return list(found.values())


def _runs_of_frames(frames: Sequence[Document]) -> Iterator[list[Document]]:
    run: list[Document] = []
    for frame in frames:
        if run and is_library(str(run[0].get("file", ""))) != is_library(str(frame.get("file", ""))):
            yield run
            run = []
        run.append(frame)
    if run:
        yield run


def _frame(frame: Document, mark: str) -> str:
    function = short(clean(frame.get("function", "?")), _FUNCTION)
    return f"  {mark}{function:{_FUNCTION}}  {tail(_place(frame, function=False), WIDTH - _FUNCTION - 6)}"


def _place(site: Document, function: bool = True) -> str:
    file, line = clean(site.get("file", "?")), site.get("line")
    known = _INSTALLED.sub("", file) + (f":{clean(line)}" if line else "")
    return f"{known} in {clean(site['function'])}" if function and site.get("function") else known


def waits(document: Document) -> Iterator[str]:
    """Who waits for whom, and in which call: one line for each rank that is waited for."""
    edges: dict[tuple[int, str, int], set[int]] = {}
    group = document.get("group") or {}
    named = {clean(group.get("name")): group_name(group.get("name"), group.get("desc"))}
    for wait in document.get("waits") or []:
        edges.setdefault((wait.get("for", -1), clean(wait.get("group", "")), wait.get("seq", 0)), set()).add(wait.get("rank", -1))
    for (on, where, seq), ranks in sorted(edges.items()):
        verb = "waits" if len(ranks) == 1 else "wait"
        yield from wrapped(f"{name_ranks(ranks)} {verb} for rank {on} in call {seq} of group {named.get(where, where)}")


def processes(document: Document, paint: Paint = PLAIN) -> Iterator[str]:
    """How the culprits' processes are, or how they ended."""
    for process in document.get("processes") or []:
        where = f" on {clean(process['host'])}" if process.get("host") else ""
        yield f"rank {process.get('rank')}: process {process.get('pid', '?')}{where} {_condition(process)}"
        if raised := process.get("exception"):
            text = f"{clean(raised.get('type', 'exception'))}: {clean(raised.get('message', ''))}"
            yield from (paint.bad(line) for line in wrapped(text, indent="  "))
            if raised.get("site"):
                yield f"  at {tail(_place(raised['site']), WIDTH - 5)}"


_STATES = {"R": "running", "S": "sleeping", "D": "in uninterruptible sleep", "T": "stopped", "t": "traced", "Z": "ended", "I": "idle"}


def _condition(process: Document) -> str:
    if (number := process.get("signal")) is not None:
        return f"ended by {_signal_name(number)}"
    if (status := process.get("exit_status")) is not None:
        return f"exited with status {clean(status)}"
    state = clean(process.get("state") or "?")
    return f"is {_STATES[state]} (state {state})" if state in _STATES else "is in an unknown state"


def _signal_name(number: object) -> str:
    try:
        return signal.Signals(int(str(number))).name
    except ValueError:  # a real-time signal has no name
        return f"signal {clean(number)}"
