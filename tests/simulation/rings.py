"""What a node agent reads in rings that do not exist."""

from __future__ import annotations

from typing import Any, NamedTuple

from hangwatch.model.ranks import ExceptionInfo, Lifecycle
from hangwatch.protocol.heartbeat import ProcessUpdate
from hangwatch.ring.reader import RingSnapshot, StreamState


class ProcessView(NamedTuple):
    """What is known of a process without its ring, and the ring."""

    process: ProcessUpdate
    snapshot: RingSnapshot | None


def make_snapshot(*streams: StreamState, **fields: Any) -> RingSnapshot:
    """The ring of a process that is initialised, with ``fields`` changed."""
    defaults: dict[str, Any] = {"lifecycle": int(Lifecycle.INITIALISED), "pulse_s": 0.01}
    defaults |= {"streams": streams, "active_streams": streams}
    return RingSnapshot(**{**defaults, **fields})


def encode_exception(exception: ExceptionInfo, raised_at: float) -> dict[str, Any]:
    """The exception as the recorder writes it into the ring."""
    encoded = {
        "type": exception.type,
        "message": exception.message,
        "at_ns": int(raised_at * 1e9),
    }
    if (site := exception.site) is not None:
        encoded |= {"file": site.file, "line": site.line, "function": site.function}
    return encoded
