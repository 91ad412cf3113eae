"""Traced calls of a ring and the upper bounds of their durations."""

from __future__ import annotations

import mmap
import os
from pathlib import Path
from typing import Any

import pytest

from hangwatch.agent.node.requests.traces import HOLD_S, TraceRequests, read_trace
from hangwatch.agent.recorder.writer import RingWriter
from hangwatch.model.calls import Signature, Site, encode_signature
from hangwatch.protocol.commands import Command, CommandKind, TensorStats
from hangwatch.ring import checks
from hangwatch.ring.checks import CheckEntry
from hangwatch.ring.layout import (
    RECORD_SLOTS,
    RECORDS,
    UNKNOWN_COMPLETED,
    CheckFlag,
    RecordFlag,
)
from hangwatch.ring.reader import RingReader
from tests.unit.agent.node.discovery.test_rings import make_ring, watch_ring

NS_PER_MS = 1_000_000


class TimedRing:
    """A ring with records at times that the test chooses."""

    def __init__(self, folder: Path) -> None:
        self.writer = RingWriter(folder / "1-1.ring", pid=1, start_ticks=1)
        self.writer.open_stream(
            1,
            {"kind": "collective", "name": "0", "desc": "d", "ranks": "0-1"},
        )
        self.ops = {
            op: self.writer.intern_signature(encode_signature(Signature(op=op, shapes=((4,),))))
            for op in ("all_reduce", "barrier")
        }
        self.site = self.writer.intern_site({"file": "a.py", "line": 3, "function": "f"})
        self.reader = RingReader(self.writer.map)
        self.seq = 0

    def record_call(
        self,
        at_ms: int,
        *,
        done_ms: int = 0,
        completed: int | None = None,
        blocking: bool = True,
        thread: int = 7,
        op: str = "all_reduce",
    ) -> None:
        self.seq += 1
        index = next(self.writer.record_indices)
        completed_field = UNKNOWN_COMPLETED if completed is None else completed
        flags = RecordFlag.BLOCKING if blocking else RecordFlag.ASYNC
        values = (
            index + 1,
            at_ms * NS_PER_MS,
            done_ms * NS_PER_MS,
            self.seq,
            0,
            completed_field,
            16,
            1,
            self.ops[op],
            self.site,
            thread,
            flags,
            -1,
            0,
            index + 1,
        )
        RECORDS.slot.pack_into(self.writer.map, RECORDS.locate_slot(index), *values)

    def list_durations_ms(self, now_ms: int = 10_000) -> list[float | None]:
        trace = read_trace(self.reader, 0, now_ms * NS_PER_MS, is_last=True)
        return [
            None if call.within_s is None else round(1000 * call.within_s, 3)
            for call in trace.calls
        ]


def test_duration_is_the_smallest_known_upper_bound(tmp_path: Path) -> None:
    ring = TimedRing(tmp_path)
    # The poller detects completion at 190, but the thread makes its next call at 120.
    ring.record_call(100, done_ms=190, completed=0)
    ring.record_call(120, completed=1, blocking=False)
    ring.record_call(130, completed=1, blocking=False)
    ring.record_call(180, completed=3, thread=8)  # both are complete by now
    # Another thread's call does not bound the previous one.
    ring.record_call(200, completed=3, thread=9)
    assert ring.list_durations_ms() == [20, 60, 50, None, None]


def test_unknown_completion_gives_no_duration(
    tmp_path: Path,
) -> None:
    ring = TimedRing(tmp_path)
    ring.record_call(100, blocking=False)
    ring.record_call(120, blocking=False)
    trace = read_trace(ring.reader, 0, 121 * NS_PER_MS)
    assert [(c.within_s, c.is_pending) for c in trace.calls] == [(None, False)] * 2


def test_recent_unfinished_call_delays_later_calls(tmp_path: Path) -> None:
    ring = TimedRing(tmp_path)
    ring.record_call(100, done_ms=101, completed=0)
    ring.record_call(110, completed=1)
    ring.record_call(111, done_ms=112, completed=1, thread=8)
    trace = read_trace(ring.reader, 0, 150 * NS_PER_MS)
    assert ([c.call.seq for c in trace.calls], trace.next_index) == ([1], 1)
    assert (
        len(read_trace(ring.reader, trace.next_index, 150 * NS_PER_MS, is_last=True).calls) == 2
    ), "the last read holds nothing back"
    later_trace = read_trace(ring.reader, trace.next_index, int((0.110 + HOLD_S) * 1e9) + NS_PER_MS)
    assert [(c.call.seq, c.within_s, c.is_pending) for c in later_trace.calls] == [
        (2, None, True),
        (3, 0.001, False),
    ], "a hanging call is reported"
    assert read_trace(ring.reader, later_trace.next_index, 2000 * NS_PER_MS).calls == ()


