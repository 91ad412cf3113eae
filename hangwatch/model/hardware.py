"""What a host knows without the training processes: its links, devices, memory, storage and kernel
log, and NCCL's own report.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

JOB_SOURCE = "nccl ras"  # it reports on the whole job, wherever it is asked

ObservedValue = int | float | str | None


class Weight(str, enum.Enum):
    """How much an observation explains."""

    FAULT = "fault"  # it can stop a job by itself: a link that went down, a GPU that left the bus
    HINT = "hint"  # it may contribute: retransmitted packets, a throttled clock
    FACT = "fact"  # a version, to be compared with known problems


@dataclass(frozen=True, kw_only=True)
class Observation:
    """One value that a source reports. No slots: see `hangwatch.protocol.heartbeat`.

    A counter is an observation only of what it counted: ``before`` is its value before the incident.
    A state is one if it is abnormal by itself, and then ``before`` may be None.
    """

    source: str  # such as "infiniband"
    about: str  # the part of the host: "mlx5_0/1", "GPU 3", "process 4711"
    what: str  # "link_downed", "xid"
    now: ObservedValue
    before: ObservedValue = None
    weight: Weight = Weight.HINT
    is_counter: bool = False  # it only grows, and its value means nothing by itself
    is_abnormal: bool = False  # this value needs no earlier one to mean something
    age_s: float = 0.0  # since it was read; of an event, since it happened


@dataclass(frozen=True, slots=True, kw_only=True)
class HostObservation:
    """An observation as evidence of an incident."""

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
