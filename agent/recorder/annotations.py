"""The declarations of the script: phases, steps, and communication outside torch.distributed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from time import monotonic_ns
from typing import TYPE_CHECKING, Any, Protocol

import torch.distributed as dist

from hangwatch.model.calls import LossReason, StreamKind
from hangwatch.model.groups import DECLARED_BACKEND, Group, RankTuple, pack_ranks
from hangwatch.model.ranks import Lifecycle
from hangwatch.ring.layout import LiveWord

from . import faults
from .dynamo import run_uncompiled
from .group_setup import SetupRecorder
from .streams import StreamRecorder

if TYPE_CHECKING:
    from .poller import Poller
    from .recorder import Recorder
    from .writer import RingWriter

# The server refuses larger values.
MAX_PHASE_LIMIT_S = 1e8
MAX_STEP = 1 << 60

# The communicator's name, and its members (None: all ranks) or the identity of a foreign group.
DeclaredKey = tuple[str, tuple[int, ...] | str | None]


class AnnotatedRank(Protocol):
    """The parts of a rank that annotations use."""

    rank: int
    world_size: int
    lifecycle: Lifecycle
    ring: RingWriter
    recorder: Recorder
    poller: Poller

    def set_lifecycle(self, state: Lifecycle) -> None: ...


class UserAnnotations:
    """Implements the functions of `hangwatch`. No error of ours reaches the script."""

    def __init__(self, rank: AnnotatedRank) -> None:
        self._rank = rank
        # Entered phases, innermost last: (interned name, time of entry in ns, limit in ns or 0).
        self._phases: list[tuple[int, int, int]] = []
        self._declared_streams: dict[DeclaredKey, StreamRecorder | None] = {}

    def enter_phase(self, name: str, limit: float | None) -> None:
        faults.run_guarded("recording a phase", self._enter_phase, name, limit)

    def _enter_phase(self, name: str, limit: float | None) -> None:
        number = self._rank.ring.intern_site({"phase": name[:120]})
        limit_s = min(limit or 0, MAX_PHASE_LIMIT_S)
        self._phases.append((number, monotonic_ns(), int(limit_s * 1e9)))
        self._write_phase()

    def leave_phase(self) -> None:
        if self._phases:
            self._phases.pop()
            run_uncompiled(self._write_phase)

    def step(self, number: int) -> None:
        try:
            self._rank.poller.declared_step = min(int(number), MAX_STEP)
        except Exception as error:  # our error: the training continues
            faults.record_fault("recording a step", error)

    def enter_collective(self, name: str, group: Any, ranks: Iterable[int] | None) -> Any:
        return run_uncompiled(self._enter_collective, name, group, ranks)

    def _enter_collective(self, name: str, group: Any, ranks: Iterable[int] | None) -> Any:
        stream = None
        try:
            stream = self._find_stream(group, ranks)
            if stream is None:
                return None
            return self._rank.recorder.enter_declared_call(stream, name[:80])
        except Exception as error:  # our error: the communication continues
            (stream or self._rank.recorder.groups).mark_incomplete(LossReason.FAULT)
            faults.record_fault(f"recording {name}", error)
            return None

    def leave_collective(self, token: Any, returned: bool) -> None:
        where = "recording the completion of a declared call"
        faults.run_guarded(where, SetupRecorder.leave_call, token, returned)

    def _find_stream(self, group: Any, ranks: Iterable[int] | None) -> StreamRecorder | None:
        """The stream that a declared call belongs to; None if it is not recorded."""
        has_world = dist.is_initialized()
        if not has_world and self._rank.lifecycle in (Lifecycle.STARTING, Lifecycle.DESTROYED):
            # The rank communicates, though not by torch.distributed.
            self._rank.set_lifecycle(Lifecycle.INITIALISED)
        is_declared = isinstance(group, str)
        if group is None:
            is_declared = ranks is not None or not has_world
        if is_declared:
            members = None if ranks is None else tuple(ranks)
            return self._get_declared_stream(group or DECLARED_BACKEND, members)
        groups = self._rank.recorder.groups
        track = groups.find_group(dist.group.WORLD if group is None else group)
        # A wait of the host in a call on a device is not observable. In the stream of such calls a
        # declared call would not be seen to wait either, so it gets a stream of its own.
        if not track.has_device_backend:
            return track.collective_stream
        name = f"{track.group.desc} {track.group.name}"
        if not track.group.foreign:
            return self._get_declared_stream(name, track.group.ranks)
        declared = replace(track.group, desc=name, backend=DECLARED_BACKEND)
        key = name, track.group.foreign
        streams = self._declared_streams
        return groups.open_stream_once(streams, key, StreamKind.COLLECTIVE, declared)

    def _get_declared_stream(
        self, name: str, ranks: tuple[int, ...] | None
    ) -> StreamRecorder | None:
        """The stream of a declared communicator; ``ranks`` None means all ranks."""
        streams = self._declared_streams
        if (name, ranks) in streams:
            return streams[name, ranks]
        if ranks is None:
            members = RankTuple(range(self._rank.world_size))
        else:
            members = RankTuple(sorted({int(rank) for rank in ranks}))
        if self._rank.rank in members:
            group = Group(
                name=name, desc=name, ranks=members, backend=DECLARED_BACKEND, generation=0
            )
            streams[name, ranks] = self._rank.recorder.groups.open_stream_once(
                streams, (name, members), StreamKind.COLLECTIVE, group
            )
        else:
            streams[name, ranks] = None
            faults.record_message(
                f"rank {self._rank.rank} makes calls of {name!r}, whose ranks are"
                f" {pack_ranks(members) or 'none'}: these are not watched"
            )
        return streams[name, ranks]

    def _write_phase(self) -> None:
        number, entered_ns, limit_ns = self._phases[-1] if self._phases else (0, 0, 0)
        ring = self._rank.ring
        ring.set_word(LiveWord.PHASE_NS, entered_ns)
        ring.set_word(LiveWord.PHASE_LIMIT_NS, limit_ns)
        ring.set_word(LiveWord.PHASE, number)
