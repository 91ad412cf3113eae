"""Evidence in detail: ``/api/v1/trace`` shows the calls of ranks as they are made,
``/api/v1/dumps`` their stacks, ``/api/v1/recordings`` where they spend their time. Recordings and the
stacks of incidents can be downloaded as flame graphs, folded stacks, and profiles for speedscope.
"""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from datetime import datetime, timezone
from typing import Annotated

from fastapi import APIRouter, Query
from fastapi.responses import PlainTextResponse, Response, StreamingResponse

from hangwatch.model.calls import StreamKind
from hangwatch.model.incidents import MergedStack
from hangwatch.model.ranks import AttemptKey, Frame
from hangwatch.report import terminal
from hangwatch.report.documents import build_document
from hangwatch.report.text import group_name, name_ranks, strip_style
from hangwatch.stacks import trees
from hangwatch.stacks.frames import is_library
from hangwatch.stacks.profile import Profile, make_speedscope_document

from ..core.problems import Problem
from ..ondemand.dumps import Dump, DumpRequest
from ..ondemand.recordings import Recording, RecordingRequest, describe_recording, unpack_profiles
from ..ondemand.traces import MAX_SESSIONS, MAX_TRACED_RANKS, stream_events
from .app_state import AppState, State
from .rendering import FLAME_GRAPH_WIDTH_PX, PageRenderer, make_attachment

MAX_PENDING_DUMP_RANKS = 65536  # the ranks in dumps that are not complete
MAX_TRACE_S = 86_400
MIN_BAR_WIDTH_PX = 0.5  # narrower bars of flame graphs are omitted
MAX_STACK_DEPTH = 250  # frames in a flame graph

NameQuery = Annotated[str, Query(max_length=256)]
RankProfiles = Sequence[tuple[int, Profile]]

routes = APIRouter(prefix="/api/v1")
recording_routes = APIRouter(prefix="/recordings", tags=["recordings"])
stack_routes = APIRouter(prefix="/incidents/{id}", tags=["incidents"])


@routes.get(
    "/trace",
    name="trace",
    tags=["trace"],
    summary="The calls of some ranks as they are made, as server-sent events",
    response_class=StreamingResponse,
    responses={200: {"content": {"text/event-stream": {}}}},
)
async def stream_trace(
    state: State,
    rank: Annotated[
        list[int], Query(min_length=1, max_length=MAX_TRACED_RANKS, description="these ranks")
    ],
    job: Annotated[
        str | None, Query(description="of this job; can be omitted if only one is known")
    ] = None,
    op: Annotated[NameQuery, Query(description="only this operation, such as all_reduce")] = "",
    group: Annotated[
        NameQuery, Query(description="only this process group, by its name or description")
    ] = "",
    values: Annotated[
        bool, Query(description="with the values of the tensors, if the job records them")
    ] = False,
    seconds: Annotated[
        float | None, Query(gt=0, le=MAX_TRACE_S, description="end after this time")
    ] = None,
) -> StreamingResponse:
    attempt = state.choose_attempt(job, rank)
    traces = state.shared.traces
    if len(traces.requests) >= MAX_SESSIONS:
        raise Problem(
            503,
            f"{MAX_SESSIONS} clients already trace calls on this server: end one of them",
            headers={"Retry-After": "30"},
        )
    ended = [number for number in rank if attempt.processes[number].exit is not None]
    if len(ended) == len(set(rank)):
        have = "has" if len(ended) == 1 else "have"
        detail = f"{name_ranks(ended)} of job {attempt.job!r} {have} ended and will make no calls"
        raise Problem(409, detail)
    groups = {
        (stream.group.name, stream.group.desc)
        for number in rank
        for stream in attempt.processes[number].streams.values()
        if stream.kind is not StreamKind.SETUP
    }
    if group and not any(group in names for names in groups):
        known = ", ".join(sorted({group_name(*names) for names in groups})) or "none yet"
        detail = f"unknown group {group!r} of {name_ranks(rank)}; known groups: {known}"
        raise Problem(404, detail)

    async def stream_calls() -> AsyncIterator[str]:
        session = traces.start_session(
            attempt, rank, state.now(), op=op, group=group, values=values, seconds=seconds
        )
        try:
            async for part in stream_events(traces, session, lambda: state.shared.events.is_closed):
                yield part
        finally:
            traces.drop_request(session.id)

    return state.shared.events.make_response(stream_calls())


