"""Selects the calls to check. All ranks select the same ones without communicating."""

from __future__ import annotations

UINT64_MASK = (1 << 64) - 1
# The first calls of every stream are always sampled: they broadcast a job's initial state.
ALWAYS_SAMPLED_CALLS = 8
ALWAYS_LEVEL = 64  # the level of these calls


def sampling_level(seq: int) -> int:
    """The sampling level of call ``seq`` (from 1) of a stream. Half of the calls of one level or
    above belong to the next level.

    The number is hashed first (the finaliser of splitmix64: Steele, Lea and Flood, "Fast splittable
    pseudorandom number generators", 2014), since training is periodic: every 16th call could be the
    same call of each step.
    """
    if seq <= ALWAYS_SAMPLED_CALLS:
        return ALWAYS_LEVEL
    x = (seq * 0x9E3779B97F4A7C15) & UINT64_MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & UINT64_MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & UINT64_MASK
    x ^= x >> 31
    return (x & -x).bit_length() - 1 if x else ALWAYS_LEVEL


def min_sampling_level(every: int, size_bytes: int, large_bytes: int) -> int:
    """The lowest level to sample, so that one in ``every`` calls is sampled; calls of more than
    ``large_bytes`` are sampled proportionally less often.

    Both factors are rounded up to powers of two.
    """
    return (every - 1).bit_length() + (max(1, -(-size_bytes // large_bytes)) - 1).bit_length()


def thin_calls(seqs: list[int], max_calls: int) -> set[int]:
    """At most ``max_calls`` of the calls, those of the highest levels, so that the selections of
    different ranks overlap.
    """
    ordered = sorted(seqs, key=sampling_level, reverse=True)
    if len(ordered) <= max_calls:
        return set(ordered)
    floor = sampling_level(ordered[max_calls])
    return {seq for seq in ordered if sampling_level(seq) > floor} or set(ordered[:max_calls])
