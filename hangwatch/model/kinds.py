"""The kinds of verdict and the properties of each kind: one `KindSpec` each, in
`KINDS`.

A new kind is a member of `VerdictKind` and an entry of `KINDS` here, a rule module under
`hangwatch.diagnosis.rules`, and its entry in `hangwatch.diagnosis.engine.RULES`. Everything else
follows from the properties in `KindSpec`.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass

from .ranks import RankState


class VerdictKind(str, enum.Enum):
    """The name of a kind of verdict. CONTRACT: each name is public."""

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


class Timing(str, enum.Enum):
    """When a verdict is confirmed. The values appear in the documentation."""

    IMMEDIATE = "at once"
    AFTER_STALL = "after `--stall-after`"
    IMMEDIATE_IF_STOPPED = "stopped: at once; otherwise after `--stall-after`"


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


@dataclass(frozen=True, slots=True, kw_only=True)
class KindSpec:
    """What holds for every verdict of one kind."""

    meaning: str  # one sentence for the table of kinds
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
    is_due_early: bool = False  # a second stack sample, or one more second, decides it


_ALERT, _WARNING = Severity.ALERT, Severity.WARNING

KINDS: dict[VerdictKind, KindSpec] = {
    VerdictKind.MISMATCH: KindSpec(
        meaning=(
            "members of a group made different calls at the same position: operation, shape, dtype,"
            " reduce op, root, split sizes or tag"
        ),
        severity=_ALERT,
        timing=Timing.IMMEDIATE,
        role=Role.ROOT,
        abort=Abort.BY_DEFAULT,
        compares_calls=True,
        is_call_error=True,
    ),
    VerdictKind.GROUP_MISMATCH: KindSpec(
        meaning="process groups were created in a different order or with different members",
        severity=_ALERT,
        timing=Timing.IMMEDIATE,
        role=Role.ROOT,
        abort=Abort.BY_DEFAULT,
        compares_calls=True,
        is_call_error=True,
    ),
    VerdictKind.DEADLOCK: KindSpec(
        meaning="ranks wait for each other in a cycle, across groups or point-to-point",
        severity=_ALERT,
        timing=Timing.IMMEDIATE,
        role=Role.ROOT,
        abort=Abort.BY_DEFAULT,
        blocks_culprits=True,
        is_due_early=True,
    ),
    VerdictKind.DEAD_RANK: KindSpec(
        meaning="a process was ended by a signal, exited with a non-zero status, or vanished",
        severity=_ALERT,
        timing=Timing.IMMEDIATE,
        role=Role.END,
        abort=Abort.BY_DEFAULT,
        has_culprit_line=False,
        is_due_early=True,
    ),
    VerdictKind.EXITED_RANK: KindSpec(
        meaning="a rank finished, or destroyed its process group, while others wait for it",
        severity=_ALERT,
        timing=Timing.IMMEDIATE,
        role=Role.END,
        abort=Abort.BY_DEFAULT,
        compares_calls=True,
        stack_advice=StackAdvice.BEFORE,
        has_culprit_line=False,
        is_due_early=True,
    ),
    VerdictKind.FROZEN_RANK: KindSpec(
        meaning=(
            "a rank is alive but cannot run Python: stopped, in uninterruptible sleep, or native"
            " code holds the GIL"
        ),
        severity=_ALERT,
        timing=Timing.IMMEDIATE_IF_STOPPED,
        role=Role.HANG,
        abort=Abort.ON_REQUEST,
        stack_advice=StackAdvice.BEFORE,
        ignores_sleep=True,
        culprit_state=RankState.FROZEN,
        is_due_early=True,
    ),
    VerdictKind.LOST_NODE: KindSpec(
        meaning="the node agent of a host no longer reports, and other ranks wait for its ranks",
        severity=_ALERT,
        timing=Timing.AFTER_STALL,
        role=Role.END,
        abort=Abort.ON_REQUEST,
        has_culprit_line=False,
        is_unreachable=True,
    ),
    VerdictKind.STARTUP_STALL: KindSpec(
        meaning="ranks never reached `init_process_group`, in which others wait",
        severity=_ALERT,
        timing=Timing.AFTER_STALL,
        role=Role.HANG,
        abort=Abort.ON_REQUEST,
        stack_advice=StackAdvice.BEFORE,
    ),
    VerdictKind.MISSING_RANK: KindSpec(
        meaning=(
            "ranks that are alive in their own code have not entered the call in which others wait"
        ),
        severity=_ALERT,
        timing=Timing.AFTER_STALL,
        role=Role.HANG,
        abort=Abort.BY_DEFAULT,
        compares_calls=True,
        stack_advice=StackAdvice.INSTEAD,
    ),
    VerdictKind.NO_PROGRESS: KindSpec(
        meaning="every member made the same call and none completes it: network, device or driver",
        severity=_ALERT,
        timing=Timing.AFTER_STALL,
        role=Role.HANG,
        abort=Abort.BY_DEFAULT,
        names_culprits=False,
    ),
    VerdictKind.SLOW_RANK: KindSpec(
        meaning=(
            "as `missing_rank`, but the rank is working or in a declared phase; becomes a"
            " `missing_rank` alert at `--slow-limit`"
        ),
        severity=_WARNING,
        timing=Timing.AFTER_STALL,
        role=Role.SLOWDOWN,
        abort=Abort.NEVER,
        compares_calls=True,
        culprit_state=RankState.SLOW,
        stack_advice=StackAdvice.BEFORE,
    ),
    VerdictKind.CONCURRENT_USE: KindSpec(
        meaning="two threads of a rank make calls on one group at the same time",
        severity=_WARNING,
        timing=Timing.IMMEDIATE,
        role=Role.INDEPENDENT,
        abort=Abort.NEVER,
    ),
    VerdictKind.REPLICA_DIVERGENCE: KindSpec(
        meaning=(
            "results that must be equal on every rank differ (only with"
            " `HANGWATCH_CHECKS=replicas`)"
        ),
        severity=_WARNING,
        timing=Timing.IMMEDIATE,
        role=Role.INDEPENDENT,
        abort=Abort.NEVER,
    ),
    VerdictKind.NONFINITE: KindSpec(
        meaning=(
            "NaN or Inf entered the job: the first call that carried any (only with"
            " `HANGWATCH_CHECKS=nonfinite`)"
        ),
        severity=_WARNING,
        timing=Timing.IMMEDIATE,
        role=Role.INDEPENDENT,
        abort=Abort.NEVER,
    ),
}


def select_kinds(accept: Callable[[KindSpec], bool]) -> tuple[VerdictKind, ...]:
    """The kinds whose spec satisfies ``accept``, in the order of `KINDS`."""
    return tuple(kind for kind, spec in KINDS.items() if accept(spec))
