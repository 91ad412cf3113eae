"""The running hashes that ranks report. Ranks that report the same share them in memory: of 100,000,
nearly all do.

A history is sorted by sequence number, whatever the order in which its hashes arrived: a reply to a
request has hashes that are older than those held. A long history is thinned and never cut: of each
power of two, the newest multiples stay, and all powers of two. So two ranks have positions in common
however far one is ahead of the other.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

MAX_PAIRS = 96  # a history with more is thinned
# What a thinned history has: the newest positions, and the newest multiples of each power of two.
NEWEST_KEPT, MULTIPLES_KEPT = 16, 4
MAX_PINNED_PAIRS = 512
# Shared reports, and as many histories, per rank of the job and at most. A job that runs for long has
# new ones all the time.
SHARED_PER_RANK, MAX_SHARED = 2, 4096
_PAIRS_PER_REPORT = 8
_MAX_LEVEL = 64  # no sequence number is a multiple of a higher power of two

Hashes = tuple[tuple[int, int], ...]  # sequence numbers and running hashes, the newest last


def merge_hashes(history: Hashes, report: Iterable[tuple[int, int]]) -> Hashes:
    """Both together, by position. Where both have one, that of the report counts.

    >>> merge_hashes(((4, 44), (90, 990)), ((89, 989), (90, 990)))
    ((4, 44), (89, 989), (90, 990))
    """
    return tuple(sorted((dict(history) | dict(report)).items()))


def thin_hashes(history: Hashes, first_pinned: int = 0, last_pinned: int = 0) -> Hashes:
    """The history without pairs that are neither among the newest, nor at a power of two or one of its
    newest multiples, nor from ``first_pinned`` to ``last_pinned``.
    """
    kept: list[tuple[int, int]] = []
    # By exponent: how many newer positions are multiples of that power of two.
    counts = [0] * (_MAX_LEVEL + 1)
    pinned_count = 0
    for index, pair in enumerate(reversed(history)):
        seq = pair[0]
        level = min((seq & -seq).bit_length() - 1, _MAX_LEVEL) if seq else _MAX_LEVEL
        is_pinned = first_pinned <= seq <= last_pinned and pinned_count < MAX_PINNED_PAIRS
        pinned_count += is_pinned
        is_aligned = counts[level] < MULTIPLES_KEPT or seq == 1 << level
        if index < NEWEST_KEPT or is_aligned or is_pinned:
            kept.append(pair)
        for exponent in range(level + 1):
            counts[exponent] += 1
    kept.reverse()
    return tuple(kept)


@dataclass(slots=True)
class HashHistories:
    """The histories of all streams of a job: each is what the reports of one stream had."""

    capacity: int = SHARED_PER_RANK  # shared reports, and as many histories
    _pairs: dict[tuple[int, int], tuple[int, int]] = field(default_factory=dict)
    _reports: dict[Hashes, Hashes] = field(default_factory=dict)
    # By the identities of a history and of the report that follows it, and the pinned positions: both,
    # and the new history.
    _extended: dict[tuple[int, int, int, int], tuple[Hashes, Hashes, Hashes]] = field(
        default_factory=dict
    )

    def set_rank_count(self, count: int) -> None:
        self.capacity = min(MAX_SHARED, SHARED_PER_RANK * count)

    def share_report(self, report: Hashes) -> Hashes:
        """The report that is shared by all that are equal to this one."""
        shared = self._reports.get(report)
        if shared is None:
            if len(self._reports) >= self.capacity:
                self._reports.clear()
            if len(self._pairs) >= _PAIRS_PER_REPORT * self.capacity:
                self._pairs.clear()
            # Reports of other times differ, but have many pairs in common.
            shared = tuple([self._pairs.setdefault(pair, pair) for pair in report])
            self._reports[shared] = shared
        return shared

    def extend_history(
        self, history: Hashes, report: Hashes, first_pinned: int = 0, last_pinned: int = 0
    ) -> Hashes:
        """The history with a shared report; thinned if it has become long, see `thin_hashes`."""
        key = id(history), id(report), first_pinned, last_pinned
        extended = self._extended.get(key)
        if extended is None:
            if len(self._extended) >= self.capacity:
                self._extended.clear()
            if not history or history[-1][0] < report[0][0]:
                after = (*history, *report)
            else:
                after = merge_hashes(history, report)
            if len(after) > MAX_PAIRS:
                after = thin_hashes(after, first_pinned, last_pinned)
            # The entry keeps both alive, so that no other object has their identities.
            extended = self._extended[key] = history, report, after
        return extended[2]
