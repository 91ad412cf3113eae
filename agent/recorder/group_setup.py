"""The creation of process groups as calls, recorded by wrappers of torch.distributed's functions.

All ranks of a world make these calls in the same order, and wait for a rank that does not.
"""

from __future__ import annotations

import functools
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

from torch.distributed import distributed_c10d as c10d

from hangwatch.model.calls import LossReason, StreamKind
from hangwatch.model.groups import Group, RankTuple, pack_ranks

from . import faults
from .dynamo import run_uncompiled
from .faults import Arguments, KeywordArguments
from .group_origins import origin_tracker
from .recorder import Recorder
from .streams import EnteredCall, StreamRecorder

_MAX_COUNTED = 1 << 12  # names of groups that their members alone create


def wrap_function(
    name: str,
    before_call: Callable[[Arguments, KeywordArguments], Any] | None,
    after_call: Callable[[Any, bool], None],
    record_loss: Callable[[], None],
) -> None:
    """Runs ``before_call(args, kwargs)`` before a function of torch.distributed, and
    ``after_call(its result, whether the function returned)`` after it. If one of them fails,
    ``record_loss()`` is called as well: the call may not be recorded.

    The function is replaced in every module of torch that has imported it by name.
    """
    original = getattr(c10d, name, None)
    if original is None or hasattr(original, "__hangwatch__"):
        return

    @functools.wraps(original)
    def recorded_function(*args: Any, **kwargs: Any) -> Any:
        token = None
        try:
            if before_call is not None:
                token = run_uncompiled(before_call, args, kwargs)
        except Exception as error:  # our error: the call continues
            faults.record_fault(f"recording {name}", error)
            record_loss()
        returned = False
        origin_tracker.ranked_creation.depth += 1
        try:
            result = original(*args, **kwargs)
            returned = True
            return result
        finally:
            origin_tracker.ranked_creation.depth -= 1
            try:
                run_uncompiled(after_call, token, returned)
            except Exception as error:  # our error: the call returns or raises as without us
                faults.record_fault(f"recording the completion of {name}", error)
                record_loss()

    # Dynamo calls the function, instead of tracing into it, as it does with the original.
    recorded_function._torchdynamo_disable = True  # type: ignore[attr-defined]
    recorded_function.__hangwatch__ = True  # type: ignore[attr-defined]
    for module_name, module in list(sys.modules.items()):
        if module_name.startswith("torch.distributed") and getattr(module, name, None) is original:
            setattr(module, name, recorded_function)


class SetupRecorder:
    """Records the set-up calls of this process, in one stream for each world that it joins.

    Some ranks may also form a smaller world in between, so worlds are counted by their size.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._stream: StreamRecorder | None = None
        self._completed_worlds: Counter[int] = Counter()  # worlds by their size
        self._local_creations: Counter[str] = Counter()  # by the name of the group

    def begin_world(self, world_size: int) -> None:
        """Opens the stream of a new world's set-up calls."""
        groups = self._recorder.groups
        if self._stream is not None:
            groups.retire_stream(self._stream)
        groups.world_size = world_size
        groups.generation = self._completed_worlds[world_size] + 1
        setup = Group(
            name="setup",
            desc="process group set-up",
            ranks=RankTuple(range(world_size)),
            generation=groups.generation,
            world_size=world_size,
        )
        self._stream = groups.open_stream(StreamKind.SETUP, setup)

    def complete_world(self, world_size: int) -> None:
        """Counts a world that all ranks have joined. Not all ranks make the attempts that fail."""
        if self._stream is None:  # the rank of this process is known only now
            self.begin_world(world_size)
        self._completed_worlds[world_size] += 1
        groups = self._recorder.groups
        groups.world_size = world_size
        groups.generation = self._completed_worlds[world_size]

    def enter_call(self, op: str, ranks: tuple[int, ...] | None = None) -> EnteredCall | None:
        """Records a set-up call; ``ranks`` are the members that it concerns, None if all."""
        if self._stream is None:
            return None
        members = None if ranks is None else f"ranks={pack_ranks(ranks)}"
        return self._recorder.enter_declared_call(self._stream, op, members)

    def enter_local_call(self, op: str, ranks: tuple[int, ...], name: str) -> EnteredCall | None:
        """Records the creation of a group by its members alone (use_local_synchronization). The order of
        such calls proves nothing about other ranks, so each has a stream of its own. ``name`` is
        torch's for the group: members that give it different ones do not find each other.
        """
        groups, counts = self._recorder.groups, self._local_creations
        if len(counts) >= _MAX_COUNTED:
            counts.clear()
        counts[name] += 1  # torch may use a name again after the group was destroyed
        members = Group(
            name=f"set-up {name[:12]} {counts[name]}",
            desc=f"set-up of ranks {pack_ranks(ranks)}",
            ranks=RankTuple(ranks),
            generation=groups.generation,
            world_size=groups.world_size,
        )
        return self.enter_creation(op, members)

    def enter_creation(self, op: str, members: Group) -> EnteredCall | None:
        """Records, in a stream of its own, that this process begins to create a group."""
        stream = self._recorder.groups.open_stream(StreamKind.SETUP, members)
        return None if stream is None else self._recorder.enter_declared_call(stream, op)

    def leave_creation(self, call: EnteredCall | None, returned: bool) -> None:
        """Records that the group was created or given up; its stream may then make room."""
        if call is not None:
            self.leave_call(call, returned)
            self._recorder.groups.retire_stream(call[0])

    def mark_incomplete(self) -> None:
        """Records that the creation of a group may not have been recorded."""
        if self._stream is not None:
            self._stream.mark_incomplete(LossReason.FAULT)

    @staticmethod
    def leave_call(call: EnteredCall | None, returned: bool) -> None:
        if call is not None:
            if returned:
                call[0].finish_call(call)
            else:
                call[0].fail_call(call)
