"""How calls perform: which of them are looked at closely, size classes, distributions, and the bandwidths of nccl-tests. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from hangwatch.model.calls import Signature
from hangwatch.model.signatures import BASE, MASK

TIMED_LEVEL = 6  # calls of this level or more tell when they are over, where that can be had; as in agent/recorder/native/recorder.cpp
STEPS = 8  # buckets of a distribution from one power of two to the next: a quantile is off by 4.4 % at most
LONGEST_US = 1e12

# In these each member waits for all others: nobody can leave before the last one comes. Who is late to a broadcast, or sends
# something to a root, may hold up nobody.
MUTUAL = frozenset(
    {
        "all_reduce", "all_reduce_coalesced", "all_gather", "all_gather_into_tensor", "all_gather_coalesced",
        "all_gather_into_tensor_coalesced", "reduce_scatter", "reduce_scatter_tensor", "reduce_scatter_tensor_coalesced",
        "all_to_all", "all_to_all_single", "barrier", "monitored_barrier",
    }
)  # fmt: skip
# A record's bytes are those of the tensors that `hangwatch.model.operators` names: here one rank's part of the whole.
_OF_ONE_RANK = frozenset(
    {"all_gather_into_tensor", "all_gather_coalesced", "all_gather_into_tensor_coalesced", "gather", "scatter"}
)  # fmt: skip
_WHOLE = frozenset({"broadcast", "reduce", "send", "recv", "recv_any_source"})
_NO_DATA = frozenset({"barrier", "monitored_barrier"})


def level(seq: int) -> int:
    """How coarse a sample may be that still holds a call: one call in 2**k is of level k or above, the same ones on every rank.

    The bits of multiples of the golden ratio are spread evenly (Knuth, TAOCP volume 3, 6.4), so that a training whose calls repeat
    every 2**n has each of them looked at; of multiples of powers of two it would always be the same one.
    """
    return 64 - (seq * BASE & MASK).bit_length()


def sample(seqs: Sequence[int], most: int) -> list[int]:
    """At most so many of some calls: those of the smallest level that allows it. What any two ranks choose has a part in common."""
    least = 0
    while len(seqs) > most:
        least += 1
        seqs = [seq for seq in seqs if level(seq) >= least]
    return list(seqs)


def size_class(size: int) -> int:
    """0 for no bytes; else k for sizes from 2**(k - 1) to below 2**k.

    >>> size_class(0), size_class(4), size_class(7), size_class(8)
    (0, 3, 3, 4)
    """
    return size.bit_length()


def class_from(number: int) -> int:
    """The smallest size of a class, in bytes."""
    return 1 << (number - 1) if number else 0


def size_text(size: int) -> str:
    """
    >>> size_text(0), size_text(512), size_text(4096), size_text(25 << 20)
    ('0 B', '512 B', '4 KiB', '25 MiB')
    """
    at = min(4, max(0, size.bit_length() - 1) // 10)
    amount = size / (1 << 10 * at)
    return f"{amount:.3g} {('B', 'KiB', 'MiB', 'GiB', 'TiB')[at]}"


def speed_text(gbs: float) -> str:
    """A bandwidth in units of ten, as nccl-tests have them.

    >>> speed_text(12.34), speed_text(0.0256), speed_text(0.000738)
    ('12.3 GB/s', '25.6 MB/s', '738 kB/s')
    """
    for unit, size in (("GB/s", 1.0), ("MB/s", 1e-3)):
        if gbs >= size:
            return f"{float(f'{gbs / size:.3g}'):g} {unit}"
    return f"{float(f'{gbs * 1e6:.3g}'):g} kB/s"


def whole_size(op: str, recorded: int, ranks: int) -> int:
    """The size of a call as nccl-tests count it, in bytes: of an all-gather or a reduce-scatter the whole array.

    Source: github.com/NVIDIA/nccl-tests, doc/PERFORMANCE.md, and the ``…GetBw`` functions in ``src/*.cu``.
    """
    return recorded * ranks if op in _OF_ONE_RANK else recorded


def even(signature: Signature) -> bool:
    """Every member sends each other as much: what the bandwidth of an all-to-all is defined for."""
    return signature.splits is None or all(len(set(side)) <= 1 for side in signature.splits)


def bus_factor(op: str, ranks: int) -> float | None:
    """What makes algorithm bandwidth (size / time) bus bandwidth; None for what moves no data, or is not known.

    Source: github.com/NVIDIA/nccl-tests, doc/PERFORMANCE.md: 2(n-1)/n for all-reduce, (n-1)/n for reduce-scatter, all-gather and
    all-to-all, 1 for broadcast and reduce; and ``src/gather.cu``, ``src/scatter.cu``: (n-1)/n, ``src/sendrecv.cu``: 1.
    """
    if op in _WHOLE:
        return 1.0
    if op in ("all_reduce", "all_reduce_coalesced"):
        return 2 * (ranks - 1) / ranks
    if op in ("gather", "scatter") or (op in MUTUAL and op not in _NO_DATA):
        return (ranks - 1) / ranks
    return None


@dataclass(slots=True)
class Distribution:
    """Durations in microseconds, in buckets that grow by a factor of 2**(1/8). Memory is bounded by their number, some 300."""

    counts: dict[int, int] = field(default_factory=dict)
    longest: float = 0.0

    def add(self, us: float, times: int = 1) -> None:
        us = min(max(us, 0.0), LONGEST_US)
        at = int(STEPS * math.log2(us)) + 1 if us >= 1 else 0
        self.counts[at] = self.counts.get(at, 0) + times
        self.longest = max(self.longest, us)

    def merge(self, counts: Iterable[tuple[int, int]], longest: float) -> None:
        for at, count in counts:
            self.counts[at] = self.counts.get(at, 0) + count
        self.longest = max(self.longest, longest)

    @property
    def count(self) -> int:
        return sum(self.counts.values())

    def quantile(self, share: float) -> float | None:
        """In seconds: the middle of the bucket in which it lies; None where nothing was added."""
        left = share * self.count
        for at in sorted(self.counts):
            left -= self.counts[at]
            if left <= 0:
                middle: float = 2 ** ((at - 0.5) / STEPS) if at else 0.5
                return min(middle, self.longest) / 1e6
        return None


def valid(counts: Iterable[tuple[int, int]]) -> bool:
    """Whether buckets that somebody sent can be merged."""
    return all(0 <= at <= STEPS * math.log2(LONGEST_US) + 1 and 0 < count < 1 << 40 for at, count in counts)


def bandwidths(op: str, ranks: int, size: float, seconds: float | None) -> tuple[float, float] | None:
    """(algorithm, bus) bandwidth in GB/s (10**9 bytes) of calls of ``size`` bytes that took so long; None where it is not defined."""
    factor = bus_factor(op, ranks)
    if factor is None or not seconds or size <= 0:
        return None
    return size / seconds / 1e9, factor * size / seconds / 1e9
