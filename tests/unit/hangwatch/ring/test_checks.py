"""The check table behind a ring's heap: complete entries are read, and nothing else."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hangwatch.agent.recorder.checks.inspection import CheckedCall, CheckTableWriter
from hangwatch.agent.recorder.writer import RingWriter
from hangwatch.ring import checks
from hangwatch.ring.layout import CHECK_SLOTS, CHECKS, CheckFlag
from hangwatch.ring.reader import RingReader


@pytest.fixture
def ring(tmp_path: Path) -> RingWriter:
    return RingWriter(
        tmp_path / "a.ring",
        pid=os.getpid(),
        start_ticks=1,
        has_checks=True,
    )


def make_checked_call(ring: RingWriter, seq: int, uid: int = 3) -> CheckedCall:
    signature = ring.intern_signature({"op": "broadcast", "agree": 1, "root": 0})
    site = ring.intern_site({"file": "train.py", "line": seq, "function": "step"})
    return CheckedCall(
        entered_ns=1000 + seq,
        seq=seq,
        chain=2**64 - seq,
        size=64,
        uid=uid,
        signature=signature,
        site=site,
        flags=1,
    )


def test_entries_are_read_once(ring: RingWriter) -> None:
    table, reader = CheckTableWriter(ring), RingReader(ring.map)
    assert checks.read_check_entries(reader) == ([], 0)
    table.write_check(
        make_checked_call(ring, 1), CheckFlag.OUTPUT | CheckFlag.CHECKSUM, checksum=0xFFFFFFFF
    )
    table.write_check(
        make_checked_call(ring, 2),
        CheckFlag.NONFINITE,
        nan=3,
        inf=4,
        first_seq=1,
        rounds=5,
        overflows=6,
    )
    (one, two), next_start = checks.read_check_entries(reader)
    assert (one.seq, one.chain, one.checksum, one.flags) == (
        1,
        2**64 - 1,
        0xFFFFFFFF,
        CheckFlag.OUTPUT | CheckFlag.CHECKSUM,
    )
    assert (two.nan, two.inf, two.first, two.rounds, two.overflows) == (3, 4, 1, 5, 6)
    assert checks.read_check_entries(reader, next_start) == ([], next_start)
    call = checks.call_from_entry(reader, two, 10_000_001_002)
    assert (
        call.signature.op,
        call.signature.root,
        call.site and call.site.line,
        call.entered_s,
    ) == ("broadcast", 0, 2, 10.0)


@pytest.mark.parametrize(
    "behind", [1, CHECK_SLOTS - 1, CHECK_SLOTS, CHECK_SLOTS + 5, 3 * CHECK_SLOTS + 7]
)
def test_late_reader_gets_remaining_entries(ring: RingWriter, behind: int) -> None:
    table, reader = CheckTableWriter(ring), RingReader(ring.map)
    call_to_check = make_checked_call(ring, 1)
    for _ in range(10):
        table.write_check(call_to_check, CheckFlag.CHECKSUM)
    _, next_start = checks.read_check_entries(reader)
    for n in range(behind):
        table.write_check(call_to_check, CheckFlag.CHECKSUM, checksum=n)
    entries, next_index = checks.read_check_entries(reader, next_start)
    assert [e.checksum for e in entries] == list(range(max(0, behind - CHECK_SLOTS), behind))
    assert next_index == 10 + behind


def test_partial_entry_is_ignored(ring: RingWriter) -> None:
    CheckTableWriter(ring).write_check(make_checked_call(ring, 1), CheckFlag.CHECKSUM)
    ring.map[CHECKS.locate_slot(1) - 1] = 7
    assert checks.read_check_entries(RingReader(ring.map)) == ([], 0)


def test_values_belong_to_requested_call(ring: RingWriter) -> None:
    table, reader = CheckTableWriter(ring), RingReader(ring.map)
    table.write_check(make_checked_call(ring, 5), CheckFlag.CHECKSUM)
    table.write_check(
        make_checked_call(ring, 5), CheckFlag.VALUES, stats=(0.5, -1.0, 2.0, 4.0), nan=2
    )
    entries = checks.read_value_entries(reader)
    assert {key: (entry.stats, entry.nan, entry.inf) for key, entry in entries.items()} == {
        (3, 5): ((0.5, -1.0, 2.0, 4.0), 2, 0)
    }


def test_ring_without_check_table_is_empty(tmp_path: Path) -> None:
    reader = RingReader(RingWriter(tmp_path / "b.ring", pid=1, start_ticks=1).map)
    assert checks.read_check_entries(reader) == ([], 0)
    assert checks.read_value_entries(reader) == {}
    assert checks.read_checked_calls(reader, 1, 0, from_seq=1) == []
