"""An incident as lines of text for a terminal of 80 columns, from the API's JSON documents. Pure.

Everything that a job reports (names of functions, files, messages) is untrusted: `clean_text`
removes what could control a terminal. Documents are read leniently, since the server may be newer.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime

from hangwatch.model.calls import JsonObject
from hangwatch.model.hardware import HostObservation, Observation, find_xid
from hangwatch.model.kernels import Kernel, Kernels, RankKernels
from hangwatch.model.kinds import select_kinds
from hangwatch.stacks.frames import is_library

from . import recovery
from .documents import parse_document
from .text import (
    TERMINAL_COLUMNS,
    Document,
    abbreviate_list,
    as_bold,
    as_dim,
    as_error,
    as_success,
    as_warning,
    by_severity,
    clean_member,
    clean_text,
    format_age,
    format_line,
    format_site,
    get_parts,
    group_name,
    join_blocks,
    name_group,
    name_ranks,
    resolve_root_rank,
    seconds_since,
    truncate_end,
    truncate_start,
    wrap_text,
)

Lines = Iterator[str]
AwaitedCall = tuple[int, str, int]  # the awaited rank, the group's name, and the number of the call

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
_MAX_KERNELS_SHOWN = 3  # of a device
_MAX_KERNEL_CLAUSES = 3
_MAX_KERNEL_CHARS = 100  # templates have long names
# The keys are `Observation.what`; the fields in braces are an observation's.
_CLAUSES = {
    "link_downed": "the link of {about} went down ({before} to {now} times)",
    "carrier_down_count": "{about} lost its carrier ({before} to {now} times)",
    "state": "{about} went from {before} to {now}",
    "phys_state": "{about} went from {before} to {now}",
    "link_down": "the link of {about} went down",
    "xid": "{about} reported Xid {now}{meaning}",
    "program_xid": "{about} caused Xid {now}{meaning}",
    "earlier_xid": "{about} has reported Xid {now}{meaning} since NCCL started or was last asked",
    "sxid": "the NVSwitches of {about} have reported SXid {now} since NCCL started or was last asked",
    "memory_errors_since_boot": "the GPUs of {about} have {now} uncorrected memory errors since they were"
    " started",
    "inactive_nvlinks": "the GPUs of {about} have inactive NVLinks ({now} ranks)",
    "differs_between_ranks": "{about} is not the same on all ranks: {now}",
    "nccl_finding": "{about}: {now}",
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


def format_incident(document: Document, now: datetime, full: bool = False) -> Lines:
    """One incident: the verdict, the advice, the calls side by side, stacks, waits, devices and
    processes. With ``full``, nothing is folded.
    """
    return join_blocks(
        (
            _format_verdict(document, now),
            wrap_text(document.get("advice")),
            wrap_text(recovery.format_recovery(document)),
            format_calls(document),
            format_divergence(document),
            format_stacks(document, full),
            itertools.chain.from_iterable(map(wrap_text, describe_incident_kernels(document))),
            format_waits(document),
            format_devices(document),
            format_hardware(document),
            format_processes(document),
        )
    )


def format_summary(document: Document) -> str:
    """The summary, with the line of a single culprit that is alive if the summary lacks it."""
    summary = clean_member(document, "summary", "")
    site = document.get("site")
    has_one_culprit = len(get_parts(document, "culprits")) == 1
    if not site or not has_one_culprit or document.get("kind") in _KINDS_WITHOUT_SITE:
        return summary
    line = format_line(site)
    if line in summary:
        return summary
    return f"{summary}: it is at {line} in {clean_member(site, 'function')}"


def _format_verdict(document: Document, now: datetime) -> Lines:
    """Severity, kind, job, age and id, in one line or, if that is too long, in two; the summary, and
    why the incident was resolved.
    """
    job = truncate_end(clean_member(document, "job"), TERMINAL_COLUMNS // 2)
    text = f"  {clean_member(document, 'kind')} · job {job} · "
    if document.get("attempt"):
        text += f"attempt {clean_member(document, 'attempt')} · "
    status = clean_member(document, "status", "open")
    text += status
    onset_s = seconds_since(document.get("onset_at"), now)
    resolved_s = seconds_since(document.get("resolved_at"), now)
    if onset_s is not None and status == "open":
        text += f" for {format_age(onset_s)}"
    elif onset_s is not None:
        text += f", began {format_age(onset_s)} ago"
        if resolved_s is not None:
            text += f", lasted {format_age(onset_s - resolved_s)}"
    severity = clean_member(document, "severity", "alert")
    label = severity.upper()
    headline = as_success(label)
    if status == "open":
        headline = by_severity(label, severity)
    name = clean_member(document, "id", "")
    if name and len(f"{label}{text}  {name}") <= TERMINAL_COLUMNS:
        yield f"{headline}{text}  {as_dim(name)}"
    else:
        yield f"{headline}{text}"
        if name:
            yield as_dim(name)
    summary = format_summary(document)
    yield from map(as_bold, wrap_text(summary))
    site = document.get("site")
    if site and f":{site.get('line')}" not in summary:
        yield as_bold(f"at {format_site(site)}")
    resolution = RESOLUTIONS.get(str(document.get("resolution")))
    if resolution:
        yield f"It was resolved: {resolution}."


def format_calls(document: Document) -> Lines:
    """The ranks' calls, with a column for each class of equal calls; rows in which the classes
    differ are marked with ``≠``.
    """
    classes = get_parts(document, "calls")
    if not classes:
        return
    group = document.get("group") or {}
    # The calls of a channel between two ranks are not counted by group.
    is_point_to_point = any(c.get("peer") is not None for c in classes)
    title = "Calls"
    if document.get("seq") is not None and not is_point_to_point:
        title = f"Call {document['seq']}"
    if group:
        title += f" of group {name_group(group)}"
    yield as_bold(title)
    members = get_parts(group, "ranks")
    # Roots are shown as ranks of the job, as in the summary.
    classes = [{**c, "root": resolve_root_rank(c.get("root"), members)} for c in classes]
    differing = set(get_parts(document, "fields"))
    yield from join_blocks(
        _format_call_table(classes[start : start + _MAX_COLUMNS], differing)
        for start in range(0, len(classes), _MAX_COLUMNS)
    )


def _format_call_table(classes: Sequence[Document], differing_fields: set[str]) -> Lines:
    width = (TERMINAL_COLUMNS - 2 - _LABEL_WIDTH) // len(classes) - 2
    rows = []
    for name in _CALL_ROWS:
        key = "shapes" if name == "shape" else name
        rows.append((name, [_format_value(c.get(key)) for c in classes]))
    sites = [c.get("site") or {} for c in classes]
    if any(sites):
        locations = [format_site(site, with_function=False) if site else "-" for site in sites]
        rows.append(("at", [truncate_start(location, width) for location in locations]))
        rows.append(("in", [clean_member(site, "function", "-") for site in sites]))
    titles = [name_ranks(c.get("ranks")) for c in classes]
    yield _format_row(f"  {'':{_LABEL_WIDTH}}", titles, width, as_bold)
    for name, texts in rows:
        if not any(texts):
            continue
        cells = [text or "-" for text in texts]
        if name in differing_fields:
            yield _format_row(f"≠ {name:{_LABEL_WIDTH}}", cells, width, as_error)
        else:
            yield _format_row(f"  {name:{_LABEL_WIDTH}}", cells, width)


def format_divergence(document: Document) -> Lines:
    """The last calls of both sides, aligned; ``≠`` marks a call that only one side made."""
    divergence = document.get("divergence")
    if not divergence:
        return
    yield as_bold(f"Calls of group {name_group(divergence.get('group') or {})}, aligned")
    width = (TERMINAL_COLUMNS - 2) // 2 - 1
    titles = [name_ranks(side.get("ranks")) for side in get_parts(divergence, "sides")]
    yield _format_row("  ", titles, width, as_bold)
    for row in get_parts(divergence, "rows"):
        if row.get("omitted"):
            yield as_dim(f"  … {clean_member(row, 'omitted')} more that agree")
        texts, differs = format_aligned_row(row)
        if differs:
            yield _format_row("≠ ", texts, width, as_error)
        else:
            yield _format_row("  ", texts, width)


def format_aligned_row(row: Document) -> tuple[list[str], bool]:
    """The calls of both sides, such as ``812 all_reduce train.py:41 [64]``, and whether only one
    side made the call.
    """
    cells = []
    differs = False
    for seq, call in zip(get_parts(row, "seq"), get_parts(row, "calls"), strict=False):
        if call is None:
            cells.append("-")
            differs = True
            continue
        differs |= bool(call.get("raised"))
        parts = (
            clean_text(seq),
            clean_member(call, "op"),
            "raised" if call.get("raised") else "",
            format_line(call["site"]) if call.get("site") else "",
            _format_value(call.get("shapes")),
        )
        cells.append(" ".join(part for part in parts if part))
    return cells, differs


def _format_row(
    label: str, texts: Iterable[str], width: int, apply_style: Callable[[str], str] = str
) -> str:
    """A row of cells with ``width`` columns each."""
    cells = []
    for text in texts:
        shown = truncate_end(text, width).rstrip()
        cells.append(apply_style(shown) + " " * (width - len(shown)))
    return f"{label}{'  '.join(cells)}".rstrip()


def _format_value(value: object) -> str:
    """A value of a call; lists, such as shapes, one after another."""
    if value is None:
        return ""
    if not isinstance(value, (list, tuple)):
        return clean_text(value)
    parts = []
    for part in value:
        if isinstance(part, (list, tuple)):
            parts.append(f"[{', '.join(map(clean_text, part))}]")
        else:
            parts.append(clean_text(part))
    return " ".join(parts)


def format_waits(document: Document) -> Lines:
    """The ranks that wait: one line for each awaited rank and call."""
    for (awaited, group, seq), ranks in merge_waits(document):
        waits = "waits" if len(ranks) == 1 else "wait"
        yield from wrap_text(
            f"{name_ranks(ranks)} {waits} for rank {awaited} in call {seq} of group {group}"
        )


def merge_waits(document: Document) -> list[tuple[AwaitedCall, set[int]]]:
    """Each awaited call, with the group's name to show, and the ranks that wait there; sorted."""
    waiters: dict[AwaitedCall, set[int]] = {}
    for wait in get_parts(document, "waits"):
        call = (wait.get("for", -1), clean_member(wait, "group", ""), wait.get("seq", 0))
        waiters.setdefault(call, set()).add(wait.get("rank", -1))
    return [
        ((awaited, _show_group(document, name), seq), ranks)
        for (awaited, name, seq), ranks in sorted(waiters.items())
    ]