@routes.post(
    "/dumps",
    name="ask",
    tags=["dumps"],
    status_code=202,
    summary="Requests the current stacks of ranks",
)
async def request_dump(state: State, body: DumpRequest, response: Response) -> Dump:
    attempt = state.choose_attempt(body.job, body.ranks)
    if state.shared.commands.unsent_count + len(body.ranks) > MAX_PENDING_DUMP_RANKS:
        raise Problem(
            429,
            f"stacks of at most {MAX_PENDING_DUMP_RANKS} ranks can be requested at a time",
            headers={"Retry-After": "5"},
        )
    dump = state.shared.dumps.request_dump(attempt, body.ranks, body.native, state.now())
    response.headers["Location"] = f"/api/v1/dumps/{dump.id}"
    return Dump.model_validate(dump, from_attributes=True)


@routes.get(
    "/dumps/{id}",
    name="dump",
    tags=["dumps"],
    summary="The results of a dump so far",
)
async def show_dump(state: State, id: str) -> Dump:
    dump = state.shared.dumps.get_request(id)
    return Dump.model_validate(dump, from_attributes=True)


@recording_routes.post(
    "",
    name="ask",
    status_code=202,
    summary="Records where ranks spend their time, sampled with py-spy",
)
async def request_recording(
    state: State, wanted: RecordingRequest, response: Response
) -> Recording:
    attempt = state.choose_attempt(wanted.job, wanted.ranks)
    registry = state.shared.recordings
    other = registry.find_conflict(attempt, wanted.ranks, state.now())
    if other is not None:
        detail = (
            f"recording {other} is in progress on a host of these ranks, and a host records one"
            " process at a time: wait until it ends"
        )
        raise Problem(409, detail, headers={"Retry-After": "10"}, recording=other)
    recording = registry.request_recording(attempt, wanted, state.now())
    response.headers["Location"] = f"/api/v1/recordings/{recording.id}"
    return describe_recording(recording)


@recording_routes.post(
    "/{id}/stop",
    name="stop",
    status_code=202,
    summary="Ends a recording early and keeps what was sampled",
)
async def stop_recording(state: State, id: str) -> Recording:
    registry = state.shared.recordings
    recording = registry.get_request(id)
    attempt = state.shared.fleet.attempts.get(AttemptKey(recording.job, recording.attempt))
    if attempt is not None:
        registry.stop_recording(recording, attempt, state.now())
    return await asyncio.to_thread(describe_recording, recording)


@recording_routes.get(
    "/{id}",
    name="recording",
    summary="The progress and the results of a recording",
)
async def show_recording(state: State, id: str) -> Recording:
    recording = state.shared.recordings.get_request(id)
    return await asyncio.to_thread(describe_recording, recording)


async def _render_recording(
    state: AppState, id: str, render: Callable[[str, RankProfiles, int], str]
) -> str:
    recording = state.shared.recordings.get_request(id)
    if recording.status == "pending":
        raise Problem(
            409,
            f"recording {id} is still in progress: see /api/v1/recordings/{id}",
            headers={"Retry-After": "2"},
        )
    if not recording.profile_bytes:
        detail = f"recording {id} failed on every rank: /api/v1/recordings/{id} shows why"
        raise Problem(409, detail)
    sampled = [rank.rank for rank in recording.ranks if rank.profile]
    rate = recording.rate
    title = (
        f"job {recording.job}, {name_ranks(sampled)}: {recording.seconds} s at {rate} Hz,"
        f" {recording.created_at:%Y-%m-%d %H:%M:%S} UTC"
    )
    return await asyncio.to_thread(lambda: render(title, unpack_profiles(recording), rate))


@recording_routes.get(
    "/{id}/flamegraph.svg",
    name="flamegraph",
    summary="A recording as a flame graph",
    response_class=Response,
    responses={200: {"content": {"image/svg+xml": {}}}},
)
async def download_recording_flamegraph(state: State, id: str) -> Response:
    image = await _render_recording(state, id, functools.partial(render_flamegraph, state.pages))
    return make_attachment(f"hangwatch-{id}.svg", image, "image/svg+xml")


@recording_routes.get(
    "/{id}/speedscope.json",
    name="for_speedscope",
    summary="A recording for speedscope",
    response_class=Response,
)
async def download_recording_speedscope(state: State, id: str) -> Response:
    document = await _render_recording(state, id, render_speedscope)
    return make_attachment(f"hangwatch-{id}.speedscope.json", document, "application/json")


def render_flamegraph(pages: PageRenderer, title: str, profiles: RankProfiles, rate: int) -> str:
    """An SVG with a flame graph of each active thread. A frame's width is the time spent in it."""
    threads = [
        (f"rank {rank}, {thread.thread}", thread)
        for rank, profile in profiles
        for thread in profile.shown_threads
    ]
    total = max(1, sum(thread.sample_count for _, thread in threads))
    bars = []
    x = 0.0
    for label, thread in threads:
        root = Frame(function=label, file="", line=0)
        stacks = (((root, *frames[:MAX_STACK_DEPTH]), count) for frames, count in thread.stacks)
        for bar in trees.layout_bars(stacks, x, total, MIN_BAR_WIDTH_PX / FLAME_GRAPH_WIDTH_PX):
            frame = bar.frame
            file = f" {frame.file}" if frame.file else ""
            line = f":{frame.line}" if frame.line else ""
            tooltip = f"{frame.function}{file}{line}, {bar.samples / rate:.2f} s"
            bars.append((bar, frame.function, tooltip))
        x += thread.sample_count / total
    return pages.render_flame_graph(title, bars)


