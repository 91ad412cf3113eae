"""The kinds of verdict and the properties of each kind: one `KindSpec` each, in `KINDS`.

CONTRIBUTING.md says what else a new kind needs; its documentation follows from its `KindSpec`.
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
    AFTER_STALL_THEN_ALERT = (
        "after `--stall-after` as a warning, after `--startup-after` as an alert"
    )
    IMMEDIATE_IF_STOPPED = "stopped: immediately; otherwise after `--stall-after`"


class Role(enum.Enum):
    """How a kind relates to other verdicts on the same attempt, when incidents are matched."""

    # Wrong arguments or a wrong order of calls explain every wait and death that follows.
    ROOT = "root"
    END = "end"  # a process or a host is gone: whatever waits or dies afterwards follows from that
    # Ranks cannot go on. A later exit is a consequence, since a launcher ends a job that hangs.
    HANG = "hang"
    SLOWDOWN = "slowdown"  # ranks wait, but may go on by themselves
    INDEPENDENT = "independent"  # neither the cause nor the effect of a wait


class Abort(enum.Enum):
    """Whether ``--on-hang abort`` may end ranks for a kind."""

    NEVER = "never"
    ON_REQUEST = "on request"  # a debugger, a late rank or a network partition may end by itself
    BY_DEFAULT = "by default"


class StackAdvice(enum.Enum):
    """Whether the advice of a kind says what the culprit's stack shows."""

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
    remedy: str  # advice for the documentation, in Markdown
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
    CONCURRENT_USE = "concurrent_use"
    REPLICA_DIVERGENCE = "replica_divergence"
    NONFINITE = "nonfinite"


_ALERT, _WARNING = Severity.ALERT, Severity.WARNING

