"""Process groups, their members as compact text, and the backends with what can be observed of each."""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from .ranks import Ranks

GroupKey = tuple[int, str, Ranks, int]

# The backend of a group that is only known from `hangwatch.collective`.
DECLARED_BACKEND = "declared"
# That of the calls of a group's members on symmetric memory, which its own backend does not make.
SYMMETRIC_BACKEND = "symm_mem"
_GROUP_ADDRESS = re.compile(r"group [^/]*:[0-9a-f]{16}")
_MAX_ADDRESS_NAME = 80  # characters
_MAX_RANKS, _MAX_CACHED_RANKS = 1 << 20, 1 << 17


class OutsideMember(int):
    """A member of a foreign group that is not known to be a rank of the attempt. The value is negative,
    and different for different processes.
    """

    label: str  # a description of the member for people

    @classmethod
    def create(cls, value: int, label: str) -> OutsideMember:
        member = cls(value)
        member.label = label
        return member


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """A process group. Its torch name is only unique together with its members and its world.

    Each init_process_group creates a world, in which torch reuses names. ``world_size`` is the size
    of the world, and ``generation`` counts the worlds of that size: between two of them, some ranks
    may have been in worlds of other sizes.
    """

    name: str
    desc: str
    ranks: Ranks
    backend: str = ""
    generation: int = 1
    world_size: int = 0  # 0 if not reported
    # The identity, on all members, of a group that numbers its members by itself. Its ``ranks`` are
    # those of the processes that are known to have its numbers, and `OutsideMember` for others.
    foreign: str = ""
    part: str = ""  # distinguishes the streams of a foreign group that are not compared
    numbers: tuple[int, ...] = ()  # the numbers of all members of a foreign group
    number: int = -1  # the number of the process that reports a foreign group

    @property
    def key(self) -> GroupKey:
        if self.foreign:
            # The key leaves the ranks out, because they become known one after the other.
            return (0, f"{self.foreign}{self.part}", self.numbers or self.ranks, 0)
        return (self.generation, self.name, self.ranks, self.world_size)

    @property
    def outside_labels(self) -> tuple[str, ...]:
        """The descriptions of the members that are not known to be ranks of the attempt."""
        return tuple(rank.label for rank in self.ranks if isinstance(rank, OutsideMember))

    @property
    def known_ranks(self) -> Ranks:
        """The members that are ranks of the attempt."""
        if not self.foreign:
            return self.ranks
        return tuple(rank for rank in self.ranks if rank >= 0)

    @property
    def title(self) -> str:
        """``group transfer``, as texts call it."""
        name = self.desc if self.desc not in ("", "undefined") else f"group {self.name}"
        return name if name.startswith("group ") else f"group {name}"

    @property
    def is_declared(self) -> bool:
        return self.backend == DECLARED_BACKEND


def format_group_address(group: Group) -> str:
    """The place where the members of a foreign group meet, as the rendezvous of processes that are ranks
    only as such members. It is the same for all members, and different for each group.

    >>> format_group_address(Group(name="engines", desc="", ranks=(0, 1), foreign="0123456789abcdef"))
    'group engines:0123456789abcdef'
    """
    name = group.name.removeprefix("tcp://").replace("/", ".")[:_MAX_ADDRESS_NAME]
    printable = "".join(c if c.isprintable() else "?" for c in name)
    return f"group {printable}:{group.foreign}"


def is_group_address(address: str) -> bool:
    """Whether `format_group_address` made it."""
    return _GROUP_ADDRESS.fullmatch(address) is not None