def test_calls_are_filtered_by_operation(tmp_path: Path) -> None:
    ring = TimedRing(tmp_path)
    for n in range(6):
        ring.record_call(n, done_ms=n + 1, completed=n, op="barrier" if n % 3 else "all_reduce")
    trace = read_trace(ring.reader, 0, 50 * NS_PER_MS, op="all_reduce")
    assert ([c.call.seq for c in trace.calls], trace.other_ops, trace.next_index) == (
        [1, 4],
        ("barrier",),
        6,
    )
    first, *_ = trace.calls
    assert first.call.site == Site(
        file="a.py", line=3, function="f"
    ) and first.call.signature.shapes == ((4,),)


def test_overwritten_calls_are_counted_and_replies_limited(tmp_path: Path) -> None:
    ring = TimedRing(tmp_path)
    for n in range(RECORD_SLOTS + 100):
        ring.record_call(n, completed=n)  # no call may be delayed: the ring wraps around
    trace = read_trace(ring.reader, 40, (RECORD_SLOTS + 200) * NS_PER_MS, max_calls=50)
    assert (trace.missed, len(trace.calls), trace.next_index, trace.has_more) == (60, 50, 150, True)
    assert trace.calls[0].call.seq == 101
    offset = RECORDS.locate_slot(150)
    ring.writer.map[offset : offset + 8] = bytes(8)  # a torn record
    next_trace = read_trace(
        ring.reader, trace.next_index, (RECORD_SLOTS + 200) * NS_PER_MS, max_calls=50
    )
    assert (next_trace.missed, next_trace.calls[0].call.seq) == (1, 152)


def test_record_being_written_is_awaited(tmp_path: Path) -> None:
    ring = TimedRing(tmp_path)
    for n in range(4):
        ring.record_call(n, done_ms=n + 1, completed=n)
    end = RECORDS.locate_slot(3)
    ring.writer.map[end - 4 : end] = bytes(4)
    trace = read_trace(ring.reader, 0, 50 * NS_PER_MS)
    assert (len(trace.calls), trace.next_index, trace.missed) == (2, 2, 0)


def test_infinite_number_makes_a_signature_malformed(tmp_path: Path) -> None:
    ring = TimedRing(tmp_path)
    infinite = {"op": "all_reduce", "numel": float("inf")}  # JSON in Python has such numbers
    ring.ops["all_reduce"] = ring.writer.intern_signature(infinite)
    ring.record_call(1)
    (traced,) = read_trace(ring.reader, 0, 5 * NS_PER_MS, is_last=True).calls
    assert traced.call.signature == Signature(op="?")


class TestTraceAnswers:
    """The replies of the node agent, on a ring of this process."""

    def make_command(self, key: str, **more: Any) -> Command:
        return Command(
            id=f"c{more}", kind=CommandKind.TRACE, key=key, **{"max_calls": 1000, **more}
        )

    def test_reply_is_repeated_until_acknowledged(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        w = watch_ring(make_ring(tmp_path))
        stats = (1.0, float("-inf"), 2.0, float("nan"))
        entry = CheckEntry(0, 4, 0, 0, 1, 1, 0, *stats, 1, 0, 0, CheckFlag.VALUES, 0, 0)
        monkeypatch.setattr(checks, "read_value_entries", lambda _: {(1, 4): entry})
        requests = TraceRequests()
        requests.add_request(self.make_command(w.key, after=-1), 0)
        (start,) = requests.build_replies({w.key: w}, 1)
        assert (start.upto, start.calls) == (39, ())
        requests.add_request(self.make_command(w.key, after=0, values=True, last=True), 1)
        assert len(requests.build_replies({w.key: w}, 2)) == 2, (
            "the heartbeat with the first reply may be lost"
        )
        requests.mark_delivered((start,))
        (reply,) = requests.build_replies({w.key: w}, 3)
        assert [call.seq for call in reply.calls] == list(range(1, 40))
        assert reply.calls[3].values == TensorStats(mean=1.0, max=2.0, nonfinite=2), (
            "JSON has no infinity"
        )
        assert reply.calls[4].values is None
        assert reply.kinds[reply.calls[8].kind].site == Site(file="a.py", line=9, function="f")
        assert requests.build_replies({w.key: w}, int(60e9)) == (), "the request has expired"
        w.close()

    def test_unreadable_ring_is_reported_in_reply(self, tmp_path: Path) -> None:
        w = watch_ring(make_ring(tmp_path))
        w.reader = None
        requests = TraceRequests()
        requests.add_request(self.make_command(w.key), 0)
        requests.add_request(self.make_command("7-7", op="x"), 0)
        here, gone = requests.build_replies({w.key: w}, 1)
        assert "it has no ring" in str(here.error) and "no such process" in str(gone.error)
        w.close()


def test_ring_is_mapped_like_node_agent(tmp_path: Path) -> None:
    """`read_trace` works on a read-only map of its own."""
    ring = TimedRing(tmp_path)
    ring.record_call(1, done_ms=2, completed=0)
    fd = os.open(ring.writer.path, os.O_RDONLY)
    try:
        with mmap.mmap(fd, 0, prot=mmap.PROT_READ) as mapped:
            assert len(read_trace(RingReader(mapped), 0, 5 * NS_PER_MS).calls) == 1
    finally:
        os.close(fd)
