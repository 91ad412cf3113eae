"""A trace session as a stream of server-sent events."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable

from ..core.events import encode_event
from ..core.waiting import wait_for_event
from .trace_session import TraceSession
from .tracing import TraceRegistry

POLL_INTERVAL_S = 1.0  # between two checks whether the trace has ended
KEEPALIVE_INTERVAL_S = 10.0  # a comment is sent after this time without events
MAX_EVENTS_PER_CHUNK = 200


async def stream_events(
    registry: TraceRegistry, session: TraceSession, is_closed: Callable[[], bool]
) -> AsyncIterator[str]:
    """The session's events until it ends, or until the server stops: ``is_closed``."""
    clock = registry.clock
    last_sent_at = clock.monotonic()
    while True:
        session.changed.clear()
        while session.events:
            last_sent_at = clock.monotonic()
            yield _encode_chunk(session)
        if session.is_done or is_closed():
            yield encode_event("end", {"reason": _get_end_reason(session, is_closed())})
            return
        if clock.monotonic() - last_sent_at >= KEEPALIVE_INTERVAL_S:
            last_sent_at = clock.monotonic()
            yield ": still here\n\n"
        if not await wait_for_event(POLL_INTERVAL_S, session.changed):
            registry.expire_ranks(session, clock.monotonic())


def _get_end_reason(session: TraceSession, is_closed: bool) -> str:
    if is_closed:
        return "closed"
    return "ended" if session.have_all_exited else "done"


def _encode_chunk(session: TraceSession) -> str:
    count = min(len(session.events), MAX_EVENTS_PER_CHUNK)
    return "".join(encode_event(*session.events.popleft()) for _ in range(count))
