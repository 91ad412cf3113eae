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
from ..http.app_state import Live
from ..http.stack_files import main_entries, stacks_of
from ..monitor import views
from .rank_table import spans, within
from .wait_graph import Picture, graph, picture

COMPARED = ("op", "shapes", "dtype", "reduce_op", "root", "peer", "splits", "detail")
PROPOSED_MOST = 32  # ranks that the form for fresh stacks begins with


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    at: datetime
    after_s: float
    text: str


def evidence(live: Live, id: str, ranks: str, dump: str) -> dict[str, Any]:
    """The values of the page; ``ranks`` narrows the stacks and processes to some. Raises Problem
    for an unknown incident.
    """
    incident = live.incident(id).incident
    wanted = spans(ranks)
    stacks = [
        entry.model_copy(update={"ranks": kept})
        for entry in incident.stacks
        if (kept := within(entry.ranks, wanted))
    ]
    mains = main_entries(stacks)
    asked = live.watch.dumps.get(dump, live.now()) if dump else None
    drawn = picture(graph(incident))
    return {
        "incident": incident,
        "place": views.culprit_place(incident),
        "recovery": recovery.format_recovery(
            incident.model_dump(mode="json", include={"recovery", "status", "resolution"})
        ),
        "open_s": (
            (incident.resolved_at or live.watch.clock.date(live.now())) - incident.onset_at
        ).total_seconds(),
        "picture": drawn,
        "box_places": box_places(incident, drawn),
        **labels(live, incident, {arrow.waiter for arrow in drawn.arrows}),
        "differing": differing(incident),
        "compared": COMPARED,
        "ranks": ranks,
        "misread": bool(ranks.strip()) and wanted is None,
        "tree": merge_stacks(stacks_of(mains)),
        "tree_ranks": sorted({r for entry in mains for r in entry.ranks}),
        "failed": [s for s in stacks if s.error is not None],
        "others": [s for s in stacks if s.frames and not any(s is m for m in mains)],
        "processes": [p for p in incident.processes if within([p.rank], wanted)],
        "moments": timeline(incident),
        "dump": dump,
        "asked": asked,
        "asked_stacks": asked_stacks(asked) if asked else [],
        "proposed": ", ".join(map(str, (incident.culprits or incident.waiting)[:PROPOSED_MOST])),
    }


def labels(
    live: Live, incident: schema.Incident, waiters: Iterable[int]
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


def places(incident: schema.Incident) -> dict[int, str]:
    """The user's innermost line of each rank whose stack is known."""
    found: dict[int, str] = {}
    for ranks, frames in stacks_of(main_entries(incident.stacks)):
        mine = next((f for f in frames if not is_library(f.file)), None)
        if mine is not None:
            found |= dict.fromkeys(
                ranks, f"{mine.file.rsplit('/', 1)[-1]}:{mine.line} {mine.function}"
            )
    return found


def box_places(incident: schema.Incident, drawn: Picture) -> list[str]:
    """A line of each box of the graph: where one of its ranks is whose stack is known."""
    known = places(incident)
    return [
        next(
            (known[r] for r in box.of.ranks if r in known), "culprit" if box.of.culprit else "waits"
        )
        for box in drawn.boxes
    ]


def differing(incident: schema.Incident) -> frozenset[str]:
    """Which columns of the calls, put side by side, are not the same in all."""
    calls: Iterable[schema.CallClass] = incident.calls
    return frozenset(name for name in COMPARED if len({repr(getattr(c, name)) for c in calls}) > 1)


def timeline(incident: schema.Incident) -> list[Moment]:
    """What happened when, in order."""
    waiting = (
        f": {truncate_end(name_ranks(incident.waiting), 60)} waited from here on"
        if incident.waiting
        else ""
    )
    told = [(incident.onset_at, f"It began{waiting}")]
    told.append(
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
    for (_, source, well), entries in stacks.items():
        whose = truncate_end(name_ranks(r for e in entries for r in e.ranks), 60)
        told.append(
            (
                min(e.taken_at for e in entries),
                f"{'Stacks' if well else 'Failed to take stacks'} of {whose} ({source})",
            )
        )
    for at, text in recovery.iter_recovery_events(
        incident.model_dump(mode="json", include={"recovery"})
    ):
        told.append((datetime.fromisoformat(at.replace("Z", "+00:00")), text))
    if incident.resolved_at is not None:
        why = (
            terminal.RESOLUTIONS[incident.resolution]
            if incident.resolution
            else "the job went on or ended"
        )
        told.append((incident.resolved_at, f"It was over: {why}"))
    told.sort(key=lambda moment: moment[0])
    return [
        Moment(at=at, after_s=(at - incident.onset_at).total_seconds(), text=text)
        for at, text in told
    ]


def asked_stacks(asked: schema.Dump) -> list[tuple[schema.Stack, bool]]:
    """The stacks of a dump, equal ones as one; and whether each is that of a main thread."""
    merged: dict[str, tuple[list[int], schema.Stack, bool]] = {}
    for rank in asked.ranks:
        for n, entry in enumerate(rank.stacks):
            same = entry.model_dump_json(exclude={"ranks", "taken_at"})
            merged.setdefault(same, ([], entry, n == 0))[0].append(rank.rank)
    ordered = sorted(merged.values(), key=lambda found: (not found[2], len(found[0])))
    return [(entry.model_copy(update={"ranks": ranks}), main) for ranks, entry, main in ordered]
