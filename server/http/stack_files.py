"""An incident's stacks as files for other tools, and its verdict as text."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from datetime import datetime, timezone

from fastapi import APIRouter
from fastapi.responses import PlainTextResponse, Response

from hangwatch.model.incidents import MergedStack
from hangwatch.report import terminal
from hangwatch.report.documents import build_incident_document
from hangwatch.report.text import name_ranks
from hangwatch.stacks.call_tree import ProfileBar
from hangwatch.stacks.frames import is_library
from hangwatch.stacks.stack_tree import (
    Branch,
    RankedStack,
    format_folded_stacks,
    merge_stacks,
    stacks_to_speedscope,
)

from .app_state import AppState
from .rendering import make_attachment, render_flame_graph


def select_calling_stacks(stacks: Sequence[MergedStack]) -> list[MergedStack]:
    """The calling thread's stack of each rank: the rank's first entry with frames."""
    seen: set[int] = set()
    calling_stacks = []
    for entry in stacks:
        if entry.frames and not seen.issuperset(entry.ranks):
            seen.update(entry.ranks)
            calling_stacks.append(entry)
    return calling_stacks


def convert_stacks(entries: Sequence[MergedStack]) -> list[RankedStack]:
    return [(entry.ranks, entry.frames) for entry in entries]


def build_router(live: AppState) -> APIRouter:
    routes = APIRouter(prefix="/api/v1/incidents/{id}", tags=["incidents"])

    @routes.get(
        "/text",
        operation_id="text_api_v1_incidents__id__text_get",
        summary="The whole verdict as text",
        response_class=PlainTextResponse,
    )
    async def show_text(id: str) -> Response:
        document = build_incident_document(live.get_incident(id).incident)
        lines = terminal.format_incident(document, datetime.now(timezone.utc), full=True)
        return PlainTextResponse("\n".join(lines) + "\n")

    @routes.get(
        "/stacks.speedscope.json",
        operation_id="for_speedscope_api_v1_incidents__id__stacks_speedscope_json_get",
        summary="The stacks for speedscope",
    )
    async def download_speedscope(id: str) -> Response:
        incident = live.get_incident(id).incident
        stacks = [
            (f"{name_ranks(stack.ranks)}, {stack.thread or 'no thread'}", stack.frames)
            for stack in incident.stacks
            if stack.frames
        ]
        document = json.dumps(stacks_to_speedscope(incident.summary, stacks))
        return make_attachment(f"hangwatch-{id}.speedscope.json", document, "application/json")

    @routes.get(
        "/stacks.folded",
        operation_id="for_flamegraph_api_v1_incidents__id__stacks_folded_get",
        summary="The stacks as folded lines, for flame graph tools",
        response_class=PlainTextResponse,
    )
    async def download_folded_stacks(id: str) -> Response:
        lines = format_folded_stacks(
            convert_stacks(select_calling_stacks(live.get_incident(id).incident.stacks))
        )
        text = "".join(f"{line}\n" for line in lines)
        return make_attachment(f"hangwatch-{id}.folded", text, "text/plain")

    @routes.get(
        "/stacks.svg",
        operation_id="flamegraph_api_v1_incidents__id__stacks_svg_get",
        summary="The stacks as a flame graph: a frame's width is its number of ranks",
        response_class=Response,
        responses={200: {"content": {"image/svg+xml": {}}}},
    )
    async def download_flamegraph(id: str) -> Response:
        incident = live.get_incident(id).incident
        tree = merge_stacks(convert_stacks(select_calling_stacks(incident.stacks)))
        bars = list(_iter_bars(tree, 0.0, 0, max(1, sum(len(b.ranks) for b in tree))))
        image = render_flame_graph(incident.summary, bars)
        return make_attachment(f"hangwatch-{id}.svg", image, "image/svg+xml")

    return routes


def _iter_bars(
    branches: tuple[Branch, ...], x: float, depth: int, total_ranks: int
) -> Iterator[tuple[ProfileBar, str, str]]:
    """With texts and tooltips. Ranks are counted as samples are in a profile."""
    for branch in branches:
        width = len(branch.ranks) / total_ranks
        for level, frame in enumerate(branch.frames, depth):
            text = f"{frame.function} {frame.file}:{frame.line}"
            bar = ProfileBar(
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
