"""What a host knows without the training processes: its links, devices, memory, storage and kernel
log with NVIDIA's Xid errors, NCCL's own report, and versions of software that are known to hang.

`KNOWN_PROBLEMS` has only what the software's own maintainers confirmed, with the version that fixes
it, as of 2026-11-26.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from .bounds import Finite

# The sources that report on the whole job, whichever host reads them.
JOB_SOURCE = "nccl ras"
JOB_DIAGNOSTICS = "nccl diagnostics"

ObservedValue = int | Finite | str | None


class Weight(str, enum.Enum):
    """How much an observation explains."""

    FAULT = "fault"  # can stop a job by itself: a link that went down, a GPU that left the bus
    HINT = "hint"  # may contribute: retransmitted packets, a throttled clock
    FACT = "fact"  # a version, to be compared with known problems


@dataclass(frozen=True, kw_only=True)
class Observation:
    """One value that a source reports. No slots: see `hangwatch.protocol.heartbeat`.

    A counter is an observation only of what it counted: ``before`` is its value before the incident.
    A state is one if it is abnormal by itself, and then ``before`` may be None.
    """

    source: str  # for example "infiniband"
    about: str  # the part of the host: "mlx5_0/1", "GPU 3", "process 4711"
    what: str  # "link_downed", "xid"
    now: ObservedValue
    before: ObservedValue = None
    weight: Weight = Weight.HINT
    is_counter: bool = False  # the value only grows, and means nothing by itself
    is_abnormal: bool = False  # the value needs no earlier one to mean something
    age_s: float = 0.0  # the time since the reading, or since the event

    @property
    def concerns_job(self) -> bool:
        """Whether it is about the whole job, and not about the host that reports it."""
        return self.source in (JOB_SOURCE, JOB_DIAGNOSTICS)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostObservation:
    """A value that one of the hosts concerned reports: a counter that grew, or a state.

    It is evidence of an incident.
    """

    host: str
    observation: Observation


@dataclass(frozen=True, slots=True, kw_only=True)
class MissingEvidence:
    """A source that hosts could not read for an incident, and what to do about it."""

    hosts: tuple[str, ...]
    source: str
    reason: str
    remedy: str


@dataclass(frozen=True, kw_only=True)
class UnavailableSource:
    """A source that cannot be read on a host, with the reason and what to do about it."""

    source: str
    reason: str
    remedy: str = ""


class XidAction(enum.Enum):
    """The immediate action after an Xid, by NVIDIA's catalogue of these errors."""

    CHECK_PROGRAM = "check_program"  # the program caused it
    RESTART_JOB = "restart_job"  # the GPU itself can be used again
    RESET_GPU = "reset_gpu"
    RESTART_NODE = "restart_node"
    CHECK_NVLINK = "check_nvlink"
    NONE = "none"  # the error was corrected, or follows from another Xid


@dataclass(frozen=True, slots=True)
class Xid:
    meaning: str
    action: XidAction


_COPY_ENGINE = Xid("copy engine error", XidAction.RESTART_JOB)
_NVLINK = Xid("NVLink error", XidAction.CHECK_NVLINK)
# Source: https://docs.nvidia.com/deploy/xid-errors/analyzing-xid-catalog.html, Ampere and later, as of
# 2026-11-28. Codes of engines that training does not use, such as video decoders, are left out.
XIDS: Mapping[int, Xid] = {
    8: Xid("the GPU stopped processing", XidAction.RESTART_JOB),
    11: Xid("invalid command for the GPU", XidAction.CHECK_PROGRAM),
    13: Xid("exception in a kernel, often the program's", XidAction.CHECK_PROGRAM),
    25: Xid("invalid command for the GPU", XidAction.CHECK_PROGRAM),
    31: Xid("memory page fault, often the program's", XidAction.CHECK_PROGRAM),
    32: Xid("corrupted commands for the GPU", XidAction.CHECK_PROGRAM),
    **dict.fromkeys((39, 40, 41, 70, 71, 72, 75, 76, 77, 85), _COPY_ENGINE),
    43: Xid("the GPU stopped a program's work after an error of it", XidAction.NONE),
    45: Xid("the GPU's work was cancelled after another error or an exit", XidAction.NONE),
    46: Xid("the GPU stopped processing", XidAction.RESET_GPU),
    48: Xid("double-bit memory error", XidAction.RESET_GPU),
    62: Xid("the GPU's power controller halted", XidAction.RESET_GPU),
    63: Xid("row remapping recorded", XidAction.NONE),
    64: Xid("row remapping failed", XidAction.RESET_GPU),
    69: Xid("invalid command for the GPU", XidAction.CHECK_PROGRAM),
    74: _NVLINK,
    79: Xid("the GPU has fallen off the bus", XidAction.RESTART_NODE),
    80: Xid("corrupted commands for the GPU", XidAction.CHECK_PROGRAM),
    92: Xid("many corrected memory errors", XidAction.NONE),
    94: Xid("contained memory error", XidAction.RESTART_JOB),
    95: Xid("uncontained memory error", XidAction.RESET_GPU),
    109: Xid("the GPU did not switch contexts in time", XidAction.RESET_GPU),
    110: Xid("security fault", XidAction.RESET_GPU),
    119: Xid("the GPU's system processor does not answer", XidAction.RESET_GPU),
    120: Xid("error of the GPU's system processor", XidAction.RESET_GPU),
    136: Xid("NVLink training failed", XidAction.RESET_GPU),
    140: Xid("unrecovered memory error", XidAction.RESET_GPU),
    143: Xid("the GPU cannot be initialised", XidAction.RESET_GPU),
    **dict.fromkeys(range(144, 151), _NVLINK),
}


