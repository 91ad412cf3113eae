"""Watches the Work of a call for its completion without keeping it alive: a Work holds the tensors of
its call.

The functions of torch.distributed call an operator, and then wait for the Work themselves, or return
it to the user. They hold it by a Python object, to which we have a weak reference. That object does
not exist yet when the operator returns to its kernel: torch makes it for the result, unless the Work
has one already. So the kernel makes it, and leaves it in the frame of torch's function until that
returns.

What C++ starts, such as the buckets of DistributedDataParallel, has no such object. Its Work is held
until the next call or poll finds it complete.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable
from types import FrameType, FunctionType
from typing import Any

from . import faults
from .dynamo import run_uncompiled

# A name that no local variable has.
FRAME_KEY = "<Work watched by hangwatch>"

# A call's Work as `watch_work` returns it: None, if nothing shows its completion; the boxed Work; a
# weak reference to it, if the call is complete once it is gone; or a `DroppableWork`.
WatchedWork = Any


class DroppableWork:
    """The Work of an asynchronous call, until the job drops its Python object of it."""

    __slots__ = ("_backend_keeps_it", "_boxed", "_is_complete", "_unbox")

    def __init__(self, boxed: Any, unbox: Callable[[Any], Any], *, backend_keeps_it: bool) -> None:
        """``backend_keeps_it``: the backend itself holds the Work until it is complete."""
        self._boxed = boxed
        self._unbox = unbox
        self._backend_keeps_it = backend_keeps_it
        self._is_complete = False

    def is_complete(self) -> bool | None:
        """None if that will never be known: the job has dropped the Work without waiting."""
        if self._boxed is not None:
            return bool(self._unbox(self._boxed).is_completed())
        return self._is_complete or None

    def drop_work(self, _: object) -> None:
        """Lets go of the Work, whose Python object is being deleted, unless it goes on without it."""
        try:
            self._is_complete = bool(self.is_complete())
            if self._is_complete or not self._backend_keeps_it:
                self._boxed = None
        except Exception as error:  # ours: the job's object is deleted all the same
            faults.record_fault("dropping a Work", error)


def watch_work(
    boxed: Any,
    unbox: Callable[[Any], Any],
    frame_locals: dict[str, Any] | None,
    *,
    is_blocking: bool,
    backend_keeps_it: bool,
) -> tuple[WatchedWork, ...]:
    """The Work to watch, and what must be kept for it.

    ``frame_locals`` are the local variables of the function of torch.distributed that holds the Work
    until it returns; None if C++ may hold it.
    """
    if frame_locals is None or boxed is None:
        return (boxed,)
    if is_blocking:
        frame_locals[FRAME_KEY] = boxed
        return (weakref.ref(boxed),)
    work = frame_locals[FRAME_KEY] = unbox(boxed)
    droppable = DroppableWork(boxed, unbox, backend_keeps_it=backend_keeps_it)
    return droppable, weakref.ref(work, droppable.drop_work)


def is_complete(work: WatchedWork, unbox: Callable[[Any], Any]) -> bool | None:
    """Whether the call of a Work is complete; None if nothing shows it."""
    if work is None:
        return None
    if type(work) is DroppableWork:
        return work.is_complete()
    if type(work) is weakref.ref:
        work = work()
        if work is None:  # torch's function has waited for it
            return True
    return bool(unbox(work).is_completed())


@functools.cache
def find_holding_file() -> str:
    """The file of torch's functions that hold the Work of a call until they return."""
    from torch.distributed import distributed_c10d as c10d

    function: FunctionType = run_uncompiled(inspect.unwrap, c10d.isend)
    return function.__code__.co_filename


def get_holding_locals(caller: FrameType) -> dict[str, Any] | None:
    """The local variables of a call's caller if it holds the Work until it returns."""
    return caller.f_locals if caller.f_code.co_filename == find_holding_file() else None
