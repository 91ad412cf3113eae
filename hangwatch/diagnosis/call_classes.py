"""Which members of a group are known to have made equal calls, by their running hashes: these are equal
only if all calls up to there are.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from hangwatch.tracking.call_stream import CallStream, Hashes, list_histories

HashClass = tuple[int, list[int]]  # a running hash, and the ranks that have it


def classify_members(
    members: Mapping[int, CallStream], seq: int
) -> tuple[list[HashClass], list[int]]:
    """The classes of members with equal hashes, and the members past ``seq`` of unknown class."""
    ranks_by_hash: dict[int, list[int]] = {}
    unplaced: list[tuple[Hashes, list[int]]] = []
    # The different histories, each with its ranks. 100,000 members share a few dozen of them.
    ranks_by_history: dict[int, tuple[Hashes, list[int]]] = {}
    for rank, stream in members.items():
        history = stream.reported_hashes
        ranks_by_history.setdefault(id(history), (history, []))[1].append(rank)
    for history, ranks in ranks_by_history.values():
        running_hash = dict(history).get(seq)
        if running_hash is not None:
            ranks_by_hash.setdefault(running_hash, []).extend(ranks)
            continue
        past = [r for r in ranks if members[r].entered >= seq and members[r].is_counted(seq)]
        if past:
            unplaced.append((history, past))
    unclassified = _place_by_later_hash(members, seq, ranks_by_hash, unplaced) if unplaced else []
    for ranks in ranks_by_hash.values():
        ranks.sort()
    classes = sorted(ranks_by_hash.items(), key=lambda item: (-len(item[1]), item[1]))
    return classes, unclassified


def _place_by_later_hash(
    members: Mapping[int, CallStream],
    seq: int,
    ranks_by_hash: dict[int, list[int]],
    unplaced: Iterable[tuple[Hashes, list[int]]],
) -> list[int]:
    """Adds members to the class that has a later hash of theirs. Returns those that share none."""
    classes_by_later_hash: dict[tuple[int, int], int] = {}
    for running_hash, ranks in ranks_by_hash.items():
        for history in list_histories(members[rank] for rank in ranks):
            for position in history:
                if position[0] > seq:
                    classes_by_later_hash[position] = running_hash
    unclassified: list[int] = []
    for history, ranks in unplaced:
        shared = next((p for p in reversed(history) if p in classes_by_later_hash), None)
        if shared is None:
            unclassified += ranks
        else:
            ranks_by_hash[classes_by_later_hash[shared]] += ranks
    return sorted(unclassified)


def list_equal_callers(members: Mapping[int, CallStream], rank: int, seq: int) -> tuple[int, ...]:
    """The ranks whose call ``seq`` is known to be equal to that of ``rank``, and this rank itself."""
    classes, _ = classify_members(members, seq)
    return next((tuple(ranks) for _, ranks in classes if rank in ranks), (rank,))
