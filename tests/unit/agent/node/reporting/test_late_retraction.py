"""A call that raises an exception before it communicates is taken back by its recorder. Where a node
agent has read it before, nothing that it reports from then on differs from a rank without the call.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from hangwatch.agent.environment import run_dir
from hangwatch.agent.node.discovery import rings
from hangwatch.agent.node.discovery.watched import watch_process
from hangwatch.agent.recorder.streams import CompletionMode, EnteredCall, StreamRecorder
from hangwatch.agent.recorder.writer import RingWriter
from hangwatch.model.calls import Signature, encode_signature
from hangwatch.model.ranks import Lifecycle
from hangwatch.protocol import heartbeat
from hangwatch.ring.layout import LiveWord
from hangwatch.tracking.attempt import Attempt
from hangwatch.tracking.call_stream import CallStream
from hangwatch.tracking.fleet import Fleet

UID = 1


class ReportedRank:
    """This process as a rank, watched by its ring and reported by a host of its own."""

    def __init__(self, folder: Path, rank: int, fleet: Fleet) -> None:
        pid, ticks = os.getpid(), run_dir.read_start_ticks(os.getpid())
        folder.mkdir()
        path = folder / f"{pid}-{ticks}.ring"
        self.ring = RingWriter(path, pid=pid, start_ticks=ticks)
        self.ring.write_identity({"job": "j", "rank": rank, "world_size": 2})
        self.ring.set_word(LiveWord.LIFECYCLE, Lifecycle.INITIALISED)
        description = {"kind": "collective", "name": "0", "desc": "d", "ranks": "0-1"}
        slot = self.ring.open_stream(UID, description)
        self.stream = StreamRecorder(self.ring, UID, slot, unbox=lambda work: work)
        file = rings.RingFile(path=path, pid=pid, start_ticks=ticks)
        self.watched = watch_process(pid, ticks, time.monotonic_ns(), ring=file)
        self._fleet, self._host, self._number = fleet, f"n{rank}", 0

    def enter_call(self, op: str) -> EnteredCall:
        agree = sum(op.encode())
        number = self.ring.intern_signature(encode_signature(Signature(op=op, agree=agree)))
        body = self.stream.pack_record_body(number, 0, 0)
        return self.stream.enter_call(agree, body, 0, CompletionMode.RETURN)

    def make_calls(self, *ops: str) -> None:
        for op in ops:
            self.stream.finish_call(self.enter_call(op))

    def read_ring(self) -> None:
        self.watched.read_state(time.monotonic_ns())

    def send_report(self) -> None:
        """Reads the ring and reports it, which is to be acknowledged."""
        self.read_ring()
        update = self.watched.compose_update(time.monotonic_ns())
        if update is not None:
            self._send(update)

    def report(self) -> None:
        self.send_report()
        self.watched.mark_acked(time.monotonic_ns())

    def answer_request(self, last: int) -> None:
        calls = self.watched.read_window(time.monotonic_ns(), UID, 1, last)
        self.watched.history.add_reply(UID, calls)
        reply = heartbeat.CallsReply(
            key=self.watched.key, request="r", uid=UID, calls=tuple(calls), from_seq=1, to_seq=last
        )
        self._send(replies=(reply,))

    def _send(
        self,
        update: heartbeat.ProcessUpdate | None = None,
        replies: tuple[heartbeat.CallsReply, ...] = (),
    ) -> None:
        self._number += 1
        beat = heartbeat.Heartbeat(
            host=self._host,
            agent=self._host,
            number=self._number,
            full=self._number == 1,
            processes=(update,) if update is not None else (),
            calls=replies,
        )
        self._fleet.apply_heartbeat(beat, float(self._number))


@pytest.fixture
def fleet() -> Fleet:
    return Fleet()


@pytest.fixture
def raising(tmp_path: Path, fleet: Fleet) -> ReportedRank:
    return ReportedRank(tmp_path / "1", 1, fleet)


@pytest.fixture
def other(tmp_path: Path, fleet: Fleet) -> ReportedRank:
    return ReportedRank(tmp_path / "0", 0, fleet)


def get_attempt(fleet: Fleet) -> Attempt:
    (attempt,) = fleet.attempts.values()
    return attempt


def get_stream(fleet: Fleet, rank: int) -> CallStream:
    return get_attempt(fleet).processes[rank].streams[UID]


def raise_after_reading(rank: ReportedRank) -> None:
    call = rank.enter_call("gather")
    rank.read_ring()
    rank.stream.retract_call(call)


def raise_after_report(rank: ReportedRank) -> None:
    call = rank.enter_call("gather")
    rank.report()
    rank.stream.retract_call(call)


def raise_before_acknowledgement(rank: ReportedRank) -> None:
    call = rank.enter_call("gather")
    rank.send_report()
    rank.stream.retract_call(call)
    rank.read_ring()
    rank.watched.mark_acked(time.monotonic_ns())


def raise_after_lost_report(rank: ReportedRank) -> None:
    call = rank.enter_call("gather")
    rank.send_report()
    rank.stream.retract_call(call)
    rank.report()


def raise_twice(rank: ReportedRank) -> None:
    """The script tries again, while it is being reported that the first try was retracted."""
    raise_after_report(rank)
    call = rank.enter_call("gather")
    rank.send_report()
    rank.stream.retract_call(call)
    rank.read_ring()
    rank.watched.mark_acked(time.monotonic_ns())


def raise_after_reply(rank: ReportedRank) -> None:
    call = rank.enter_call("gather")
    rank.answer_request(call[1])
    rank.read_ring()
    rank.stream.retract_call(call)


@pytest.mark.parametrize(
    "raise_call",
    [
        raise_after_reading,
        raise_after_report,
        raise_before_acknowledgement,
        raise_after_lost_report,
        raise_twice,
        raise_after_reply,
    ],
)
@pytest.mark.parametrize("is_read_before_next_call", [False, True])
def test_retracted_call_leaves_no_trace(
    fleet: Fleet,
    raising: ReportedRank,
    other: ReportedRank,
    raise_call: Callable[[ReportedRank], None],
    is_read_before_next_call: bool,
) -> None:
    for rank in (raising, other):
        rank.make_calls("broadcast", "all_reduce")
        rank.report()
    other.make_calls("barrier")
    other.report()
    raise_call(raising)
    if is_read_before_next_call:
        raising.report()
        assert get_stream(fleet, 1).entered == 2
        assert get_stream(fleet, 1).reported_hashes == get_stream(fleet, 0).reported_hashes[:2]
    for op in ("barrier", "all_reduce", "all_gather"):
        raising.make_calls(op)
        raising.report()
        if op != "barrier":
            other.make_calls(op)
            other.report()
    stream = get_stream(fleet, 1)
    assert (stream.entered, stream.loss) == (5, None)
    assert stream.reported_hashes == get_stream(fleet, 0).reported_hashes
    assert not get_attempt(fleet).diverged_groups
    assert all(call.signature.op != "gather" for call in stream.calls.values())
    calls = raising.watched.read_window(time.monotonic_ns(), UID, 1, 5)
    assert [(call.seq, call.signature.op) for call in calls] == [
        (1, "broadcast"),
        (2, "all_reduce"),
        (3, "barrier"),
        (4, "all_reduce"),
        (5, "all_gather"),
    ]
    assert not raising.watched.history.retractions, "the server knows of it"


def test_call_that_was_only_read_is_not_reported_as_retracted(raising: ReportedRank) -> None:
    raising.make_calls("broadcast")
    raising.report()
    raise_after_reading(raising)
    raising.make_calls("barrier")
    raising.read_ring()
    update = raising.watched.compose_update(time.monotonic_ns())
    assert update is not None
    assert update.retractions == ()


def test_divergence_that_a_retracted_call_showed_is_revoked(
    fleet: Fleet, raising: ReportedRank, other: ReportedRank
) -> None:
    for rank in (raising, other):
        rank.make_calls("broadcast")
        rank.report()
    other.make_calls("barrier")
    other.report()
    call = raising.enter_call("gather")
    raising.report()
    assert get_attempt(fleet).diverged_groups
    raising.stream.retract_call(call)
    raising.report()
    assert not get_attempt(fleet).diverged_groups
    raising.make_calls("barrier")
    raising.report()
    assert not get_attempt(fleet).diverged_groups
