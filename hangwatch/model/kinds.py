"""The kinds of verdict and the properties of each kind: one `KindSpec` each, in `KINDS`.

CONTRIBUTING.md lists what else a new kind needs.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass

from .ranks import RankState


class Severity(str, enum.Enum):
    WARNING = "warning"
    ALERT = "alert"


class Timing(str, enum.Enum):
    """The time at which a verdict is confirmed. The values appear in the documentation."""

    IMMEDIATE = "immediately"
    AFTER_STALL = "after `--stall-after`"
    AFTER_STALL_OR_START = (
        "after `--stall-after`; during set-up and in a group's first call as a warning, after"
        " `--startup-after` as an alert"
    )
    AFTER_PAUSE_THEN_ALERT = (
        "after `--stall-after`, and 5 times the longest earlier pause, as a warning; with culprits, after"
        " `--slow-limit` as an alert"
    )
    AFTER_STALL_THEN_ALERT = (
        "after `--stall-after` as a warning, after `--startup-after` as an alert"
    )
    IMMEDIATE_IF_STOPPED = "stopped: immediately; otherwise after `--stall-after`"


class Role(enum.Enum):
    """How a kind relates to other verdicts on the same attempt, when incidents are matched."""

    # Wrong arguments or a wrong order of calls explain every wait and death that follows.
    ROOT = "root"
    END = "end"  # a process or a host is gone: whatever waits or dies afterwards follows from that
    # Ranks cannot continue. A later exit is a consequence, since a launcher ends a job that hangs.
    HANG = "hang"
    SLOWDOWN = "slowdown"  # ranks wait, but may continue by themselves
    INDEPENDENT = "independent"  # neither the cause nor the effect of a wait


class Abort(enum.Enum):
    """Whether ``--on-hang abort`` may end ranks for a kind."""

    NEVER = "never"
    ON_REQUEST = "on request"  # a debugger, a late rank or a network partition may end by itself
    BY_DEFAULT = "by default"


class StackAdvice(enum.Enum):
    """Whether the advice of a kind describes what the culprit's stack shows."""

    NONE = "none"
    BEFORE = "before"  # the general advice follows
    INSTEAD = "instead"  # replaces the general advice, which only refers to the stack


class HardwareScope(enum.Enum):
    """The ranks whose hosts' hardware may explain a verdict."""

    NONE = "none"
    CULPRITS = "culprits"
    ALL = "all"


@dataclass(frozen=True, slots=True, kw_only=True)
class KindSpec:
    """What holds for every verdict of one kind."""

    meaning: str  # one sentence for the table of kinds
    next_step: str  # the advice for coding agents, without any text of the job
    severity: Severity = Severity.ALERT
    timing: Timing
    role: Role
    abort: Abort
    # The culprits themselves are blocked, even if no other rank waits for them. No rank is a
    # culprit of two verdicts of the kind.
    blocks_culprits: bool = False
    is_of_whole_job: bool = False  # there is at most one verdict of the kind at a time
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
    DEVICE_STUCK = "device_stuck"
    NO_PROGRESS = "no_progress"
    SLOW_RANK = "slow_rank"
    QUIET_JOB = "quiet_job"
    CONCURRENT_USE = "concurrent_use"
    REPLICA_DIVERGENCE = "replica_divergence"
    NONFINITE = "nonfinite"


