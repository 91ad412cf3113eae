"""An incident as lines of text for a terminal of 80 columns, from the API's JSON documents. Pure.

Everything that a job reports (names of functions, files, messages) is untrusted: `clean_text`
removes what could control a terminal. Documents are read leniently, since the server may be newer.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from typing import Any

from hangwatch.model.hardware import HostObservation, Observation
from hangwatch.model.kinds import select_kinds
from hangwatch.stacks.frames import is_library

from . import recovery
from .documents import parse_document
from .text import (
    PLAIN_PAINT,
    TERMINAL_COLUMNS,
    Document,
    Paint,
    abbreviate_list,
    clean_text,
    format_age,
    format_line,
    format_site,
    group_name,
    name_ranks,
    resolve_root_rank,
    seconds_since,
    truncate_end,
    truncate_start,
    wrap_text,
)

# The reasons for which an incident is resolved: the API's value, and its text.
RESOLUTIONS = {
    "progress": "the job made progress",
    "ended": "the job ended",
    "restarted": "a later attempt of the job runs",
    "not_reporting": "the job has not reported for a day",
    "aborted": "the job ended after hangwatch had aborted ranks of it",
}

_KINDS_WITHOUT_SITE = select_kinds(lambda spec: not spec.has_culprit_line)
_MAX_COLUMNS = 3  # classes shown side by side
_LABEL_WIDTH = 11
# The names of a call's arguments in ``fields``; a call's document has "shapes" instead of "shape".
_CALL_ROWS = ("op", "shape", "dtype", "reduce_op", "root", "peer", "splits", "detail")
_FUNCTION_WIDTH = 26  # columns for a function's name
_MAX_FLIGHT_CALLS_SHOWN = 3
_MAX_LIBRARY_RUN = 3  # longer runs of library frames are folded
# The states of /proc/PID/stat (proc(5)).
_STATE_NAMES = {
    "R": "running",
    "S": "sleeping",
    "D": "in uninterruptible sleep",
    "T": "stopped",
    "t": "traced",
    "Z": "ended",
    "I": "idle",
}
_MAX_HOSTS_NAMED = 3
# The keys are `Observation.what`; the fields in braces are an observation's.
_CLAUSES = {
    "link_downed": "the link of {about} went down ({before} to {now} times)",
    "carrier_down_count": "{about} lost its carrier ({before} to {now} times)",
    "state": "{about} went from {before} to {now}",
    "phys_state": "{about} went from {before} to {now}",
    "link_down": "the link of {about} went down",
    "xid": "{about} reported Xid {now}{meaning}",
    "lost": "{about} cannot be reached ({now})",
    "hung_task": "{about} ({now}) is blocked in the kernel",
    "nfs_not_responding": "the NFS server {about} does not respond",
    "io_error": "{about} has I/O errors",
    "throttled": "{about} is throttled ({now})",
    "spins": "{about} spins, as NCCL's kernels do while they wait ({now})",
    "idle": "{about} is idle ({now})",
    "does_not_answer": "{now} does not answer in NCCL's {about}",
    "considered_dead": "NCCL considers {now} dead ({about})",
    "async_error": "NCCL reports an error of {now} ({about})",
    "lags": "{now} ({about})",
    "waiting_share": "tasks waited for {about} in {now} % of the last ten seconds",
    "does_not_return": "{about} did not answer within {now}",
    "dead": "{now}",
    "incomplete": "{now} ({about})",
    "mismatch": "{now} ({about})",
    "timeout": "{now}",
    "nfs_requests_without_reply": "{now} requests to {about} have no reply",
}
_KILLED = {
    "kernel log": "the kernel killed {about} ({now}) for lack of memory",
    "cgroup": "processes in {about} were killed for lack of memory ({before} to {now})",
}
# The meanings in NVIDIA's Xid catalogue of the errors that stop a job.
_XID_MEANINGS = {
    "31": "memory page fault, often the program's",
    "48": "double-bit memory error",
    "63": "row remapping recorded",
    "64": "row remapping failed",
    "74": "NVLink error",
    "79": "the GPU has fallen off the bus",
    "94": "contained memory error",
    "95": "uncontained memory error",
    "119": "the GPU's system processor does not answer",
    "120": "error of the GPU's system processor",
}


def format_incident(
    document: Document, now: datetime, paint: Paint = PLAIN_PAINT, full: bool = False
) -> Iterator[str]:
    """One incident: the verdict, the advice, the calls side by side, stacks, waits, devices and
    processes. With ``full``, nothing is folded.
    """
    yield from format_headline(document, now, paint)
    summary = format_summary(document)
    for line in wrap_text(summary):
        yield paint.bold(line)
    site = document.get("site")
    if site and f":{site.get('line')}" not in summary:
        yield paint.bold(f"at {format_site(site)}")
    resolution = RESOLUTIONS.get(str(document.get("resolution")))
    if resolution:
        yield f"It was resolved: {resolution}."
    for paragraph in (document.get("advice"), recovery.format_recovery(document)):
        if paragraph:
            yield ""
            yield from wrap_text(paragraph)
    sections = (
        format_calls(document, paint),
        format_divergence(document, paint),
        format_stacks(document, paint, full),
        format_waits(document),
        format_devices(document),
        format_hardware(document),
        format_processes(document, paint),
    )
    for section in sections:
        for i, line in enumerate(section):
            if i == 0:
                yield ""
            yield line


def format_summary(document: Document) -> str:
    """The summary, with the line of a single culprit that is alive if the summary lacks it."""
    summary = clean_text(document.get("summary") or "")
    site = document.get("site")
    has_one_culprit = len(document.get("culprits") or []) == 1
    if not site or not has_one_culprit or document.get("kind") in _KINDS_WITHOUT_SITE:
        return summary
    line = format_line({"file": site.get("file", "?"), "line": site.get("line")})
    if line in summary:
        return summary
    return f"{summary}: it is at {line} in {clean_text(site.get('function', '?'))}"


def format_headline(document: Document, now: datetime, paint: Paint = PLAIN_PAINT) -> Iterator[str]:
    """Severity, kind, job, age and id, in one line or, if that is too long, in two."""
    severity = clean_text(document.get("severity", "alert"))
    is_open = clean_text(document.get("status", "open")) == "open"
    job = truncate_end(clean_text(document.get("job", "?")), TERMINAL_COLUMNS // 2)
    parts = [clean_text(document.get("kind", "?")), f"job {job}"]
    if document.get("attempt"):
        parts.append(f"attempt {clean_text(document['attempt'])}")
    parts.append(_format_status(document, now))
    label = severity.upper()
    headline = paint.by_severity(label, severity) if is_open else paint.as_success(label)
    text = f"  {' · '.join(parts)}"
    name = clean_text(document.get("id", ""))
    if name and len(f"{label}{text}  {name}") <= TERMINAL_COLUMNS:
        yield f"{headline}{text}  {paint.dim(name)}"
        return
    yield f"{headline}{text}"
    if name:
        yield paint.dim(name)


def _format_status(document: Document, now: datetime) -> str:
    status = clean_text(document.get("status", "open"))
    onset_s = seconds_since(document.get("onset_at"), now)
    resolved_s = seconds_since(document.get("resolved_at"), now)
    if onset_s is None:
        return status
    if status == "open":
        return f"open for {format_age(onset_s)}"
    text = f"{status}, began {format_age(onset_s)} ago"
    if resolved_s is None:
        return text
    return f"{text}, lasted {format_age(onset_s - resolved_s)}"


def format_calls(document: Document, paint: Paint = PLAIN_PAINT) -> Iterator[str]:
    """The ranks' calls, with a column for each class of equal calls; rows in which the classes
    differ are marked with ``≠``.
    """
    classes = document.get("calls") or []
    if not classes:
        return
    group = document.get("group") or {}
    where = f" of group {group_name(group.get('name'), group.get('desc'))}" if group else ""
    # The calls of a channel between two ranks are not counted by group.
    is_point_to_point = any(c.get("peer") is not None for c in classes)
    has_position = document.get("seq") is not None and not is_point_to_point
    yield paint.bold(f"Call {document['seq']}{where}" if has_position else f"Calls{where}")
    members = group.get("ranks") or []
    # Roots are shown as ranks of the job, as in the summary.
    classes = [{**c, "root": resolve_root_rank(c.get("root"), members)} for c in classes]
    differing = set(document.get("fields") or [])
    for start in range(0, len(classes), _MAX_COLUMNS):
        if start:
            yield ""
        yield from _format_call_table(classes[start : start + _MAX_COLUMNS], differing, paint)


def _format_call_table(
    classes: Sequence[Document], differing_fields: set[str], paint: Paint
) -> Iterator[str]:
    width = (TERMINAL_COLUMNS - 2 - _LABEL_WIDTH) // len(classes) - 2
    titles = [_pad_text(name_ranks(c.get("ranks") or []), width) for c in classes]
    yield _format_row("", "", [paint.bold(title) for title in titles])
    for name in _CALL_ROWS:
        key = "shapes" if name == "shape" else name
        values = [_format_value(c.get(key)) for c in classes]
        if not any(values):
            continue
        cells = [_pad_text(value or "-", width) for value in values]
        if name in differing_fields:
            yield _format_row("≠", name, [paint.as_error(cell) for cell in cells])
        else:
            yield _format_row("", name, cells)
    if not any(c.get("site") for c in classes):
        return
    sites = [c.get("site") or {} for c in classes]
    locations = [format_site(site, with_function=False) if site else "-" for site in sites]
    functions = [clean_text(site.get("function", "-")) for site in sites]
    yield _format_row("", "at", [_pad_text(truncate_start(x, width), width) for x in locations])
    yield _format_row("", "in", [_pad_text(function, width) for function in functions])


def format_divergence(document: Document, paint: Paint = PLAIN_PAINT) -> Iterator[str]:
    """The last calls of both sides, aligned; ``≠`` marks a call that only one side made."""
    divergence = document.get("divergence")
    if not divergence:
        return
    group = divergence.get("group") or {}
    yield paint.bold(f"Calls of group {group_name(group.get('name'), group.get('desc'))}, aligned")
    width = (TERMINAL_COLUMNS - 2) // 2 - 1
    sides = [name_ranks(side.get("ranks") or []) for side in divergence.get("sides") or []]
    titles = [paint.bold(_pad_text(side, width)) for side in sides]
    yield f"  {'  '.join(titles)}".rstrip()
    for row in divergence.get("rows") or []:
        if row.get("omitted"):
            yield paint.dim(f"  … {clean_text(row['omitted'])} more that agree")
        texts, differs = format_aligned_row(row)
        cells = [_pad_text(text, width) for text in texts]
        if differs:
            cells = [paint.as_error(cell) for cell in cells]
        yield f"{'≠' if differs else ' '} {'  '.join(cells)}".rstrip()


def format_aligned_row(row: Document) -> tuple[list[str], bool]:
    """The calls of both sides, such as ``812 all_reduce train.py:41 [64]``, and whether only one
    side made the call.
    """
    cells: list[str] = []
    differs = False
    for seq, call in zip(row.get("seq") or [], row.get("calls") or [], strict=False):
        if call is None:
            cells.append("-")
            differs = True
            continue
        differs |= bool(call.get("raised"))
        parts = (
            clean_text(seq),
            clean_text(call.get("op", "?")),
            "raised" if call.get("raised") else "",
            format_line(call["site"]) if call.get("site") else "",
            _format_value(call.get("shapes")),
        )
        cells.append(" ".join(part for part in parts if part))
    return cells, differs


def _format_row(mark: str, name: str, cells: Sequence[str]) -> str:
    return f"{mark:2}{name:{_LABEL_WIDTH}}{'  '.join(cells)}".rstrip()


def _pad_text(text: str, width: int) -> str:
    return f"{truncate_end(text, width):{width}}"


def _format_value(value: object) -> str:
    """A value of a call; lists, such as shapes, one after another."""
    if value is None:
        return ""
    if not isinstance(value, (list, tuple)):
        return clean_text(value)
    return " ".join(
        f"[{', '.join(map(clean_text, part))}]"
        if isinstance(part, (list, tuple))
        else clean_text(part)
        for part in value
    )


def format_waits(document: Document) -> Iterator[str]:
    """The ranks that wait: one line for each awaited rank and call."""
    for (awaited, group, seq), ranks in merge_waits(document):
        verb = "waits" if len(ranks) == 1 else "wait"
        yield from wrap_text(
            f"{name_ranks(ranks)} {verb} for rank {awaited} in call {seq} of group {group}"
        )


def merge_waits(document: Document) -> list[tuple[tuple[int, str, int], set[int]]]:
    """The awaited rank, the group's name to show and the number of each awaited call, with the
    ranks that wait there; sorted.
    """
    waiters: dict[tuple[int, str, int], set[int]] = {}
    for wait in document.get("waits") or []:
        call = (wait.get("for", -1), clean_text(wait.get("group", "")), wait.get("seq", 0))
        waiters.setdefault(call, set()).add(wait.get("rank", -1))
    return [
        ((awaited, _show_group(document, name), seq), ranks)
        for (awaited, name, seq), ranks in sorted(waiters.items())
    ]


def _show_group(document: Document, name: str) -> str:
    """The name to show of the group with this name: a description is only known of the incident's."""
    group = document.get("group") or {}
    if name == clean_text(group.get("name")):
        return group_name(group.get("name"), group.get("desc"))
    return name


