"""What the server keeps of `HANGWATCH_CHECKS`, in bounded memory: checksums that do not agree, and
where numbers ceased to be finite.

Pure: the time is passed in, in seconds on the caller's monotonic clock.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hangwatch.model.calls import StreamKind
from hangwatch.model.groups import Group, GroupKey
from hangwatch.protocol import heartbeat

if TYPE_CHECKING:
    from .call_stream import CallStream
    from .process import Process

# rounds of training without a step: the scale that loss scaling begins with, 2**16, has become
# 2**-8 by then
PERSISTENT_ROUNDS = 24
STREAK_GAP_S = 120.0  # seconds without a call that is not finite after which it is over
_MAX_RANKS_PER_GROUP = 1 << 18  # ranks that are kept of one group, over all positions
_MAX_DIFFERING_CALLS = 8  # positions of one group


@dataclass(slots=True, kw_only=True)
class ChecksumComparison:
    """The results of one call: the ranks by the checksum that they told."""

    seq: int
    ranks_by_checksum: dict[int, set[int]] = field(default_factory=dict)
    differs_at: float = 0.0  # when that was first known


@dataclass(slots=True, kw_only=True)
class ReplicaChecksums:
    """The sampled calls of one group. Positions are (seq, running hash): only ranks that made equal
    calls up to there are compared.
    """

    group: Group
    incomplete: dict[tuple[int, int], ChecksumComparison] = field(
        default_factory=dict
    )  # for more members to tell, oldest first
    differing: dict[tuple[int, int], ChecksumComparison] = field(default_factory=dict)

    def record_checksum(
        self, rank: int, position: tuple[int, int], checksum: int, now: float
    ) -> None:
        found = self.differing.get(position) or self.incomplete.setdefault(
            position, ChecksumComparison(seq=position[0])
        )
        found.ranks_by_checksum.setdefault(checksum, set()).add(rank)
        members = len(self.group.ranks)
        if len(found.ranks_by_checksum) > 1 and not found.differs_at:
            found.differs_at = now
            del self.incomplete[position]
            self.differing[position] = found
            if len(self.differing) > _MAX_DIFFERING_CALLS:
                del self.differing[max(self.differing)]
        elif (
            len(found.ranks_by_checksum) == 1 and len(found.ranks_by_checksum[checksum]) == members
        ):
            del self.incomplete[position]
        while len(self.incomplete) > max(16, min(256, _MAX_RANKS_PER_GROUP // members)):
            del self.incomplete[next(iter(self.incomplete))]


@dataclass(slots=True, kw_only=True)
class NonfiniteCall:
    """One call in which numbers were not finite."""

    group: Group
    seq: int
    channel: tuple[int, int] | None  # (rank, uid) of a point-to-point call, which is nobody else's
    first_report: heartbeat.NonfiniteReport  # by whom it was told first
    entered_at: float  # when it was entered, the first of those who told
    reported_at: float
    input_ranks: set[int] = field(default_factory=set)  # ranks that put such numbers in
    output_ranks: set[int] = field(
        default_factory=set
    )  # ranks whose result holds some though what they put in did not


NonfinitePosition = tuple[GroupKey, int, tuple[int, int] | None]


@dataclass(slots=True, kw_only=True)
class NonfiniteStreak:
    """Such calls, as long as there are new ones every now and then: the first ones, or the newest."""

    keeps_newest: bool = False
    calls: dict[NonfinitePosition, NonfiniteCall] = field(default_factory=dict)
    last_report_at: float = -math.inf

    def is_ongoing(self, now: float) -> bool:
        return now - self.last_report_at <= STREAK_GAP_S

    def record_nonfinite(
        self, stream: CallStream, rank: int, report: heartbeat.NonfiniteReport, now: float
    ) -> None:
        if not self.is_ongoing(now):
            self.calls.clear()
        self.last_report_at = now
        own = None if stream.kind is StreamKind.COLLECTIVE else (rank, stream.uid)
        position, at = (stream.group.key, report.seq, own), now - report.at_s
        if (found := self.calls.get(position)) is None:
            found = NonfiniteCall(
                group=stream.group,
                seq=report.seq,
                channel=own,
                first_report=report,
                entered_at=at,
                reported_at=now,
            )
            self.calls[position] = found
        found.entered_at = min(found.entered_at, at)
        (found.output_ranks if report.output else found.input_ranks).add(rank)
        while len(self.calls) > max(16, min(256, _MAX_RANKS_PER_GROUP // len(stream.group.ranks))):
            del self.calls[
                (
                    next(iter(self.calls))
                    if self.keeps_newest
                    else max(self.calls, key=lambda key: self.calls[key].entered_at)
                )
            ]


@dataclass(slots=True, kw_only=True)
class CheckResults:
    """Of one attempt of a job."""

    replicas: dict[GroupKey, ReplicaChecksums] = field(default_factory=dict)
    unscaled: NonfiniteStreak = field(default_factory=NonfiniteStreak)  # what nothing excuses
    scaled: NonfiniteStreak = field(
        default_factory=lambda: NonfiniteStreak(keeps_newest=True)
    )  # what loss scaling meets by leaving a step out
    persistent: NonfiniteStreak = field(
        default_factory=NonfiniteStreak
    )  # of those, what has not ceased for `LASTING` rounds

    @property
    def is_quiet(self) -> bool:
        """There is nothing to judge."""
        return not (self.unscaled.calls or self.persistent.calls or any(self.iter_differing()))

    def iter_differing(self) -> Iterator[ReplicaChecksums]:
        return (held for held in self.replicas.values() if held.differing)

    def apply_update(self, process: Process, update: heartbeat.ProcessUpdate, now: float) -> None:
        """What the holder of a rank told."""
        rank = process.rank
        for uid, seq, chain, checksum in update.checksums:
            sequence = process.streams.get(uid)
            if (
                sequence is not None
                and sequence.kind is StreamKind.COLLECTIVE
                and rank in sequence.group.ranks
            ):
                group = sequence.group
                self.replicas.setdefault(group.key, ReplicaChecksums(group=group)).record_checksum(
                    rank, (seq, chain), checksum, now
                )
        for told in update.nonfinite:
            if (sequence := process.streams.get(told.uid)) is None:
                continue
            spells = (
                [self.unscaled]
                if not told.scaled
                else (
                    [self.scaled, self.persistent]
                    if told.rounds >= PERSISTENT_ROUNDS
                    else [self.scaled]
                )
            )
            for spell in spells:
                spell.record_nonfinite(sequence, rank, told, now)