def render_speedscope(title: str, profiles: RankProfiles, rate: int) -> str:
    """A file for https://www.speedscope.app. The order of a thread's samples is not recorded."""
    threads = (
        (f"rank {rank}, {thread.thread}", thread.stacks)
        for rank, profile in profiles
        for thread in profile.threads
    )
    return json.dumps(make_speedscope_document(title, threads, "seconds", rate))


@stack_routes.get(
    "/text",
    name="text",
    summary="The whole verdict as text",
    response_class=PlainTextResponse,
)
async def show_text(state: State, id: str) -> Response:
    document = build_document(state.get_incident(id).incident)
    lines = terminal.format_incident(document, datetime.now(timezone.utc), full=True)
    return PlainTextResponse(strip_style("\n".join(lines)) + "\n")


@stack_routes.get(
    "/stacks.speedscope.json",
    name="for_speedscope",
    summary="The stacks for speedscope",
)
async def download_stacks_speedscope(state: State, id: str) -> Response:
    incident = state.get_incident(id).incident
    profiles = []
    for stack in incident.stacks:
        if stack.frames:
            name = f"{name_ranks(stack.ranks)}, {stack.thread or 'no thread'}"
            profiles.append((name, [(stack.frames[::-1], 1)]))
    document = json.dumps(make_speedscope_document(incident.summary, profiles, "none", rate=1))
    return make_attachment(f"hangwatch-{id}.speedscope.json", document, "application/json")


@stack_routes.get(
    "/stacks.folded",
    name="for_flamegraph",
    summary="The stacks as folded lines, for flame graph tools",
    response_class=PlainTextResponse,
)
async def download_folded_stacks(state: State, id: str) -> Response:
    lines = trees.format_folded_stacks(
        convert_stacks(select_calling_stacks(state.get_incident(id).incident.stacks))
    )
    text = "".join(f"{line}\n" for line in lines)
    return make_attachment(f"hangwatch-{id}.folded", text, "text/plain")


@stack_routes.get(
    "/stacks.svg",
    name="flamegraph",
    summary="The stacks as a flame graph: a frame's width is its number of ranks",
    response_class=Response,
    responses={200: {"content": {"image/svg+xml": {}}}},
)
async def download_stacks_flamegraph(state: State, id: str) -> Response:
    incident = state.get_incident(id).incident
    tree = trees.merge_stacks(convert_stacks(select_calling_stacks(incident.stacks)))
    rank_count = max(1, sum(len(branch.ranks) for branch in tree))
    bars = list(_iter_bars(tree, 0.0, 0, rank_count))
    image = state.pages.render_flame_graph(incident.summary, bars)
    return make_attachment(f"hangwatch-{id}.svg", image, "image/svg+xml")


def select_calling_stacks(stacks: Sequence[MergedStack]) -> list[MergedStack]:
    """The calling thread's stack of each rank: the rank's first entry with frames."""
    seen: set[int] = set()
    calling_stacks = []
    for entry in stacks:
        if entry.frames and not seen.issuperset(entry.ranks):
            seen.update(entry.ranks)
            calling_stacks.append(entry)
    return calling_stacks


def convert_stacks(entries: Sequence[MergedStack]) -> list[trees.RankedStack]:
    return [(entry.ranks, entry.frames) for entry in entries]


def _iter_bars(
    branches: tuple[trees.Branch, ...], x: float, depth: int, total_ranks: int
) -> Iterator[tuple[trees.ProfileBar, str, str]]:
    """Bars with their texts and tooltips. Ranks are counted as samples are in a profile."""
    for branch in branches:
        width = len(branch.ranks) / total_ranks
        for level, frame in enumerate(branch.frames, depth):
            text = f"{frame.function} {frame.file}:{frame.line}"
            bar = trees.ProfileBar(
                x=x,
                width=width,
                depth=level,
                frame=frame,
                samples=len(branch.ranks),
                is_user=not is_library(frame.file),
            )
            yield bar, text, f"{text}, {name_ranks(branch.ranks)}"
        yield from _iter_bars(branch.branches, x, depth + len(branch.frames), total_ranks)
        x += width


routes.include_router(recording_routes)
routes.include_router(stack_routes)
