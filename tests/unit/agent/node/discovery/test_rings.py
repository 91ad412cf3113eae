"""Rings that cannot be trusted: whatever is in the file, the node agent reports it and continues."""

from __future__ import annotations

import os
import random
import time
from pathlib import Path

from hangwatch.agent.environment import run_dir
from hangwatch.agent.node.discovery import rings
from hangwatch.agent.node.discovery.watched import (
    UNREADABLE_GRACE_NS,
    WatchedProcess,
    watch_process,
)
from hangwatch.agent.recorder.streams import CompletionMode, StreamRecorder
from hangwatch.agent.recorder.writer import RingWriter
from hangwatch.model.calls import Signature, encode_signature
from hangwatch.protocol import codec
from hangwatch.ring.layout import (
    EXCEPTION,
    FAULTS,
    HEADER_SIZE,
    HEAP,
    RECORDS,
    SIGNATURES,
    LiveWord,
    RecordFlag,
)


def make_ring(folder: Path) -> rings.RingFile:
    """A ring of this very process, with calls in it."""
    pid, ticks = os.getpid(), run_dir.read_start_ticks(os.getpid())
    ring = RingWriter(folder / f"{pid}-{ticks}.ring", pid=pid, start_ticks=ticks)
    ring.write_identity({"job": "j", "rank": 1, "world_size": 2})
    slot = ring.open_stream(1, {"kind": "collective", "name": "0", "desc": "d", "ranks": "0-1"})
    stream = StreamRecorder(ring, 1, slot, unbox=lambda work: work)
    for seq in range(1, 40):
        number = ring.intern_signature(
            encode_signature(Signature(op="all_reduce", shapes=((4,),), agree=7))
        )
        site = ring.intern_site({"file": "a.py", "line": seq, "function": "f"})
        stream.enter_call(
            7,
            stream.pack_record_body(number, site, RecordFlag.BLOCKING, 16),
            0,
            CompletionMode.RETURN,
        )
    ring.write_progress(slot, 38, 0)
    ring.write_pulse(0)
    ring.write_note(EXCEPTION, {"type": "KeyError", "message": "x"})
    ring.write_note(FAULTS, {"lines": ["something"]})
    ring.set_word(LiveWord.STEP, 5)
    (ring_file,), foreign = rings.find_ring_files(folder)
    assert foreign == []
    return ring_file


def watch_ring(ring: rings.RingFile) -> WatchedProcess:
    began = time.monotonic_ns()
    w = watch_process(ring.pid, ring.start_ticks, began, ring=ring)
    w.read_state(began + UNREADABLE_GRACE_NS + 1)
    return w


def test_valid_ring(tmp_path: Path) -> None:
    w = watch_ring(make_ring(tmp_path))
    try:
        update = w.compose_update(time.monotonic_ns())
        assert update is not None and update.identity is not None
        assert (update.identity.rank, update.step, update.faults) == (1, 4, ("something",))
        assert update.raised is not None and update.raised.type == "KeyError"
        assert (update.streams[0].entered, update.streams[0].op) == (39, "all_reduce")
    finally:
        w.close()


def test_corrupt_rings(tmp_path: Path) -> None:
    ring = make_ring(tmp_path)
    good = ring.path.read_bytes()
    draw = random.Random(7)
    places = [
        range(8, 300),
        range(1024, 1200),
        range(6144, 6300),
        range(8192, 8300),
        range(HEADER_SIZE, HEADER_SIZE + 80),
    ]
    places += [
        range(RECORDS.offset, RECORDS.offset + 4000),
        range(HEAP.offset, HEAP.offset + 100),
        range(SIGNATURES.offset, SIGNATURES.offset + 9000),
    ]
    for _ in range(120):
        bad = bytearray(good)
        spot = draw.choice(places)
        for _ in range(draw.choice((1, 4, 60))):
            bad[draw.choice(spot)] = draw.randrange(256)
        ring.path.unlink()
        ring.path.write_bytes(bad)
        began = time.monotonic()
        w = watch_ring(ring)
        try:
            update = w.compose_update(time.monotonic_ns())
            assert w.ring_problem or (
                update is not None and codec.encode_message(update)["key"] == ring.key
            )
        finally:
            w.close()
        assert time.monotonic() - began < 5


def test_foreign_rings_are_listed_and_truncated_ones_refused(tmp_path: Path) -> None:
    ring = make_ring(tmp_path)
    good = ring.path.read_bytes()
    other = rings.RingFile(path=tmp_path / "1-1.ring", pid=1, start_ticks=1)
    for content, why in (
        (good, "foreign"),
        (b"", "empty"),
        (good[:9000], "truncated"),
        (good[:-1], "truncated"),
        (b"x" * 20000, "not a ring"),
    ):
        other.path.unlink(missing_ok=True)
        other.path.write_bytes(content)
        w = watch_ring(other)
        assert why in w.ring_problem, content[:20]
        w.close()
    (tmp_path / "x.ring").write_bytes(good)
    ring_files, foreign = rings.find_ring_files(tmp_path)
    assert (len(ring_files), foreign) == (2, ["x.ring"])
    other.path.with_suffix(run_dir.STACKS_SUFFIX).write_text("")
    other.remove_files()
    other.remove_files()
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted([ring.path.name, "x.ring"])
