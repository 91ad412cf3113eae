"""Which calls are looked at closely: the same ones on every rank, without a word between them."""

from __future__ import annotations

UINT64_MASK = (1 << 64) - 1
ALWAYS_SAMPLED_CALLS = (
    8  # calls of every sequence, always: what a job sets out from is broadcast there
)
ALWAYS_LEVEL = 64  # the level of those


def sampling_level(seq: int) -> int:
    """How rarely call ``seq`` (from 1) of a sequence is left out: each level holds half of the one
    below it.

    A call's number is scattered first (the finaliser of splitmix64: Steele, Lea and Flood, "Fast
    splittable pseudorandom number generators", 2014), since training repeats itself: every 16th
    call would be the same one of each step, for ever.
    """
    if seq <= ALWAYS_SAMPLED_CALLS:
        return ALWAYS_LEVEL
    x = (seq * 0x9E3779B97F4A7C15) & UINT64_MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & UINT64_MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & UINT64_MASK
    x ^= x >> 31
    return (x & -x).bit_length() - 1 if x else ALWAYS_LEVEL


def min_sampling_level(every: int, size_bytes: int, large_bytes: int) -> int:
    """The lowest level to look at, so that it is one in ``every`` calls; of calls of more than
    ``large`` bytes fewer in proportion.

    Both are rounded up to powers of two.
    """
    return (every - 1).bit_length() + (max(1, -(-size_bytes // large_bytes)) - 1).bit_length()


def thin_calls(seqs: list[int], max_calls: int) -> set[int]:
    """At most ``most`` of them, those of the highest levels: what any two ranks keep, they have in
    common.
    """
    ordered = sorted(seqs, key=sampling_level, reverse=True)
    if len(ordered) <= max_calls:
        return set(ordered)
    floor = sampling_level(ordered[max_calls])
    return {seq for seq in ordered if sampling_level(seq) > floor} or set(ordered[:max_calls])
