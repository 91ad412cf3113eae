"""The JSON API under ``/api/v1``: jobs, ranks, groups, incidents and events.

Lists come in pages: ``?limit=``, and ``?after=`` with the cursor of the previous page's last item.
An incident can be downloaded as one archive, to attach to a bug report.
"""

from __future__ import annotations

import asyncio
import io
import json
import zipfile
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Generic, Literal, TypeVar

import msgspec
from fastapi import APIRouter, Depends, Header, Query, Request, Response
from fastapi.responses import StreamingResponse
from starlette.datastructures import URL

from hangwatch import __version__
from hangwatch.model.groups import Group
from hangwatch.model.incidents import Incident
from hangwatch.model.ranks import RankState, format_ranks
from hangwatch.report.documents import build_document
from hangwatch.tracking.attempt import Attempt

from ..core.job_views import AttemptView, GroupView, JobView, RankView
from ..core.problems import Problem
from ..core.schema import ApiModel, describe_document
from ..incidents.registry import IncidentRecord
from ..monitor import views
from .app_state import State
from .rendering import make_attachment, make_json_response

# A group of 100,000 ranks repeats all of them for each rank.
MAX_MEMBERS_PER_PAGE = 1 << 18  # members of groups in one response, or 1.5 MB
MAX_DETAILED_RANKS = 4000  # the largest job whose bundle has all data about every rank

Item = TypeVar("Item")
Row = TypeVar("Row")

JobName = Annotated[str | None, Query(description="only this job")]
RankNumber = Annotated[int | None, Query(ge=0, description="only this rank")]


class Page(ApiModel, Generic[Item]):
    """Describes the responses; ``next`` is the URL of the next page."""

    items: list[Item]
    next: str | None = None


@dataclass(frozen=True, slots=True)
class PageRequest:
    """The page that a request wants: ``limit`` items after the one with the cursor ``after``."""

    url: URL
    limit: int
    after: str | None = None

    def make_response(
        self,
        rows: Iterable[Row],
        make_cursor: Callable[[Row], str],
        make_item: Callable[[Row], object],
        count_members: Callable[[Row], int] = lambda _: 0,
    ) -> Response:
        """The page of ``rows`` as JSON, shorter if its items would have over `MAX_MEMBERS_PER_PAGE`
        members. Only its items are built. Raises Problem for a cursor that no row has.
        """
        remaining = iter(rows)
        if self.after is not None and not any(make_cursor(row) == self.after for row in remaining):
            raise Problem(
                422,
                f"the list has no item {self.after!r} to continue after: start again without ?after=",
            )
        chosen: list[Row] = []
        weight = 0
        next_url = None
        for row in remaining:
            weight += count_members(row)
            if len(chosen) == self.limit or (chosen and weight > MAX_MEMBERS_PER_PAGE):
                url = self.url.include_query_params(after=make_cursor(chosen[-1]), limit=self.limit)
                next_url = f"{url.path}?{url.query}"
                break
            chosen.append(row)
        return make_json_response({"items": [make_item(row) for row in chosen], "next": next_url})


def _read_page_request(default_limit: int) -> Callable[..., Awaitable[PageRequest]]:
    async def read_page_request(
        request: Request,
        limit: Annotated[
            int, Query(ge=1, le=10_000, description="maximum number of items in one response")
        ] = default_limit,
        after: Annotated[
            str | None, Query(description="the cursor in `next` of the previous response")
        ] = None,
    ) -> PageRequest:
        return PageRequest(request.url, limit, after)

    return read_page_request


# The pages of routes, with up to 100 large items or 1000 small ones unless the request says more.
PageOf100 = Annotated[PageRequest, Depends(_read_page_request(100))]
PageOf1000 = Annotated[PageRequest, Depends(_read_page_request(1000))]

routes = APIRouter(prefix="/api/v1")


@routes.get(
    "/jobs",
    name="jobs",
    tags=["jobs"],
    summary="Jobs, each with its latest attempt, the newest first",
    response_model=Page[JobView],
)
async def list_jobs(state: State, page: PageOf1000, job: JobName = None) -> Response:
    return page.make_response(state.find_attempts(job), lambda a: a.job, state.describe_job)


@routes.get(
    "/attempts",
    name="attempts",
    tags=["jobs"],
    summary="Runs of jobs from the history, newest first",
    response_model=Page[AttemptView],
)
async def list_attempts(
    state: State,
    page: PageOf1000,
    job: Annotated[
        str | None, Query(max_length=256, pattern=r"^[^\x00]*$", description="only this job")
    ] = None,
) -> Response:
    rows = await asyncio.to_thread(state.watch.persistence.store.load_attempts, job)
    return page.make_response(rows, lambda a: f"{a.server or ''}/{a.job}/{a.attempt}", lambda a: a)


