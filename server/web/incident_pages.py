"""``/incidents``: the list of incidents, filtered by the address. ``/incidents/{id}``: one incident
with its evidence; and the same as one HTML file for a ticket, which makes no request.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request
from fastapi.responses import Response
from pydantic import BaseModel

from hangwatch.model.incidents import Incident, MergedStack
from hangwatch.model.kinds import VerdictKind
from hangwatch.report import recovery, terminal
from hangwatch.report.documents import build_document
from hangwatch.report.text import Document, group_name, name_ranks, parse_time, truncate_end
from hangwatch.stacks.frames import find_user_frame
from hangwatch.stacks.trees import merge_stacks

from ..http import api
from ..http.app_state import AppState, State
from ..http.ondemand_routes import convert_stacks, select_calling_stacks
from ..http.rendering import STYLESHEET_PATH, make_attachment, wants_json
from ..incidents.registry import IncidentRecord
from ..monitor import views
from ..ondemand.dumps import RequestedDump
from .ranks_page import parse_rank_filter
from .serving import PageNumber, TextQuery, serve_page, slice_page
from .wait_graph import draw_graph

INCIDENTS_PER_PAGE = 50
PERIODS = {
    "1h": timedelta(hours=1),
    "24h": timedelta(days=1),
    "7d": timedelta(days=7),
    "30d": timedelta(days=30),
}
COMPARED_FIELDS = ("op", "shapes", "dtype", "reduce_op", "root", "peer", "splits", "detail")
MAX_PROPOSED_RANKS = 32  # ranks that the form for new stacks proposes
MAX_RANKS_LENGTH = 60  # characters in a line of the timeline
# The parts of the incident's page that the file has, in this order, with their labels.
SECTIONS = (
    ("verdict", "Verdict"),
    ("graph", "Graph"),
    ("calls", "Calls"),
    ("stacks", "Stacks"),
    ("device", "Devices"),
    ("hardware", "Hardware"),
    ("processes", "Processes"),
    ("timeline", "Timeline"),
)


class IncidentsQuery(BaseModel):
    """Empty values select everything."""

    job: str = ""
    status: Literal["open", "resolved", ""] = ""
    kind: VerdictKind | Literal[""] = ""
    since: Literal["1h", "24h", "7d", "30d", ""] = ""
    rank: Annotated[str, Query(pattern="^[0-9]{0,9}$")] = ""
    page: PageNumber = 1

    @property
    def is_active(self) -> bool:
        return any(self.model_dump(exclude={"page"}).values())


routes = APIRouter()


@routes.get("/incidents", include_in_schema=False)
async def show_incidents(
    state: State, request: Request, listed: api.PageOf100, query: Annotated[IncidentsQuery, Query()]
) -> Response:
    if wants_json(request):
        return api.make_incidents_response(listed, _find_matching_records(state, query))
    return serve_page(state, request, "incidents.html", lambda: _build_list_values(state, query))


@routes.get("/incidents/{id}", include_in_schema=False)
async def show_incident(
    state: State, request: Request, id: str, ranks: TextQuery = "", dump: TextQuery = ""
) -> Response:
    if wants_json(request):
        return await api.show_incident(state, id)
    return serve_page(
        state, request, "incident.html", lambda: _build_incident_values(state, id, ranks, dump)
    )


@routes.get(
    "/api/v1/incidents/{id}/report",
    tags=["incidents"],
    summary="The incident as one HTML file that needs no server",
    response_class=Response,
    responses={200: {"content": {"text/html": {}}}},
)
async def download_report(state: State, id: str) -> Response:
    values = _build_incident_values(state, id, "", "")
    document = state.pages.render_text(
        "report.html",
        **values,
        parts=state.pages.render_parts("incident.html", **values),
        sections=SECTIONS,
        stylesheet=STYLESHEET_PATH.read_text(encoding="utf-8"),
        made_at=state.shared.clock.date(state.now()),
        address=f"{state.base_url}/incidents/{id}",
    )
    return make_attachment(f"hangwatch-{id}.html", document, "text/html")


def _find_matching_records(state: AppState, query: IncidentsQuery) -> list[IncidentRecord]:
    """The matching incidents, the newest first."""
    rank = int(query.rank) if query.rank else None
    records = state.find_incidents(query.job or None, query.status or None, rank)
    if query.kind:
        records = [record for record in records if record.incident.kind is query.kind]
    if query.since:
        earliest = state.shared.clock.date(state.now()) - PERIODS[query.since]
        records = [
            record
            for record in records
            if record.is_open
            or (record.incident.resolved_at or record.incident.opened_at) >= earliest
        ]
    return list(records)


def _build_list_values(state: AppState, query: IncidentsQuery) -> dict[str, Any]:
    records = _find_matching_records(state, query)
    past_jobs = {record.incident.job for record in state.shared.incidents.records.values()}
    current_jobs = {attempt.job for attempt in state.list_latest_attempts()}
    return {
        "shown": slice_page(records, query.page, INCIDENTS_PER_PAGE),
        "jobs": sorted(past_jobs | current_jobs),
        "kinds": [kind.value for kind in VerdictKind],
        "periods": list(PERIODS),
        "filter": query,
    }


def _build_incident_values(state: AppState, id: str, ranks: str, dump_id: str) -> dict[str, Any]:
    """The values of the page. ``ranks`` selects the ranks whose stacks and processes are shown;
    ``dump_id`` names the requested stacks, if any. Raises Problem for an unknown incident.
    """
    record = state.get_incident(id)
    incident = record.incident
    is_listed = parse_rank_filter(ranks)
    is_shown = is_listed or (lambda _: True)
    stacks = []
    for stack in incident.stacks:
        shown_ranks = tuple(filter(is_shown, stack.ranks))
        if shown_ranks:
            stacks.append(replace(stack, ranks=shown_ranks))
    calling_stacks = select_calling_stacks(stacks)
    callers = set(calling_stacks)
    kernels = tuple(entry for entry in incident.kernels if is_shown(entry.rank))
    document = build_document(replace(incident, stacks=(), kernels=kernels))
    ended_at = incident.resolved_at or state.shared.clock.date(state.now())
    dump = state.shared.dumps.find_request(dump_id, state.now()) if dump_id else None
    proposed = (incident.culprits or incident.waiting)[:MAX_PROPOSED_RANKS]
    return {
        "incident": incident,
        "calls": document["calls"],
        "divergence": document["divergence"],
        "culprit_frame": views.find_culprit_frame(incident),
        "recovery": recovery.format_recovery(document),
        "open_s": (ended_at - incident.onset_at).total_seconds(),
        **_build_graph_values(state, record),
        "differing": {
            name
            for name in COMPARED_FIELDS
            if len({repr(call[name]) for call in document["calls"]}) > 1
        },
        "compared": COMPARED_FIELDS,
        "ranks": ranks,
        "is_invalid_filter": bool(ranks.strip()) and is_listed is None,
        "tree": merge_stacks(convert_stacks(calling_stacks)),
        "tree_ranks": sorted({rank for stack in calling_stacks for rank in stack.ranks}),
        "failed_stacks": [stack for stack in stacks if stack.error is not None],
        "other_stacks": [s for s in stacks if s.frames and s not in callers],
        "kernels": list(terminal.describe_incident_kernels(document)),
        "processes": [process for process in incident.processes if is_shown(process.rank)],
        "device": [position for position in incident.device if is_shown(position.rank)],
        "hardware": [
            (entry, terminal.describe_observation(entry.observation)) for entry in incident.hardware
        ],
        "timeline": _build_timeline(incident, document),
        "dump_id": dump_id,
        "dump": dump,
        "dump_stacks": _merge_dump_stacks(dump) if dump else [],
        "proposed_ranks": ", ".join(map(str, proposed)),
    }


def _build_graph_values(state: AppState, record: IncidentRecord) -> dict[str, Any]:
    """The graph, with its names: ``group_names`` by group, and ``ops`` by (rank, call). Calls
    outside the incident have a name only while the job is known.
    """
    incident = record.incident
    places: dict[int, str] = {}
    for stack in select_calling_stacks(incident.stacks):
        frame = find_user_frame(stack.frames)
        if frame is not None:
            file_name = frame.file.rsplit("/", 1)[-1]
            places |= dict.fromkeys(stack.ranks, f"{file_name}:{frame.line} {frame.function}")
    picture = draw_graph(incident, places)

    group_names: dict[str, str] = {}
    ops: dict[tuple[int, int], str] = {}
    attempt = state.shared.fleet.attempts.get(record.attempt_key)
    processes = {} if attempt is None else attempt.processes
    for rank in processes.keys() & {arrow.waiter for arrow in picture.arrows}:
        for stream in processes[rank].streams.values():
            if stream.is_pending:
                group = stream.group
                group_names[group.name] = group_name(group.name, group.desc)
                ops[rank, stream.first_unfinished] = stream.op
    if incident.group:
        name = incident.group.name
        group_names[name] = group_name(name, incident.group.desc)
    for call_class in incident.calls:
        call = call_class.call
        for rank in call_class.ranks:
            ops[rank, call.seq] = call.signature.op
    return {"picture": picture, "group_names": group_names, "ops": ops}


def _merge_dump_stacks(dump: RequestedDump) -> list[tuple[MergedStack, bool]]:
    """The stacks of a dump, equal ones merged, each with whether it is a calling thread's."""
    merged: dict[MergedStack, tuple[list[int], bool]] = {}
    for rank in dump.ranks:
        for index, stack in enumerate(rank.stacks):
            content = replace(stack, ranks=(), taken_at=dump.created_at)
            ranks, _ = merged.setdefault(content, ([], index == 0))
            ranks.append(rank.rank)
    shown = [
        (replace(stack, ranks=tuple(ranks)), is_caller)
        for stack, (ranks, is_caller) in merged.items()
    ]
    return sorted(shown, key=lambda entry: (not entry[1], len(entry[0].ranks)))


