"""Performance of calls: size classes, duration histograms and the bandwidths of nccl-tests."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from hangwatch.model.bounds import MAX_DURATION_US
from hangwatch.model.calls import Signature
from hangwatch.model.operators import OPERATIONS

# Histogram buckets per power of two: the error of a quantile is at most 4.4 %.
BUCKETS_PER_OCTAVE = 8

# The operations in which each member waits for all others.
MUTUAL_WAIT_OPS = frozenset(op for op, spec in OPERATIONS.items() if spec.is_mutual_wait)


def size_class(size: int) -> int:
    """0 for no bytes; else k for sizes from 2**(k - 1) to below 2**k.

    >>> size_class(0), size_class(4), size_class(7), size_class(8)
    (0, 3, 3, 4)
    """
    return size.bit_length()


def size_class_min_bytes(size_class_index: int) -> int:
    """The smallest size of a class, in bytes."""
    return 1 << (size_class_index - 1) if size_class_index else 0


def full_size(op: str, recorded_bytes: int, rank_count: int) -> int:
    """The size of a call in bytes as nccl-tests define it: the whole array for an all-gather or a
    reduce-scatter. The source is that of `BusFactor`.
    """
    spec = OPERATIONS.get(op)
    if spec is not None and spec.size_is_per_rank:
        return recorded_bytes * rank_count
    return recorded_bytes


def is_even_split(signature: Signature) -> bool:
    """Whether all members exchange equal amounts, as the bandwidth of an all-to-all requires."""
    return all(len(set(side)) <= 1 for side in signature.splits or ())


@dataclass(slots=True)
class DurationHistogram:
    """Durations in microseconds, in at most about 300 buckets that grow by a factor of 2**(1/8)."""

    counts: dict[int, int] = field(default_factory=dict)
    longest_us: float = 0.0

    def add_duration(self, us: float) -> None:
        us = min(max(us, 0.0), MAX_DURATION_US)
        bucket = 0
        if us >= 1:
            bucket = int(BUCKETS_PER_OCTAVE * math.log2(us)) + 1
        self.counts[bucket] = self.counts.get(bucket, 0) + 1
        self.longest_us = max(self.longest_us, us)

    def merge_counts(self, counts: Iterable[tuple[int, int]], longest_us: float) -> None:
        """Adds another histogram's (bucket, count) pairs."""
        for bucket, count in counts:
            self.counts[bucket] = self.counts.get(bucket, 0) + count
        self.longest_us = max(self.longest_us, longest_us)

    @property
    def total_count(self) -> int:
        return sum(self.counts.values())

    def quantile(self, share: float) -> float | None:
        """The quantile in seconds, as the middle of its bucket; None for an empty histogram."""
        remaining = share * self.total_count
        for bucket, count in sorted(self.counts.items()):
            remaining -= count
            if remaining <= 0:
                middle_us: float = 2 ** ((bucket - 0.5) / BUCKETS_PER_OCTAVE) if bucket else 0.5
                return min(middle_us, self.longest_us) / 1e6
        return None


def compute_bandwidths(
    op: str, rank_count: int, size_bytes: float, seconds: float | None
) -> tuple[float, float] | None:
    """(algorithm, bus) bandwidth of a call in 10**9 bytes/s; None if it is not defined."""
    spec = OPERATIONS.get(op)
    if spec is None or spec.bus_factor is None or not rank_count:
        return None
    if not seconds or size_bytes <= 0:
        return None
    factor = spec.bus_factor.for_ranks(rank_count)
    return size_bytes / seconds / 1e9, factor * size_bytes / seconds / 1e9
