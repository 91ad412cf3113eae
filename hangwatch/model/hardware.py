"""What a host knows without the training processes: its links, devices, memory, storage and kernel
log, NCCL's own report, and versions of software that are known to hang.

`KNOWN_PROBLEMS` has only what the software's own maintainers confirmed, with the version that fixes
it, as of 2026-11-26.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterator
from dataclasses import dataclass

from .bounds import Finite

JOB_SOURCE = "nccl ras"  # a source that reports on the whole job, whichever host reads it

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
