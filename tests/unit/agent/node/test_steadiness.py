"""When a host is steady, by samples of a real ring of this very process."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from hangwatch.agent.environment import run_dir
from hangwatch.agent.node.discovery import rings
from hangwatch.agent.node.discovery.watched import FLOOD_DIVISOR, WatchedProcess, watch_process
from hangwatch.agent.node.schedule import SETTLE_NS, SteadinessCheck, list_unfinished_ages
from hangwatch.agent.recorder.streams import CompletionMode, StreamRecorder
from hangwatch.agent.recorder.writer import RingWriter
from hangwatch.model.calls import Signature, StreamKind, encode_signature
from hangwatch.model.groups import Group
from hangwatch.model.limits import BLOCKED_AFTER_S
from hangwatch.model.ranks import ExitInfo, Lifecycle
from hangwatch.ring.layout import RECORD_SLOTS, LiveWord, RecordFlag
from hangwatch.ring.parts import DeviceEntry
from hangwatch.ring.reader import StreamState

BLOCKED_AFTER_NS = int(BLOCKED_AFTER_S * 1e9)
SECOND_NS = 1_000_000_000


class Rank:
    """This process as a rank that makes calls, watched by its ring; times are nanoseconds from the
    start.
    """

    def __init__(self, folder: Path) -> None:
        pid, ticks = os.getpid(), run_dir.read_start_ticks(os.getpid())
        path = folder / f"{pid}-{ticks}.ring"
        self.ring = RingWriter(path, pid=pid, start_ticks=ticks)
        self.ring.write_identity({"job": "j", "rank": 1, "world_size": 2})
        self._slot = self.ring.open_stream(
            1,
            {"kind": "collective", "name": "0", "desc": "d", "ranks": "0-1"},
        )
        self._stream = StreamRecorder(self.ring, 1, self._slot, unbox=lambda work: work)
        self._signature = self.ring.intern_signature(encode_signature(Signature(op="all_reduce")))
        self.calls = 0
        self.start_ns = time.monotonic_ns()
        self.write_pulse(0)
        file = rings.RingFile(path=path, pid=pid, start_ticks=ticks)
        self.watched = watch_process(pid, ticks, self.start_ns, ring=file)
        self.check = SteadinessCheck()

    def write_pulse(self, at_ns: int) -> None:
        self.ring.set_word(LiveWord.PULSE_NS, self.start_ns + at_ns)

    def enter_call(self, *, is_complete: bool = True) -> int:
        """When it was entered."""
        body = self._stream.pack_record_body(self._signature, 0, RecordFlag.BLOCKING, 16)
        _, _, _, entered_ns, *_ = self._stream.enter_call(7, body, 0, CompletionMode.RETURN)
        self.calls += 1
        if is_complete:
            self.complete_calls()
        return entered_ns - self.start_ns

    def complete_calls(self) -> None:
        self.ring.write_progress(self._slot, self.calls, 0)

    def sample(self, at_ns: int, *, with_pulse: bool = True) -> bool:
        if with_pulse:
            self.write_pulse(at_ns)
        return self.check.sample_processes([self.watched], self.start_ns + at_ns)

    def become_steady(self) -> int:
        """When it is."""
        for at_ns in range(0, SETTLE_NS + SECOND_NS, SECOND_NS // 4):
            self.enter_call()
            self.sample(at_ns)
        assert self.check.is_steady
        return at_ns


@pytest.fixture
def rank(tmp_path: Path) -> Iterator[Rank]:
    made = Rank(tmp_path)
    yield made
    made.watched.close()


def test_rank_that_makes_calls_is_steady_after_a_while(rank: Rank) -> None:
    rank.enter_call()
    assert not rank.sample(0), "what was never quiet cannot cease to be"
    rank.enter_call()
    rank.sample(1)
    assert not rank.check.is_steady
    rank.enter_call()
    rank.sample(SETTLE_NS + 1)
    assert rank.check.is_steady


def test_rank_between_calls_remains_steady(rank: Rank) -> None:
    at_ns = rank.become_steady()
    for _ in range(20):
        at_ns += SECOND_NS
        assert not rank.sample(at_ns)
    assert rank.check.is_steady


def test_long_call_is_reported_once(rank: Rank) -> None:
    at_ns = rank.become_steady()
    entered_ns = rank.enter_call(is_complete=False)
    assert not rank.sample(at_ns + 1)
    began_ns = at_ns + 2
    assert rank.sample(began_ns), "entered before the samples that were given later times"
    assert entered_ns < began_ns - BLOCKED_AFTER_NS
    assert not rank.check.is_steady
    assert not rank.sample(began_ns + SECOND_NS), "it was reported before"
    rank.complete_calls()
    rank.sample(began_ns + 2 * SECOND_NS)
    assert not rank.check.is_steady, "not before it has been quiet for a while"
    rank.sample(began_ns + 2 * SECOND_NS + SETTLE_NS)
    assert rank.check.is_steady


def test_when_a_call_becomes_long(rank: Rank) -> None:
    rank.sample(0)
    entered_ns = rank.enter_call(is_complete=False)
    rank.sample(entered_ns)
    rank.sample(entered_ns + BLOCKED_AFTER_NS // 2)
    due_ns = rank.check.next_block_ns - rank.start_ns
    assert due_ns == entered_ns + BLOCKED_AFTER_NS
    assert not rank.sample(due_ns - 1_000_000)
    assert rank.sample(due_ns)


@pytest.mark.parametrize(
    ("word", "value"),
    [
        (LiveWord.LIFECYCLE, Lifecycle.DESTROYED),
        (LiveWord.PHASE, 1),
        (LiveWord.SEQUENCES, 2),
        (LiveWord.ERRORS, 1),
    ],
)
def test_rare_changes_are_reported(rank: Rank, word: LiveWord, value: int) -> None:
    at_ns = rank.become_steady()
    rank.ring.set_word(word, value)
    assert rank.sample(at_ns + 1)
    assert not rank.check.is_steady


def test_rank_without_a_pulse_is_reported(rank: Rank) -> None:
    at_ns = rank.become_steady()
    assert rank.sample(at_ns + 2 * SECOND_NS, with_pulse=False)


def test_exit_ends_steadiness_until_it_is_reported(rank: Rank) -> None:
    at_ns = rank.become_steady()
    rank.watched.exit = ExitInfo(exit_status=0)
    assert rank.sample(at_ns + 1)
    assert not rank.check.is_steady


def test_replaced_ring_ends_steadiness(rank: Rank) -> None:
    at_ns = rank.become_steady()
    assert rank.watched.ring is not None
    os.truncate(rank.watched.ring.path, 100)
    assert rank.sample(at_ns + 1)


def test_process_without_a_ring_is_never_steady() -> None:
    ticks = run_dir.read_start_ticks(os.getpid())
    watched = watch_process(os.getpid(), ticks, time.monotonic_ns())
    check = SteadinessCheck()
    for number in range(20):
        check.sample_processes([watched], time.monotonic_ns() + number * SECOND_NS)
    assert not check.is_steady
    watched.close()


def test_ring_is_read_before_it_is_full(rank: Rank) -> None:
    rank.sample(0)
    for _ in range(RECORD_SLOTS // FLOOD_DIVISOR + 1):
        rank.enter_call()
    rank.sample(1)
    assert rank.check.is_reading_due
    read_state(rank.watched)
    rank.enter_call()
    rank.sample(2)
    assert not rank.check.is_reading_due


def read_state(watched: WatchedProcess) -> None:
    watched.read_state(time.monotonic_ns())


STREAM = StreamState(
    uid=1,
    kind=StreamKind.COLLECTIVE,
    group=Group(name="0", desc="default_pg", ranks=(0, 1)),
    peer=None,
    tag=None,
    entered=5,
    completed=5,
    chain=0,
    entered_s=2.0,
    pending_s=None,
)
UNKNOWN = replace(STREAM, completed=None)
NOW_NS = 100 * SECOND_NS


def make_device(completed: int, read_age_s: float) -> DeviceEntry:
    read_ns = NOW_NS - int(read_age_s * 1e9)
    return DeviceEntry(uid=1, enqueued=5, started=None, completed=completed, read_ns=read_ns)


@pytest.mark.parametrize(
    ("streams", "devices", "ages_s"),
    [
        ([STREAM], [], []),
        ([replace(STREAM, completed=4, pending_s=2.0)], [], [2.0]),
        ([UNKNOWN], [], [2.0]),
        ([UNKNOWN], [make_device(5, 1.0)], []),
        ([UNKNOWN], [make_device(4, 1.0)], [2.0]),
        ([UNKNOWN], [make_device(5, 3.0)], [2.0]),
        ([UNKNOWN, replace(STREAM, uid=2, entered_s=1.0)], [], []),
        ([replace(UNKNOWN, entered=0)], [], []),
    ],
    ids=[
        "complete",
        "unfinished",
        "unknown",
        "the device has completed it",
        "the device has not",
        "the device was read before it was entered",
        "unknown, and a later call elsewhere",
        "never used",
    ],
)
def test_unfinished_calls(
    streams: list[StreamState], devices: list[DeviceEntry], ages_s: list[float]
) -> None:
    assert list_unfinished_ages(streams, devices, NOW_NS) == ages_s
