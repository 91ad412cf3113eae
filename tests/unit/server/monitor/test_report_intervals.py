"""How often hosts report."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hangwatch.model.limits import Limits
from hangwatch.protocol import heartbeat
from hangwatch.server.app import build_app
from hangwatch.server.core.clock import Clock
from hangwatch.server.http.app_state import AppState
from hangwatch.server.monitor.cadence import (
    FAMILY_ROUND_S,
    FULL_UPDATE_INTERVALS,
    MAX_PRESSING_AGENTS,
    MAX_SUSPECTED_AGENTS,
    MAX_USUAL_INTERVAL_S,
    POLL_S,
    ReportScheduler,
    RoundTurns,
    find_fair_share,
    find_interval_s,
    find_own_time_s,
    find_slot_wait_s,
)
from hangwatch.server.settings import Settings
from hangwatch.server.shared_state import SharedState
from hangwatch.server.storage.store import Store
from hangwatch.tracking.fleet import Fleet
from hangwatch.tracking.tenants import qualify_agent


def make_scheduler(stall_after_s: float, agent_count: int = 1) -> ReportScheduler:
    shared = SharedState(Clock())
    for number in range(agent_count):
        beat = heartbeat.Heartbeat(host=f"n{number}", agent=f"a{number}", number=1)
        shared.agents.record_heartbeat(beat, 0.0)
    return ReportScheduler(shared=shared, configured_limits=Limits(stall_after_s=stall_after_s))


@pytest.mark.parametrize(
    ("late_s", "agents", "expected"),
    [
        (0.0, 10, 0.5),
        (0.0, 500, 1.0),
        (0.1, 10, 1.0),
        (0.1, 500, 2.0),
        (5.0, 10, MAX_USUAL_INTERVAL_S),
        (0.0, 12_500, MAX_USUAL_INTERVAL_S),
        (5.0, 12_500, MAX_USUAL_INTERVAL_S),
        (0.0, 30_000, 40.0),
    ],
)
def test_report_interval_grows_with_lag_and_hosts(
    late_s: float, agents: int, expected: float
) -> None:
    assert find_interval_s(agents, late_s) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("agents", "within_s"), [(500, None), (2000, 1.0), (12_500, 12_500 / 8000)]
)
def test_rarely_reporting_hosts_may_report_changes_early(
    agents: int, within_s: float | None
) -> None:
    """Not more than 8,000 in a second, even if all report changes."""
    scheduler = make_scheduler(60.0, agents)
    reply = scheduler.make_reply("a0", 100.0, commands=(), needs_resync=False)
    assert reply.changes_s == within_s


def test_hosts_answered_together_return_spread_out() -> None:
    agents, interval = [f"agent-{n}" for n in range(6000)], 6.0
    waits = [find_slot_wait_s(agent, interval, 100.0) for agent in agents]
    assert 0.1 * interval < min(waits) and max(waits) <= 1.1 * interval
    seconds = [sum(int(wait) == second for wait in waits) for second in range(1, 6)]
    assert max(seconds) < 1.3 * min(seconds), "about equally many in each second"
    for agent, wait in zip(agents, waits, strict=True):
        late = 100.0 + wait + 1.7
        turns = (late + find_slot_wait_s(agent, interval, late) - 100.0 - wait) / interval
        assert turns == pytest.approx(round(turns), abs=1e-6), "even if its reply was late"
    reply = make_scheduler(60.0, 1).make_reply("a0", 100.0, commands=(), needs_resync=False)
    assert reply.interval_s == 0.5, "few hosts have no slots"


def test_rarely_reporting_hosts_may_send_terse_updates() -> None:
    agents, interval = [f"agent-{n}" for n in range(2000)], 10.0
    reply = make_scheduler(60.0, 1).make_reply("a0", 100.0, commands=(), needs_resync=False)
    assert reply.details_s is None, "few hosts always send all positions"
    full_updates: dict[int, int] = {}  # the number in each round
    for agent in agents:
        at, until, rounds = 100.0, 0.0, []
        for n in range(4 * FULL_UPDATE_INTERVALS):
            if at >= until:
                rounds.append(n)
                full_updates[n] = full_updates.get(n, 0) + 1
            until = at + find_own_time_s(agent, FULL_UPDATE_INTERVALS * interval, at)
            at += find_slot_wait_s(agent, interval, at)
        assert (
            len(rounds) >= 4  # the first of them is before its host's first slot
            and max(b - a for a, b in itertools.pairwise(rounds[1:])) <= FULL_UPDATE_INTERVALS
        ), "every host sends its positions"
    assert (
        max(full_updates[n] for n in range(1, 4 * FULL_UPDATE_INTERVALS))
        < 2 * len(agents) / FULL_UPDATE_INTERVALS
    ), "not all at the same time"


@pytest.mark.parametrize(
    ("stall_after_s", "agent_count", "expected_s"),
    [(60.0, 1, 2.0), (4.0, 1, 1.0), (2.0, 1, None), (60.0, 800, 2.0), (60.0, 5000, None)],
)
def test_steady_hosts_report_less_often(
    stall_after_s: float, agent_count: int, expected_s: float | None
) -> None:
    scheduler = make_scheduler(stall_after_s, agent_count)
    reply = scheduler.make_reply("a0", 100.0, commands=(), needs_resync=False)
    assert reply.steady_s == expected_s
    if expected_s is not None:
        assert 2 * expected_s <= scheduler.get_limits("").lost_after_s


@pytest.fixture
def state(tmp_path: Path) -> Iterator[AppState]:
    store = Store(tmp_path)
    yield build_app(Settings(data_dir=tmp_path), store=store, base_url="http://here", token=None)[1]
    store.close()


def test_host_of_a_suspect_does_not_report_less_often(state: AppState) -> None:
    beat = heartbeat.Heartbeat(host="n0", agent="a0", number=1)
    assert state.watch.apply_heartbeat(beat).steady_s == 2.0
    state.watch.report_scheduler.suspect_agents(["a0"], time.monotonic())
    assert state.watch.apply_heartbeat(beat).steady_s is None


@pytest.mark.parametrize(
    ("wanted", "total", "share"),
    [
        ((), 250, math.inf),
        ((100, 150), 250, math.inf),
        ((10, 300), 250, 240.0),
        ((300, 300, 5), 250, 122.5),
    ],
)
def test_fair_share_is_what_others_leave(wanted: tuple[int, ...], total: int, share: float) -> None:
    assert find_fair_share(wanted, total) == share


def test_hosts_of_a_small_job_report_often_beside_a_large_one() -> None:
    scheduler = make_scheduler(60.0, 0)
    for job, hosts in (("large", 12_500), ("small", 2), ("evil", 10_463)):
        for number in range(hosts):
            name = qualify_agent(job, f"a{number}")
            beat = heartbeat.Heartbeat(host=f"n{number}", agent=name, number=1)
            scheduler.shared.agents.record_heartbeat(beat, 0.0)
    intervals_s = {job: scheduler.get_interval_s(job) for job in ("large", "small", "evil")}
    assert intervals_s["small"] == 0.5
    assert sum(
        hosts / intervals_s[job] for job, hosts in (("large", 12_500), ("evil", 10_463))
    ) == pytest.approx(750, rel=0.02), "together they report as often as one job would"
    reply = scheduler.make_reply("small\na0", 100.0, commands=(), needs_resync=False)
    assert (reply.interval_s, reply.poll_s) == (0.5, POLL_S)


def test_urgent_hosts_of_one_job_do_not_delay_those_of_another() -> None:
    scheduler = make_scheduler(60.0, 0)
    agents = [
        *(qualify_agent("evil", f"a{number}") for number in range(MAX_SUSPECTED_AGENTS + 1)),
        qualify_agent("run7", "a0"),
    ]
    for agent in agents:
        beat = heartbeat.Heartbeat(host="n", agent=agent, number=1)
        scheduler.shared.agents.record_heartbeat(beat, 0.0)
        scheduler.record_heartbeat(agent, True, 1.0)
    assert agents[-2] not in scheduler.suspected and agents[-1] in scheduler.suspected
    replies = [scheduler.make_reply(a, 1.0, commands=(), needs_resync=False) for a in agents]
    assert sum(reply.urgent for reply in replies) == MAX_PRESSING_AGENTS + 1
    assert replies[-1].urgent


def test_attempts_of_one_job_take_turns_over_several_rounds() -> None:
    turns, fleet = RoundTurns(), Fleet()
    for number in range(4):
        job = f"evil/{number}" if number < 3 else "run7"
        update = heartbeat.ProcessUpdate(
            key=f"{number}-1",
            identity=heartbeat.ProcessIdentity(
                job=job, rank=0, world_size=1, pid=number, start_ticks=1
            ),
        )
        fleet.apply_heartbeat(
            heartbeat.Heartbeat(host="n", agent="a", number=number + 1, processes=(update,)), 1.0
        )
    rounds: list[list[str]] = []
    for _ in range(4):
        rounds.append([])
        for attempt in turns.iter_due(fleet.attempts.values()):
            rounds[-1].append(attempt.job)
            time.sleep(FAMILY_ROUND_S)
    assert [*map(sorted, rounds)] == [[f"evil/{number}", "run7"] for number in (0, 1, 2, 0)]
