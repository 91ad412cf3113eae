"""The JSON API under ``/api/v1``: jobs, ranks, groups, incidents, dumps and events."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Annotated, Literal

from fastapi import APIRouter, Header, Query, Response
from fastapi.responses import StreamingResponse

from hangwatch.model.groups import GroupKey
from hangwatch.model.ranks import RankState, format_ranks
from hangwatch.report.documents import build_incident_document
from hangwatch.tracking.attempt import Attempt

from ..core.job_views import AttemptView, GroupView, JobView, RankView
from ..core.problems import Problem
from ..incidents.records import IncidentRecord
from ..monitor import views
from ..ondemand.dumps import build_dump_document
from . import bundle, schema, stream
from .app_state import AppState
from .listing import Page, PageOf100, PageOf1000, PageRequest
from .rendering import make_attachment, make_json_response

MAX_PENDING_DUMP_RANKS = 65536  # in dumps that are not complete

JobName = Annotated[str | None, Query(description="only this job")]
RankNumber = Annotated[int | None, Query(ge=0, description="only this rank")]


def build_router(live: AppState) -> APIRouter:
    routes = APIRouter(prefix="/api/v1")
    _add_job_routes(routes, live)
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
        response_model=Page[JobView],
    )
    async def list_jobs(page: PageOf1000, job: JobName = None) -> Response:
        return page.make_response(live.find_attempts(job), lambda a: a.job, live.describe_job)

    @routes.get(
        "/attempts",
        operation_id="attempts_api_v1_attempts_get",
        tags=["jobs"],
        summary="Runs of jobs from the history, newest first",
        response_model=Page[AttemptView],
    )
    async def list_attempts(
        page: PageOf1000,
        job: Annotated[
            str | None, Query(max_length=256, pattern=r"^[^\x00]*$", description="only this job")
        ] = None,
    ) -> Response:
        rows = await asyncio.to_thread(live.watch.store.load_attempts, job)
        return page.make_response(
            rows, lambda a: f"{a.server or ''}/{a.job}/{a.attempt}", lambda a: a
        )

    @routes.get(
        "/ranks",
        operation_id="ranks_api_v1_ranks_get",
        tags=["jobs"],
        summary="Ranks of the latest attempt of each job",
        response_model=Page[RankView],
    )
    async def list_ranks(
        page: PageOf1000,
        job: JobName = None,
        attempt: Annotated[
            int | None, Query(ge=0, description="an attempt of ?job= other than the latest")
        ] = None,
        rank: RankNumber = None,
        state: RankState | None = None,
        members: Annotated[
            bool,
            Query(description="false: omit the ranks of each group, which are many in a large job"),
        ] = True,
    ) -> Response:
        now = live.now()
        rows = (
            (shown, number, states[number])
            for shown in live.find_attempts(job, attempt)
            for states in [live.get_rank_states(shown)]
            for number in (states if rank is None else states.keys() & {rank})
            if state is None or states[number] is state
        )
        return page.make_response(
            rows,
            lambda row: f"{row[0].job}/{row[0].number}/{row[1]}",
            lambda row: views.describe_rank(*row, now, members),
            lambda row: views.count_members(row[0], row[1]) if members else 0,
        )

    @routes.get(
        "/groups",
        operation_id="groups_api_v1_groups_get",
        tags=["jobs"],
        summary="Process groups, with the progress of each member",
        response_model=Page[GroupView],
    )
    async def list_groups(
        page: PageOf1000, job: JobName = None, rank: RankNumber = None
    ) -> Response:
        rows = [(a, key) for a in live.find_attempts(job) for key in views.list_groups(a, rank)]
        return page.make_response(
            rows,
            lambda row: make_group_cursor(*row),
            lambda row: views.describe_group(*row),
            lambda row: len(row[0].streams_by_group[row[1]]),
        )


def make_group_cursor(attempt: Attempt, key: GroupKey) -> str:
    generation, name, ranks, world_size = key
    first_rank = format_ranks(ranks[:1])
    return f"{attempt.job}/{attempt.number}/{generation}/{name}/{first_rank}/{world_size}"


def make_incidents_response(page: PageRequest, records: Sequence[IncidentRecord]) -> Response:
    return page.make_response(
        records,
        lambda record: record.incident.id,
        lambda record: build_incident_document(record.incident),
    )


def _add_incident_routes(routes: APIRouter, live: AppState) -> None:
    @routes.get(
        "/incidents",
        operation_id="incidents_api_v1_incidents_get",
        tags=["incidents"],
        summary="Incidents, the newest first",
        response_model=Page[schema.Incident],
    )
    async def list_incidents(
        page: PageOf100,
        job: JobName = None,
        status: Annotated[Literal["open", "resolved"] | None, Query()] = None,
        rank: RankNumber = None,
    ) -> Response:
        return make_incidents_response(page, live.find_incidents(job, status, rank))

    @routes.get(
        "/incidents/{id}",
        operation_id="incident_api_v1_incidents__id__get",
        tags=["incidents"],
        summary="One incident with its evidence",
        response_model=schema.Incident,
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
        ranks: list[RankView] = []
        if attempt is not None:
            states = live.get_rank_states(attempt)
            ranks = bundle.describe_ranks(attempt, states, record.incident, live.now())
        archive = bundle.build_archive(record.incident, ranks)
        return make_attachment(f"hangwatch-{id}.zip", archive, "application/zip")


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
        attempt = live.choose_attempt(body.job, body.ranks)
        if live.watch.commands.unsent_count + len(body.ranks) > MAX_PENDING_DUMP_RANKS:
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
