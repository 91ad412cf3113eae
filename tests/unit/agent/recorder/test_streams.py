"""Two threads that make calls in one sequence: hand-overs are legal, calls at the same time are
not.
"""

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from hangwatch.agent.recorder.streams import End, Sequence, leave
from hangwatch.agent.recorder.writer import RingWriter
from hangwatch.ring.layout import STREAM_STRUCT, RecordFlag
from hangwatch.ring.reader import RingReader


class Watched:
    def __init__(self, folder: Path) -> None:
        self.ring = RingWriter(folder / "a.ring", pid=os.getpid(), start_ticks=1)
        described = self.ring.describe(
            {"kind": "collective", "name": "0", "desc": "d", "ranks": "0-1"}
        )
        self.sequence = Sequence(
            self.ring, 1, self.ring.open_sequence(1, described), unbox=lambda work: work
        )

    def call(self) -> None:
        self.sequence.finish(
            self.sequence.enter(7, self.described(), threading.get_ident(), End.RETURN)
        )

    def described(self) -> bytes:
        return self.sequence.describe(0, 0, RecordFlag.BLOCKING)

    def published(self) -> tuple[int, int]:
        """How many calls are entered and complete, by what the poll wrote into the ring."""
        completed, _, entered, *_ = STREAM_STRUCT.unpack_from(
            self.ring.map, self.sequence.slot << 3
        )
        return entered, completed

    def shared(self) -> dict[int, int]:
        return RingReader(self.ring.map).read_delta(0).first_concurrent


@pytest.fixture
def watched(tmp_path: Path) -> Watched:
    return Watched(tmp_path)


def beside(work: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def test_threads_that_hand_over_to_one_another(watched: Watched) -> None:
    mine, its = threading.Semaphore(0), threading.Semaphore(0)

    def answer() -> None:
        for _ in range(5):
            its.acquire()
            watched.call()
            mine.release()

    thread = beside(answer)
    for _ in range(5):
        watched.call()
        its.release()
        mine.acquire()
    thread.join()
    watched.call()
    assert watched.shared() == {}


def test_threads_that_go_on_by_themselves(watched: Watched) -> None:
    ended = False

    def work() -> None:
        while not ended:
            watched.call()
            time.sleep(0.002)  # the user's own line, as a computation would be

    thread = beside(work)
    deadline = time.monotonic() + 20
    while not watched.shared() and time.monotonic() < deadline:
        watched.call()
        time.sleep(0.002)
    ended = True
    thread.join()
    found = watched.shared()[1]
    one, other = RingReader(watched.ring.map).read_calls(
        1, time.monotonic_ns(), max_calls=10_000, from_seq=found - 1
    )[:2]
    assert one.thread != other.thread, "the flagged call and the one before it are of two threads"


class Work:
    done = False

    def is_completed(self) -> bool:
        return self.done


def test_a_call_that_returned_is_complete_with_the_asynchronous_ones_before_it(
    watched: Watched,
) -> None:
    sequence, work = watched.sequence, Work()
    sequence.works.append(
        (sequence.enter(7, sequence.describe(0, 0, RecordFlag.ASYNC), 0, End.WORK), work)
    )
    watched.call()
    assert (sequence.poll(0), sequence.completed, sequence.entered) == (True, 0, 2)
    work.done = True
    assert (sequence.poll(0), sequence.completed) == (False, 2)


def test_a_call_that_returned_shows_that_one_is_over_that_never_tells(watched: Watched) -> None:
    sequence = watched.sequence
    leave(sequence.enter(7, sequence.describe(0, 0, RecordFlag.ASYNC), 0, End.NEXT))
    assert sequence.completed == 0
    watched.call()
    assert (sequence.poll(0), sequence.completed) == (False, 2)


def test_what_is_complete_while_an_operator_blocks(watched: Watched) -> None:
    sequence, work, told = watched.sequence, Work(), watched.described()
    sequence.works.append((sequence.enter(7, told, threading.get_ident(), End.WORK), work))
    sequence.settle(0)
    assert watched.published() == (1, 0)
    work.done = True  # seen by the user's wait alone: the next call comes before the next poll
    call = sequence.enter(7, told, threading.get_ident(), End.RETURN)
    for _ in range(2):
        sequence.settle(0)
        assert watched.published() == (2, 1)
    leave(call)
    sequence.settle(0)
    assert watched.published() == (2, 2)


def test_a_later_works_word_does_not_cover_the_call_that_blocks(watched: Watched) -> None:
    sequence, work, told = watched.sequence, Work(), watched.described()
    for one in (Work(), work):
        sequence.works.append((sequence.enter(7, told, 0, End.WORK), one))
    sequence.enter(7, told, threading.get_ident(), End.RETURN)
    work.done = True
    for _ in range(2):
        sequence.settle(0)
        assert watched.published() == (3, 2)
