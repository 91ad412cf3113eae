"""Attempts for tests of the server."""

from __future__ import annotations

from hangwatch.model.ranks import Lifecycle
from hangwatch.protocol import heartbeat
from hangwatch.tracking.attempt import Attempt
from hangwatch.tracking.fleet import Fleet


def make_attempt(ranks: int = 3, world: int = 4, now: float = 100.0) -> Attempt:
    fleet = Fleet()
    processes = tuple(
        heartbeat.ProcessUpdate(
            key=f"{r}-1",
            lifecycle=int(Lifecycle.INITIALISED),
            identity=heartbeat.ProcessIdentity(
                job="run7", rank=r, world_size=world, pid=r, start_ticks=1
            ),
        )
        for r in range(ranks)
    )
    fleet.apply_heartbeat(
        heartbeat.Heartbeat(host="n", agent="a", number=1, processes=processes), now
    )
    attempt = fleet.latest_attempt("run7")
    assert attempt is not None
    return attempt
