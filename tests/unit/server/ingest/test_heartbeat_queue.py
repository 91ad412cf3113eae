"""The order in which heartbeats are applied, and the time that they leave for other work."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest

from hangwatch.protocol import heartbeat
from hangwatch.server.core.load import OVERLOAD_LATE_S, OVERLOAD_WAIT_S, Load
from hangwatch.server.core.problems import Problem
from hangwatch.server.ingest import heartbeat_queue
from hangwatch.server.ingest.heartbeat_queue import LONG_S, SLICE_S, HeartbeatQueue


@dataclass
class QueueHarness:
    """A queue whose ingestion takes ``ingest_time_s`` for each heartbeat."""

    ingest_time_s: float = 0.0
    ingested: list[int] = field(default_factory=list)
    load: Load = field(default_factory=Load)

    def __post_init__(self) -> None:
        self.queue = HeartbeatQueue(self.ingest_heartbeat, self.load)

    def ingest_heartbeat(self, beat: heartbeat.Heartbeat, urgent: bool) -> heartbeat.HeartbeatReply:
        until = time.perf_counter() + self.ingest_time_s
        while time.perf_counter() < until:
            pass
        self.ingested.append(beat.number)
        return heartbeat.HeartbeatReply(interval_s=float(beat.number), resync=urgent)

    def submit_heartbeat(
        self, number: int, urgent: bool = False, family: str = ""
    ) -> asyncio.Future[heartbeat.HeartbeatReply]:
        beat = heartbeat.Heartbeat(host="n0", agent="a0", number=number)
        return self.queue.submit(lambda: beat, urgent, family)


def test_simultaneous_heartbeats_do_not_block_event_loop() -> None:
    async def submit_all() -> tuple[QueueHarness, list[heartbeat.HeartbeatReply], int]:
        harness, passes = QueueHarness(ingest_time_s=SLICE_S / 2), 0
        replies = asyncio.gather(*[harness.submit_heartbeat(n) for n in range(60)])
        while not replies.done():
            await asyncio.sleep(0)
            passes += 1
        return harness, await replies, passes

    harness, replies, passes = asyncio.run(submit_all())
    assert harness.ingested == list(range(60)), "in order"
    assert [reply.interval_s for reply in replies] == harness.ingested, "each got its own reply"
    assert passes >= 15
    assert len(harness.queue) == 0 and harness.load.waited_s == 0.0


def test_single_heartbeat_does_not_wait() -> None:
    async def submit_one() -> heartbeat.HeartbeatReply:
        return QueueHarness().submit_heartbeat(7).result()

    assert asyncio.run(submit_one()).interval_s == 7


def test_urgent_heartbeats_come_first_and_none_is_ingested_during_diagnosis() -> None:
    async def run_diagnosis() -> tuple[QueueHarness, list[int]]:
        harness, loop = QueueHarness(), asyncio.get_running_loop()
        answers: list[asyncio.Future[heartbeat.HeartbeatReply]] = []

        def submit_meanwhile() -> list[int]:
            def submit(number: int) -> None:
                answers.append(harness.submit_heartbeat(number, urgent=number == 3))

            for number in (1, 2, 3):
                loop.call_soon_threadsafe(submit, number)
            deadline = time.monotonic() + 5
            while len(harness.queue) < 3 and time.monotonic() < deadline:
                pass
            return list(harness.ingested)

        meanwhile = await harness.queue.run_exclusively(submit_meanwhile)
        assert [(await answer).resync for answer in answers] == [
            False,
            False,
            True,
        ], "the urgency is passed on"
        return harness, meanwhile

    harness, meanwhile = asyncio.run(run_diagnosis())
    assert (meanwhile, harness.ingested) == ([], [3, 1, 2])


def test_diagnosis_waits_for_queue_for_a_limited_time() -> None:
    async def run_diagnosis(within_s: float) -> list[int]:
        harness = QueueHarness(ingest_time_s=SLICE_S)
        come = [harness.submit_heartbeat(n, urgent=n >= 76) for n in range(80)]
        await asyncio.sleep(0)
        seen = await harness.queue.run_exclusively(lambda: list(harness.ingested), within_s)
        await asyncio.gather(*come)
        return seen

    assert len(asyncio.run(run_diagnosis(0.0))) < 4
    some = asyncio.run(run_diagnosis(40 * SLICE_S))
    assert {76, 77, 78, 79} <= set(some) and len(some) < 60
    assert len(asyncio.run(run_diagnosis(60.0))) == 80


def test_queue_is_emptied_however_slow_the_machine_is(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = itertools.count()
    clock = SimpleNamespace(monotonic=lambda: next(ticks) * 1.01 * SLICE_S)
    monkeypatch.setattr(heartbeat_queue, "time", clock)

    async def submit_all() -> list[int]:
        harness = QueueHarness()
        replies = [harness.submit_heartbeat(n) for n in range(4)]
        await asyncio.wait_for(asyncio.gather(*replies), 5.0)
        return harness.ingested

    assert asyncio.run(submit_all()) == [0, 1, 2, 3]


def test_unreadable_heartbeat_fails_alone() -> None:
    async def submit_all() -> list[object]:
        harness = QueueHarness(ingest_time_s=SLICE_S)

        def raise_problem() -> heartbeat.Heartbeat:
            raise Problem(422, "no heartbeat")

        come = [
            harness.submit_heartbeat(1),
            harness.submit_heartbeat(2),
            harness.queue.submit(raise_problem, False, ""),
            harness.submit_heartbeat(3),
        ]
        left = harness.submit_heartbeat(4)
        await asyncio.sleep(0)
        left.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await left
        return [*await asyncio.gather(*come, return_exceptions=True)]

    first, second, broken, last = asyncio.run(submit_all())
    assert isinstance(broken, Problem)
    assert all(isinstance(reply, heartbeat.HeartbeatReply) for reply in (first, second, last))


def test_overloaded_queue_refuses_heartbeats() -> None:
    refusal = Load(waits_s={"": OVERLOAD_WAIT_S + 0.1}).make_refusal(is_urgent=False)
    assert refusal is not None
    assert "overloaded" in refusal.detail
    assert Load(waits_s={"": OVERLOAD_WAIT_S + 0.1}).make_refusal(is_urgent=True) is None, (
        "urgent ones do not wait in the queue"
    )
    assert Load(late_s=OVERLOAD_LATE_S + 0.1).make_refusal(is_urgent=True) is not None
    assert Load(waits_s={"": OVERLOAD_WAIT_S - 0.1}).make_refusal(is_urgent=False) is None


def test_heartbeats_of_one_job_delay_those_of_others_by_one() -> None:
    async def submit_all() -> tuple[QueueHarness, dict[str, float]]:
        harness, waits_s = QueueHarness(ingest_time_s=SLICE_S / 5), {}
        come = [harness.submit_heartbeat(n, urgent=n % 2 > 0, family="evil") for n in range(200)]
        come += [harness.submit_heartbeat(n, family="run7") for n in (1000, 1001)]
        await come[-1]
        waits_s = dict(harness.load.waits_s)
        await asyncio.gather(*come)
        return harness, waits_s

    harness, waits_s = asyncio.run(submit_all())
    applied_before = harness.ingested.index(1001)
    assert applied_before <= 10, "some of the first were applied when they arrived"
    urgent_first = [number for number in harness.ingested[10:] if number < 1000]
    assert [n % 2 for n in urgent_first] == sorted([n % 2 for n in urgent_first], reverse=True)
    assert waits_s.get("run7", 0.0) < 1.0


def test_heartbeats_with_the_servers_token_take_turns_as_those_of_one_job() -> None:
    """SECURITY.md: "Jobs that report with the server's token or, without one, as one user share one
    queue", "Receiving a request and checking its signature takes CPU time".
    """

    async def submit_all() -> list[int]:
        harness = QueueHarness(ingest_time_s=SLICE_S / 5)
        come = [harness.submit_heartbeat(n, family="") for n in range(200)]
        come.append(harness.submit_heartbeat(1000, family="run7"))
        come.append(harness.submit_heartbeat(1001, family=""))
        await asyncio.gather(*come)
        return harness.ingested

    ingested = asyncio.run(submit_all())
    assert (ingested.index(1000) <= 10, ingested[-1]) == (True, 1001)


def test_job_whose_heartbeat_took_long_waits_for_others() -> None:
    async def submit_all() -> QueueHarness:
        harness = QueueHarness(ingest_time_s=10 * LONG_S)
        greedy = [harness.submit_heartbeat(n, family="greedy") for n in (1, 2)]
        harness.ingest_time_s = 0.0
        modest = [await harness.submit_heartbeat(n, family="run7") for n in (3, 4)]
        assert [reply.interval_s for reply in modest] == [3, 4]
        assert harness.ingested == [1, 3, 4], "the second heartbeat was there before"
        await asyncio.gather(*greedy)
        return harness

    assert asyncio.run(submit_all()).ingested == [1, 3, 4, 2]


def test_rest_that_ends_at_any_moment_leaves_no_heartbeat_behind() -> None:
    async def submit_all(passes: int) -> None:
        harness = QueueHarness(ingest_time_s=1.0)
        replies = [harness.submit_heartbeat(n, family="greedy") for n in (1, 2)]
        harness.ingest_time_s = 0.0
        for _ in range(passes):
            await asyncio.sleep(0)
        harness.queue._end_rest("greedy")
        await asyncio.wait_for(asyncio.gather(*replies), 0.5)

    for passes in range(3):
        asyncio.run(submit_all(passes))


def test_job_that_floods_the_queue_is_refused_alone() -> None:
    load = Load(waits_s={"evil": OVERLOAD_WAIT_S + 0.1})
    assert load.make_refusal(is_urgent=False, family="evil") is not None
    assert load.make_refusal(is_urgent=False, family="run7") is None
    assert (load.get_wait_s("evil"), load.get_wait_s("run7")) == (OVERLOAD_WAIT_S + 0.1, 0.0)