def _build_timeline(incident: Incident, document: Document) -> list[tuple[datetime, str]]:
    onset = "Onset"
    if incident.waiting:
        ranks = truncate_end(name_ranks(incident.waiting), MAX_RANKS_LENGTH)
        onset = f"Onset: {ranks} started waiting"
    opened = f"Incident opened: {incident.severity.value} {incident.kind.value}"
    events = [(incident.onset_at, onset), (incident.opened_at, opened)]
    # Stacks taken within the same second, from the same source, are one event.
    batches: dict[tuple[datetime, str, bool], list[MergedStack]] = {}
    for stack in incident.stacks:
        key = stack.taken_at.replace(microsecond=0), stack.source, stack.error is None
        batches.setdefault(key, []).append(stack)
    for (_, source, is_success), stacks in batches.items():
        all_ranks = name_ranks(rank for stack in stacks for rank in stack.ranks)
        what = "Stacks taken of" if is_success else "Failed to take stacks of"
        text = f"{what} {truncate_end(all_ranks, MAX_RANKS_LENGTH)} ({source})"
        events.append((min(stack.taken_at for stack in stacks), text))
    for at, text in recovery.iter_recovery_events(document):
        events.append((parse_time(at), text))
    if incident.resolved_at is not None:
        reason = "the job made progress or ended"
        if incident.resolution:
            reason = terminal.RESOLUTIONS[incident.resolution]
        events.append((incident.resolved_at, f"Resolved: {reason}"))
    return sorted(events, key=lambda event: event[0])
