"""Check results in a node agent's updates: reported once, repeated until acknowledged, and limited in
number.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hangwatch.agent.node.reporting.acked import CheckHistory
from hangwatch.agent.recorder.checks.inspection import CheckedCall, CheckTableWriter
from hangwatch.agent.recorder.writer import RingWriter
from hangwatch.ring.layout import CheckFlag
from hangwatch.ring.reader import RingReader
from hangwatch.ring.sampling import check_level

RESULT_FLAGS = CheckFlag.OUTPUT | CheckFlag.CHECKSUM


@pytest.fixture
def table(tmp_path: Path) -> CheckTableWriter:
    return CheckTableWriter(
        RingWriter(
            tmp_path / "a.ring",
            pid=os.getpid(),
            start_ticks=1,
            has_checks=True,
        )
    )


def make_checked_call(seq: int, uid: int = 1) -> CheckedCall:
    return CheckedCall(
        entered_ns=seq * 10**9,
        seq=seq,
        chain=seq * 3,
        size=64,
        uid=uid,
        signature=0,
        site=0,
        flags=1,
    )


def test_check_result_is_repeated_until_acknowledged(table: CheckTableWriter) -> None:
    history, reader = CheckHistory(), RingReader(table._ring.map)
    assert history.build_update_fields(0) == ({}, 0)
    table.write_check(make_checked_call(5), RESULT_FLAGS, checksum=55)
    table.write_check(make_checked_call(6), CheckFlag.VALUES)
    table.write_check(
        make_checked_call(7),
        CheckFlag.NONFINITE | CheckFlag.SCALED,
        nan=2,
        inf=1,
        first_seq=6,
        rounds=3,
        overflows=9,
    )
    history.read_entries(reader, 8 * 10**9)
    fields, upto = history.build_update_fields(9 * 10**9)
    assert fields["checksums"] == ((1, 5, 15, 55),)
    (report,) = fields["nonfinite"]
    assert (
        report.uid,
        report.seq,
        report.nan,
        report.inf,
        report.scaled,
        report.output,
        report.first,
        report.rounds,
    ) == (
        1,
        7,
        2,
        1,
        True,
        False,
        6,
        3,
    )
    assert (report.at_s, fields["overflows"]) == (2.0, 9)
    assert history.build_update_fields(9 * 10**9)[0] == fields, "the heartbeat was lost"
    history.mark_acked(upto)
    assert history.build_update_fields(9 * 10**9) == ({}, 0)
    history.rewind_cursor()
    history.read_entries(reader, 8 * 10**9)
    assert history.build_update_fields(9 * 10**9)[0] == fields, "the server was restarted"


def test_many_results_are_thinned_by_level(table: CheckTableWriter) -> None:
    history, reader = CheckHistory(), RingReader(table._ring.map)
    for seq in range(100, 600):
        table.write_check(make_checked_call(seq), RESULT_FLAGS)
    for seq in range(1, 151):
        table.write_check(make_checked_call(seq, uid=2), CheckFlag.NONFINITE, nan=1, first_seq=seq)
    history.read_entries(reader, 0)
    fields, upto = history.build_update_fields(0)
    kept = [seq for _, seq, _, _ in fields["checksums"]]
    assert 0 < len(kept) <= 64 and min(map(check_level, kept)) >= max(
        check_level(s) for s in range(100, 600) if s not in kept
    )
    seqs = [bad.seq for bad in fields["nonfinite"]]
    while fields:
        history.mark_acked(upto)
        fields, upto = history.build_update_fields(0)
        seqs += [bad.seq for bad in fields.get("nonfinite", ())]
    assert seqs == list(range(1, 151))
