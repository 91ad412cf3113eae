"""What the user's script tells hangwatch by itself: phases, steps, and communication outside torch.distributed."""

from __future__ import annotations

import sys
from time import monotonic_ns
from typing import TYPE_CHECKING, Any

from hangwatch.operators import Agree
from hangwatch.ring import Flag, Live
from hangwatch.signature import encode_signature, with_agreement
from hangwatch.types import Signature

from . import faults
from .sequence import End
from .setup import SetUp

if TYPE_CHECKING:
    from .rank import Rank


class Told:
    """Serves `hangwatch.phase`, `hangwatch.step` and `hangwatch.collective`; errors of ours end here."""

    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        self._phases: list[tuple[int, int, int]] = []

    def enter_phase(self, name: str, limit: float | None) -> Any:
        try:
            number = self._rank.ring.site({"phase": name[:120]})
            self._phases.append((number, monotonic_ns(), int(limit * 1e9) if limit else 0))
            self._show_phase()
        except Exception as error:  # ours: the phase itself goes on
            faults.fault("recording a phase", error)

    def leave_phase(self, token: Any) -> None:
        if self._phases:
            self._phases.pop()
            self._show_phase()

    def step(self, number: int) -> None:
        self._rank.poller.told_step = number

    def enter_collective(self, name: str, group: Any) -> Any:
        try:
            import torch.distributed as dist

            pg = dist.group.WORLD if group is None else group
            groups = self._rank.recorder.groups
            track = groups.tracks.get(id(pg))
            if track is None or track.ref() is not pg:
                track = groups.open(pg)
            if track.collective is None:
                return None
            signature = with_agreement(Signature(op=name[:80]), Agree.NOTHING, ())
            number = self._rank.ring.signature(encode_signature(signature))
            site = self._rank.recorder.sites.find(sys._getframe(1))
            return track.collective.enter(signature.agree, track.collective.describe(number, site, Flag.BLOCKING), 0, End.RETURN)
        except Exception as error:  # ours: the communication goes on
            faults.fault(f"recording {name}", error)
            return None

    def leave_collective(self, token: Any, returned: bool) -> None:
        SetUp.leave(token, returned)

    def _show_phase(self) -> None:
        number, since, limit = self._phases[-1] if self._phases else (0, 0, 0)
        ring = self._rank.ring
        ring.set(Live.PHASE_NS, since)
        ring.set(Live.PHASE_LIMIT_NS, limit)
        ring.set(Live.PHASE, number)