def format_devices(document: Document) -> Iterator[str]:
    """The devices' progress: one line for all ranks of a group in the same position."""
    ranks_by_position: dict[tuple[str, int, int, int], set[int]] = {}
    for device in document.get("device") or []:
        started = device.get("started")
        position = (
            clean_text(device.get("group", "")),
            device.get("completed", -1),
            -1 if started is None else max(0, started),
            device.get("enqueued", -1),
        )
        ranks_by_position.setdefault(position, set()).add(device.get("rank", -1))
    for (name, completed, started, enqueued), ranks in sorted(ranks_by_position.items()):
        begun = "" if started < 0 else f"begun {started} and "
        yield from wrap_text(
            f"{name_ranks(ranks)}: the device has {begun}completed {max(0, completed)} of"
            f" {max(0, enqueued)} queued collectives of group {_show_group(document, name)}"
        )


def format_processes(document: Document, paint: Paint = PLAIN_PAINT) -> Iterator[str]:
    """The states of the culprits' processes, or how they ended."""
    for process in document.get("processes") or []:
        where = f" on {clean_text(process['host'])}" if process.get("host") else ""
        yield (
            f"rank {process.get('rank')}: process {process.get('pid', '?')}{where}"
            f" {_describe_condition(process)}"
        )
        exception = process.get("exception")
        if exception:
            type_name = clean_text(exception.get("type", "exception"))
            text = f"{type_name}: {clean_text(exception.get('message', ''))}"
            yield from (paint.as_error(line) for line in wrap_text(text, indent="  "))
            if exception.get("site"):
                site = format_site(exception["site"])
                yield f"  at {truncate_start(site, TERMINAL_COLUMNS - 5)}"
        if process.get("flight_file"):
            yield from _format_flight_file(process["flight_file"])


