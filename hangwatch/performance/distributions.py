"""How calls perform: which of them are looked at closely, size classes, distributions, and the
bandwidths of nccl-tests. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from hangwatch.model.calls import Signature
from hangwatch.model.signatures import CHAIN_BASE, UINT64_MASK

# calls of this level or more tell when they are over, where that can be had; as in
# agent/recorder/native/recorder.cpp
MIN_TIMED_LEVEL = 6
# buckets of a distribution from one power of two to the next: a quantile is off by 4.4 % at most
BUCKETS_PER_OCTAVE = 8
MAX_DURATION_US = 1e12

# In these each member waits for all others: nobody can leave before the last one comes. Who is late
# to a broadcast, or sends something to a root, may hold up nobody.
MUTUAL_WAIT_OPS = frozenset(
    {
        "all_reduce", "all_reduce_coalesced", "all_gather", "all_gather_into_tensor", "all_gather_coalesced",
        "all_gather_into_tensor_coalesced", "reduce_scatter", "reduce_scatter_tensor", "reduce_scatter_tensor_coalesced",
        "all_to_all", "all_to_all_single", "barrier", "monitored_barrier",
    }
)  # fmt: skip
# A record's bytes are those of the tensors that `hangwatch.model.operators` names: here one rank's
# part of the whole.
_PER_RANK_SIZE_OPS = frozenset(
    {"all_gather_into_tensor", "all_gather_coalesced", "all_gather_into_tensor_coalesced", "gather", "scatter"}
)  # fmt: skip
_UNIT_FACTOR_OPS = frozenset({"broadcast", "reduce", "send", "recv", "recv_any_source"})
_NO_DATA_OPS = frozenset({"barrier", "monitored_barrier"})


def timing_level(seq: int) -> int:
    """How coarse a sample may be that still holds a call: one call in 2**k is of level k or above,
    the same ones on every rank.

    The bits of multiples of the golden ratio are spread evenly (Knuth, TAOCP volume 3, 6.4), so
    that a training whose calls repeat every 2**n has each of them looked at; of multiples of powers
    of two it would always be the same one.
    """
    return 64 - (seq * CHAIN_BASE & UINT64_MASK).bit_length()


def sample_calls(seqs: Sequence[int], max_calls: int) -> list[int]:
    """At most so many of some calls: those of the smallest level that allows it. What any two ranks
    choose has a part in common.
    """
    least = 0
    while len(seqs) > max_calls:
        least += 1
        seqs = [seq for seq in seqs if timing_level(seq) >= least]
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
    """
    >>> size_text(0), size_text(512), size_text(4096), size_text(25 << 20)
    ('0 B', '512 B', '4 KiB', '25 MiB')
    """
    at = min(4, max(0, size_bytes.bit_length() - 1) // 10)
    amount = size_bytes / (1 << 10 * at)
    return f"{amount:.3g} {('B', 'KiB', 'MiB', 'GiB', 'TiB')[at]}"


def format_bandwidth(gbs: float) -> str:
    """A bandwidth in units of ten, as nccl-tests have them.

    >>> speed_text(12.34), speed_text(0.0256), speed_text(0.000738)
    ('12.3 GB/s', '25.6 MB/s', '738 kB/s')
    """
    for unit, size in (("GB/s", 1.0), ("MB/s", 1e-3)):
        if gbs >= size:
            return f"{float(f'{gbs / size:.3g}'):g} {unit}"
    return f"{float(f'{gbs * 1e6:.3g}'):g} kB/s"


def full_size(op: str, recorded_bytes: int, rank_count: int) -> int:
    """The size of a call as nccl-tests count it, in bytes: of an all-gather or a reduce-scatter the
    whole array.

    Source: github.com/NVIDIA/nccl-tests, doc/PERFORMANCE.md, and the ``…GetBw`` functions in
    ``src/*.cu``.
    """
    return recorded_bytes * rank_count if op in _PER_RANK_SIZE_OPS else recorded_bytes


def is_even_split(signature: Signature) -> bool:
    """Every member sends each other as much: what the bandwidth of an all-to-all is defined for."""
    return signature.splits is None or all(len(set(side)) <= 1 for side in signature.splits)


def bus_factor(op: str, rank_count: int) -> float | None:
    """What makes algorithm bandwidth (size / time) bus bandwidth; None for what moves no data, or
    is not known.

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
    """Durations in microseconds, in buckets that grow by a factor of 2**(1/8). Memory is bounded by
    their number, some 300.
    """

    counts: dict[int, int] = field(default_factory=dict)
    longest_us: float = 0.0

    def add_duration(self, us: float, times: int = 1) -> None:
        us = min(max(us, 0.0), MAX_DURATION_US)
        at = int(BUCKETS_PER_OCTAVE * math.log2(us)) + 1 if us >= 1 else 0
        self.counts[at] = self.counts.get(at, 0) + times
        self.longest_us = max(self.longest_us, us)

    def merge_counts(self, counts: Iterable[tuple[int, int]], longest_us: float) -> None:
        for at, count in counts:
            self.counts[at] = self.counts.get(at, 0) + count
        self.longest_us = max(self.longest_us, longest_us)

    @property
    def total_count(self) -> int:
        return sum(self.counts.values())

    def quantile(self, share: float) -> float | None:
        """In seconds: the middle of the bucket in which it lies; None where nothing was added."""
        left = share * self.total_count
        for at in sorted(self.counts):
            left -= self.counts[at]
            if left <= 0:
                middle: float = 2 ** ((at - 0.5) / BUCKETS_PER_OCTAVE) if at else 0.5
                return min(middle, self.longest_us) / 1e6
        return None


def are_valid_counts(counts: Iterable[tuple[int, int]]) -> bool:
    """Whether buckets that somebody sent can be merged."""
    return all(
        0 <= at <= BUCKETS_PER_OCTAVE * math.log2(MAX_DURATION_US) + 1 and 0 < count < 1 << 40
        for at, count in counts
    )


def compute_bandwidths(
    op: str, rank_count: int, size_bytes: float, seconds: float | None
) -> tuple[float, float] | None:
    """(algorithm, bus) bandwidth in GB/s (10**9 bytes) of calls of ``size`` bytes that took so
    long; None where it is not defined.
    """
    factor = bus_factor(op, rank_count)
    if factor is None or not seconds or size_bytes <= 0:
        return None
    return size_bytes / seconds / 1e9, factor * size_bytes / seconds / 1e9
