"""Running hashes are shared between ranks, and what is kept for that is bounded."""

from __future__ import annotations

from hangwatch.tracking.hash_histories import (
    CHECKPOINTS_KEPT,
    MAX_SHARED,
    SHARED_PER_RANK,
    Hashes,
    HashHistories,
)


def make_report(first: int, count: int = 4) -> Hashes:
    return tuple((seq, 1_000_000 + seq) for seq in range(first, first + count))


def make_histories(ranks: int) -> HashHistories:
    histories = HashHistories()
    histories.set_rank_count(ranks)
    return histories


def test_equal_reports_and_histories_are_one_object() -> None:
    histories = make_histories(8)
    first, second = (histories.share_report(make_report(1)) for _ in range(2))
    assert first is second == make_report(1)
    before: Hashes = ()
    assert histories.extend_history(before, first) is histories.extend_history(before, second)


def test_different_reports_share_their_pairs() -> None:
    histories = make_histories(8)
    one, other = (histories.share_report(make_report(first)) for first in (1, 3))
    assert one[2] is other[0] == (3, 1_000_003)


def test_old_hashes_are_dropped() -> None:
    histories = make_histories(8)
    history: Hashes = ()
    for first in range(1, 1001, 4):
        history = histories.extend_history(history, histories.share_report(make_report(first)))
    assert [seq for seq, _ in history] == list(range(1001 - CHECKPOINTS_KEPT, 1001))


def test_long_small_job_keeps_little() -> None:
    histories = make_histories(8)
    history: Hashes = ()
    for first in range(1, 100_000, 4):
        history = histories.extend_history(history, histories.share_report(make_report(first)))
    assert len(histories._reports) <= 8 * SHARED_PER_RANK
    assert len(histories._extended) <= 8 * SHARED_PER_RANK
    assert len(histories._pairs) <= 10 * 8 * SHARED_PER_RANK
    assert make_histories(1_000_000).capacity == MAX_SHARED
