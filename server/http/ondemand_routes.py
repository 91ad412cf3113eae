"""``GET /api/v1/trace`` and ``/api/v1/recordings``: what ranks call as they call it, and where they
spend their time.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Annotated

from fastapi import APIRouter, Query, Response
from fastapi.responses import StreamingResponse

from hangwatch.model.calls import StreamKind
from hangwatch.model.ranks import AttemptKey
from hangwatch.report.text import group_name, name_ranks
from hangwatch.tracking.attempt import Attempt

from ..core.problems import Problem
from ..ondemand import schema
from ..ondemand.recording_documents import describe_recording, unpack_profiles
from ..ondemand.recordings import RecordingRecord
from ..ondemand.trace_session import TraceFilter
from ..ondemand.trace_stream import stream_events
from ..ondemand.tracing import MAX_SESSIONS, MAX_TRACED_RANKS
from . import recording_files, stream
from .app_state import AppState, require_single_attempt
from .rendering import make_attachment

MAX_TRACE_S = 86_400

NameQuery = Annotated[str, Query(max_length=256)]


def build_router(live: AppState) -> APIRouter:
    routes = APIRouter(prefix="/api/v1")
    _add_trace_routes(routes, live)
    _add_recording_routes(routes, live)
    _add_file_routes(routes, live)
    return routes


def find_attempt(live: AppState, job: str | None, ranks: Sequence[int]) -> Attempt:
    """The one that is meant, which has all of ``ranks``. Raises Problem."""
    found = live.find_attempts(job)
    if job is None:  # those that have ended spend no time, and make no calls
        found = [a for a in found if not a.is_finished] or found
    return require_single_attempt(found, ranks, "no job has reported yet")


def _add_trace_routes(routes: APIRouter, live: AppState) -> None:
    @routes.get(
        "/trace",
        operation_id="trace_api_v1_trace_get",
        tags=["trace"],
        summary="The calls of some ranks as they are made, as server-sent events",
        response_class=StreamingResponse,
        responses={200: {"content": {"text/event-stream": {}}}},
    )
    async def stream_trace(
        rank: Annotated[
            list[int], Query(min_length=1, max_length=MAX_TRACED_RANKS, description="these ranks")
        ],
        job: Annotated[
            str | None, Query(description="of this job; may be left out where only one is known")
        ] = None,
        op: Annotated[NameQuery, Query(description="only this operation, such as all_reduce")] = "",
        group: Annotated[
            NameQuery, Query(description="only this process group, by its name or description")
        ] = "",
        values: Annotated[
            bool, Query(description="with the values of the tensors, where the job notes them")
        ] = False,
        seconds: Annotated[
            float | None, Query(gt=0, le=MAX_TRACE_S, description="end after so long")
        ] = None,
    ) -> StreamingResponse:
        found = find_attempt(live, job, rank)
        _check_traceable(live, found, rank, group)

        async def stream_calls() -> AsyncIterator[str]:
            traces = live.watch.on_demand.traces
            trace_filter = TraceFilter(op=op, group=group, values=values, seconds=seconds)
            session = traces.start_session(found, rank, trace_filter, live.now())
            try:
                async for part in stream_events(
                    traces, session, lambda: live.watch.events.is_closed
                ):
                    yield part
            finally:
                traces.stop_session(session)

        return stream.make_stream_response(live, stream_calls())


def _check_traceable(live: AppState, attempt: Attempt, ranks: Sequence[int], group: str) -> None:
    """Raises Problem for what cannot be traced."""
    if len(live.watch.on_demand.traces.sessions) >= MAX_SESSIONS:
        raise Problem(
            503,
            f"{MAX_SESSIONS} clients trace calls of this server already: end some",
            headers={"Retry-After": "30"},
        )
    ended = [rank for rank in ranks if attempt.processes[rank].exit is not None]
    if len(ended) == len(set(ranks)):
        raise Problem(
            409,
            f"{name_ranks(ended)} of job {attempt.job!r} {'has' if len(ended) == 1 else 'have'}"
            " ended: no calls will come",
        )
    sequences = [
        s
        for rank in ranks
        for s in attempt.processes[rank].streams.values()
        if s.kind is not StreamKind.SETUP
    ]
    groups = {(s.group.name, s.group.desc) for s in sequences}
    if group and not any(group in names for names in groups):
        known = ", ".join(sorted({group_name(name, desc) for name, desc in groups})) or "none yet"
        raise Problem(
            404, f"no group {group!r} is known of {name_ranks(ranks)}; known are: {known}"
        )


def _add_recording_routes(routes: APIRouter, live: AppState) -> None:
    @routes.post(
        "/recordings",
        operation_id="ask_api_v1_recordings_post",
        tags=["recordings"],
        status_code=202,
        summary="Asks where ranks spend their time, sampled with py-spy",
    )
    async def request_recording(
        wanted: schema.RecordingRequest, response: Response
    ) -> schema.Recording:
        found = find_attempt(live, wanted.job, wanted.ranks)
        registry = live.watch.on_demand.recordings
        other = registry.find_conflict(found, wanted.ranks, live.now())
        if other is not None:
            detail = (
                f"recording {other} is under way on a host of these ranks, and a host records one"
                " process at a time: wait for its end"
            )
            raise Problem(409, detail, headers={"Retry-After": "10"}, recording=other)
        record = registry.request_recording(found, wanted, live.now())
        response.headers["Location"] = f"/api/v1/recordings/{record.id}"
        return describe_recording(record)

    @routes.post(
        "/recordings/{id}/stop",
        operation_id="stop_api_v1_recordings__id__stop_post",
        tags=["recordings"],
        status_code=202,
        summary="Ends a recording with what it has",
    )
    async def stop_recording(id: str) -> schema.Recording:
        kept = _find_recording(live, id)
        if (found := live.watch.fleet.attempts.get(AttemptKey(kept.job, kept.attempt))) is not None:
            live.watch.on_demand.recordings.stop_recording(kept, found, live.now())
        return await asyncio.to_thread(describe_recording, kept)

    @routes.get(
        "/recordings/{id}",
        operation_id="recording_api_v1_recordings__id__get",
        tags=["recordings"],
        summary="How far a recording has come, and what it found",
    )
    async def show_recording(id: str) -> schema.Recording:
        return await asyncio.to_thread(describe_recording, _find_recording(live, id))


def _add_file_routes(routes: APIRouter, live: AppState) -> None:
    @routes.get(
        "/recordings/{id}/flamegraph.svg",
        operation_id="flamegraph_api_v1_recordings__id__flamegraph_svg_get",
        tags=["recordings"],
        summary="A recording as a flame graph",
        response_class=Response,
        responses={200: {"content": {"image/svg+xml": {}}}},
    )
    async def download_flamegraph(id: str) -> Response:
        kept = _find_finished_recording(live, id)

        def render_svg() -> str:
            return recording_files.render_flamegraph(
                _format_title(kept), unpack_profiles(kept), kept.request.rate
            )

        return make_attachment(
            f"hangwatch-{id}.svg", await asyncio.to_thread(render_svg), "image/svg+xml"
        )

    @routes.get(
        "/recordings/{id}/speedscope.json",
        operation_id="for_speedscope_api_v1_recordings__id__speedscope_json_get",
        tags=["recordings"],
        summary="A recording for speedscope",
        response_class=Response,
    )
    async def download_speedscope(id: str) -> Response:
        kept = _find_finished_recording(live, id)

        def render_json() -> str:
            return recording_files.render_speedscope(
                _format_title(kept), unpack_profiles(kept), kept.request.rate
            )

        return make_attachment(
            f"hangwatch-{id}.speedscope.json",
            await asyncio.to_thread(render_json),
            "application/json",
        )


def _find_recording(live: AppState, id: str) -> RecordingRecord:
    found = live.watch.on_demand.recordings.find_recording(id, live.now())
    if found is None:
        raise Problem(
            404,
            f"no recording {id!r} is known: the last ones are kept, and none over a restart; record"
            " again",
        )
    return found


def _find_finished_recording(live: AppState, id: str) -> RecordingRecord:
    found = _find_recording(live, id)
    if found.is_pending:
        raise Problem(
            409,
            f"recording {id} is still under way: see /api/v1/recordings/{id}",
            headers={"Retry-After": "2"},
        )
    if not found.has_profile:
        raise Problem(409, f"recording {id} failed on every rank: /api/v1/recordings/{id} says why")
    return found


def _format_title(recording: RecordingRecord) -> str:
    sampled = [number for number, rank in recording.ranks.items() if rank.profile]
    moment = f"{recording.created_at:%Y-%m-%d %H:%M:%S} UTC"
    return (
        f"job {recording.job}, {name_ranks(sampled)}: {recording.request.seconds} s at {recording.request.rate} Hz,"
        f" {moment}"
    )
