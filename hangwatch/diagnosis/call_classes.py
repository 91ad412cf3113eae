"""Which members of a group are known to have made equal calls, by their running hashes: these are equal
only if all calls up to there are.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from hangwatch.tracking.call_stream import CallStream, list_histories

HashClass = tuple[int, list[int]]  # a running hash, and the ranks that have it


def classify_members(
    members: Mapping[int, CallStream], seq: int
) -> tuple[list[HashClass], list[int]]:
    """The classes of members with equal hashes, and the members past ``seq`` of unknown class."""
    # The ranks with each history. 100,000 members share a few dozen of them.
    ranks_by_history: defaultdict[int, list[int]] = defaultdict(list)
    for rank, stream in members.items():
        ranks_by_history[id(stream.reported_hashes)].append(rank)
    ranks_by_hash: defaultdict[int, list[int]] = defaultdict(list)
    unplaced = []  # ranks past `seq` without a hash there, by history
    for ranks in ranks_by_history.values():
        running_hash = members[ranks[0]].hashes_by_seq.get(seq)
        if running_hash is not None:
            ranks_by_hash[running_hash] += ranks
            continue
        past = [rank for rank in ranks if members[rank].entered >= seq]
        counted = [rank for rank in past if members[rank].is_counted(seq)]
        if counted:
            unplaced.append(counted)
    # The members are in the class that has a later hash of theirs.
    classes_by_later_hash = {}
    if unplaced:
        for running_hash, ranks in ranks_by_hash.items():
            for history in list_histories(members[rank] for rank in ranks):
                for position in history:
                    if position[0] > seq:
                        classes_by_later_hash[position] = running_hash
    unclassified = []
    for ranks in unplaced:
        positions = reversed(members[ranks[0]].reported_hashes)
        shared = next((p for p in positions if p in classes_by_later_hash), None)
        if shared is None:
            unclassified += ranks
        else:
            ranks_by_hash[classes_by_later_hash[shared]] += ranks
    for ranks in ranks_by_hash.values():
        ranks.sort()
    classes = sorted(ranks_by_hash.items(), key=lambda item: (-len(item[1]), item[1]))
    return classes, sorted(unclassified)


def list_equal_callers(members: Mapping[int, CallStream], rank: int, seq: int) -> tuple[int, ...]:
    """The ranks whose call ``seq`` is known to be equal to that of ``rank``, and this rank itself."""
    classes, _ = classify_members(members, seq)
    for _, ranks in classes:
        if rank in ranks:
            return tuple(ranks)
    return (rank,)
