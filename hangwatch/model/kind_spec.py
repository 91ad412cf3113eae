"""The type of a kind's entry in `hangwatch.model.kinds`."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from .ranks import RankState


class Severity(str, enum.Enum):
    WARNING = "warning"
    ALERT = "alert"


class Timing(str, enum.Enum):
    """When a verdict is confirmed. The values appear in the documentation."""

    IMMEDIATE = "immediately"
    AFTER_STALL = "after `--stall-after`"
    AFTER_STALL_THEN_ALERT = (
        "after `--stall-after` as a warning, after `--startup-after` as an alert"
    )
    IMMEDIATE_IF_STOPPED = "stopped: immediately; otherwise after `--stall-after`"


class Role(enum.Enum):
    """How a kind relates to other verdicts on the same attempt, when incidents are matched."""

    # wrong arguments or a wrong order of calls: it explains every wait and death that follows
    ROOT = "root"
    END = "end"  # a process or a host is gone: whatever waits or dies afterwards follows from it
    # ranks cannot go on: a later exit is a consequence, since a launcher ends a job that hangs
    HANG = "hang"
    SLOWDOWN = "slowdown"  # ranks wait, but may go on by themselves
    INDEPENDENT = "independent"  # neither the cause nor the effect of a wait


class Abort(enum.Enum):
    """Whether ``--on-hang abort`` may end ranks for a kind."""

    NEVER = "never"
    ON_REQUEST = "on request"  # it may heal by itself: a debugger, a late rank, a network partition
    BY_DEFAULT = "by default"


class StackAdvice(enum.Enum):
    """Whether the advice of a kind says what the culprit's stack shows."""

    NONE = "none"
    BEFORE = "before"  # followed by the general advice
    INSTEAD = "instead"  # of the general advice, which only refers to the stack


class HardwareScope(enum.Enum):
    """Of which ranks' hosts the hardware may explain a verdict."""

    NONE = "none"
    CULPRITS = "culprits"
    ALL = "all"


@dataclass(frozen=True, slots=True, kw_only=True)
class KindSpec:
    """What holds for every verdict of one kind."""

    meaning: str  # one sentence for the table of kinds
    remedy: str  # what to do about it, for the documentation, in Markdown
    severity: Severity
    timing: Timing
    role: Role
    abort: Abort
    names_culprits: bool = True
    # The culprits themselves are blocked, even if no other rank waits for them. No rank is a
    # culprit of two verdicts of the kind.
    blocks_culprits: bool = False
    # The verdict is about calls that were made, whether or not they delay any rank. Later
    # differences between the same ranks' calls are consequences.
    is_call_error: bool = False
    # The verdict shows where the calls of the culprits and of the other ranks diverge.
    compares_calls: bool = False
    stack_advice: StackAdvice = StackAdvice.NONE
    # A sleep on the culprit's stack does not explain why it is not running.
    ignores_sleep: bool = False
    # No host reports the culprits: they cannot be aborted, and other deaths may follow from it.
    is_unreachable: bool = False
    culprit_state: RankState | None = None  # how the culprits are shown while it is open
    has_culprit_line: bool = True  # the culprits are, or were, at a line of code that is known
    # What hosts know of their links, devices, memory and storage may explain it.
    hardware: HardwareScope = HardwareScope.NONE
    is_due_early: bool = False  # a second stack sample, or one more second, decides it