def _format_flight_file(document: Document) -> Iterator[str]:
    """The calls that had timed out, or else those that had not completed; then the file's path."""
    calls = list(document.get("calls") or ())
    timed_out = [call for call in calls if call.get("timed_out")]
    for call in (timed_out or calls)[:_MAX_FLIGHT_CALLS_SHOWN]:
        yield from wrap_text(_describe_call(call), indent="  ")
    reason = f" ({clean_text(document['error'])})" if document.get("error") else ""
    yield from wrap_text(
        f"Flight Recorder file: {clean_text(document.get('path', ''))}{reason}", indent="  "
    )


def _describe_call(call: Document) -> str:
    what = (
        f"{clean_text(call.get('op', '?'))}, number {call.get('seq', '?')} of group"
        f" {group_name(call.get('group'), call.get('desc'))}"
    )
    waited = f"{float(call.get('waited_s') or 0.0):.1f} s"
    if call.get("timed_out"):
        limit = f"{float(call.get('timeout_s') or 0.0):g} s"
        return f"watchdog timeout: {what}, after {waited} (its limit is {limit})"
    return f"unfinished: {what}, for {waited} ({clean_text(call.get('state') or 'unknown')})"


def _describe_condition(process: Document) -> str:
    if process.get("signal") is not None:
        return f"ended by {recovery.get_signal_name(process['signal'])}"
    if process.get("exit_status") is not None:
        return f"exited with status {clean_text(process['exit_status'])}"
    state = clean_text(process.get("state") or "?")
    if state not in _STATE_NAMES:
        return "is in an unknown state"
    return f"is {_STATE_NAMES[state]} (state {state})"


