"""Records what creates and destroys process groups, by wrapping the few functions of torch.distributed that do.

These are calls as well: all ranks make them in the same order, and a rank that is missing from one holds up the others.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

from hangwatch.operators import Agree
from hangwatch.ring import Flag
from hangwatch.signature import encode_signature, with_agreement
from hangwatch.types import SequenceKind, Signature, pack_ranks

from . import faults
from .kernels import Recorder
from .sequence import End, Entered

Wrapper = Callable[..., Any]
Before = Callable[[tuple[Any, ...], dict[str, Any]], Any]


def wrap(name: str, before: Before, after: Callable[[Any, bool], None]) -> None:
    """Puts ``before(args, kwargs)`` and ``after(its result, whether it returned)`` around a function of torch.distributed.

    It is replaced in every module of torch that already holds it by name, so that no door stays unwatched.
    """
    from torch.distributed import distributed_c10d as c10d

    original = getattr(c10d, name, None)
    if original is None or hasattr(original, "__hangwatch__"):
        return

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        token = None
        try:
            token = before(args, kwargs)
        except Exception as error:  # ours: the call goes on
            faults.fault(f"recording {name}", error)
        returned = False
        try:
            result = original(*args, **kwargs)
            returned = True
            return result
        finally:
            try:
                after(token, returned)
            except Exception as error:  # ours: the call's own outcome stands
                faults.fault(f"recording the end of {name}", error)

    wrapper.__hangwatch__ = True  # type: ignore[attr-defined]
    for module_name, module in list(sys.modules.items()):
        if module_name.startswith("torch.distributed") and getattr(module, name, None) is original:
            setattr(module, name, wrapper)


class SetUp:
    """The sequence of set-up calls of this process."""

    def __init__(self, recorder: Recorder, world_size: int) -> None:
        self._recorder = recorder
        told = {
            "kind": SequenceKind.SETUP.value,
            "name": "setup",
            "desc": "process group set-up",
            "ranks": pack_ranks(range(world_size)),
            "backend": "",
            "generation": 1,
        }
        self._sequence = recorder.groups.sequence(told)

    def enter(self, op: str, *, detail: str | None = None, ranks: tuple[int, ...] | None = None, waits: bool = True) -> Entered | None:
        """Records a set-up call; ``ranks`` are the members that it concerns, None all of them."""
        if self._sequence is None:
            return None
        members = None if ranks is None else f"ranks={pack_ranks(ranks)}"
        signature = with_agreement(Signature(op=op, detail=detail or members), Agree.NOTHING, ())
        number = self._recorder.ring.signature(encode_signature(signature))
        site = self._recorder.sites.find(sys._getframe(1))
        described = self._sequence.describe(number, site, Flag.BLOCKING if waits else Flag.ASYNC)
        return self._sequence.enter(signature.agree, described, 0, End.RETURN)

    @staticmethod
    def leave(call: Entered | None, returned: bool) -> None:
        if call is not None:
            if returned:
                call[0].finish(call)
            else:
                call[0].fail(call)
