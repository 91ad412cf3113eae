"""The state of a job that is rebuilt from Flight Recorder dumps, with what the dumps leave open."""

from __future__ import annotations

from dataclasses import dataclass, field

from hangwatch.model.groups import GroupKey
from hangwatch.tracking.attempt import Attempt

NOW_S = 1e6  # so that every pending call of a dump has waited for long
LAST_SEEN_S = NOW_S - 5.0


@dataclass(slots=True, kw_only=True)
class OfflineJob:
    """The attempt, as heartbeats would have built it, and the facts that only dumps provide."""

    attempt: Attempt
    # Backends whose dumps show which calls are complete.
    completion_backends: set[str] = field(default_factory=set)
    # Groups with sends and receives, which the recorder's counts include.
    p2p_groups: set[str] = field(default_factory=set)
    # By rank, the groups whose calls are unknown and were assumed to match the others'.
    assumed_groups: dict[int, set[str]] = field(default_factory=dict)
    # By group and rank, how many collectives the host has queued on its device.
    queued_counts: dict[GroupKey, dict[int, int]] = field(default_factory=dict)
    # Ranks whose call, at the first difference of a group, is invalid whatever the others called.
    invalid_ranks: dict[GroupKey, set[int]] = field(default_factory=dict)
    # Groups with a note on sizes that do not add up.
    ambiguous_groups: set[GroupKey] = field(default_factory=set)
    # For the user: oddities that accuse no rank.
    notes: list[str] = field(default_factory=list)
