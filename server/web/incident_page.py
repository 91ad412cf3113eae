"""What /incidents/{id} shows of an incident: the graph, the calls, the tree of stacks, the
timeline.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from hangwatch.report import recovery, terminal
from hangwatch.report.text import group_name, name_ranks, truncate_end
from hangwatch.stacks.frames import is_library
from hangwatch.stacks.stack_tree import merge_stacks

from ..core import schema
from ..http.app_state import AppState
from ..http.stack_files import convert_stacks, select_main_stacks
from ..monitor import views
from .rank_table import filter_ranks, parse_rank_spans
from .wait_graph import GraphPicture, build_graph, draw_graph

COMPARED_FIELDS = ("op", "shapes", "dtype", "reduce_op", "root", "peer", "splits", "detail")
MAX_PROPOSED_RANKS = 32  # ranks that the form for fresh stacks begins with


@dataclass(frozen=True, slots=True, kw_only=True)
class TimelineEntry:
    at: datetime
    after_s: float
    text: str


def build_page_values(live: AppState, id: str, ranks: str, dump_id: str) -> dict[str, Any]:
    """The values of the page; ``ranks`` narrows the stacks and processes to some. Raises Problem
    for an unknown incident.
    """
    incident = live.get_incident(id).incident
    wanted = parse_rank_spans(ranks)
    stacks = [
        entry.model_copy(update={"ranks": kept})
        for entry in incident.stacks
        if (kept := filter_ranks(entry.ranks, wanted))
    ]
    mains = select_main_stacks(stacks)
    asked = live.watch.dumps.find_dump(dump_id, live.now()) if dump_id else None
    drawn = draw_graph(build_graph(incident))
    return {
        "incident": incident,
        "place": views.find_culprit_frame(incident),
        "recovery": recovery.format_recovery(
            incident.model_dump(mode="json", include={"recovery", "status", "resolution"})
        ),
        "open_s": (
            (incident.resolved_at or live.watch.clock.date(live.now())) - incident.onset_at
        ).total_seconds(),
        "picture": drawn,
        "box_places": label_boxes(incident, drawn),
        **build_graph_labels(live, incident, {arrow.waiter for arrow in drawn.arrows}),
        "differing": find_differing_fields(incident),
        "compared": COMPARED_FIELDS,
        "ranks": ranks,
        "misread": bool(ranks.strip()) and wanted is None,
        "tree": merge_stacks(convert_stacks(mains)),
        "tree_ranks": sorted({r for entry in mains for r in entry.ranks}),
        "failed": [s for s in stacks if s.error is not None],
        "others": [s for s in stacks if s.frames and not any(s is m for m in mains)],
        "processes": [p for p in incident.processes if filter_ranks([p.rank], wanted)],
        "moments": build_timeline(incident),
        "dump": dump_id,
        "asked": asked,
        "asked_stacks": merge_dump_stacks(asked) if asked else [],
        "proposed": ", ".join(
            map(str, (incident.culprits or incident.waiting)[:MAX_PROPOSED_RANKS])
        ),
    }


def build_graph_labels(
    live: AppState, incident: schema.Incident, waiters: Iterable[int]
) -> dict[str, dict[Any, str]]:
    """For the graph: ``group_names`` by name, and ``ops`` by rank and call. Of its own calls
    always; of others while the job is known.
    """
    job = live.watch.fleet.attempts.get((incident.job, incident.attempt))
    waiting = [
        (rank, s)
        for rank in waiters
        if job and rank in job.processes
        for s in job.processes[rank].streams.values()
        if s.is_pending
    ]
    groups = {s.group.name: group_name(s.group.name, s.group.desc) for _, s in waiting}
    if incident.group:
        groups[incident.group.name] = group_name(incident.group.name, incident.group.desc)
    ops = {(rank, s.first_unfinished): s.op for rank, s in waiting}
    return {
        "group_names": groups,
        "ops": ops | {(rank, c.seq): c.op for c in incident.calls for rank in c.ranks},
    }


def find_user_lines(incident: schema.Incident) -> dict[int, str]:
    """The user's innermost line of each rank whose stack is known."""
    found: dict[int, str] = {}
    for ranks, frames in convert_stacks(select_main_stacks(incident.stacks)):
        user_frame = next((f for f in frames if not is_library(f.file)), None)
        if user_frame is not None:
            found |= dict.fromkeys(
                ranks,
                f"{user_frame.file.rsplit('/', 1)[-1]}:{user_frame.line} {user_frame.function}",
            )
    return found


def label_boxes(incident: schema.Incident, drawn: GraphPicture) -> list[str]:
    """A line of each box of the graph: where one of its ranks is whose stack is known."""
    known = find_user_lines(incident)
    return [
        next(
            (known[r] for r in box.wait_class.ranks if r in known),
            "culprit" if box.wait_class.culprit else "waits",
        )
        for box in drawn.boxes
    ]


def find_differing_fields(incident: schema.Incident) -> frozenset[str]:
    """Which columns of the calls, put side by side, are not the same in all."""
    calls: Iterable[schema.CallClass] = incident.calls
    return frozenset(
        name for name in COMPARED_FIELDS if len({repr(getattr(c, name)) for c in calls}) > 1
    )


def build_timeline(incident: schema.Incident) -> list[TimelineEntry]:
    """What happened when, in order."""
    waiting = (
        f": {truncate_end(name_ranks(incident.waiting), 60)} waited from here on"
        if incident.waiting
        else ""
    )
    moments = [(incident.onset_at, f"It began{waiting}")]
    moments.append(
        (
            incident.opened_at,
            f"hangwatch opened this incident, as {incident.severity.value} {incident.kind.value}",
        )
    )
    stacks: dict[tuple[datetime, str, bool], list[schema.Stack]] = {}  # by the second
    for entry in incident.stacks:
        stacks.setdefault(
            (entry.taken_at.replace(microsecond=0), entry.source, entry.error is None), []
        ).append(entry)
    for (_, source, is_success), entries in stacks.items():
        ranks_text = truncate_end(name_ranks(r for e in entries for r in e.ranks), 60)
        moments.append(
            (
                min(e.taken_at for e in entries),
                f"{'Stacks' if is_success else 'Failed to take stacks'} of {ranks_text} ({source})",
            )
        )
    for at, text in recovery.iter_recovery_events(
        incident.model_dump(mode="json", include={"recovery"})
    ):
        moments.append((datetime.fromisoformat(at.replace("Z", "+00:00")), text))
    if incident.resolved_at is not None:
        why = (
            terminal.RESOLUTIONS[incident.resolution]
            if incident.resolution
            else "the job went on or ended"
        )
        moments.append((incident.resolved_at, f"It was over: {why}"))
    moments.sort(key=lambda moment: moment[0])
    return [
        TimelineEntry(at=at, after_s=(at - incident.onset_at).total_seconds(), text=text)
        for at, text in moments
    ]


def merge_dump_stacks(dump: schema.Dump) -> list[tuple[schema.Stack, bool]]:
    """The stacks of a dump, equal ones as one; and whether each is that of a main thread."""
    merged: dict[str, tuple[list[int], schema.Stack, bool]] = {}
    for rank in dump.ranks:
        for n, entry in enumerate(rank.stacks):
            merge_key = entry.model_dump_json(exclude={"ranks", "taken_at"})
            merged.setdefault(merge_key, ([], entry, n == 0))[0].append(rank.rank)
    ordered = sorted(merged.values(), key=lambda found: (not found[2], len(found[0])))
    return [(entry.model_copy(update={"ranks": ranks}), main) for ranks, entry, main in ordered]
