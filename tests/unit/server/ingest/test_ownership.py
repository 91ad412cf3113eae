"""One agent cannot hide, end or invent what another, active one reports."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hangwatch.model.calls import StreamKind
from hangwatch.model.kinds import VerdictKind
from hangwatch.model.ranks import AttemptKey, ExitInfo, Lifecycle
from hangwatch.protocol import heartbeat
from hangwatch.server.app import build_app
from hangwatch.server.core.clock import Clock
from hangwatch.server.http.app_state import AppState
from hangwatch.server.settings import Settings
from hangwatch.server.storage.store import Store
from hangwatch.tracking.fleet import OWNER_SILENT_S

RANKS = 2


class Scene:
    """A server with a clock of the test, and a job of two ranks; rank 1 hangs."""

    def __init__(self, folder: Path) -> None:
        self.now = 1000.0
        self.store = Store(folder)
        self.state: AppState = build_app(
            Settings(data_dir=folder, stall_after=4),
            store=self.store,
            base_url="http://here",
            token=None,
            clock=Clock(monotonic=lambda: self.now),
        )[1]
        self.numbers: dict[str, int] = {}
        self.began_at = self.now

    def send(
        self, agent: str, *processes: heartbeat.ProcessUpdate, host: str = "node", owner: str = ""
    ) -> None:
        self.numbers[agent] = self.numbers.get(agent, 0) + 1
        self.state.watch.apply_heartbeat(
            heartbeat.Heartbeat(
                host=host,
                agent=agent,
                owner=owner,
                number=self.numbers[agent],
                processes=processes,
            )
        )

    def report_job(self) -> None:
        updates = [self.make_update(rank) for rank in range(RANKS)]
        self.send("owner", *updates, owner="secret of the run dir")

    def make_update(self, rank: int, **changes: Any) -> heartbeat.ProcessUpdate:
        identity = heartbeat.ProcessIdentity(
            job="run7", rank=rank, world_size=RANKS, pid=rank + 1, start_ticks=1
        )
        age_s = self.now - self.began_at
        stream = heartbeat.StreamUpdate(
            uid=1,
            identity=heartbeat.StreamIdentity(
                kind=StreamKind.COLLECTIVE, name="0", desc="default_pg", ranks="0-1"
            ),
            entered=2 - rank,
            completed=1,
            op="all_reduce",
            entered_s=age_s,
            pending_s=None if rank else age_s,
        )
        update = heartbeat.ProcessUpdate(
            key=f"{rank + 1}-1",
            identity=identity,
            lifecycle=int(Lifecycle.INITIALISED),
            state="S",
            idle_s=age_s,
            streams=(stream,),
        )
        return replace(update, **changes)

    def run_for(self, seconds: float, claim: heartbeat.ProcessUpdate | None = None) -> None:
        """The job is reported every half second, and after it the forged claim."""
        for _ in range(int(seconds * 2)):
            self.now += 0.5
            self.report_job()
            if claim is not None:
                self.send("forger", claim, host="node")
            asyncio.run(self.state.watch.loop.run_round())

    def list_verdicts(self) -> list[tuple[VerdictKind, tuple[int, ...], int]]:
        return [
            (r.incident.kind, tuple(r.incident.culprits), r.incident.attempt)
            for r in self.state.shared.incidents.records.values()
            if r.is_open
        ]


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    made = Scene(tmp_path)
    made.report_job()
    yield made
    made.store.close()


def test_hang_is_reported(scene: Scene) -> None:
    scene.run_for(8)
    assert scene.list_verdicts() == [(VerdictKind.MISSING_RANK, (1,), 0)]


def test_claimed_exit_of_others_process_is_dropped(scene: Scene) -> None:
    claim = scene.make_update(1, ended=ExitInfo(signal=9))
    scene.run_for(8, claim)
    assert scene.list_verdicts() == [(VerdictKind.MISSING_RANK, (1,), 0)]
    assert scene.state.shared.fleet.foreign_reports >= 16


@pytest.mark.parametrize("restart", [0, 7])
def test_claimed_rank_does_not_hide_the_hang(scene: Scene, restart: int) -> None:
    claim = scene.make_update(1)
    assert claim.identity is not None
    identity = replace(claim.identity, pid=99, restart=restart)
    scene.run_for(8, replace(claim, key="99-1", identity=identity))
    assert (VerdictKind.MISSING_RANK, (1,), 0) in scene.list_verdicts()
    holder = scene.state.shared.fleet.attempts[AttemptKey("run7", 0)].processes[1]
    assert holder.identity.pid == 2, "the rank of the older launch is still that of its process"


def test_silent_owner_is_succeeded(scene: Scene) -> None:
    """SECURITY.md: "A process is reported by one node agent"."""
    scene.now += OWNER_SILENT_S + 0.1
    scene.send("successor", scene.make_update(1, ended=ExitInfo(exit_status=0)))
    process = scene.state.shared.fleet.processes[("run7", "node", "2-1")]
    assert (process.agent, process.exit) == ("successor", ExitInfo(exit_status=0))


def test_replacement_agent_of_the_run_dir_succeeds_immediately(scene: Scene) -> None:
    """SECURITY.md: "only its successor in the same run dir may take over sooner"."""
    scene.now += 1
    ended = scene.make_update(1, ended=ExitInfo(exit_status=0))
    scene.send("stranger", ended)
    assert scene.state.shared.fleet.processes[("run7", "node", "2-1")].exit is None
    scene.send("replacement", ended, owner="secret of the run dir")
    process = scene.state.shared.fleet.processes[("run7", "node", "2-1")]
    assert (process.agent, process.exit) == ("replacement", ended.ended)


def test_own_restart_ends_the_earlier_attempt(scene: Scene) -> None:
    scene.run_for(8)
    assert scene.list_verdicts()
    claim = scene.make_update(0)
    assert claim.identity is not None
    identity = replace(claim.identity, pid=99, restart=1)
    restarted = replace(claim, key="99-1", identity=identity, streams=())
    for _ in range(4):
        scene.now += 0.5
        scene.report_job()
        scene.send("replacement", restarted, owner="secret of the run dir")
        asyncio.run(scene.state.watch.loop.run_round())
    assert scene.list_verdicts() == []
