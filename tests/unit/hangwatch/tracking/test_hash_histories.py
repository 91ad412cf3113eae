"""Running hashes are shared between ranks, and what is kept for that is bounded."""

from __future__ import annotations

from hangwatch.tracking.call_stream import (
    MAX_PAIRS,
    MAX_SHARED,
    NEWEST_KEPT,
    SHARED_PER_RANK,
    Hashes,
    HashHistories,
    thin_hashes,
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


def extend_step_by_step(histories: HashHistories, last: int, count: int = 4) -> Hashes:
    history: Hashes = ()
    for first in range(1, last, count):
        report = histories.share_report(make_report(first, count))
        history = histories.extend_history(history, report)
    return history


def test_old_hashes_are_thinned() -> None:
    history = extend_step_by_step(make_histories(8), 1000)
    seqs = [seq for seq, _ in history]
    assert len(seqs) <= MAX_PAIRS
    assert seqs[-NEWEST_KEPT:] == list(range(1001 - NEWEST_KEPT, 1001))
    assert {256, 512, 768, 896, 960} <= set(seqs)


def test_ranks_far_apart_have_a_position_in_common() -> None:
    histories = make_histories(8)
    for behind, ahead in ((100, 140), (500, 900), (2000, 6000)):
        one, other = (
            {seq for seq, _ in extend_step_by_step(histories, last)} for last in (behind, ahead)
        )
        assert one & other


def test_older_hashes_are_merged_by_position() -> None:
    """What was requested is older than what is held, and may be more than a history has."""
    histories = make_histories(8)
    newest = histories.extend_history((), histories.share_report(make_report(88, 3)))
    history = histories.extend_history(newest, histories.share_report(make_report(1, 89)))
    assert list(history) == sorted(history)
    assert set(newest) <= set(history)
    assert len(history) <= MAX_PAIRS


def test_pinned_hashes_are_kept() -> None:
    history = make_report(1, 1000)
    pinned = [seq for seq, _ in thin_hashes(history, (301, 309)) if 301 <= seq <= 309]
    assert pinned == list(range(301, 310))


def test_long_small_job_keeps_little() -> None:
    histories = make_histories(8)
    history: Hashes = ()
    for first in range(1, 100_000, 4):
        history = histories.extend_history(history, histories.share_report(make_report(first)))
    assert len(histories._reports) <= 8 * SHARED_PER_RANK
    assert len(histories._extended) <= 8 * SHARED_PER_RANK
    assert len(histories._pairs) <= 10 * 8 * SHARED_PER_RANK
    assert make_histories(1_000_000).capacity == MAX_SHARED
