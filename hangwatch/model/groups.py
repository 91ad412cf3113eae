"""Process groups and their members."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

GroupKey = tuple[int, str, tuple[int, ...], int]


DECLARED_BACKEND = "declared"  # the backend of a group that only hangwatch.collective knows of


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """A process group: a torch name is only unique together with its members and the world that it
    was made in.

    Each init_process_group makes a world and starts torch's names anew. ``world`` is its size and
    ``generation`` counts those of that size: some ranks may have been in worlds of another size
    meanwhile, others not.
    """

    name: str
    desc: str
    ranks: tuple[int, ...]
    backend: str = ""
    generation: int = 1
    world_size: int = 0  # 0 where it is not told

    @property
    def key(self) -> GroupKey:
        return (self.generation, self.name, self.ranks, self.world_size)

    @property
    def is_declared(self) -> bool:
        return self.backend == DECLARED_BACKEND


def pack_ranks(ranks: Sequence[int]) -> str:
    """Members in their order as ``first-last`` or ``first-last:step`` runs, so that 16,384 of them
    take a few bytes.

    >>> pack_ranks([0, 8, 16, 24, 3])
    '0-24:8,3'
    """
    parts: list[str] = []
    i = 0
    while i < len(ranks):
        j = i + 1
        if j < len(ranks):
            step = ranks[j] - ranks[i]
            while j + 1 < len(ranks) and ranks[j + 1] - ranks[j] == step:
                j += 1
            if step > 0 and (j - i >= 2 or step == 1):
                parts.append(f"{ranks[i]}-{ranks[j]}" + (f":{step}" if step > 1 else ""))
                i = j + 1
                continue
        parts.append(str(ranks[i]))
        i += 1
    return ",".join(parts)


class RankTuple(tuple[int, ...]):
    """Ranks of a group, hashed once: else each look-up of a group would take longer the more
    members it has.
    """

    _hash: int | None = None

    def __hash__(self) -> int:
        if self._hash is None:
            self._hash = super().__hash__()
        return self._hash


@functools.lru_cache(maxsize=256)
def unpack_ranks(text: str, max_ranks: int = 1 << 20) -> tuple[int, ...]:
    """The inverse of `pack_ranks`. Raises ValueError for anything else, or for more than ``limit``
    ranks.

    Each member of a group tells of all: without a memory, 16,384 ranks would be 16,384 tuples of so
    many.
    """
    members: list[int] = []
    for part in text.split(",") if text else []:
        span, _, step = part.partition(":")
        first, dash, last = span.partition("-")
        chunk = (
            range(int(first), int(last) + 1, int(step or 1))
            if dash
            else range(int(first), int(first) + 1)
        )
        if (
            len(members) + (chunk.stop - chunk.start) // chunk.step > max_ranks
        ):  # len() overflows on what anybody may send
            raise ValueError(f"more than {max_ranks} ranks")
        members.extend(chunk)
    return RankTuple(members)