KINDS: dict[VerdictKind, KindSpec] = {
    VerdictKind.MISMATCH: KindSpec(
        meaning=(
            "members of a group made different calls at the same position: operation, shape, dtype,"
            " reduce op, root, split sizes or tag; or a peer that is no rank of the group"
        ),
        next_step="Call get_calls, and look for the condition that one side took.",
        timing=Timing.IMMEDIATE,
        role=Role.ROOT,
        abort=Abort.BY_DEFAULT,
        compares_calls=True,
        is_call_error=True,
    ),
    VerdictKind.GROUP_MISMATCH: KindSpec(
        meaning="process groups were created in a different order or with different members",
        next_step="Create the same groups in the same order on all ranks.",
        timing=Timing.IMMEDIATE,
        role=Role.ROOT,
        abort=Abort.BY_DEFAULT,
        compares_calls=True,
        is_call_error=True,
    ),
    VerdictKind.DEADLOCK: KindSpec(
        meaning="ranks wait for each other in a cycle, across groups or point-to-point",
        next_step="Call get_wait_graph, follow the cycle, and order the calls alike.",
        timing=Timing.IMMEDIATE,
        role=Role.ROOT,
        abort=Abort.BY_DEFAULT,
        blocks_culprits=True,
        is_due_early=True,
    ),
    VerdictKind.DEAD_RANK: KindSpec(
        meaning="a process was ended by a signal, exited with a non-zero status, or vanished",
        next_step="Look at the exception and the exit in `processes`, and at the job's log.",
        timing=Timing.IMMEDIATE,
        role=Role.END,
        abort=Abort.BY_DEFAULT,
        has_culprit_line=False,
        is_due_early=True,
        hardware=HardwareScope.CULPRITS,
    ),
    VerdictKind.EXITED_RANK: KindSpec(
        meaning="a rank finished, or destroyed its process group, while others wait for it",
        next_step="Look for what let the culprit end while others still call.",
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
        next_step="Look at what stops the process or holds the GIL, in `culprit_stack`.",
        timing=Timing.IMMEDIATE_IF_STOPPED,
        role=Role.HANG,
        abort=Abort.ON_REQUEST,
        stack_advice=StackAdvice.BEFORE,
        ignores_sleep=True,
        culprit_state=RankState.FROZEN,
        is_due_early=True,
        hardware=HardwareScope.CULPRITS,
    ),
    VerdictKind.LOST_NODE: KindSpec(
        meaning="the node agent of a host no longer reports, and other ranks wait for its ranks",
        next_step="Check the culprits' host and its network.",
        timing=Timing.AFTER_STALL,
        role=Role.END,
        abort=Abort.ON_REQUEST,
        has_culprit_line=False,
        is_unreachable=True,
        hardware=HardwareScope.ALL,
    ),
    VerdictKind.STARTUP_STALL: KindSpec(
        meaning="ranks never reached `init_process_group`, in which others wait",
        next_step="Look at the launcher and the logs of the culprits.",
        timing=Timing.AFTER_STALL_THEN_ALERT,
        role=Role.HANG,
        abort=Abort.ON_REQUEST,
        stack_advice=StackAdvice.BEFORE,
    ),
    VerdictKind.MISSING_RANK: KindSpec(
        meaning=(
            "ranks that are alive in their own code have not entered the call in which others wait"
        ),
        next_step="Ask what the culprit's code at `line` waits for.",
        timing=Timing.AFTER_STALL,
        role=Role.HANG,
        abort=Abort.BY_DEFAULT,
        compares_calls=True,
        stack_advice=StackAdvice.INSTEAD,
        hardware=HardwareScope.CULPRITS,
    ),
    VerdictKind.DEVICE_STUCK: KindSpec(
        meaning=(
            "every member's host made the call, and some members' devices have not reached it or"
            " fell behind the others': a kernel that never ends, a stream that waits"
        ),
        next_step="Read `hardware`, and look for a kernel that never ends.",
        timing=Timing.AFTER_STALL,
        role=Role.HANG,
        abort=Abort.BY_DEFAULT,
        stack_advice=StackAdvice.BEFORE,
        hardware=HardwareScope.CULPRITS,
    ),
    VerdictKind.NO_PROGRESS: KindSpec(
        meaning=(
            "every member entered the call, none completes it, no difference between their calls is known,"
            " and no device is known to lag: network, device or driver"
        ),
        next_step="Read `hardware`, and check the network and the devices.",
        timing=Timing.AFTER_STALL_OR_START,
        role=Role.HANG,
        abort=Abort.BY_DEFAULT,
        hardware=HardwareScope.ALL,
    ),
    VerdictKind.SLOW_RANK: KindSpec(
        meaning=(
            "as `missing_rank`, but the rank is working or in a declared phase; becomes a"
            " `missing_rank` alert once it is stuck, and at the latest at `--slow-limit`"
        ),
        next_step="Ask what takes the culprit's code at `line` so long.",
        severity=Severity.WARNING,
        timing=Timing.AFTER_STALL,
        role=Role.SLOWDOWN,
        abort=Abort.NEVER,
        compares_calls=True,
        culprit_state=RankState.SLOW,
        stack_advice=StackAdvice.BEFORE,
    ),
    VerdictKind.QUIET_JOB: KindSpec(
        meaning=(
            "no rank makes calls any more, none works, and none is known to wait in a call; the culprits"
            " are blocked where the other ranks are not"
        ),
        next_step="Compare the stacks: who should end the waits of the others?",
        severity=Severity.WARNING,
        timing=Timing.AFTER_PAUSE_THEN_ALERT,
        role=Role.HANG,
        abort=Abort.ON_REQUEST,
        is_of_whole_job=True,
        stack_advice=StackAdvice.BEFORE,
        hardware=HardwareScope.CULPRITS,
    ),
    VerdictKind.CONCURRENT_USE: KindSpec(
        meaning="two threads of a rank make calls on one group at the same time",
        next_step="Make the calls of one group in one thread.",
        severity=Severity.WARNING,
        timing=Timing.IMMEDIATE,
        role=Role.INDEPENDENT,
        abort=Abort.NEVER,
    ),
    VerdictKind.REPLICA_DIVERGENCE: KindSpec(
        meaning="results that must be equal differ (only with `HANGWATCH_CHECKS=replicas`)",
        next_step="Look for what makes the culprits' results differ.",
        severity=Severity.WARNING,
        timing=Timing.IMMEDIATE,
        role=Role.INDEPENDENT,
        abort=Abort.NEVER,
    ),
    VerdictKind.NONFINITE: KindSpec(
        meaning=(
            "NaN or Inf entered the job: the first call that carried any (only with"
            " `HANGWATCH_CHECKS=nonfinite`)"
        ),
        next_step="Look for the first call with NaN or Inf and what computed its input.",
        severity=Severity.WARNING,
        timing=Timing.IMMEDIATE,
        role=Role.INDEPENDENT,
        abort=Abort.NEVER,
    ),
}


def select_kinds(accept: Callable[[KindSpec], bool]) -> tuple[VerdictKind, ...]:
    """The kinds whose spec satisfies ``accept``, in the order of `KINDS`."""
    return tuple(kind for kind, spec in KINDS.items() if accept(spec))