def _show_group(document: Document, name: str) -> str:
    """The name to show of the group with this name: a description is only known of the incident's."""
    group = document.get("group") or {}
    return name_group(group) if name == clean_member(group, "name") else name


def format_devices(document: Document) -> Lines:
    """The devices' progress: one line for all ranks of a group in the same position."""
    ranks_by_position: dict[tuple[str, int, int, int], set[int]] = {}
    for device in get_parts(document, "device"):
        started = device.get("started")
        position = (
            clean_member(device, "group", ""),
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


def format_processes(document: Document) -> Lines:
    """The states of the culprits' processes, or how they ended."""
    for process in get_parts(document, "processes"):
        text = f"rank {process.get('rank')}: process {process.get('pid', '?')}"
        if process.get("host"):
            text += f" on {clean_member(process, 'host')}"
        state = clean_member(process, "state")
        condition = "is in an unknown state"
        if process.get("signal") is not None:
            condition = f"ended by {recovery.get_signal_name(process['signal'])}"
        elif process.get("exit_status") is not None:
            condition = f"exited with status {clean_member(process, 'exit_status')}"
        elif state in _STATE_NAMES:
            condition = f"is {_STATE_NAMES[state]} (state {state})"
        yield f"{text} {condition}"
        for key, prefix in (("exception", ""), ("handling", "handling ")):
            exception = process.get(key)
            if exception:
                type_name = clean_member(exception, "type", "exception")
                message = f"{prefix}{type_name}: {clean_member(exception, 'message', '')}"
                yield from map(as_error, wrap_text(message, indent="  "))
                if exception.get("site"):
                    site = format_site(exception["site"])
                    yield f"  at {truncate_start(site, TERMINAL_COLUMNS - 5)}"
        if process.get("flight_file"):
            yield from _format_flight_file(process["flight_file"])


def _format_flight_file(document: Document) -> Lines:
    """The calls that had timed out, or else those that had not completed; then the file's path."""
    calls = get_parts(document, "calls")
    timed_out = [call for call in calls if call.get("timed_out")]
    for call in (timed_out or calls)[:_MAX_FLIGHT_CALLS_SHOWN]:
        group = group_name(call.get("group"), call.get("desc"))
        what = f"{clean_member(call, 'op')}, number {call.get('seq', '?')} of group {group}"
        waited = f"{float(call.get('waited_s') or 0.0):.1f} s"
        if timed_out:
            limit = f"{float(call.get('timeout_s') or 0.0):g} s"
            text = f"watchdog timeout: {what}, after {waited} (its limit is {limit})"
        else:
            state = clean_member(call, "state", "unknown")
            text = f"unfinished: {what}, for {waited} ({state})"
        yield from wrap_text(text, indent="  ")
    file = f"Flight Recorder file: {clean_member(document, 'path', '')}"
    if document.get("error"):
        file += f" ({clean_member(document, 'error')})"
    yield from wrap_text(file, indent="  ")


def format_stacks(document: Document, full: bool) -> Lines:
    """The stacks in the document's order (culprits first), with the innermost frame on top; failed
    samples with their remedy.
    """
    culprits = set(get_parts(document, "culprits"))
    blocks = []
    omitted_count = 0
    for entry in get_parts(document, "stacks"):
        # Threads without user code, other than the main one, such as those of a pool.
        frames = get_parts(entry, "frames")
        is_foldable = not full and not entry.get("error") and bool(frames)
        is_named = entry.get("thread") not in (None, "MainThread")
        if is_foldable and is_named and all(map(is_library_frame, frames)):
            omitted_count += 1
            continue
        role = ""
        if culprits:
            role = "waiting" if culprits.isdisjoint(get_parts(entry, "ranks")) else "culprit"
        blocks.append(format_stack(entry, role=role, full=full))
    yield from join_blocks(blocks)
    if omitted_count:
        yield as_dim(f"… and {omitted_count} more in libraries only: see `hangwatch show --full`")


def format_stack(entry: Document, role: str = "", full: bool = False) -> Lines:
    """One stack. User frames are bold and marked with ``>``; library frames are dim and, unless
    ``full``, folded.
    """
    origin = [clean_member(entry, key, "") for key in ("thread", "source")]
    parts = [as_bold(name_ranks(entry.get("ranks"))), role, *origin]
    yield " · ".join(part for part in parts if part)
    if entry.get("error"):
        yield from map(as_warning, wrap_text(entry["error"], indent="  ! "))
    for in_library, frames in itertools.groupby(get_parts(entry, "frames"), is_library_frame):
        run = list(frames)
        if in_library:
            shown = run if full or len(run) <= _MAX_LIBRARY_RUN else run[:1]
            for frame in shown:
                yield as_dim(_format_frame(frame, "  "))
            if len(shown) < len(run):
                yield as_dim(f"    … {len(run) - len(shown)} more frames of libraries")
            continue
        for frame in run:
            yield as_bold(_format_frame(frame, "> "))
            if frame.get("text"):
                line = clean_member(frame, "text").strip()
                yield truncate_end(f"      {line}", TERMINAL_COLUMNS)


def is_library_frame(frame: Document) -> bool:
    return is_library(str(frame.get("file", "")))


def merge_equal_stacks(entries: Iterable[Document]) -> list[JsonObject]:
    """Merges equal stacks of several ranks into one entry with all their ranks, in the order of
    their first appearance.
    """
    merged: dict[tuple[object, ...], JsonObject] = {}
    for entry in entries:
        key = [entry.get("thread"), entry.get("source"), entry.get("error")]
        for frame in get_parts(entry, "frames"):
            key += [frame.get("function"), frame.get("file"), frame.get("line")]
        first = merged.setdefault(tuple(key), {**entry, "ranks": []})
        first["ranks"] = sorted({*first["ranks"], *get_parts(entry, "ranks")})
    return list(merged.values())


def _format_frame(frame: Document, mark: str) -> str:
    function = truncate_end(clean_member(frame, "function"), _FUNCTION_WIDTH)
    location_width = TERMINAL_COLUMNS - _FUNCTION_WIDTH - 6
    location = truncate_start(format_site(frame, with_function=False), location_width)
    return f"  {mark}{function:{_FUNCTION_WIDTH}}  {location}"


def describe_observation(observation: Observation) -> str:
    """A clause such as "the link of mlx5_0/1 went down (2 to 3 times)"."""
    what, about = observation.what, observation.about
    template = _KILLED.get(observation.source) if what == "oom_kill" else _CLAUSES.get(what)
    if template is not None:
        xid = find_xid(observation.now)
        return template.format(
            about=about,
            before=observation.before,
            now=observation.now,
            meaning=f" ({xid.meaning})" if xid is not None else "",
        )
    name = what.replace("_", " ")
    if observation.before is None:
        return f"{about}: {name} ({observation.now})"
    return f"{name} of {about} went from {observation.before} to {observation.now}"


def list_kernel_clauses(kernels_by_rank: Mapping[int, Kernels]) -> list[str]:
    """``rank 3's device runs fill (2 x 128 threads)``: a clause for all ranks whose devices run the same
    kernels, those of the fewest ranks first.
    """
    ranks_by_kernels: dict[tuple[str, ...], list[int]] = {}
    for rank, kernels in kernels_by_rank.items():
        names = tuple(dict.fromkeys(map(_format_kernel, kernels)))
        ranks_by_kernels.setdefault(names, []).append(rank)
    clauses = []
    for names, ranks in sorted(ranks_by_kernels.items(), key=lambda entry: len(entry[1])):
        shown = abbreviate_list(names, _MAX_KERNELS_SHOWN) or "no kernel"
        if len(ranks) == 1:
            clauses.append(f"rank {ranks[0]}'s device runs {shown}")
        else:
            clauses.append(f"the devices of {name_ranks(ranks)} run {shown}")
    return clauses


def describe_kernels(kernels_by_rank: Mapping[int, Kernels]) -> str:
    """The first clauses of `list_kernel_clauses`, as one."""
    clauses = list_kernel_clauses(kernels_by_rank)
    if len(clauses) > _MAX_KERNEL_CLAUSES:
        clauses[_MAX_KERNEL_CLAUSES:] = ["the other devices run others"]
    return "; ".join(clauses)


def _format_kernel(kernel: Kernel) -> str:
    name = truncate_end(clean_text(kernel.name), _MAX_KERNEL_CHARS)
    return f"{name} ({math.prod(kernel.grid)} x {math.prod(kernel.block)} threads)"


def describe_incident_kernels(document: Document) -> Iterator[str]:
    """The kernels on the devices, with their source, and the ranks whose kernels are not known."""
    kernels_by_source: dict[str, dict[int, Kernels]] = {}
    ranks_by_error: dict[str, list[int]] = {}
    for item in get_parts(document, "kernels"):
        entry = parse_document(RankKernels, item)
        if entry.error is not None:
            ranks_by_error.setdefault(entry.error, []).append(entry.rank)
        else:
            kernels_by_source.setdefault(entry.source, {})[entry.rank] = entry.kernels
    for source, kernels_by_rank in kernels_by_source.items():
        for clause in list_kernel_clauses(kernels_by_rank):
            yield f"{clause} ({source})"
    for error, ranks in ranks_by_error.items():
        yield f"the kernels of {name_ranks(ranks)} are not known: {error}"


def format_hardware(document: Document) -> Lines:
    """The reports of an incident's hosts: one line for each observation, and one for each source
    that could not be read.
    """
    for item in get_parts(document, "hardware"):
        entry = parse_document(HostObservation, item)
        yield from wrap_text(f"{entry.host}: {describe_observation(entry.observation)}")
    for gap in get_parts(document, "hardware_missing"):
        hosts = abbreviate_list(get_parts(gap, "hosts"), _MAX_HOSTS_NAMED)
        yield from wrap_text(
            f"not read on {hosts}: {gap.get('source')}, {gap.get('reason')}; {gap.get('remedy')}"
        )
