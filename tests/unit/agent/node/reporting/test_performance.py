"""The statistics that a node agent aggregates from a real ring, each reported once."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hangwatch.agent.node.reporting.calls import (
    REPORT_INTERVAL_S,
    PerformanceReporter,
    ProcessTally,
)
from hangwatch.agent.node.reporting.uplink import HeartbeatOutcome
from hangwatch.agent.recorder.streams import CompletionMode, StreamRecorder
from hangwatch.agent.recorder.writer import RingWriter
from hangwatch.model.calls import Signature, encode_signature
from hangwatch.protocol import heartbeat
from hangwatch.ring.layout import RECORD_SLOTS, RecordFlag
from hangwatch.ring.reader import RingReader
from hangwatch.ring.sampling import MIN_TIMED_LEVEL, sampling_level

SECOND_NS = 1_000_000_000


class MeasuredRank:
    """A rank that makes calls, and what its node agent knows of it."""

    def __init__(self, folder: Path, kind: str = "collective", ranks: str = "0-3") -> None:
        self.ring = RingWriter(folder / "a.ring", pid=os.getpid(), start_ticks=1)
        self.ring.write_identity({"job": "j", "rank": 1, "world_size": 4})
        described = {
            "kind": kind,
            "name": "0",
            "desc": "d",
            "ranks": ranks,
            "peer": 1 if kind == "send" else None,
        }
        self.stream = StreamRecorder(
            self.ring, 1, self.ring.open_stream(1, described), unbox=lambda work: work
        )
        self.numbers: dict[str, int] = {}
        self.reader, self.tally, self.cursor = RingReader(self.ring.map), ProcessTally(), 0

    def make_call(self, op: str, size: int, took_us: int | None = None) -> int:
        if op not in self.numbers:
            splits = ((1, 3), (2, 2)) if op == "all_to_all" else None
            self.numbers[op] = self.ring.intern_signature(
                encode_signature(Signature(op=op, agree=7, splits=splits))
            )
        described = self.stream.pack_record_body(self.numbers[op], 0, RecordFlag.BLOCKING, size)
        call = self.stream.enter_call(7, described, 0, CompletionMode.UNOBSERVABLE)
        if took_us is not None and sampling_level(call[1]) >= MIN_TIMED_LEVEL:
            self.complete_call(call[2], call[3] + 1000 * took_us)
        return call[2]

    def complete_call(self, index: int, at_ns: int) -> None:
        """Records the completion as the native recorder does."""
        self.ring.record_completion(index, at_ns)
        self.ring.add_flags(index, RecordFlag.TIMED)

    def read_ring(self) -> None:
        delta = self.reader.read_delta(self.cursor)
        self.cursor = delta.next_index
        self.tally.add_records(delta.records, self.reader.read_snapshot(0).streams, self.reader)

    def make_report(self) -> heartbeat.StreamPerformance:
        self.read_ring()
        (report,) = self.tally.build_report("k")
        return report


@pytest.fixture
def rank(tmp_path: Path) -> MeasuredRank:
    return MeasuredRank(tmp_path)


def test_calls_are_counted_by_operation_and_size(rank: MeasuredRank) -> None:
    for size in (0, 1000, 1023, 1024):
        rank.make_call("all_reduce", size)
    rank.make_call("all_gather_into_tensor", 256)
    report = rank.make_report()
    assert [(t.op, t.size, t.calls, t.bytes) for t in report.totals] == [
        ("all_reduce", 0, 1, 0), ("all_reduce", 10, 2, 2023), ("all_reduce", 11, 1, 1024), ("all_gather_into_tensor", 11, 1, 1024),
    ]  # fmt: skip
    assert [(s[0], s[3], s[4], s[6]) for s in report.samples] == [
        (1, -1, "all_reduce", 0), (2, -1, "all_reduce", 1000), (3, -1, "all_reduce", 1023), (4, -1, "all_reduce", 1024),
        (5, -1, "all_gather_into_tensor", 1024),
    ]  # fmt: skip
    assert rank.tally.build_report("k") == [], "calls count once"


def test_durations_are_added_when_calls_complete(rank: MeasuredRank) -> None:
    open_ones = [
        index
        for n in range(96)
        if sampling_level((index := rank.make_call("all_reduce", 64)) + 1) >= MIN_TIMED_LEVEL
        and n > 80
    ]
    rank.make_call("all_reduce", 64, took_us=1)
    while sampling_level(rank.stream.entered) < MIN_TIMED_LEVEL:
        open_ones = [rank.make_call("all_reduce", 64)]
    first = rank.make_report()
    assert sum(count for _, count in first.totals[0].latency) == 0
    rank.complete_call(open_ones[-1], rank.reader.read_record(open_ones[-1])[1] + 250_000)  # type: ignore[index]
    rank.make_call("all_reduce", 64)
    second = rank.make_report()
    assert second.totals[0].longest_us == 250
    assert [count for _, count in second.totals[0].latency] == [1]


def test_few_calls_are_compared_and_only_synchronizing_ones(rank: MeasuredRank) -> None:
    for _ in range(1000):
        rank.make_call("all_reduce", 64, took_us=40)
    report = rank.make_report()
    assert 4 <= len(report.samples) <= 16
    assert {s[3] for s in report.samples} == {40}
    assert all(0 <= s[2] < 10_000 for s in report.samples), "after the previous call"
    assert all(sampling_level(s[0]) >= MIN_TIMED_LEVEL for s in report.samples)
    rank.make_call("broadcast", 64)
    rank.make_call("all_to_all", 64)
    report = rank.make_report()
    assert [(s[4], s[6]) for s in report.samples] == [("all_to_all", -1)], (
        "of uneven sizes, there is no bandwidth"
    )


def test_lost_ring_records_are_counted(rank: MeasuredRank) -> None:
    rank.make_call("all_reduce", 8)
    rank.read_ring()
    for _ in range(RECORD_SLOTS + 100):
        rank.make_call("all_reduce", 8)
    report = rank.make_report()
    assert (report.missed, report.totals[0].calls) == (100, RECORD_SLOTS + 1)


def test_messages_are_counted_but_not_compared(tmp_path: Path) -> None:
    rank = MeasuredRank(tmp_path, kind="send")
    rank.make_call("send", 4096)
    report = rank.make_report()
    assert (report.totals[0].op, report.totals[0].bytes, report.samples) == ("send", 4096, ())


def test_report_is_repeated_until_acknowledged_but_rate_limited(rank: MeasuredRank) -> None:
    reporter, now = PerformanceReporter(), 100 * SECOND_NS
    rank.make_call("all_reduce", 8)
    rank.read_ring()
    first = reporter.next_report(now, {"k": rank.tally})
    assert first is not None and first.number == 1 and first.clock is None
    assert reporter.next_report(now + 60 * SECOND_NS, {"k": rank.tally}) is first, "the same again"
    reporter.mark_delivered()
    reporter.apply_outcome(
        HeartbeatOutcome(
            reply=heartbeat.HeartbeatReply(clock_s=50.001), sent_s=10.0, answered_s=10.002
        )
    )
    rank.make_call("all_reduce", 8)
    rank.read_ring()
    again = now + int(REPORT_INTERVAL_S * SECOND_NS)
    assert reporter.next_report(again - 1, {"k": rank.tally}) is None
    second = reporter.next_report(again, {"k": rank.tally})
    assert second is not None and second.number == 2
    assert second.clock == (pytest.approx(39.999), pytest.approx(40.001))
    reporter.mark_delivered()
    assert reporter.next_report(again + 60 * SECOND_NS, {"k": rank.tally}) is None, (
        "nothing was called"
    )
    rank.make_call("all_reduce", 8)
    rank.read_ring()
    assert (
        reporter.next_report(again + 60 * SECOND_NS + 1, {"k": rank.tally}, flush=True) is not None
    )
