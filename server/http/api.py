"""The JSON API under ``/api/v1``: jobs, ranks, groups, incidents, dumps and events."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from typing import Annotated, Literal

from fastapi import APIRouter, Header, Query, Request, Response
from fastapi.responses import StreamingResponse

from hangwatch.model.groups import GroupKey
from hangwatch.model.ranks import RankState, format_ranks
from hangwatch.report.documents import build_incident_document
from hangwatch.tracking.attempt import Attempt

from ..core.job_views import AttemptView, GroupView, JobView, RankView
from ..core.problems import Problem
from ..monitor import views
from ..ondemand.dumps import build_dump_document
from . import bundle, incident_schema, schema, stream
from .app_state import AppState, require_single_attempt
from .json_responses import make_json_response, make_page_response
from .listing import PageCursor, PageLimit, build_page
from .rendering import make_attachment

MAX_PENDING_DUMP_RANKS = 65536  # in dumps that are not complete

JobName = Annotated[str | None, Query(description="only this job")]
RankNumber = Annotated[int | None, Query(ge=0, description="only this rank")]
Status = Annotated[Literal["open", "resolved"] | None, Query()]


def build_router(live: AppState) -> APIRouter:
    routes = APIRouter(prefix="/api/v1")
    _add_job_routes(routes, live)
    _add_rank_route(routes, live)
    _add_group_route(routes, live)
    _add_incident_routes(routes, live)
    _add_dump_routes(routes, live)

    @routes.get(
        "/events",
        operation_id="events_api_v1_events_get",
        tags=["events"],
        summary="Changes of ranks, incidents and jobs as server-sent events",
        response_class=StreamingResponse,
        responses={200: {"content": {"text/event-stream": {}}}},
    )
    async def stream_events(
        last_event_id: Annotated[str | None, Header(description="resume after this event")] = None,
    ) -> StreamingResponse:
        return stream.make_stream_response(live, live.watch.events.stream_events(last_event_id))

    return routes


def _add_job_routes(routes: APIRouter, live: AppState) -> None:
    @routes.get(
        "/jobs",
        operation_id="jobs_api_v1_jobs_get",
        tags=["jobs"],
        summary="Jobs, each with its latest attempt, the newest first",
        response_model=schema.Page[JobView],
    )
    async def list_jobs(
        request: Request, job: JobName = None, limit: PageLimit = 1000, after: PageCursor = None
    ) -> Response:
        return make_page_response(
            build_page(
                request, live.find_attempts(job), lambda a: a.job, live.describe_job, limit, after
            )
        )

    @routes.get(
        "/attempts",
        operation_id="attempts_api_v1_attempts_get",
        tags=["jobs"],
        summary="Runs of jobs from the history, newest first",
        response_model=schema.Page[AttemptView],
    )
    async def list_attempts(
        request: Request,
        job: Annotated[
            str | None, Query(max_length=256, pattern=r"^[^\x00]*$", description="only this job")
        ] = None,
        limit: PageLimit = 1000,
        after: PageCursor = None,
    ) -> Response:
        rows = await asyncio.to_thread(live.watch.store.load_attempts, job)
        return make_page_response(
            build_page(
                request,
                rows,
                lambda a: f"{a.server or ''}/{a.job}/{a.attempt}",
                lambda a: a,
                limit,
                after,
            )
        )


def _add_rank_route(routes: APIRouter, live: AppState) -> None:
    @routes.get(
        "/ranks",
        operation_id="ranks_api_v1_ranks_get",
        tags=["jobs"],
        summary="Ranks of the latest attempt of each job",
        response_model=schema.Page[RankView],
    )
    async def list_ranks(
        request: Request,
        job: JobName = None,
        attempt: Annotated[
            int | None, Query(ge=0, description="an attempt of ?job= other than the latest")
        ] = None,
        rank: RankNumber = None,
        state: RankState | None = None,
        members: Annotated[
            bool,
            Query(
                description=("false: omit the ranks of each group, which are many in a large job")
            ),
        ] = True,
        limit: PageLimit = 1000,
        after: PageCursor = None,
    ) -> Response:
        now = live.now()
        rows = (
            (shown, number, rank_state)
            for shown in live.find_attempts(job, attempt)
            for number, rank_state in _select_rank(live.get_rank_states(shown), rank)
            if state is None or rank_state is state
        )
        return make_page_response(build_page(
            request, rows, lambda r: f"{r[0].job}/{r[0].number}/{r[1]}", lambda r: views.describe_rank(*r, now, members), limit, after,
            lambda r: views.count_members(r[0], r[1]) if members else 0,
        ))  # fmt: skip


def _add_group_route(routes: APIRouter, live: AppState) -> None:
    @routes.get(
        "/groups",
        operation_id="groups_api_v1_groups_get",
        tags=["jobs"],
        summary="Process groups, with the progress of each member",
        response_model=schema.Page[GroupView],
    )
    async def list_groups(
        request: Request,
        job: JobName = None,
        rank: RankNumber = None,
        limit: PageLimit = 1000,
        after: PageCursor = None,
    ) -> Response:
        rows = [(a, key) for a in live.find_attempts(job) for key in views.list_groups(a, rank)]

        def make_cursor(row: tuple[Attempt, GroupKey]) -> str:
            its, (generation, group, ranks, world) = row
            return f"{its.job}/{its.number}/{generation}/{group}/{format_ranks(ranks[:1])}/{world}"

        return make_page_response(
            build_page(
                request,
                rows,
                make_cursor,
                lambda row: views.describe_group(*row),
                limit,
                after,
                lambda row: len(row[0].streams_by_group[row[1]]),
            )
        )


def _select_rank(
    states: Mapping[int, RankState], rank: int | None
) -> Iterable[tuple[int, RankState]]:
    """The states of all ranks, or of one."""
    if rank is None:
        return states.items()
    return [(rank, states[rank])] if rank in states else []


def _add_incident_routes(routes: APIRouter, live: AppState) -> None:
    @routes.get(
        "/incidents",
        operation_id="incidents_api_v1_incidents_get",
        tags=["incidents"],
        summary="Incidents, the newest first",
        response_model=schema.Page[incident_schema.Incident],
    )
    async def list_incidents(
        request: Request,
        job: JobName = None,
        status: Status = None,
        rank: RankNumber = None,
        limit: PageLimit = 100,
        after: PageCursor = None,
    ) -> Response:
        page = build_page(
            request,
            live.find_incidents(job, status, rank),
            lambda record: record.incident.id,
            lambda record: build_incident_document(record.incident),
            limit,
            after,
        )
        return make_page_response(page)

    @routes.get(
        "/incidents/{id}",
        operation_id="incident_api_v1_incidents__id__get",
        tags=["incidents"],
        summary="One incident with its evidence",
        response_model=incident_schema.Incident,
    )
    async def show_incident(id: str) -> Response:
        return make_json_response(build_incident_document(live.get_incident(id).incident))

    @routes.get(
        "/incidents/{id}/bundle",
        operation_id="archive_api_v1_incidents__id__bundle_get",
        tags=["incidents"],
        summary="All data about an incident as a zip archive",
        response_class=Response,
        responses={200: {"content": {"application/zip": {}}}},
    )
    async def download_bundle(id: str) -> Response:
        record = live.get_incident(id)
        attempt = live.watch.fleet.attempts.get(record.attempt_key)
        ranks = (
            bundle.describe_ranks(
                attempt, live.get_rank_states(attempt), record.incident, live.now()
            )
            if attempt
            else []
        )
        name = f"hangwatch-{record.incident.id}.zip"
        return make_attachment(
            name, bundle.build_archive(record.incident, ranks), "application/zip"
        )


def _add_dump_routes(routes: APIRouter, live: AppState) -> None:
    @routes.post(
        "/dumps",
        operation_id="ask_api_v1_dumps_post",
        tags=["dumps"],
        status_code=202,
        summary="Requests the current stacks of ranks",
        response_model=schema.Dump,
    )
    async def request_dump(body: schema.DumpRequest) -> Response:
        attempt = require_single_attempt(
            live.find_attempts(body.job),
            body.ranks,
            "no job has reported yet: there is nothing to dump",
        )
        if len(live.watch.commands.user_requests) + len(body.ranks) > MAX_PENDING_DUMP_RANKS:
            raise Problem(
                429,
                f"stacks of at most {MAX_PENDING_DUMP_RANKS} ranks can be requested at a time",
                headers={"Retry-After": "5"},
            )
        dump = live.watch.on_demand.dumps.request_dump(attempt, body.ranks, body.native, live.now())
        response = make_json_response(build_dump_document(dump), status_code=202)
        response.headers["Location"] = f"/api/v1/dumps/{dump.id}"
        return response

    @routes.get(
        "/dumps/{id}",
        operation_id="dump_api_v1_dumps__id__get",
        tags=["dumps"],
        summary="The results of a dump so far",
        response_model=schema.Dump,
    )
    async def show_dump(id: str) -> Response:
        dump = live.watch.on_demand.dumps.find_dump(id, live.now())
        if dump is None:
            raise Problem(
                404,
                f"unknown dump {id!r}: only recent dumps are kept, and none after a restart;"
                " request it again",
            )
        return make_json_response(build_dump_document(dump))
