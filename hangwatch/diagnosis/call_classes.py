"""Which members of a group are known to have made equal calls, by their running hashes: these are equal
only if all calls up to there are.
"""

from __future__ import annotations

from collections.abc import Mapping

from hangwatch.tracking.call_stream import CallStream, list_histories

HashClass = tuple[int, list[int]]  # a running hash, and the ranks that have it


def classify_members(
    members: Mapping[int, CallStream], seq: int
) -> tuple[list[HashClass], list[int]]:
    """The classes of members with equal hashes, and the members past ``seq`` whose class is
    unknown.
    """
    ranks_by_hash: dict[int, list[int]] = {}
    unclassified: list[int] = []
    hash_by_history = {
        id(history): dict(history).get(seq) for history in list_histories(members.values())
    }
    for rank in sorted(members):
        stream = members[rank]
        running_hash = hash_by_history[id(stream.reported_hashes)]
        if running_hash is not None:
            ranks_by_hash.setdefault(running_hash, []).append(rank)
        elif stream.entered >= seq and stream.is_counted(seq):
            unclassified.append(rank)
    if unclassified:
        _classify_by_later_hash(members, seq, ranks_by_hash, unclassified)
    classes = sorted(ranks_by_hash.items(), key=lambda item: (-len(item[1]), item[1]))
    return classes, unclassified


def _classify_by_later_hash(
    members: Mapping[int, CallStream],
    seq: int,
    ranks_by_hash: dict[int, list[int]],
    unclassified: list[int],
) -> None:
    """Moves members without a hash at ``seq`` to the class with which they share a later hash."""
    classes_by_later_hash: dict[tuple[int, int], int] = {}
    for running_hash, ranks in ranks_by_hash.items():
        for rank in ranks:
            for position in members[rank].hashes_by_seq.items():
                if position[0] > seq:
                    classes_by_later_hash[position] = running_hash
    for rank in list(unclassified):
        for position in members[rank].hashes_by_seq.items():
            if position in classes_by_later_hash:
                ranks_by_hash[classes_by_later_hash[position]].append(rank)
                unclassified.remove(rank)
                break
    for ranks in ranks_by_hash.values():
        ranks.sort()


def list_equal_callers(members: Mapping[int, CallStream], rank: int, seq: int) -> tuple[int, ...]:
    """The ranks whose call ``seq`` is known to be equal to that of ``rank``, and this rank itself."""
    classes, _ = classify_members(members, seq)
    return next((tuple(ranks) for _, ranks in classes if rank in ranks), (rank,))
