"""What the server does differently for jobs whose state takes long to read."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hangwatch.diagnosis import Diagnosis
from hangwatch.model.calls import Call, Signature, StreamKind
from hangwatch.model.kinds import VerdictKind
from hangwatch.model.limits import Limits
from hangwatch.model.ranks import AttemptKey, ExitInfo, RankState
from hangwatch.protocol import codec, heartbeat
from hangwatch.protocol.commands import CommandKind
from hangwatch.server.app import build_app
from hangwatch.server.core import events, limits
from hangwatch.server.http.app_state import AppState
from hangwatch.server.incidents.registry import IncidentRecord
from hangwatch.server.monitor import cadence, diagnoser, diagnosis_loop, views
from hangwatch.server.settings import Settings
from hangwatch.server.storage.store import Store
from hangwatch.tracking.attempt import Attempt
from hangwatch.tracking.call_stream import CallStream
from tests.unit.incident_documents import make_incident as build_incident


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[AppState]:
    monkeypatch.setattr(limits, "LARGE_RANKS", 8)
    store = Store(tmp_path)
    yield build_app(Settings(data_dir=tmp_path), store=store, base_url="http://here", token=None)[1]
    store.close()


def make_heartbeat(
    number: int, restart: int = 0, state: str = "S", ended: ExitInfo | None = None
) -> heartbeat.Heartbeat:
    def make_process_update(rank: int) -> heartbeat.ProcessUpdate:
        identity = heartbeat.ProcessIdentity(
            job="large", restart=restart, rank=rank, world_size=16, pid=rank, start_ticks=restart
        )
        return heartbeat.ProcessUpdate(
            key=f"{rank}-{restart}", identity=identity, lifecycle=3, state=state, ended=ended
        )

    return heartbeat.Heartbeat(
        host="n0",
        agent=f"a{restart}",
        number=number,
        full=True,
        processes=tuple(map(make_process_update, range(16))),
    )


def test_heartbeats_are_queued_during_large_diagnosis(state: AppState) -> None:
    state.watch.apply_heartbeat(make_heartbeat(1))
    (attempt,) = state.shared.fleet.attempts.values()
    replies: list[asyncio.Future[heartbeat.HeartbeatReply]] = []
    loop = None

    def submit_heartbeat(number: int) -> None:
        decode = functools.partial(make_heartbeat, number)
        replies.append(state.watch.heartbeat_queue.submit(decode, False, ""))

    def time_reading() -> float:
        assert loop is not None
        for number in (2, 3):
            loop.call_soon_threadsafe(submit_heartbeat, number)
        deadline = state.now() + 5
        while len(state.watch.heartbeat_queue) < 2 and state.now() < deadline:
            pass
        return attempt.last_seen_at

    async def time_diagnosis() -> float:
        nonlocal loop
        loop = asyncio.get_running_loop()
        before = attempt.last_seen_at
        last_seen_at, _ = await state.watch.diagnoser.read_attempt(attempt, time_reading)
        assert last_seen_at == before, "nothing changed meanwhile"
        for reply in await asyncio.gather(*replies):
            assert not reply.resync
        return attempt.last_seen_at

    assert asyncio.run(time_diagnosis()) > 0
    assert state.shared.counters.heartbeats == 3


def test_job_is_not_shown_as_failing_while_it_is_diagnosed(
    state: AppState, monkeypatch: pytest.MonkeyPatch
) -> None:
    state.watch.apply_heartbeat(make_heartbeat(1))
    shown: list[bool] = []

    def diagnose(attempt: Attempt, now: float, limits: Limits) -> Diagnosis:
        shown.append(state.watch.diagnoser.attempts[attempt.key].has_failed)
        return Diagnosis()

    monkeypatch.setattr(diagnoser, "is_quiet", lambda attempt, now, limits: False)
    monkeypatch.setattr(diagnoser, "diagnose", diagnose)
    asyncio.run(state.watch.loop.run_round())
    assert shown == [False]


def test_large_attempt_round_updates_states_and_job(state: AppState) -> None:
    state.watch.apply_heartbeat(make_heartbeat(1))
    asyncio.run(state.watch.loop.run_round())
    (attempt,) = state.list_latest_attempts()
    assert state.describe_job(attempt).reported_ranks == 16
    assert set(state.get_rank_states(attempt)) == set(range(16))
    assert state.shared.failures.count == 0


@pytest.mark.parametrize(("large_ranks", "are_updated"), [(8, False), (1000, True)])
def test_states_of_large_attempt_are_updated_rarely(
    state: AppState, monkeypatch: pytest.MonkeyPatch, large_ranks: int, are_updated: bool
) -> None:
    monkeypatch.setattr(limits, "LARGE_RANKS", large_ranks)
    monkeypatch.setattr(diagnosis_loop, "STATES_FACTOR", 1e9)
    state.watch.apply_heartbeat(make_heartbeat(1))
    asyncio.run(state.watch.loop.run_round())
    (published,) = state.watch.diagnoser.attempts.values()
    states = published.rank_states
    state.watch.apply_heartbeat(make_heartbeat(2, ended=ExitInfo(signal=15)))
    asyncio.run(state.watch.loop.run_round())
    assert (published.rank_states != states) == are_updated


def test_only_host_with_stopped_process_is_polled_soon(
    state: AppState, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        state.shared.load, "late_s", 0.2
    )  # the others are polled less often, but have no turns yet
    assert state.watch.apply_heartbeat(make_heartbeat(1)).interval_s > cadence.PRESSING_INTERVAL_S
    assert (
        state.watch.apply_heartbeat(make_heartbeat(2, state="T")).interval_s
        == cadence.PRESSING_INTERVAL_S
    )
    monkeypatch.setattr(cadence, "MAX_PRESSING_AGENTS", 1)
    assert (
        state.watch.apply_heartbeat(make_heartbeat(3, state="T")).interval_s
        > cadence.PRESSING_INTERVAL_S
    )


def test_hosts_of_large_jobs_may_report_changes_early(
    state: AppState, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert state.watch.apply_heartbeat(make_heartbeat(1)).changes_s is None
    monkeypatch.setattr(state.shared.load, "late_s", 1.0)  # the load of thousands of hosts
    changes_s = state.watch.apply_heartbeat(make_heartbeat(2)).changes_s
    assert (
        changes_s is not None
        and codec.decode_reply(
            codec.encode_message(heartbeat.HeartbeatReply(changes_s=changes_s))
        ).changes_s
        == changes_s
    )


def test_terse_host_is_not_lost_and_sends_details_when_needed(
    state: AppState, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state.shared.load, "late_s", 1.0)
    reply = state.watch.apply_heartbeat(make_heartbeat(1))
    assert (
        reply.details_s is not None
        and codec.decode_reply(codec.encode_message(reply)).details_s == reply.details_s
    )
    process = state.shared.fleet.attempts[AttemptKey("large", 0)].processes[0]
    last_seen_at = process.reports.last_seen_at
    assert (
        state.watch.apply_heartbeat(
            heartbeat.Heartbeat(host="n0", agent="a0", number=2, brief=True)
        ).details_s
        is not None
    )
    assert process.reports.last_seen_at == last_seen_at < process.reports.agent_seen_at
    state.watch.report_scheduler.suspected = {"a0": state.now() + 60.0}
    assert (
        state.watch.apply_heartbeat(
            heartbeat.Heartbeat(host="n0", agent="a0", number=3, brief=True)
        ).details_s
        is None
    )
    assert state.watch.apply_heartbeat(
        heartbeat.Heartbeat(host="n0", agent="b0", number=7, brief=True)
    ).resync, "this server knows nothing of it"


def test_hosts_are_not_shown_as_lost_between_two_of_their_heartbeats(
    state: AppState, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert state.watch.report_scheduler.get_limits("large").lost_after_s == Limits().lost_after_s
    monkeypatch.setattr(state.shared.load, "late_s", 2.0)
    assert (
        state.watch.report_scheduler.get_limits("large").lost_after_s
        > state.watch.apply_heartbeat(make_heartbeat(1)).interval_s
    )
    (attempt,) = state.shared.fleet.attempts.values()
    late = attempt.last_seen_at + 10.5
    assert set(views.compute_states(attempt, (), late, Limits().lost_after_s).values()) == {
        RankState.LOST
    }
    assert set(
        views.compute_states(
            attempt, (), late, state.watch.report_scheduler.get_limits("large").lost_after_s
        ).values()
    ) == {RankState.RUNNING}


def test_concurrent_incident_changes_do_not_disturb_readers(
    state: AppState,
) -> None:
    registry = state.shared.incidents
    incident = build_incident(id="I", job="large", kind="mismatch", culprits=[], waiting=[])
    before = registry.records
    registry.load_records(
        [IncidentRecord(incident=incident, opened_at=0.0, onset_at=0.0, last_seen_at=0.0)]
    )
    loaded = registry.records
    registry.drop_incidents({incident.id})
    assert ([*before], [*loaded], [*registry.records]) == ([], [incident.id], [])


def test_diverging_calls_are_requested_before_full_diagnosis(
    state: AppState,
) -> None:
    """A full diagnosis takes seconds, and without these calls it could not name the difference."""
    group = heartbeat.StreamIdentity(kind=StreamKind.COLLECTIVE, name="tp", desc="tp", ranks="0-1")

    def send_heartbeat(number: int, **more: Any) -> heartbeat.HeartbeatReply:
        processes = make_heartbeat(number).processes
        odd = [
            heartbeat.StreamUpdate(
                uid=1,
                identity=group,
                entered=5,
                completed=4,
                chain=55 + rank,
                checkpoints=((4, 44),),
                entered_s=2.0,
            )
            for rank in range(2)
        ]
        parted = (
            dataclasses.replace(processes[0], streams=tuple(odd[:1])),
            dataclasses.replace(processes[1], streams=tuple(odd[1:])),
            *processes[2:],
        )
        return state.watch.apply_heartbeat(
            dataclasses.replace(make_heartbeat(number), processes=parted, **more)
        )

    commands = send_heartbeat(
        1
    ).commands  # immediately: the agent's next heartbeat may be much later
    asyncio.run(state.watch.loop.run_round())
    assert state.shared.counters.diagnoses == 0
    assert {(c.kind, c.key, c.from_seq) for c in commands} == {
        (CommandKind.CALLS, "0-0", 1),
        (CommandKind.CALLS, "1-0", 1),
    }
    made = {"0-0": Call(seq=5, signature=Signature(op="all_reduce", agree=1), chain=55)}
    made["1-0"] = Call(seq=5, signature=Signature(op="broadcast", agree=2), chain=56)
    calls = tuple(
        heartbeat.CallsReply(
            key=c.key, request=c.id, uid=1, calls=(made[c.key],), from_seq=5, to_seq=5
        )
        for c in commands
    )
    send_heartbeat(2, calls=calls)
    asyncio.run(state.watch.loop.run_round())
    assert state.shared.counters.diagnoses == 1
    (record,) = state.shared.incidents.records.values()
    assert record.incident.kind is VerdictKind.MISMATCH
    assert record.incident.differing_fields == ("op",)


def test_first_rank_of_each_diverging_side_is_requested_for_calls(
    state: AppState,
) -> None:
    def send_heartbeat(host: int, number: int, chain: int) -> tuple[CommandKind, ...]:
        group = heartbeat.StreamIdentity(
            kind=StreamKind.SETUP, name="setup", desc="set-up", ranks="0-7"
        )
        made = heartbeat.StreamUpdate(
            uid=1, identity=group, entered=3, completed=3, chain=chain, entered_s=1.0
        )
        identity = heartbeat.ProcessIdentity(
            job="large", rank=host, world_size=8, pid=host, start_ticks=0
        )
        process = heartbeat.ProcessUpdate(
            key=str(host), identity=identity, lifecycle=3, streams=(made,)
        )
        beat = heartbeat.Heartbeat(
            host=f"n{host}", agent=f"a{host}", number=number, full=True, processes=(process,)
        )
        return tuple(command.kind for command in state.watch.apply_heartbeat(beat).commands)

    for host in range(7):
        assert send_heartbeat(host, 1, chain=33) == ()
    assert send_heartbeat(7, 1, chain=44) == (CommandKind.CALLS,), "it diverges from the others"
    asyncio.run(state.watch.loop.run_round())
    assert state.shared.counters.diagnoses == 0, "the diagnosis waits for the calls"
    assert [send_heartbeat(host, 2, chain=33) for host in range(3)] == [
        (CommandKind.CALLS,),
        (),
        (),
    ], "one rank represents its side"


def test_hurried_heartbeat_is_not_counted_as_change_report(state: AppState) -> None:
    watch = state.watch
    assert watch.apply_heartbeat(make_heartbeat(1, state="T")).urgent, (
        "a stopped rank is polled again soon"
    )
    assert "a0" not in watch.report_scheduler.suspected
    watch.apply_heartbeat(make_heartbeat(2), urgent=True)
    assert "a0" not in watch.report_scheduler.suspected, "the report was requested early"
    assert not watch.apply_heartbeat(make_heartbeat(3)).urgent
    watch.apply_heartbeat(make_heartbeat(4), urgent=True)
    assert "a0" in watch.report_scheduler.suspected, "the agent reported a change on its own"


def test_missing_calls_are_awaited_briefly(
    state: AppState, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(diagnoser, "MAX_CALLS_WAIT_S", 0.0)
    group = heartbeat.StreamIdentity(kind=StreamKind.COLLECTIVE, name="tp", desc="tp", ranks="0-1")
    streams = [
        heartbeat.StreamUpdate(uid=1, identity=group, entered=5, chain=rank + 1, entered_s=2.0)
        for rank in range(2)
    ]
    processes = make_heartbeat(1).processes
    parted = tuple(
        dataclasses.replace(process, streams=(part,))
        for process, part in zip(processes, streams, strict=False)
    )
    state.watch.apply_heartbeat(
        dataclasses.replace(make_heartbeat(1), processes=(*parted, *processes[2:]))
    )
    asyncio.run(state.watch.loop.run_round())
    assert state.shared.counters.diagnoses == 1


def test_finished_large_attempt_is_dropped_for_next(
    state: AppState, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(diagnosis_loop, "SUCCEEDED_PROCESSES_KEPT", 10)
    state.watch.apply_heartbeat(make_heartbeat(1))
    state.watch.apply_heartbeat(make_heartbeat(2, ended=ExitInfo(signal=15)))
    asyncio.run(state.watch.loop.run_round())
    assert len(state.shared.fleet.attempts) == 1, "the last one is kept"
    state.watch.apply_heartbeat(make_heartbeat(1, restart=1))
    asyncio.run(state.watch.loop.run_round())
    assert [a.number for a in state.shared.fleet.attempts.values()] == [1]
    assert len(state.shared.fleet.processes) == 16


def test_dropped_attempt_memory_is_freed_immediately(
    state: AppState, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(diagnosis_loop, "SUCCEEDED_PROCESSES_KEPT", 10)
    group = heartbeat.StreamIdentity(
        kind=StreamKind.COLLECTIVE, name="no other has this name", desc="tp", ranks="0-15"
    )

    def count_held() -> int:
        return sum(
            type(made) is CallStream and made.group.name == group.name for made in gc.get_objects()
        )

    async def run_cleanup() -> None:
        await state.watch.loop.run_round()
        while state.watch.loop.retention._large_dropped:
            await asyncio.sleep(0)

    made = heartbeat.StreamUpdate(uid=1, identity=group, entered=5, completed=5, chain=55)
    beat = make_heartbeat(1)
    state.watch.apply_heartbeat(
        dataclasses.replace(
            beat,
            processes=tuple([dataclasses.replace(p, streams=(made,)) for p in beat.processes]),
        )
    )
    state.watch.apply_heartbeat(make_heartbeat(2, ended=ExitInfo(signal=15)))
    gc.disable()
    try:
        assert count_held() == 16
        state.watch.apply_heartbeat(make_heartbeat(1, restart=1))
        asyncio.run(run_cleanup())
        assert count_held() == 0
    finally:
        gc.enable()


def test_attempt_with_lost_host_is_dropped_and_not_reopened(
    state: AppState, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(diagnosis_loop, "SUCCEEDED_PROCESSES_KEPT", 10)
    state.watch.apply_heartbeat(make_heartbeat(1))
    state.watch.apply_heartbeat(make_heartbeat(1, restart=1))
    asyncio.run(state.watch.loop.run_round())
    assert len(state.shared.fleet.attempts) == 2, "its host may still report"
    monkeypatch.setattr(diagnosis_loop, "SUCCEEDED_SILENT_S", -1.0)
    asyncio.run(state.watch.loop.run_round())
    assert [a.number for a in state.shared.fleet.attempts.values()] == [1]
    assert not state.watch.apply_heartbeat(make_heartbeat(2)).resync, (
        "the host is back, with ranks of the attempt before"
    )
    assert [(a.number, len(a.processes)) for a in state.shared.fleet.attempts.values()] == [(1, 16)]


def test_stacks_of_mutually_waiting_ranks_are_requested_immediately(
    state: AppState,
) -> None:
    """A diagnosis of so many ranks takes seconds, and would need the stacks in the end."""

    def make_waiting_heartbeat(number: int, host: int) -> heartbeat.Heartbeat:
        channel = heartbeat.StreamIdentity(
            kind=StreamKind.RECV, name="pp", desc="pp", ranks="0-15", tag=0, peer=8 * (1 - host)
        )
        call = Call(seq=5, signature=Signature(op="recv"))
        waits = heartbeat.StreamUpdate(
            uid=1,
            identity=channel,
            entered=5,
            completed=4,
            entered_s=2.0,
            pending_s=2.0,
            calls=(call,),
        )
        processes = make_heartbeat(1).processes[8 * host : 8 * host + 8]
        first = dataclasses.replace(processes[0], streams=(waits,), idle_s=2.0)
        return heartbeat.Heartbeat(
            host=f"n{host}",
            agent=f"a{host}",
            number=number,
            full=True,
            processes=(first, *processes[1:]),
        )

    assert not state.watch.apply_heartbeat(make_waiting_heartbeat(1, 0)).commands, (
        "the other may be about to send"
    )
    (command,) = state.watch.apply_heartbeat(make_waiting_heartbeat(1, 1), urgent=True).commands
    assert (command.kind, command.key) == (CommandKind.STACKS, "8-0")
    assert (
        state.watch.apply_heartbeat(make_waiting_heartbeat(2, 1)).interval_s
        <= cadence.PRESSING_INTERVAL_S
    )
    (command,) = state.watch.apply_heartbeat(make_waiting_heartbeat(2, 0)).commands
    assert command.key == "0-0"


def test_event_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "MAX_KEPT_BYTES", 1000)
    made = events.EventLog(run_id="1")
    for number in range(100):
        made.publish_event("rank", {"ranks": list(range(50)), "number": number})
    assert 0 < len(made.recent_events) < 10
    assert made.last_number == 100 and "-100\n" in made.recent_events[-1]
