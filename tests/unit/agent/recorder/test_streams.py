"""Two threads that make calls in one stream: hand-overs are legal, calls at the same time are
not.
"""

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from hangwatch.agent.recorder.streams import (
    CompletionMode,
    StreamRecorder,
    current_batch,
    leave_call,
)
from hangwatch.agent.recorder.writer import RingWriter
from hangwatch.ring.layout import STREAMS, RecordFlag
from hangwatch.ring.reader import RingReader


class WatchedStream:
    def __init__(self, folder: Path) -> None:
        self.ring = RingWriter(folder / "a.ring", pid=os.getpid(), start_ticks=1)
        described = {"kind": "collective", "name": "0", "desc": "d", "ranks": "0-1"}
        self.stream = StreamRecorder(
            self.ring, 1, self.ring.open_stream(1, described), unbox=lambda work: work
        )

    def make_call(self) -> None:
        self.stream.finish_call(
            self.stream.enter_call(
                7, self.describe_call(), threading.get_ident(), CompletionMode.RETURN
            )
        )

    def describe_call(self) -> bytes:
        return self.stream.pack_record_body(0, 0, RecordFlag.BLOCKING)

    def read_published(self) -> tuple[int, int]:
        """How many calls are entered and complete, by what the poll wrote into the ring."""
        completed, _, entered, *_ = STREAMS.slot.unpack_from(self.ring.map, self.stream.slot << 3)
        return entered, completed

    def read_shared(self) -> dict[int, int]:
        return RingReader(self.ring.map).read_delta(0).first_concurrent


@pytest.fixture
def watched(tmp_path: Path) -> WatchedStream:
    return WatchedStream(tmp_path)


def start_thread(work: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def test_alternating_threads_are_legal(watched: WatchedStream) -> None:
    mine, its = threading.Semaphore(0), threading.Semaphore(0)

    def make_calls() -> None:
        for _ in range(5):
            its.acquire()
            watched.make_call()
            mine.release()

    thread = start_thread(make_calls)
    for _ in range(5):
        watched.make_call()
        its.release()
        mine.acquire()
    thread.join()
    watched.make_call()
    assert watched.read_shared() == {}


def test_concurrent_threads_are_reported(watched: WatchedStream) -> None:
    ended = False

    def make_calls() -> None:
        while not ended:
            watched.make_call()
            time.sleep(0.002)  # the user's own line, as a computation would be

    thread = start_thread(make_calls)
    deadline = time.monotonic() + 20
    while not watched.read_shared() and time.monotonic() < deadline:
        watched.make_call()
        time.sleep(0.002)
    ended = True
    thread.join()
    seq = watched.read_shared()[1]
    one, other = RingReader(watched.ring.map).read_calls(
        1, time.monotonic_ns(), max_calls=10_000, from_seq=seq - 1
    )[:2]
    assert one.thread != other.thread, "the flagged call and the one before it are of two threads"


class FakeWork:
    done = False

    def is_completed(self) -> bool:
        return self.done


def test_returned_call_completes_earlier_asynchronous_calls(
    watched: WatchedStream,
) -> None:
    stream, work = watched.stream, FakeWork()
    stream.pending_works.append(
        (
            stream.enter_call(
                7, stream.pack_record_body(0, 0, RecordFlag.ASYNC), 0, CompletionMode.WORK
            ),
            work,
        )
    )
    watched.make_call()
    assert (stream.poll_works(0), stream.completed, stream.entered) == (True, 0, 2)
    work.done = True
    assert (stream.poll_works(0), stream.completed) == (False, 2)


def test_returned_call_completes_call_without_completion(watched: WatchedStream) -> None:
    stream = watched.stream
    leave_call(
        stream.enter_call(
            7, stream.pack_record_body(0, 0, RecordFlag.ASYNC), 0, CompletionMode.NEXT
        )
    )
    assert stream.completed == 0
    watched.make_call()
    assert (stream.poll_works(0), stream.completed) == (False, 2)


def test_completed_calls_while_operator_blocks(watched: WatchedStream) -> None:
    stream, work, description = watched.stream, FakeWork(), watched.describe_call()
    stream.pending_works.append(
        (stream.enter_call(7, description, threading.get_ident(), CompletionMode.WORK), work)
    )
    stream.update_ring(0)
    assert watched.read_published() == (1, 0)
    work.done = True  # seen by the user's wait alone: the next call comes before the next poll
    call = stream.enter_call(7, description, threading.get_ident(), CompletionMode.RETURN)
    for _ in range(2):
        stream.update_ring(0)
        assert watched.read_published() == (2, 1)
    leave_call(call)
    stream.update_ring(0)
    assert watched.read_published() == (2, 2)


def test_completed_later_work_does_not_complete_blocking_call(watched: WatchedStream) -> None:
    stream, work, description = watched.stream, FakeWork(), watched.describe_call()
    for one in (FakeWork(), work):
        stream.pending_works.append(
            (stream.enter_call(7, description, 0, CompletionMode.WORK), one)
        )
    stream.enter_call(7, description, threading.get_ident(), CompletionMode.RETURN)
    work.done = True
    for _ in range(2):
        stream.update_ring(0)
        assert watched.read_published() == (3, 2)


def test_parts_of_a_batch_have_the_time_at_which_it_began(
    watched: WatchedStream, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = watched.stream.pack_record_body(0, 0, RecordFlag.BATCHED)
    monkeypatch.setattr(current_batch, "began_ns", 12345)
    times = [watched.stream.enter_call(7, body, 0, CompletionMode.UNOBSERVABLE)[3] for _ in "ab"]
    assert times == [12345, 12345]
    other = watched.stream.pack_record_body(0, 0, 0)
    assert watched.stream.enter_call(7, other, 0, CompletionMode.UNOBSERVABLE)[3] > 12345
