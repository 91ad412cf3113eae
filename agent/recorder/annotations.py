"""What the user's script tells hangwatch by itself: phases, steps, and communication outside
torch.distributed.
"""

from __future__ import annotations

import sys
from _thread import allocate_lock
from collections.abc import Iterable
from time import monotonic_ns
from typing import TYPE_CHECKING, Any, Protocol

from hangwatch.model.calls import Signature, StreamKind
from hangwatch.model.groups import DECLARED_BACKEND, pack_ranks
from hangwatch.model.operator_spec import MustMatch
from hangwatch.model.ranks import Lifecycle
from hangwatch.model.signatures import encode_signature, with_agreement_hash
from hangwatch.ring.layout import LiveWord, RecordFlag

from . import faults
from .group_setup import SetupRecorder
from .streams import CompletionMode, StreamRecorder

if TYPE_CHECKING:
    from .poller import Poller
    from .recorder import Recorder
    from .writer import RingWriter


class AnnotatedRank(Protocol):
    """What annotations need of the rank that they describe."""

    rank: int
    world_size: int
    lifecycle: Lifecycle
    ring: RingWriter
    recorder: Recorder
    poller: Poller

    def set_lifecycle(self, state: Lifecycle) -> None: ...


class UserAnnotations:
    """Serves `hangwatch.phase`, `hangwatch.step` and `hangwatch.collective`; errors of ours end
    here.
    """

    def __init__(self, rank: AnnotatedRank) -> None:
        self._rank = rank
        self._phases: list[tuple[int, int, int]] = []
        self._declared_streams: dict[
            tuple[str, tuple[int, ...] | None], StreamRecorder | None
        ] = {}  # of calls, by communicator and members
        self._open_lock = allocate_lock()
        self._interned_signatures: dict[str, tuple[int, int]] = {}

    def enter_phase(self, name: str, limit: float | None) -> Any:
        try:
            number = self._rank.ring.intern_site({"phase": name[:120]})
            self._phases.append((number, monotonic_ns(), int(limit * 1e9) if limit else 0))
            self._write_phase()
        except Exception as error:  # ours: the phase itself goes on
            faults.record_fault("recording a phase", error)

    def leave_phase(self, token: Any) -> None:
        if self._phases:
            self._phases.pop()
            self._write_phase()

    def step(self, number: int) -> None:
        self._rank.poller.declared_step = number

    def enter_collective(self, name: str, group: Any, ranks: Iterable[int] | None) -> Any:
        try:
            sequence = self._find_stream(group, ranks)
            if sequence is None:
                return None
            number, agree = self._intern_signature(name[:80])
            site = self._rank.recorder.sites.find_site(sys._getframe(1))
            return sequence.enter_call(
                agree,
                sequence.pack_record_body(number, site, RecordFlag.BLOCKING),
                0,
                CompletionMode.RETURN,
            )
        except Exception as error:  # ours: the communication goes on
            faults.record_fault(f"recording {name}", error)
            return None

    def leave_collective(self, token: Any, returned: bool) -> None:
        try:
            SetupRecorder.leave_call(token, returned)
        except Exception as error:  # as above
            faults.record_fault("recording the end of a declared call", error)

    def _find_stream(self, group: Any, ranks: Iterable[int] | None) -> StreamRecorder | None:
        """The sequence that a declared call has its place in; None where it is not watched."""
        import torch.distributed as dist

        up = dist.is_initialized()
        if not up and self._rank.lifecycle in (Lifecycle.STARTING, Lifecycle.DESTROYED):
            self._rank.set_lifecycle(
                Lifecycle.INITIALISED
            )  # it communicates, though not by torch.distributed
        if isinstance(group, str) or (group is None and (ranks is not None or not up)):
            return self._get_declared_stream(
                group or DECLARED_BACKEND, None if ranks is None else tuple(ranks)
            )
        pg = dist.group.WORLD if group is None else group
        groups = self._rank.recorder.groups
        track = groups.tracks.get(id(pg))
        if track is None or track.group_ref() is not pg:
            track = groups.open_group(pg)
        # among its own calls, of which nobody can tell whether a host waits, this would not be seen
        # to wait
        if track.has_device_backend:
            return self._get_declared_stream(
                f"{track.description['desc']} {track.description['name']}", track.ranks
            )
        return track.collective_stream

    def _get_declared_stream(
        self, name: str, ranks: tuple[int, ...] | None
    ) -> StreamRecorder | None:
        if (name, ranks) in self._declared_streams:
            return self._declared_streams[name, ranks]
        mine = self._rank.rank
        members = tuple(
            sorted(
                {int(rank) for rank in (range(self._rank.world_size) if ranks is None else ranks)}
            )
        )
        if mine not in members:
            self._declared_streams[name, ranks] = None
            faults.record_message(
                f"rank {mine} makes calls of {name!r}, whose ranks are"
                f" {pack_ranks(members) or 'none'}: these are not watched"
            )
            return None
        with self._open_lock:  # held for microseconds, and by nobody who waits
            if (name, members) not in self._declared_streams:
                told = {
                    "kind": StreamKind.COLLECTIVE.value,
                    "name": name,
                    "desc": name,
                    "ranks": pack_ranks(members),
                }
                opened = self._rank.recorder.groups.open_stream(
                    {**told, "backend": DECLARED_BACKEND, "generation": 0}
                )
                self._declared_streams[name, members] = opened
            self._declared_streams[name, ranks] = self._declared_streams[name, members]
        return self._declared_streams[name, ranks]

    def _intern_signature(self, name: str) -> tuple[int, int]:
        """A call's number in the ring, and the hash of what must agree."""
        known = self._interned_signatures.get(name)
        if known is None or not self._rank.ring.is_signature_fresh(known[0]):
            signature = with_agreement_hash(Signature(op=name), MustMatch.NOTHING, ())
            known = self._interned_signatures[name] = (
                self._rank.ring.intern_signature(encode_signature(signature)),
                signature.agree,
            )
        return known

    def _write_phase(self) -> None:
        number, since, limit = self._phases[-1] if self._phases else (0, 0, 0)
        ring = self._rank.ring
        ring.set_word(LiveWord.PHASE_NS, since)
        ring.set_word(LiveWord.PHASE_LIMIT_NS, limit)
        ring.set_word(LiveWord.PHASE, number)