def format_stacks(
    document: Document, paint: Paint = PLAIN_PAINT, full: bool = False
) -> Iterator[str]:
    """The stacks in the document's order (culprits first), with the innermost frame on top; failed
    samples with their remedy.
    """
    culprits = set(document.get("culprits") or [])
    entries = document.get("stacks") or []
    shown = [entry for entry in entries if full or not _is_library_thread(entry)]
    for i, entry in enumerate(shown):
        if i:
            yield ""
        role = ""
        if culprits:
            is_culprit = not culprits.isdisjoint(entry.get("ranks") or [])
            role = "culprit" if is_culprit else "waiting"
        yield from format_stack(entry, paint, role=role, full=full)
    omitted = len(entries) - len(shown)
    if omitted:
        yield paint.dim(f"… and {omitted} more in libraries only: see `hangwatch show --full`")


def _is_library_thread(entry: Document) -> bool:
    """Whether the stack is of a thread without user code that is not the main one, such as a
    pool's.
    """
    if entry.get("error") or entry.get("thread") in (None, "MainThread"):
        return False
    frames = entry.get("frames") or []
    return bool(frames) and all(map(is_library_frame, frames))


def format_stack(
    entry: Document, paint: Paint = PLAIN_PAINT, role: str = "", full: bool = False
) -> Iterator[str]:
    """One stack. User frames are bold and marked with ``>``; library frames are dim and, unless
    ``full``, folded.
    """
    parts = [
        paint.bold(name_ranks(entry.get("ranks") or [])),
        role,
        clean_text(entry.get("thread") or ""),
        clean_text(entry.get("source") or ""),
    ]
    yield " · ".join(part for part in parts if part)
    if entry.get("error"):
        for line in wrap_text(entry["error"], indent="  ! "):
            yield paint.as_warning(line)
    for in_library, frames in itertools.groupby(entry.get("frames") or [], is_library_frame):
        run = list(frames)
        if in_library:
            shown = run if full or len(run) <= _MAX_LIBRARY_RUN else run[:1]
            for frame in shown:
                yield paint.dim(_format_frame(frame, "  "))
            if len(shown) < len(run):
                yield paint.dim(f"    … {len(run) - len(shown)} more frames of libraries")
            continue
        for frame in run:
            yield paint.bold(_format_frame(frame, "> "))
            if frame.get("text"):
                yield truncate_end(f"      {clean_text(frame['text']).strip()}", TERMINAL_COLUMNS)