def pack_ranks(ranks: Sequence[int]) -> str:
    """Encodes members in order as runs ``first-last`` or ``first-last:step``: a few bytes even for
    16,384 ranks.

    >>> pack_ranks([0, 8, 16, 24, 3])
    '0-24:8,3'
    """
    parts = []
    steps = [after - before for before, after in itertools.pairwise(ranks)]
    i = 0
    while i < len(ranks):
        step = steps[i] if i < len(steps) else 0
        j = i
        while step > 0 and j < len(steps) and steps[j] == step:
            j += 1
        if step == 1 or (step > 1 and j - i >= 2):
            suffix = f":{step}" if step > 1 else ""
            parts.append(f"{ranks[i]}-{ranks[j]}{suffix}")
            i = j + 1
        else:
            parts.append(str(ranks[i]))
            i += 1
    return ",".join(parts)


class RankTuple(tuple[int, ...]):
    """A group's ranks with a cached hash, by which large groups are looked up as fast as small ones."""

    _hash: int | None = None

    def __hash__(self) -> int:
        if self._hash is None:
            self._hash = super().__hash__()
        return self._hash


def count_ranks(text: str) -> int:
    """The number of ranks in a text, without unpacking it. Raises ValueError for malformed text."""
    # ``len(span)`` overflows on malicious input.
    return sum(
        max(0, (span.stop - span.start + span.step - 1) // span.step) for span in _iter_spans(text)
    )


def unpack_ranks(text: str) -> Ranks:
    """The inverse of `pack_ranks`. Raises ValueError for malformed text or too many ranks."""
    count = count_ranks(text)
    if count > _MAX_RANKS:
        raise ValueError(f"more than {_MAX_RANKS} ranks")
    return _unpack_cached(text) if count <= _MAX_CACHED_RANKS else _unpack(text)


def _unpack(text: str) -> Ranks:
    return RankTuple(itertools.chain.from_iterable(_iter_spans(text)))


# Each member of a group reports all members: without the cache, 16,384 ranks would take 16,384 tuples
# of that length.
_unpack_cached = functools.lru_cache(maxsize=64)(_unpack)


def _iter_spans(text: str) -> Iterator[range]:
    for part in text.split(",") if text else []:
        span, _, step = part.partition(":")
        first, dash, last = span.partition("-")
        if not dash:
            yield range(int(first), int(first) + 1)
        elif (width := int(step or 1)) > 0:
            yield range(int(first), int(last) + 1, width)
        else:
            raise ValueError(f"the step of {part[:40]!r} is not positive")


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceCounters:
    """How far the device of a rank has come in the collectives of one process group.

    The backend counts its own collectives: a coalesced block counts once. So the counters may be
    compared between the members of a group, but not with the sequence numbers of a stream. Each is
    the number of the last collective, -1 if there is none.

    Source: ``pg_status`` of PyTorch's Flight Recorder (torch/csrc/distributed/c10d/FlightRecorder.hpp).
    """

    enqueued: int  # the host has queued it
    # The device has begun it. None: the backend does not record starts, as NCCL without
    # TORCH_NCCL_ENABLE_TIMING=1.
    started: int | None
    completed: int

    @property
    def counters(self) -> tuple[int, int | None, int]:
        return self.enqueued, self.started, self.completed

    @property
    def is_behind_host(self) -> bool:
        """Whether the host has queued collectives that the device has not completed."""
        return self.completed < self.enqueued


# The backends with each property. One that is in no list has none of the properties.

# The Flight Recorder adds an entry after the parts of a coalesced call.
COALESCED_END_BACKENDS = ("nccl", "ncclx", "rccl", "rcclx", "xccl", "hccl")
# Calls run on a device, whose Work objects cannot be queried without disturbing the device.
DEVICE_BACKENDS = (*COALESCED_END_BACKENDS, "mccl", SYMMETRIC_BACKEND)
# The Flight Recorder counts what the device has begun and completed; torch reports the counters by
# `_dump_nccl_trace_json`.
FLIGHT_RECORDER_BACKENDS = ("nccl",)
# The Work of a call on the CPU reports its completion, by `Work::finish`.
REPORTING_BACKENDS = ("gloo",)
# The threads that carry out a backend's calls: `c10::setThreadName` in ProcessGroupGloo.cpp.
WORKER_THREAD_NAMES = ("pt_gloo_runloop",)