def find_xid(now: object) -> Xid | None:
    """The Xid of an observation's value, which begins with its code; None if it is not in the table."""
    code = str(now).split(" ", 1)[0]
    return XIDS.get(int(code)) if code.isdigit() else None


_COMPONENT_NAMES = {"nccl": "NCCL", "torch": "torch"}


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownProblem:
    """The versions from ``first`` on and before ``fixed``. ``machine`` is that of `os.uname`, empty for
    all; ``problem`` completes "NCCL 2.21.5 is known to ...".
    """

    component: str
    first: tuple[int, ...]
    fixed: tuple[int, ...]
    problem: str
    workaround: str = ""
    machine: str = ""
    source: str

    def describe(self, version: str) -> str:
        """One or two sentences with the remedy and the source."""
        fixed = ".".join(map(str, self.fixed))
        workaround = f" Without an upgrade: {self.workaround}." if self.workaround else ""
        return (
            f"{_COMPONENT_NAMES[self.component]} {version} is known to {self.problem}; {fixed} has the fix"
            f" ({self.source}).{workaround}"
        )


KNOWN_PROBLEMS = (
    KnownProblem(
        component="torch",
        first=(2, 7, 0),
        fixed=(2, 7, 1),
        problem="hang at times in communicators made with init_process_group(device_id=...)",
        workaround="TORCH_NCCL_USE_COMM_NONBLOCKING=0",
        source="https://github.com/pytorch/pytorch/issues/153960",
    ),
    KnownProblem(
        component="nccl",
        first=(2, 20, 5),
        fixed=(2, 22, 3),
        problem="deadlock where captured CUDA graphs and other collectives are mixed",
        workaround="NCCL_GRAPH_MIXING_SUPPORT=0, if none are mixed",
        source="https://github.com/NVIDIA/nccl/issues/1251",
    ),
    KnownProblem(
        component="nccl",
        first=(2, 21, 5),
        fixed=(2, 26, 2),
        problem="hang in ncclCommAbort, which torch's watchdog calls",
        source="https://github.com/pytorch/pytorch/pull/149351",
    ),
    KnownProblem(
        component="nccl",
        first=(2, 28, 9),
        fixed=(2, 29, 3),
        problem="lose slots of its proxy's queue, until a rank waits for one for ever",
        machine="aarch64",
        source="https://github.com/NVIDIA/nccl/releases/tag/v2.29.3-1",
    ),
    KnownProblem(
        component="nccl",
        first=(2, 29, 7),
        fixed=(2, 30, 7),
        problem="hang on several nodes with InfiniBand",
        workaround="NCCL_PXN_DISABLE=1",
        source="https://docs.nvidia.com/cuda/cuest/troubleshooting/index.html",
    ),
)


def find_known_problems(component: str, version: str, machine: str = "") -> Iterator[KnownProblem]:
    """The problems of an installed version such as "2.7.0+cu126"; none if the text begins with no number."""
    match = re.match(r"\d+(?:\.\d+)*", version)
    if match is None:
        return
    numbers = tuple(map(int, match[0].split(".")))
    for known in KNOWN_PROBLEMS:
        is_present = known.component == component and known.machine in ("", machine)
        if is_present and known.first <= numbers < known.fixed:
            yield known
