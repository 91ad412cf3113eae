"""A node agent keeps the calls that it has read from a ring, and answers requests for any of them."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from hangwatch.agent.node.discovery.rings import RingFile
from hangwatch.agent.node.discovery.watched import WatchedProcess
from hangwatch.agent.node.reporting.calls import CALLS_KEPT
from hangwatch.agent.node.system.processes import CpuActivity
from hangwatch.agent.recorder.streams import CompletionMode, StreamRecorder
from hangwatch.agent.recorder.writer import RingWriter
from hangwatch.model.calls import Signature, encode_signature
from hangwatch.ring.layout import RECORD_SLOTS, RecordFlag

UID = 1


class QuickRank:
    """A rank that makes calls, and the node agent's view of it."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "a.ring"
        self.create_ring()
        self.watched = WatchedProcess(
            pid=os.getpid(),
            start_ticks=1,
            activity=CpuActivity(last_busy_ns=0),
            found_ns=0,
            ring=RingFile(path=self.path, pid=os.getpid(), start_ticks=1),
        )
        self.log = self.watched.call_log

    def create_ring(self) -> None:
        self.ring = RingWriter(self.path, pid=os.getpid(), start_ticks=1)
        self.ring.write_identity({"job": "j", "rank": 1, "world_size": 4})
        description = {"kind": "collective", "name": "0", "desc": "d", "ranks": "0-3"}
        slot = self.ring.open_stream(UID, description)
        self.stream = StreamRecorder(self.ring, UID, slot, unbox=lambda work: work)

    def make_calls(self, count: int, op: str = "all_reduce") -> None:
        signature = self.ring.intern_signature(encode_signature(Signature(op=op, agree=7)))
        for _ in range(count):
            body = self.stream.pack_record_body(signature, 0, RecordFlag.BLOCKING, 8)
            self.stream.enter_call(7, body, 0, CompletionMode.UNOBSERVABLE)

    def read_ring(self) -> None:
        self.watched.read_state(time.monotonic_ns())

    def list_seqs(self, first: int, last: int, step: int = 1) -> list[int]:
        calls = self.watched.read_window(0, UID, first, last, step)
        return [call.seq for call in calls]


@pytest.fixture
def rank(tmp_path: Path) -> QuickRank:
    return QuickRank(tmp_path)


def test_calls_that_the_ring_has_lost_are_sent(rank: QuickRank) -> None:
    for op in ("broadcast", "all_reduce", "all_reduce", "all_reduce"):
        rank.make_calls(RECORD_SLOTS // 2, op)
        rank.read_ring()
    calls = rank.watched.read_window(0, UID, 100, 110)
    assert [call.seq for call in calls] == list(range(100, 111))
    assert {call.signature.op for call in calls} == {"broadcast"}
    whole = rank.watched.read_window(0, UID, 1, 4 * RECORD_SLOTS)
    assert [call.seq for call in whole] == list(range(1, 2 * RECORD_SLOTS + 1))
    assert all(call.chain for call in whole)


def test_window_is_thinned_and_limited(rank: QuickRank) -> None:
    rank.make_calls(RECORD_SLOTS)
    rank.read_ring()
    rank.make_calls(64)  # not read yet: only the ring has them
    assert rank.list_seqs(1, 256, 64) == [64, 128, 192, 256]
    newest = RECORD_SLOTS + 64
    assert rank.list_seqs(newest - 1, newest + 10) == [newest - 1, newest]


def test_resync_repeats_the_history_alone(rank: QuickRank) -> None:
    rank.make_calls(10)
    rank.read_ring()
    rank.watched.reset_acked()
    rank.make_calls(2)
    rank.read_ring()
    rank.read_ring()
    assert list(rank.watched.history.chains[UID]) == list(range(1, 13))
    assert len(rank.log) == 12
    (performance,) = rank.watched.tally.build_report("k")
    assert [totals.calls for totals in performance.totals] == [12]


def test_calls_in_the_ring_of_an_executed_program_are_counted(rank: QuickRank) -> None:
    rank.make_calls(10)
    rank.read_ring()
    rank.path.unlink()
    rank.create_ring()  # the process has called exec()
    rank.make_calls(2)
    rank.read_ring()
    rank.make_calls(3)
    rank.read_ring()
    assert len(rank.log) == 15
    assert list(rank.watched.history.chains[UID]) == [1, 2, 3, 4, 5]
    (performance,) = rank.watched.tally.build_report("k")
    assert [totals.calls for totals in performance.totals] == [15]


def test_log_is_bounded(rank: QuickRank) -> None:
    for _ in range(24):
        rank.make_calls(RECORD_SLOTS // 2)
        rank.read_ring()
        assert len(rank.log) <= CALLS_KEPT * 5 // 4
    assert rank.list_seqs(1, 24 * RECORD_SLOTS)[-1] == 12 * RECORD_SLOTS
