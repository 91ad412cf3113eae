"""The running hashes that ranks report. Ranks that report the same share them in memory: of 100,000,
nearly all do.
"""

from __future__ import annotations

from dataclasses import dataclass, field

CHECKPOINTS_KEPT = 64  # running hashes kept per stream
# Shared reports, and as many histories, per rank of the job and at most. A job that runs for long has
# new ones all the time.
SHARED_PER_RANK, MAX_SHARED = 2, 4096
_PAIRS_PER_REPORT = 8

Hashes = tuple[tuple[int, int], ...]  # sequence numbers and running hashes, the newest last


@dataclass(slots=True)
class HashHistories:
    """The histories of all streams of a job: each is what the reports of one stream had."""

    capacity: int = SHARED_PER_RANK  # shared reports, and as many histories
    _pairs: dict[tuple[int, int], tuple[int, int]] = field(default_factory=dict)
    _reports: dict[Hashes, Hashes] = field(default_factory=dict)
    # By the identities of a history and of the report that follows it: both, and the new history.
    _extended: dict[tuple[int, int], tuple[Hashes, Hashes, Hashes]] = field(default_factory=dict)

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

    def extend_history(self, history: Hashes, report: Hashes) -> Hashes:
        """The history after a shared report, without what is too old."""
        key = id(history), id(report)
        extended = self._extended.get(key)
        if extended is None:
            if len(self._extended) >= self.capacity:
                self._extended.clear()
            after = (*history, *report)[-CHECKPOINTS_KEPT:]
            # The entry keeps both alive, so that no other object has their identities.
            extended = self._extended[key] = history, report, after
        return extended[2]
