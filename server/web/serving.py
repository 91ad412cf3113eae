"""What all pages have in common: each page and its stream of updates share one address, at which the
parts of the page that change are sent as server-sent events.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Generic, TypeVar
from urllib.parse import urlencode

from fastapi import Query, Request
from fastapi.responses import Response

from hangwatch.tracking.attempt import Attempt

from ..core.events import encode_event
from ..core.problems import Problem
from ..http.app_state import AppState

POLL_INTERVAL_S = 0.5  # the time between two checks, which are simultaneous for all viewers
ALIVE_INTERVAL_S = 2.0  # the time without changes after which an ``alive`` event is sent
RETRY_MS = 1000

TextQuery = Annotated[str, Query(max_length=500)]
PageNumber = Annotated[int, Query(ge=1, le=1_000_000)]
Row = TypeVar("Row")


def serve_page(
    state: AppState, request: Request, template: str, build_values: Callable[[], Mapping[str, Any]]
) -> Response:
    """The page; or its updates as server-sent events, which the page requests at its own address.
    In the template, ``link`` builds the URL of the same view with some parameters changed.
    """
    path = request.url.path
    kept = {k: v for k, v in request.query_params.items() if k not in ("page", "after")}

    def build_link(**changes: object) -> str:
        query = {k: v for k, v in {**kept, **changes}.items() if v not in (None, "")}
        return f"{path}?{urlencode(query)}" if query else path

    def values() -> dict[str, Any]:
        return {**build_values(), "link": build_link}

    if not request.headers.get("accept", "").startswith("text/event-stream"):
        return state.pages.render_page(template, **values())
    address = f"{path}?{request.url.query}"
    return state.shared.events.make_response(_follow_page(state, address, template, values))


async def _follow_page(
    state: AppState, key: str, template: str, values: Callable[[], Mapping[str, object]]
) -> AsyncIterator[str]:
    """A viewer's events of page ``key``: ``part`` with id and HTML, ``alive``, at last ``gone``. All parts come
    first, so that a reader that reconnects needs no earlier state, and each part when it changes. Parts are
    rendered and encoded once for all viewers of a URL; sse-starlette would encode them for each.
    """

    def encode_parts() -> dict[str, str]:
        parts = state.pages.render_parts(template, **values()).items()
        return {name: encode_event("part", {"id": name, "html": html}) for name, html in parts}

    loop = asyncio.get_running_loop()
    sent: dict[str, str] = {}
    last_sent_at = loop.time()
    yield f"retry: {RETRY_MS}\n\n"
    while not state.shared.events.is_closed:
        try:
            now = state.cache.get_or_compute(("page", key), encode_parts)
        except Problem as problem:  # the page's subject no longer exists
            yield encode_event("gone", {"detail": problem.detail})
            return
        changed_events = [text for name, text in now.items() if sent.get(name) != text]
        if not changed_events and loop.time() - last_sent_at >= ALIVE_INTERVAL_S:
            changed_events = [encode_event("alive", {})]
        if changed_events:
            last_sent_at = loop.time()
            yield "".join(changed_events)
        sent = now
        await asyncio.sleep(POLL_INTERVAL_S - loop.time() % POLL_INTERVAL_S)


def choose_shown_attempt(state: AppState, job: str, attempt: int | None) -> Attempt | None:
    """The attempt to show. Without a name: the newest running job with an open alert, else the
    newest job. Raises Problem for an unknown job or attempt.
    """
    if job:
        return state.find_attempts(job, attempt)[0]  # the worlds that run beside the job come later
    attempts = state.list_latest_attempts()
    alerted_jobs = {
        record.incident.job
        for record in state.shared.incidents.records.values()
        if record.is_open and record.incident.is_alert
    }
    alerted = [a for a in attempts if a.job in alerted_jobs and not a.is_finished]
    return next(iter(alerted or attempts), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowPage(Generic[Row]):
    """One page of a list of ``row_count`` rows. ``start`` of them are on the pages before it."""

    rows: Sequence[Row]
    number: int
    page_count: int
    start: int
    row_count: int


def slice_page(rows: Sequence[Row], number: int, page_size: int) -> RowPage[Row]:
    """Page ``number`` of the rows, or the last page if there are fewer.

    >>> page = slice_page(range(230), 9, 100)
    >>> page.number, page.rows
    (3, range(200, 230))
    """
    page_count = max(1, -(-len(rows) // page_size))
    number = min(number, page_count)
    start = (number - 1) * page_size
    return RowPage(
        rows=rows[start : start + page_size],
        number=number,
        page_count=page_count,
        start=start,
        row_count=len(rows),
    )
