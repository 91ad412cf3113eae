"""What the server keeps of `HANGWATCH_CHECKS`, in bounded memory: checksums that do not agree, and where numbers ceased to be finite.

Pure: the time is passed in, in seconds on the caller's monotonic clock.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hangwatch.model.calls import SequenceKind
from hangwatch.model.groups import Group, GroupKey
from hangwatch.protocol import heartbeat

if TYPE_CHECKING:
    from .call_stream import Sequence
    from .process import Process

LASTING = 24  # rounds of training without a step: the scale that loss scaling begins with, 2**16, has become 2**-8 by then
SPELL = 120.0  # seconds without a call that is not finite after which it is over
_MEMBERS = 1 << 18  # ranks that are kept of one group, over all positions
_DIFFERING = 8  # positions of one group


@dataclass(slots=True, kw_only=True)
class Compared:
    """The results of one call: the ranks by the checksum that they told."""

    seq: int
    results: dict[int, set[int]] = field(default_factory=dict)
    differs_at: float = 0.0  # when that was first known


@dataclass(slots=True, kw_only=True)
class Replicas:
    """The sampled calls of one group. Positions are (seq, running hash): only ranks that made equal calls up to there are compared."""

    group: Group
    waiting: dict[tuple[int, int], Compared] = field(default_factory=dict)  # for more members to tell, oldest first
    differing: dict[tuple[int, int], Compared] = field(default_factory=dict)

    def tell(self, rank: int, at: tuple[int, int], checksum: int, now: float) -> None:
        found = self.differing.get(at) or self.waiting.setdefault(at, Compared(seq=at[0]))
        found.results.setdefault(checksum, set()).add(rank)
        members = len(self.group.ranks)
        if len(found.results) > 1 and not found.differs_at:
            found.differs_at = now
            del self.waiting[at]
            self.differing[at] = found
            if len(self.differing) > _DIFFERING:
                del self.differing[max(self.differing)]
        elif len(found.results) == 1 and len(found.results[checksum]) == members:
            del self.waiting[at]
        while len(self.waiting) > max(16, min(256, _MEMBERS // members)):
            del self.waiting[next(iter(self.waiting))]


@dataclass(slots=True, kw_only=True)
class Tainted:
    """One call in which numbers were not finite."""

    group: Group
    seq: int
    own: tuple[int, int] | None  # (rank, uid) of a point-to-point call, which is nobody else's
    told: heartbeat.Nonfinite  # by whom it was told first
    at: float  # when it was entered, the first of those who told
    heard_at: float
    given: set[int] = field(default_factory=set)  # ranks that put such numbers in
    results: set[int] = field(default_factory=set)  # ranks whose result holds some though what they put in did not


Position = tuple[GroupKey, int, tuple[int, int] | None]


@dataclass(slots=True, kw_only=True)
class Spell:
    """Such calls, as long as there are new ones every now and then: the first ones, or the newest."""

    newest: bool = False
    calls: dict[Position, Tainted] = field(default_factory=dict)
    told_at: float = -math.inf

    def lasts(self, now: float) -> bool:
        return now - self.told_at <= SPELL

    def tell(self, sequence: Sequence, rank: int, told: heartbeat.Nonfinite, now: float) -> None:
        if not self.lasts(now):
            self.calls.clear()
        self.told_at = now
        own = None if sequence.kind is SequenceKind.COLLECTIVE else (rank, sequence.uid)
        position, at = (sequence.group.key, told.seq, own), now - told.at_s
        if (found := self.calls.get(position)) is None:
            found = Tainted(group=sequence.group, seq=told.seq, own=own, told=told, at=at, heard_at=now)
            self.calls[position] = found
        found.at = min(found.at, at)
        (found.results if told.output else found.given).add(rank)
        while len(self.calls) > max(16, min(256, _MEMBERS // len(sequence.group.ranks))):
            del self.calls[next(iter(self.calls)) if self.newest else max(self.calls, key=lambda key: self.calls[key].at)]


@dataclass(slots=True, kw_only=True)
class Checks:
    """Of one attempt of a job."""

    replicas: dict[GroupKey, Replicas] = field(default_factory=dict)
    entered: Spell = field(default_factory=Spell)  # what nothing excuses
    scaled: Spell = field(default_factory=lambda: Spell(newest=True))  # what loss scaling meets by leaving a step out
    lasting: Spell = field(default_factory=Spell)  # of those, what has not ceased for `LASTING` rounds

    @property
    def quiet(self) -> bool:
        """There is nothing to judge."""
        return not (self.entered.calls or self.lasting.calls or any(self.differing()))

    def differing(self) -> Iterator[Replicas]:
        return (held for held in self.replicas.values() if held.differing)

    def take(self, process: Process, update: heartbeat.ProcessUpdate, now: float) -> None:
        """What the holder of a rank told."""
        rank = process.rank
        for uid, seq, chain, checksum in update.checksums:
            sequence = process.sequences.get(uid)
            if sequence is not None and sequence.kind is SequenceKind.COLLECTIVE and rank in sequence.group.ranks:
                group = sequence.group
                self.replicas.setdefault(group.key, Replicas(group=group)).tell(rank, (seq, chain), checksum, now)
        for told in update.nonfinite:
            if (sequence := process.sequences.get(told.uid)) is None:
                continue
            spells = [self.entered] if not told.scaled else [self.scaled, self.lasting] if told.rounds >= LASTING else [self.scaled]
            for spell in spells:
                spell.tell(sequence, rank, told, now)
