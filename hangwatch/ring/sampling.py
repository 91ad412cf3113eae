"""Selects the calls to sample. All ranks select the same ones without communicating.

There is one hash for all purposes. The native recorder computes it as well, so a change here needs
the same change in agent/recorder/native/ring_format.h. The recorder imports this module, and so it
imports no reader.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hangwatch.model.calls import CHAIN_BASE, UINT64_MASK

# The recorder times the completion of calls of this level or above, where torch allows it.
MIN_TIMED_LEVEL = 6
# The checks always sample the first calls of a stream: they broadcast a job's initial state.
ALWAYS_CHECKED_CALLS = 8
ALWAYS_LEVEL = 64  # the level of these calls


def sampling_level(seq: int) -> int:
    """The level of call ``seq`` (from 1) of a stream: one call in 2**k has level k or above.

    The bits of multiples of the golden ratio are evenly distributed (Knuth, TAOCP volume 3, 6.4).
    If a training repeats its calls every 2**n calls, each of them is sampled sometimes; with
    multiples of a power of two it would always be the same one.
    """
    return 64 - (seq * CHAIN_BASE & UINT64_MASK).bit_length()


def check_level(seq: int) -> int:
    """The level of call ``seq`` for the checks, which examine the first calls of every stream."""
    return ALWAYS_LEVEL if seq <= ALWAYS_CHECKED_CALLS else sampling_level(seq)


def min_check_level(every: int, size_bytes: int, large_bytes: int) -> int:
    """The lowest level to check, so that one in ``every`` calls is checked, and calls of more than
    ``large_bytes`` proportionally less often. Both factors are rounded up to powers of two.
    """
    size_factor = max(1, -(-size_bytes // large_bytes))
    return (every - 1).bit_length() + (size_factor - 1).bit_length()


def sample_calls(
    seqs: Sequence[int], max_calls: int, get_level: Callable[[int], int] = sampling_level
) -> list[int]:
    """At most ``max_calls`` of the calls: all those of the lowest level that allows it or above.
    The selections of different ranks overlap.
    """
    level = 0
    while len(seqs) > max_calls:
        level += 1
        seqs = [seq for seq in seqs if get_level(seq) >= level]
    return list(seqs)


def thin_checks(seqs: list[int], max_calls: int) -> set[int]:
    """At most ``max_calls`` of the checked calls, those of the highest levels, so that the
    selections of different ranks overlap.
    """
    kept = sample_calls(seqs, max_calls, check_level)
    return set(kept or sorted(seqs, key=check_level, reverse=True)[:max_calls])
