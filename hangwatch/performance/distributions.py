"""Performance of calls: sampling, size classes, duration histograms and the bandwidths of
nccl-tests. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from hangwatch.model.calls import Signature
from hangwatch.model.signatures import CHAIN_BASE, UINT64_MASK

# The recorder times the completion of calls of this level or above, where torch allows it. Must
# equal the value in agent/recorder/native/recorder.cpp.
MIN_TIMED_LEVEL = 6
# Histogram buckets per power of two: the error of a quantile is at most 4.4 %.
BUCKETS_PER_OCTAVE = 8
MAX_DURATION_US = 1e12

# Operations in which each member waits for all others. In others, such as a broadcast or a reduce,
# a late rank may delay nobody.
MUTUAL_WAIT_OPS = frozenset(
    {
        "all_reduce", "all_reduce_coalesced", "all_gather", "all_gather_into_tensor", "all_gather_coalesced",
        "all_gather_into_tensor_coalesced", "reduce_scatter", "reduce_scatter_tensor", "reduce_scatter_tensor_coalesced",
        "all_to_all", "all_to_all_single", "barrier", "monitored_barrier",
    }
)  # fmt: skip
# A record holds the size of the tensors that `hangwatch.model.operators` names. For these
# operations that is one rank's part of the whole array.
_PER_RANK_SIZE_OPS = frozenset(
    {"all_gather_into_tensor", "all_gather_coalesced", "all_gather_into_tensor_coalesced", "gather", "scatter"}
)  # fmt: skip
_UNIT_FACTOR_OPS = frozenset({"broadcast", "reduce", "send", "recv", "recv_any_source"})
_NO_DATA_OPS = frozenset({"barrier", "monitored_barrier"})


def timing_level(seq: int) -> int:
    """The level of call ``seq``: one call in 2**k has level k or above, the same ones on all ranks.

    The bits of multiples of the golden ratio are evenly distributed (Knuth, TAOCP volume 3, 6.4).
    If a training repeats its calls every 2**n calls, each of them is sampled sometimes; with
    multiples of a power of two it would always be the same one.
    """
    return 64 - (seq * CHAIN_BASE & UINT64_MASK).bit_length()


def sample_calls(seqs: Sequence[int], max_calls: int) -> list[int]:
    """At most ``max_calls`` of the calls: all those of the lowest level that allows it or above.
    The selections of different ranks overlap.
    """
    level = 0
    while len(seqs) > max_calls:
        level += 1
        seqs = [seq for seq in seqs if timing_level(seq) >= level]
    return list(seqs)


def size_class(size: int) -> int:
    """0 for no bytes; else k for sizes from 2**(k - 1) to below 2**k.

    >>> size_class(0), size_class(4), size_class(7), size_class(8)
    (0, 3, 3, 4)
    """
    return size.bit_length()


def size_class_min_bytes(size_class_index: int) -> int:
    """The smallest size of a class, in bytes."""
    return 1 << (size_class_index - 1) if size_class_index else 0


def format_size(size_bytes: int) -> str:
    """A size in binary units.

    >>> format_size(0), format_size(512), format_size(4096), format_size(25 << 20)
    ('0 B', '512 B', '4 KiB', '25 MiB')
    """
    unit = min(4, max(0, size_bytes.bit_length() - 1) // 10)
    amount = size_bytes / (1 << 10 * unit)
    return f"{amount:.3g} {('B', 'KiB', 'MiB', 'GiB', 'TiB')[unit]}"


def format_bandwidth(gbs: float) -> str:
    """A bandwidth in decimal units, like nccl-tests. ``gbs`` is in GB/s.

    >>> format_bandwidth(12.34), format_bandwidth(0.0256), format_bandwidth(0.000738)
    ('12.3 GB/s', '25.6 MB/s', '738 kB/s')
    """
    for unit, size in (("GB/s", 1.0), ("MB/s", 1e-3)):
        if gbs >= size:
            return f"{float(f'{gbs / size:.3g}'):g} {unit}"
    return f"{float(f'{gbs * 1e6:.3g}'):g} kB/s"


def full_size(op: str, recorded_bytes: int, rank_count: int) -> int:
    """The size of a call in bytes as nccl-tests define it: the whole array for an all-gather or a
    reduce-scatter.

    Source: github.com/NVIDIA/nccl-tests, doc/PERFORMANCE.md, and the ``…GetBw`` functions in
    ``src/*.cu``.
    """
    return recorded_bytes * rank_count if op in _PER_RANK_SIZE_OPS else recorded_bytes


def is_even_split(signature: Signature) -> bool:
    """Whether all members exchange equal amounts, as the bandwidth of an all-to-all requires."""
    return signature.splits is None or all(len(set(side)) <= 1 for side in signature.splits)


def bus_factor(op: str, rank_count: int) -> float | None:
    """The ratio of bus bandwidth to algorithm bandwidth (size / time); None for operations that
    move no data or are unknown.

    Source: github.com/NVIDIA/nccl-tests, doc/PERFORMANCE.md: 2(n-1)/n for all-reduce, (n-1)/n for
    reduce-scatter, all-gather and all-to-all, 1 for broadcast and reduce; and ``src/gather.cu``,
    ``src/scatter.cu``: (n-1)/n, ``src/sendrecv.cu``: 1.
    """
    if op in _UNIT_FACTOR_OPS:
        return 1.0
    if op in ("all_reduce", "all_reduce_coalesced"):
        return 2 * (rank_count - 1) / rank_count
    if op in ("gather", "scatter") or (op in MUTUAL_WAIT_OPS and op not in _NO_DATA_OPS):
        return (rank_count - 1) / rank_count
    return None


@dataclass(slots=True)
class DurationHistogram:
    """Durations in microseconds, in at most about 300 buckets that grow by a factor of 2**(1/8)."""

    counts: dict[int, int] = field(default_factory=dict)
    longest_us: float = 0.0

    def add_duration(self, us: float, times: int = 1) -> None:
        us = min(max(us, 0.0), MAX_DURATION_US)
        bucket = int(BUCKETS_PER_OCTAVE * math.log2(us)) + 1 if us >= 1 else 0
        self.counts[bucket] = self.counts.get(bucket, 0) + times
        self.longest_us = max(self.longest_us, us)

    def merge_counts(self, counts: Iterable[tuple[int, int]], longest_us: float) -> None:
        """Adds another histogram's (bucket, count) pairs; see `are_valid_counts`."""
        for bucket, count in counts:
            self.counts[bucket] = self.counts.get(bucket, 0) + count
        self.longest_us = max(self.longest_us, longest_us)

    @property
    def total_count(self) -> int:
        return sum(self.counts.values())

    def quantile(self, share: float) -> float | None:
        """The quantile in seconds, as the middle of its bucket; None for an empty histogram."""
        remaining = share * self.total_count
        for bucket in sorted(self.counts):
            remaining -= self.counts[bucket]
            if remaining <= 0:
                middle: float = 2 ** ((bucket - 0.5) / BUCKETS_PER_OCTAVE) if bucket else 0.5
                return min(middle, self.longest_us) / 1e6
        return None


def are_valid_counts(counts: Iterable[tuple[int, int]]) -> bool:
    """Whether untrusted (bucket, count) pairs can be merged."""
    last_bucket = BUCKETS_PER_OCTAVE * math.log2(MAX_DURATION_US) + 1
    return all(0 <= bucket <= last_bucket and 0 < count < 1 << 40 for bucket, count in counts)


def compute_bandwidths(
    op: str, rank_count: int, size_bytes: float, seconds: float | None
) -> tuple[float, float] | None:
    """(algorithm, bus) bandwidth in GB/s (10**9 bytes/s) of a call of ``size_bytes`` that took
    ``seconds``; None where it is not defined.
    """
    factor = bus_factor(op, rank_count)
    if factor is None or not seconds or size_bytes <= 0:
        return None
    return size_bytes / seconds / 1e9, factor * size_bytes / seconds / 1e9
