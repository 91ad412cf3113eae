"""The kinds of verdict."""

from __future__ import annotations

import enum


class Kind(str, enum.Enum):
    """The kinds of verdict. CONTRACT: each name is public."""

    MISMATCH = "mismatch"
    GROUP_MISMATCH = "group_mismatch"
    DEADLOCK = "deadlock"
    DEAD_RANK = "dead_rank"
    EXITED_RANK = "exited_rank"
    FROZEN_RANK = "frozen_rank"
    LOST_NODE = "lost_node"
    STARTUP_STALL = "startup_stall"
    MISSING_RANK = "missing_rank"
    NO_PROGRESS = "no_progress"
    SLOW_RANK = "slow_rank"
    CONCURRENT_USE = "concurrent_use"
    REPLICA_DIVERGENCE = "replica_divergence"
    NONFINITE = "nonfinite"


class Severity(str, enum.Enum):
    WARNING = "warning"
    ALERT = "alert"