@routes.get(
    "/ranks",
    name="ranks",
    tags=["jobs"],
    summary="Ranks of the latest attempt of each job",
    response_model=Page[RankView],
)
async def list_ranks(
    state: State,
    page: PageOf1000,
    job: JobName = None,
    attempt: Annotated[
        int | None, Query(ge=0, description="an attempt of ?job= other than the latest")
    ] = None,
    rank: RankNumber = None,
    rank_state: Annotated[RankState | None, Query(alias="state")] = None,
    members: Annotated[
        bool,
        Query(description="false: omit the ranks of each group, which are many in a large job"),
    ] = True,
) -> Response:
    now = state.now()
    rows = (
        (shown, number, states[number])
        for shown in state.find_attempts(job, attempt)
        for states in [state.get_rank_states(shown)]
        for number in (states if rank is None else states.keys() & {rank})
        if rank_state is None or states[number] is rank_state
    )
    return page.make_response(
        rows,
        lambda row: f"{row[0].job}/{row[0].number}/{row[1]}",
        lambda row: views.describe_rank(*row, now, members),
        lambda row: views.count_members(row[0], row[1]) if members else 0,
    )


@routes.get(
    "/groups",
    name="groups",
    tags=["jobs"],
    summary="Process groups, with the progress of each member",
    response_model=Page[GroupView],
)
async def list_groups(
    state: State, page: PageOf1000, job: JobName = None, rank: RankNumber = None
) -> Response:
    rows = [
        (attempt, group, streams)
        for attempt in state.find_attempts(job)
        for group, streams in views.list_groups(attempt, rank)
    ]
    return page.make_response(
        rows,
        lambda row: make_group_cursor(row[0], row[1]),
        lambda row: views.describe_group(*row),
        lambda row: len(row[2]),
    )


def make_group_cursor(attempt: Attempt, group: Group) -> str:
    generation, name, ranks, world_size = group.key
    first_rank = format_ranks(ranks[:1])
    return f"{attempt.job}/{attempt.number}/{generation}/{name}/{first_rank}/{world_size}"


@routes.get(
    "/incidents",
    name="incidents",
    tags=["incidents"],
    summary="Incidents, the newest first",
    response_model=Page.__class_getitem__(describe_document(Incident)),
)
async def list_incidents(
    state: State,
    page: PageOf100,
    job: JobName = None,
    status: Annotated[Literal["open", "resolved"] | None, Query()] = None,
    rank: RankNumber = None,
) -> Response:
    return make_incidents_response(page, state.find_incidents(job, status, rank))


def make_incidents_response(page: PageRequest, records: Sequence[IncidentRecord]) -> Response:
    return page.make_response(
        records,
        lambda record: record.incident.id,
        lambda record: build_document(record.incident),
    )


@routes.get(
    "/incidents/{id}",
    name="incident",
    tags=["incidents"],
    summary="One incident with its evidence",
    response_model=describe_document(Incident),
)
async def show_incident(state: State, id: str) -> Response:
    return make_json_response(build_document(state.get_incident(id).incident))


@routes.get(
    "/incidents/{id}/bundle",
    name="archive",
    tags=["incidents"],
    summary="All data about an incident as a zip archive",
    response_class=Response,
    responses={200: {"content": {"application/zip": {}}}},
)
async def download_bundle(state: State, id: str) -> Response:
    record = state.get_incident(id)
    incident = record.incident
    ranks = []
    attempt = state.shared.fleet.attempts.get(record.attempt_key)
    if attempt is not None:
        states = state.get_rank_states(attempt)
        now = state.now()
        described = list(states)
        is_large = len(states) > MAX_DETAILED_RANKS
        if is_large:  # the culprits and first waiting ranks, without members of groups
            involved = incident.involved_ranks[: MAX_DETAILED_RANKS // 4]
            described = [rank for rank in involved if rank in states]
        ranks = [
            views.describe_rank(attempt, rank, states[rank], now, members=not is_large)
            for rank in described
        ]
    archive = build_archive(incident, ranks)
    return make_attachment(f"hangwatch-{id}.zip", archive, "application/zip")


@routes.get(
    "/events",
    name="events",
    tags=["events"],
    summary="Changes of ranks, incidents and jobs as server-sent events",
    response_class=StreamingResponse,
    responses={200: {"content": {"text/event-stream": {}}}},
)
async def stream_events(
    state: State,
    last_event_id: Annotated[str | None, Header(description="resume after this event")] = None,
) -> StreamingResponse:
    events = state.shared.events
    return events.make_response(events.stream_events(last_event_id))


def build_archive(incident: Incident, ranks: Sequence[RankView]) -> bytes:
    """A zip archive: incident.json, ranks.json, and stacks.txt with the innermost frames first."""
    lines = [f"# {incident.summary}"]
    for entry in incident.stacks:
        role = "culprit" if set(entry.ranks) & set(incident.culprits) else "waiting"
        thread = entry.thread or "no thread"
        lines += [
            "",
            f"rank {format_ranks(entry.ranks)} ({role}), {thread}, {entry.source},"
            f" {entry.taken_at.isoformat()}",
        ]
        if entry.error is not None:
            lines.append(f"    {entry.error}")
        for frame in entry.frames:
            lines.append(f"    {frame.function} ({frame.file}:{frame.line})")
            if frame.text:
                lines.append(f"        {frame.text}")
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("incident.json", json.dumps(build_document(incident), indent=1))
        archive.writestr("ranks.json", json.dumps(msgspec.to_builtins(ranks), indent=1))
        archive.writestr("stacks.txt", "\n".join(lines) + "\n")
        archive.writestr("VERSION", __version__ + "\n")
    return buffer.getvalue()
