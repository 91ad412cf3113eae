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
from hangwatch.model.operator_spec import MustMatch
from hangwatch.model.signatures import encode_signature, with_agreement_hash
from hangwatch.ring.layout import RecordFlag

from . import faults
from .recorder import Recorder
from .streams import CompletionMode, EnteredCall, StreamRecorder

Wrapper = Callable[..., Any]
BeforeCall = Callable[[tuple[Any, ...], dict[str, Any]], Any]


def wrap_function(
    name: str, before_call: BeforeCall, after_call: Callable[[Any, bool], None]
) -> None:
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
    def recorded_function(*args: Any, **kwargs: Any) -> Any:
        token = None
        try:
            token = before_call(args, kwargs)
        except Exception as error:  # ours: the call goes on
            faults.record_fault(f"recording {name}", error)
        returned = False
        try:
            result = original(*args, **kwargs)
            returned = True
            return result
        finally:
            try:
                after_call(token, returned)
            except Exception as error:  # ours: the call's own outcome stands
                faults.record_fault(f"recording the end of {name}", error)

    recorded_function.__hangwatch__ = True  # type: ignore[attr-defined]
    for module_name, module in list(sys.modules.items()):
        if module_name.startswith("torch.distributed") and getattr(module, name, None) is original:
            setattr(module, name, recorded_function)


class SetupRecorder:
    """The set-up calls of this process, a sequence of them for each world that it is in, one after
    the other.

    Not all ranks need be in all worlds: some may meet in a smaller one meanwhile. So worlds are
    counted by their size.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._stream: StreamRecorder | None = None
        self._completed_worlds: Counter[int] = Counter()  # worlds by their size

    def begin_world(self, world_size: int) -> None:
        """The calls from here on set up a further world."""
        groups = self._recorder.groups
        if self._stream is not None:
            groups.retire_stream(self._stream)
        groups.world_size, groups.generation = world_size, self._completed_worlds[world_size] + 1
        told = {
            "kind": StreamKind.SETUP.value,
            "name": "setup",
            "desc": "process group set-up",
            "ranks": pack_ranks(range(world_size)),
            "backend": "",
            "generation": groups.generation,
            "world": world_size,
        }
        self._stream = groups.open_stream(told)

    def complete_world(self, world_size: int) -> None:
        """All ranks are there. An attempt that failed does not count: others, who came later, may
        have made fewer.
        """
        if self._stream is None:  # who this is, is known only now
            self.begin_world(world_size)
        self._completed_worlds[world_size] += 1
        groups = self._recorder.groups
        groups.world_size, groups.generation = world_size, self._completed_worlds[world_size]

    def enter_call(
        self,
        op: str,
        *,
        detail: str | None = None,
        ranks: tuple[int, ...] | None = None,
        is_blocking: bool = True,
    ) -> EnteredCall | None:
        """Records a set-up call; ``ranks`` are the members that it concerns, None all of them."""
        if self._stream is None:
            return None
        members = None if ranks is None else f"ranks={pack_ranks(ranks)}"
        signature = with_agreement_hash(
            Signature(op=op, detail=detail or members), MustMatch.NOTHING, ()
        )
        number = self._recorder.ring.intern_signature(encode_signature(signature))
        site = self._recorder.sites.find_site(sys._getframe(1))
        described = self._stream.pack_record_body(
            number, site, RecordFlag.BLOCKING if is_blocking else RecordFlag.ASYNC
        )
        return self._stream.enter_call(signature.agree, described, 0, CompletionMode.RETURN)

    @staticmethod
    def leave_call(call: EnteredCall | None, returned: bool) -> None:
        if call is not None:
            if returned:
                call[0].finish_call(call)
            else:
                call[0].fail_call(call)
