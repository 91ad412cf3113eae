"""Records what creates and destroys process groups, by wrapping the few functions of
torch.distributed that do.

These are calls as well: all ranks of a world make them in the same order, and a rank that is
missing from one holds up the others.
"""

from __future__ import annotations

import functools
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

from hangwatch.model.calls import Signature, StreamKind
from hangwatch.model.groups import pack_ranks
from hangwatch.model.operators import MustMatch
from hangwatch.model.signatures import encode_signature, with_agreement_hash
from hangwatch.ring.layout import RecordFlag

from . import faults
from .kernels import Recorder
from .streams import End, Entered, Sequence

Wrapper = Callable[..., Any]
Before = Callable[[tuple[Any, ...], dict[str, Any]], Any]


def wrap(name: str, before: Before, after: Callable[[Any, bool], None]) -> None:
    """Puts ``before(args, kwargs)`` and ``after(its result, whether it returned)`` around a
    function of torch.distributed.

    It is replaced in every module of torch that already holds it by name, so that no door stays
    unwatched.
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
    """The set-up calls of this process, a sequence of them for each world that it is in, one after
    the other.

    Not all ranks need be in all worlds: some may meet in a smaller one meanwhile. So worlds are
    counted by their size.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._sequence: Sequence | None = None
        self._met: Counter[int] = Counter()  # worlds by their size

    def begin(self, world_size: int) -> None:
        """The calls from here on set up a further world."""
        groups = self._recorder.groups
        if self._sequence is not None:
            groups.retire(self._sequence)
        groups.world, groups.generation = world_size, self._met[world_size] + 1
        told = {
            "kind": StreamKind.SETUP.value,
            "name": "setup",
            "desc": "process group set-up",
            "ranks": pack_ranks(range(world_size)),
            "backend": "",
            "generation": groups.generation,
            "world": world_size,
        }
        self._sequence = groups.sequence(told)

    def met(self, world_size: int) -> None:
        """All ranks are there. An attempt that failed does not count: others, who came later, may
        have made fewer.
        """
        if self._sequence is None:  # who this is, is known only now
            self.begin(world_size)
        self._met[world_size] += 1
        groups = self._recorder.groups
        groups.world, groups.generation = world_size, self._met[world_size]

    def enter(
        self,
        op: str,
        *,
        detail: str | None = None,
        ranks: tuple[int, ...] | None = None,
        waits: bool = True,
    ) -> Entered | None:
        """Records a set-up call; ``ranks`` are the members that it concerns, None all of them."""
        if self._sequence is None:
            return None
        members = None if ranks is None else f"ranks={pack_ranks(ranks)}"
        signature = with_agreement_hash(
            Signature(op=op, detail=detail or members), MustMatch.NOTHING, ()
        )
        number = self._recorder.ring.signature(encode_signature(signature))
        site = self._recorder.sites.find(sys._getframe(1))
        described = self._sequence.describe(
            number, site, RecordFlag.BLOCKING if waits else RecordFlag.ASYNC
        )
        return self._sequence.enter(signature.agree, described, 0, End.RETURN)

    @staticmethod
    def leave(call: Entered | None, returned: bool) -> None:
        if call is not None:
            if returned:
                call[0].finish(call)
            else:
                call[0].fail(call)
