"""Results of `HANGWATCH_CHECKS` on the server, in bounded memory: checksums that differ between
ranks, and the calls in which values first became NaN or infinite.

The time is passed in, in seconds on the caller's monotonic clock.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from hangwatch.model.calls import StreamKind
from hangwatch.model.groups import Group, GroupKey
from hangwatch.model.limits import PERSISTENT_ROUNDS
from hangwatch.protocol.heartbeat import NonfiniteReport, ProcessUpdate

from .call_stream import CallStream, HashPair
from .process import Process

STREAK_GAP_S = 120.0  # a streak ends after this time without a non-finite call
_MAX_RANKS_PER_GROUP = 1 << 18  # entries kept per group, summed over all positions
_MAX_DIFFERING_CALLS = 8  # in each group


@dataclass(slots=True, kw_only=True)
class ChecksumComparison:
    """The result of one call: the ranks, grouped by the checksum that they reported."""

    seq: int
    ranks_by_checksum: dict[int, set[int]] = field(default_factory=dict)
    differs_at: float = 0.0  # when a second checksum was reported; 0 while all are equal


@dataclass(slots=True, kw_only=True)
class ReplicaChecksums:
    """The sampled calls of one group, by position: only ranks that made equal calls up to there, and so
    report equal pairs, are compared.
    """

    group: Group
    # Calls that some members have not reported.
    incomplete: dict[HashPair, ChecksumComparison] = field(default_factory=dict)
    differing: dict[HashPair, ChecksumComparison] = field(default_factory=dict)

    def record_checksum(self, rank: int, position: HashPair, checksum: int, now: float) -> None:
        comparison = self.differing.get(position) or self.incomplete.get(position)
        if comparison is None:
            comparison = self.incomplete[position] = ChecksumComparison(seq=position[0])
        ranks = comparison.ranks_by_checksum.setdefault(checksum, set())
        ranks.add(rank)
        member_count = len(self.group.ranks)
        if len(comparison.ranks_by_checksum) == 1:
            if len(ranks) == member_count:
                del self.incomplete[position]
        elif not comparison.differs_at:
            comparison.differs_at = now
            self.differing[position] = self.incomplete.pop(position)
            if len(self.differing) > _MAX_DIFFERING_CALLS:
                del self.differing[max(self.differing)]
        # The oldest positions go: a late member's reports of old calls must not displace new ones.
        while len(self.incomplete) > _max_positions(member_count):
            del self.incomplete[min(self.incomplete)]


def _max_positions(member_count: int) -> int:
    return max(16, min(256, _MAX_RANKS_PER_GROUP // max(1, member_count)))


@dataclass(slots=True, kw_only=True)
class NonfiniteCall:
    """One call with NaN or infinite values in its input or output."""

    group: Group
    seq: int
    channel: tuple[int, int] | None  # (rank, uid) of a point-to-point call; None for a collective
    first_report: NonfiniteReport
    entered_at: float  # the earliest entry among the reporting ranks
    reported_at: float  # when the first report arrived
    input_ranks: set[int] = field(default_factory=set)  # ranks with such values in their input
    # Ranks with such values in their output, but not in their input.
    output_ranks: set[int] = field(default_factory=set)


NonfinitePosition = tuple[GroupKey, int, tuple[int, int] | None]


@dataclass(slots=True, kw_only=True)
class NonfiniteStreak:
    """A run of non-finite calls without a gap of more than `STREAK_GAP_S`."""

    keeps_newest: bool = False  # when there are too many calls; otherwise the first ones are kept
    calls: dict[NonfinitePosition, NonfiniteCall] = field(default_factory=dict)
    last_report_at: float = -math.inf

    def is_ongoing(self, now: float) -> bool:
        return now - self.last_report_at <= STREAK_GAP_S

    def record_nonfinite(
        self, stream: CallStream, rank: int, report: NonfiniteReport, now: float
    ) -> None:
        if not self.is_ongoing(now):
            self.calls.clear()
        self.last_report_at = now
        group, seq = stream.group, report.seq
        channel = None if stream.kind is StreamKind.COLLECTIVE else (rank, stream.uid)
        position = (group.key, seq, channel)
        entered_at = now - report.at_s
        call = self.calls.get(position)
        if call is None:
            call = self.calls[position] = NonfiniteCall(
                group=group,
                seq=seq,
                channel=channel,
                first_report=report,
                entered_at=entered_at,
                reported_at=now,
            )
        call.entered_at = min(call.entered_at, entered_at)
        ranks = call.output_ranks if report.output else call.input_ranks
        ranks.add(rank)
        while len(self.calls) > _max_positions(len(group.ranks)):
            choose = min if self.keeps_newest else max
            surplus = choose(self.calls, key=lambda key: self.calls[key].entered_at)
            del self.calls[surplus]


@dataclass(slots=True, kw_only=True)
class CheckResults:
    """The check results of one attempt of a job."""

    replicas: dict[GroupKey, ReplicaChecksums] = field(default_factory=dict)
    # The calls without loss scaling.
    unscaled: NonfiniteStreak = field(default_factory=NonfiniteStreak)
    # The calls under loss scaling, which handles such values by skipping a step.
    scaled: NonfiniteStreak = field(default_factory=lambda: NonfiniteStreak(keeps_newest=True))
    # The calls under loss scaling for `PERSISTENT_ROUNDS` rounds or more.
    persistent: NonfiniteStreak = field(default_factory=NonfiniteStreak)

    @property
    def is_quiet(self) -> bool:
        """Whether the diagnosis has nothing to judge."""
        if self.unscaled.calls or self.persistent.calls:
            return False
        return not any(self.iter_differing())

    def iter_differing(self) -> Iterator[ReplicaChecksums]:
        return (replica for replica in self.replicas.values() if replica.differing)

    def apply_update(self, process: Process, update: ProcessUpdate, now: float) -> None:
        """Records the check results in an update of a rank's current process."""
        rank = process.rank
        for uid, seq, chain, checksum in update.checksums:
            stream = process.streams.get(uid)
            if stream is None or stream.kind is not StreamKind.COLLECTIVE:
                continue
            group = stream.group
            if rank in group.ranks:
                replica = self.replicas.setdefault(group.key, ReplicaChecksums(group=group))
                replica.record_checksum(rank, (seq, chain), checksum, now)
        for report in update.nonfinite:
            stream = process.streams.get(report.uid)
            if stream is None:
                continue
            streak = self.scaled if report.scaled else self.unscaled
            streak.record_nonfinite(stream, rank, report, now)
            if report.scaled and report.rounds >= PERSISTENT_ROUNDS:
                self.persistent.record_nonfinite(stream, rank, report, now)
