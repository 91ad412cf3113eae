"""An incident's stacks as files for other tools, and its verdict as text."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone

from fastapi import APIRouter
from fastapi.responses import PlainTextResponse, Response

from hangwatch.model.incidents import MergedStack
from hangwatch.model.threads import Frame
from hangwatch.report import terminal
from hangwatch.report.documents import build_incident_document
from hangwatch.report.text import name_ranks
from hangwatch.stacks.frames import is_library
from hangwatch.stacks.stack_tree import (
    Branch,
    RankedStack,
    format_folded_stacks,
    merge_stacks,
    stacks_to_speedscope,
)

from . import rendering
from .app_state import AppState

BAR_HEIGHT_PX = 18  # of one frame in a flame graph
CHART_WIDTH_PX = 1200  # of the whole flame graph


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
        return PlainTextResponse(
            "\n".join(terminal.format_incident(document, datetime.now(timezone.utc), full=True))
            + "\n"
        )

    @routes.get(
        "/stacks.speedscope.json",
        operation_id="for_speedscope_api_v1_incidents__id__stacks_speedscope_json_get",
        summary="The stacks for speedscope",
    )
    async def download_speedscope(id: str) -> Response:
        incident = live.get_incident(id).incident
        entries = [e for e in incident.stacks if e.frames]
        labels = [f"{name_ranks(e.ranks)}, {e.thread or 'no thread'}" for e in entries]
        made = stacks_to_speedscope(
            incident.summary,
            zip(labels, (frames for _, frames in convert_stacks(entries)), strict=True),
        )
        return rendering.make_attachment(
            f"hangwatch-{id}.speedscope.json", json.dumps(made), "application/json"
        )

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
        return rendering.make_attachment(
            f"hangwatch-{id}.folded", "".join(f"{line}\n" for line in lines), "text/plain"
        )

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
        height = BAR_HEIGHT_PX * (max((b.depth for b in bars), default=0) + 1) + 40
        picture = rendering.render_text(
            "flamegraph.svg",
            incident=incident,
            bars=bars,
            bar=BAR_HEIGHT_PX,
            width=CHART_WIDTH_PX,
            height=height,
        )
        return rendering.make_attachment(f"hangwatch-{id}.svg", picture, "image/svg+xml")

    return routes


@dataclass(frozen=True, slots=True, kw_only=True)
class FlameBar:
    x: float
    width: float
    depth: int
    frame: Frame
    ranks: tuple[int, ...]
    user: bool


def _iter_bars(
    branches: tuple[Branch, ...], x: float, depth: int, total_ranks: int
) -> Iterator[FlameBar]:
    for branch in branches:
        width = CHART_WIDTH_PX * len(branch.ranks) / total_ranks
        for n, frame in enumerate(branch.frames):
            user = not is_library(frame.file)
            yield FlameBar(
                x=round(x, 2),
                width=round(width, 2),
                depth=depth + n,
                frame=frame,
                ranks=branch.ranks,
                user=user,
            )
        yield from _iter_bars(branch.branches, x, depth + len(branch.frames), total_ranks)
        x += width
