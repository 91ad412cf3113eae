"""In which order heartbeats are taken in, and what they leave room for."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from hangwatch.protocol import heartbeat
from hangwatch.server.core.limits import OVERLOADED, WAITED, Load
from hangwatch.server.core.problems import Problem
from hangwatch.server.ingest.heartbeat_queue import SLICE, Line


@dataclass
class Door:
    """A line before something that takes ``seconds`` for each heartbeat."""

    seconds: float = 0.0
    taken: list[int] = field(default_factory=list)
    load: Load = field(default_factory=Load)

    def __post_init__(self) -> None:
        self.line = Line(self.ingest, self.load)

    def ingest(self, beat: heartbeat.Heartbeat, urgent: bool) -> heartbeat.HeartbeatReply:
        until = time.perf_counter() + self.seconds
        while time.perf_counter() < until:
            pass
        self.taken.append(beat.number)
        return heartbeat.HeartbeatReply(interval_s=float(beat.number), resync=urgent)

    def come(self, number: int, urgent: bool = False) -> asyncio.Task[heartbeat.HeartbeatReply]:
        return asyncio.get_running_loop().create_task(self.line.take(beat(number), urgent))


def beat(number: int) -> Callable[[], heartbeat.Heartbeat]:
    return lambda: heartbeat.Heartbeat(host="n0", agent="a0", number=number)


def test_heartbeats_that_come_all_at_once_leave_room_for_all_else() -> None:
    async def coming() -> tuple[Door, list[heartbeat.HeartbeatReply], int]:
        door, passes = Door(seconds=SLICE / 2), 0
        replies = asyncio.gather(*[door.come(n) for n in range(60)])
        while not replies.done():
            await asyncio.sleep(0)
            passes += 1
        return door, await replies, passes

    door, replies, passes = asyncio.run(coming())
    assert door.taken == list(range(60)), "in turn"
    assert [reply.interval_s for reply in replies] == door.taken, "each got its own answer"
    assert passes >= 15
    assert len(door.line) == 0 and door.load.waited_s == 0.0


def test_one_that_comes_alone_does_not_wait() -> None:
    async def alone() -> heartbeat.HeartbeatReply:
        coroutine = Door().line.take(beat(7))
        with pytest.raises(StopIteration) as answered:
            coroutine.send(None)
        return answered.value.value  # type: ignore[no-any-return]

    assert asyncio.run(alone()).interval_s == 7


def test_the_urgent_ones_come_first_and_none_is_taken_in_during_a_look() -> None:
    async def looks() -> tuple[Door, list[int]]:
        door, loop = Door(), asyncio.get_running_loop()
        answers: list[asyncio.Task[heartbeat.HeartbeatReply]] = []

        def work() -> list[int]:
            for number in (1, 2, 3):
                loop.call_soon_threadsafe(
                    lambda n=number: answers.append(door.come(n, urgent=n == 3))
                )
            deadline = time.monotonic() + 5
            while len(door.line) < 3 and time.monotonic() < deadline:
                pass
            return list(door.taken)

        meanwhile = await door.line.look(work)
        assert [(await answer).resync for answer in answers] == [False, False, True], (
            "who is urgent is handed on"
        )
        return door, meanwhile

    door, meanwhile = asyncio.run(looks())
    assert (meanwhile, door.taken) == ([], [3, 1, 2])


def test_a_look_waits_for_the_line_only_so_long_and_for_what_is_urgent_first() -> None:
    async def looks(within_s: float) -> list[int]:
        door = Door(seconds=SLICE)
        come = [door.come(n, urgent=n >= 76) for n in range(80)]
        await asyncio.sleep(0)
        seen = await door.line.look(lambda: list(door.taken), within_s)
        await asyncio.gather(*come)
        return seen

    assert len(asyncio.run(looks(0.0))) < 4
    some = asyncio.run(looks(40 * SLICE))
    assert {76, 77, 78, 79} <= set(some) and len(some) < 60
    assert len(asyncio.run(looks(60.0))) == 80


def test_one_that_cannot_be_read_is_an_error_for_itself_alone() -> None:
    async def coming() -> list[object]:
        door = Door(seconds=SLICE)

        def broken() -> heartbeat.Heartbeat:
            raise Problem(422, "no heartbeat")

        come = [
            door.come(1),
            door.come(2),
            asyncio.create_task(door.line.take(broken)),
            door.come(3),
        ]
        left = door.come(4)
        await asyncio.sleep(0)
        left.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await left
        return [*await asyncio.gather(*come, return_exceptions=True)]

    first, second, broken, last = asyncio.run(coming())
    assert isinstance(broken, Problem)
    assert all(isinstance(reply, heartbeat.HeartbeatReply) for reply in (first, second, last))


def test_a_line_in_which_all_wait_too_long_is_closed_for_a_while() -> None:
    refusal = Load(unread_s=WAITED + 0.1).refusal(urgent=False)
    assert refusal is not None
    assert "overloaded" in refusal.detail
    assert Load(queued_s=WAITED + 0.1).refusal(urgent=False) is not None
    assert Load(unread_s=WAITED + 0.1, queued_s=WAITED + 0.1).refusal(urgent=True) is None, (
        "who does not wait"
    )
    assert Load(late_s=OVERLOADED + 0.1).refusal(urgent=True) is not None
    assert Load(unread_s=WAITED - 0.1, queued_s=WAITED - 0.1).refusal(urgent=False) is None, (
        "the same seconds count once"
    )
