"""Which calls are looked at closely: the same ones on every rank, without a word between them."""

from __future__ import annotations

MASK = (1 << 64) - 1
FIRST = 8  # calls of every sequence, always: what a job sets out from is broadcast there
ALWAYS = 64  # the level of those


def level(seq: int) -> int:
    """How rarely call ``seq`` (from 1) of a sequence is left out: each level holds half of the one below it.

    A call's number is scattered first (the finaliser of splitmix64: Steele, Lea and Flood, "Fast splittable pseudorandom number
    generators", 2014), since training repeats itself: every 16th call would be the same one of each step, for ever.
    """
    if seq <= FIRST:
        return ALWAYS
    x = (seq * 0x9E3779B97F4A7C15) & MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    x ^= x >> 31
    return (x & -x).bit_length() - 1 if x else ALWAYS


def level_for(every: int, size: int, large: int) -> int:
    """The lowest level to look at, so that it is one in ``every`` calls; of calls of more than ``large`` bytes fewer in proportion.

    Both are rounded up to powers of two.
    """
    return (every - 1).bit_length() + (max(1, -(-size // large)) - 1).bit_length()


def thinned(seqs: list[int], most: int) -> set[int]:
    """At most ``most`` of them, those of the highest levels: what any two ranks keep, they have in common."""
    ordered = sorted(seqs, key=level, reverse=True)
    if len(ordered) <= most:
        return set(ordered)
    floor = level(ordered[most])
    return {seq for seq in ordered if level(seq) > floor} or set(ordered[:most])