KINDS: dict[VerdictKind, KindSpec] = {
    VerdictKind.MISMATCH: KindSpec(
        meaning=(
            "members of a group made different calls at the same position: operation, shape, dtype,"
            " reduce op, root, split sizes or tag"
        ),
        remedy=(
            "Compare the two lines that the verdict shows: every rank of a group must make "
            "the same calls in the same order, with arguments that fit.\n\n"
            "- `fields` in JSON, `≠` in the text: which arguments differ.\n"
            "- Usual causes: a branch on the rank or on local data (logging, evaluation, an "
            "early `continue`), a batch of another size, a layer that one rank skips, a "
            "different dtype after loading a checkpoint.\n"
            "- If the aligned calls show one that was skipped, look for the condition around "
            "that line.\n"
            "- Sizes within the lists of gather and scatter are recorded, but not compared "
            "between the root and the others."
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
        remedy=(
            "Create all process groups on every rank, in the same order and with the same "
            "members, including groups that a rank does not belong to. Stacks cannot show "
            "this fault: every rank is in `new_group`."
        ),
        severity=_ALERT,
        timing=Timing.IMMEDIATE,
        role=Role.ROOT,
        abort=Abort.BY_DEFAULT,
        compares_calls=True,
        is_call_error=True,
    ),
    VerdictKind.DEADLOCK: KindSpec(
        meaning="ranks wait for each other in a cycle, across groups or point-to-point",
        remedy=(
            "Look at the lines of the ranks on the cycle. One of them makes its calls in "
            "another order than its peers: two groups entered in opposite order, two blocking "
            "sends to each other, a receive that should come before a send. The advice names "
            "the rank through which every cycle leads, where there is one."
        ),
        severity=_ALERT,
        timing=Timing.IMMEDIATE,
        role=Role.ROOT,
        abort=Abort.BY_DEFAULT,
        blocks_culprits=True,
        is_due_early=True,
    ),
    VerdictKind.DEAD_RANK: KindSpec(
        meaning="a process was ended by a signal, exited with a non-zero status, or vanished",
        remedy=(
            "Read the exception or the signal in the verdict: it is the first one. Errors "
            'such as "Connection closed by peer" on other ranks are consequences.\n\n'
            "- SIGKILL without an abort by hangwatch is often the kernel's out-of-memory "
            "killer: check `dmesg` and the container's memory limit.\n"
            "- SIGSEGV, SIGABRT or SIGBUS come from native code: enable core dumps."
        ),
        severity=_ALERT,
        timing=Timing.IMMEDIATE,
        role=Role.END,
        abort=Abort.BY_DEFAULT,
        has_culprit_line=False,
        is_due_early=True,
        hardware=HardwareScope.CULPRITS,
    ),
    VerdictKind.EXITED_RANK: KindSpec(
        meaning="a rank finished, or destroyed its process group, while others wait for it",
        remedy=(
            "Look for uneven data, a loop that ends early on one rank, or a `return` before "
            "the last collective. The verdict shows the call that the rank never made. Uneven "
            "inputs of DistributedDataParallel need `Join`, or the same number of batches on "
            "each rank."
        ),
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
        remedy=(
            "- *Stopped*: by a debugger, job control or SIGSTOP. `kill -CONT PID` resumes it.\n"
            "- *Uninterruptible sleep*: the process waits in the kernel, usually for a file "
            "system or a device. Check the mount and `dmesg` on that host.\n"
            "- *The GIL is held in native code*: the stack shows which thread. `hangwatch "
            "dump --native RANK` shows the C++ frames."
        ),
        severity=_ALERT,
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
        remedy=(
            "Check whether the host is up, and its network. A host that only the server "
            "cannot reach is not reported as long as its ranks still make progress with "
            "others."
        ),
        severity=_ALERT,
        timing=Timing.AFTER_STALL,
        role=Role.END,
        abort=Abort.ON_REQUEST,
        has_culprit_line=False,
        is_unreachable=True,
        hardware=HardwareScope.ALL,
    ),
    VerdictKind.STARTUP_STALL: KindSpec(
        meaning="ranks never reached `init_process_group`, in which others wait",
        remedy=(
            "The verdict says which ranks are absent and, if their process is known, where "
            "each one is. Check the launcher's log on that host, the rendezvous address and "
            "port, slow imports or image pulls, and code before `init_process_group`.\n\n"
            "A rank that takes part in the job and is not recorded, such as one without "
            "`HANGWATCH_URL`, is said to be not watched. It may have made the call, so it is no "
            "culprit; the advice says what it lacks."
        ),
        severity=_ALERT,
        timing=Timing.AFTER_STALL_THEN_ALERT,
        role=Role.HANG,
        abort=Abort.ON_REQUEST,
        stack_advice=StackAdvice.BEFORE,
    ),
    VerdictKind.MISSING_RANK: KindSpec(
        meaning=(
            "ranks that are alive in their own code have not entered the call in which others wait"
        ),
        remedy=(
            "Look at the culprit's line, marked `>`. The advice says what it waits for: a "
            "DataLoader worker (whose stack is shown too), a lock, a queue, a file, a "
            "subprocess, a server; and inside what: a checkpoint, a compilation, an exception "
            "handler, interpreter exit.\n\n"
            "If the work is legitimate and long, declare it: `with "
            'hangwatch.phase("evaluate", limit=1800):`.'
        ),
        severity=_ALERT,
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
        remedy=(
            "Every rank's host made its call, so look at what the culprit's device has to "
            "do before it: a kernel that does not end, a stream that waits for an event, or a "
            "GPU that failed (`nvidia-smi`, Xid messages in `dmesg`). With "
            "`TORCH_NCCL_ENABLE_TIMING=1` exactly the stuck devices are named; without it, all that "
            "may be."
        ),
        severity=_ALERT,
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
        remedy=(
            "All members are in the call, so no code is at fault as far as is known; the summary says "
            "whether their calls were compared and are the same. "
            "Check the network between the hosts, the device and its driver. On NCCL jobs, "
            "look at `NCCL_DEBUG=WARN` output and the fabric's counters."
        ),
        severity=_ALERT,
        timing=Timing.AFTER_STALL,
        role=Role.HANG,
        abort=Abort.BY_DEFAULT,
        names_culprits=False,
        hardware=HardwareScope.ALL,
    ),
    VerdictKind.SLOW_RANK: KindSpec(
        meaning=(
            "as `missing_rank`, but the rank is working or in a declared phase; becomes a"
            " `missing_rank` alert at `--slow-limit`"
        ),
        remedy=(
            "Nothing needs to be done if the work is expected: it is a warning, and it "
            "becomes a `missing_rank` alert at `--slow-limit` (360 seconds by default) or at "
            "the limit of the declared phase. Declare long work with `hangwatch.phase`; "
            "distribute it if others wait for it often (`hangwatch perf` shows how often)."
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
        remedy=(
            "Calls of one group from two threads can be in a different order on each rank, "
            "which is a hang or wrong results sooner or later. Give each thread a group of "
            "its own."
        ),
        severity=_WARNING,
        timing=Timing.IMMEDIATE,
        role=Role.INDEPENDENT,
        abort=Abort.NEVER,
    ),
    VerdictKind.REPLICA_DIVERGENCE: KindSpec(
        meaning="results that must be equal differ (only with `HANGWATCH_CHECKS=replicas`)",
        remedy=(
            "Ranks hold different results where they must be equal, bit for bit. Stop the job "
            "and restart from a checkpoint before the reported call. If the same host is "
            "named again, test its memory and network card."
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
        remedy=(
            "The named rank and call are where NaN or Inf first entered; ranks that received "
            "it are not named. Check that rank's batch, and the loss at that step. Single "
            "overflows under `GradScaler` are normal and are not reported; 24 rounds in a row "
            "are."
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