def is_library_frame(frame: Document) -> bool:
    return is_library(str(frame.get("file", "")))


def merge_equal_stacks(entries: Iterable[Document]) -> list[dict[str, Any]]:
    """Merges equal stacks of several ranks into one entry with all their ranks, in the order of
    their first appearance.
    """
    merged: dict[tuple[object, ...], dict[str, Any]] = {}
    for entry in entries:
        frames = tuple(
            (f.get("function"), f.get("file"), f.get("line")) for f in entry.get("frames") or []
        )
        key = (entry.get("thread"), entry.get("source"), entry.get("error"), frames)
        ranks = list(entry.get("ranks") or [])
        if key in merged:
            merged[key]["ranks"] = sorted({*merged[key]["ranks"], *ranks})
        else:
            merged[key] = {**entry, "ranks": ranks}
    return list(merged.values())


def _format_frame(frame: Document, mark: str) -> str:
    function = truncate_end(clean_text(frame.get("function", "?")), _FUNCTION_WIDTH)
    location_width = TERMINAL_COLUMNS - _FUNCTION_WIDTH - 6
    location = truncate_start(format_site(frame, with_function=False), location_width)
    return f"  {mark}{function:{_FUNCTION_WIDTH}}  {location}"


def describe_observation(observation: Observation) -> str:
    """A clause such as "the link of mlx5_0/1 went down (2 to 3 times)"."""
    what, about = observation.what, observation.about
    template = _KILLED.get(observation.source) if what == "oom_kill" else _CLAUSES.get(what)
    if template is not None:
        meaning = _XID_MEANINGS.get(str(observation.now), "")
        return template.format(
            about=about,
            before=observation.before,
            now=observation.now,
            meaning=f" ({meaning})" if meaning else "",
        )
    name = what.replace("_", " ")
    if observation.before is None:
        return f"{about}: {name} ({observation.now})"
    return f"{name} of {about} went from {observation.before} to {observation.now}"


def format_hardware(document: Document) -> Iterator[str]:
    """The reports of an incident's hosts: one line for each observation, and one for each source
    that could not be read.
    """
    for item in document.get("hardware") or []:
        entry = parse_document(HostObservation, item)
        yield from wrap_text(f"{entry.host}: {describe_observation(entry.observation)}")
    for gap in document.get("hardware_missing") or []:
        hosts = abbreviate_list(gap.get("hosts") or [], _MAX_HOSTS_NAMED)
        yield from wrap_text(
            f"not read on {hosts}: {gap.get('source')}, {gap.get('reason')}; {gap.get('remedy')}"
        )
