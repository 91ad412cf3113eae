"""The kernel that records and examines: in place of the one that only records, where the
environment asks for checks.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

from .. import faults, kernels
from ..call_reader import CallReader, logged_callers
from ..streams import Entered, leave
from .arguments import Arguments
from .inspection import Pending
from .tensors import Unseen


def passing(reader: CallReader, overload: Any, after: Any) -> Callable[..., Any]:
    """The function that torch calls. Only the user's own exceptions leave it."""
    redispatch = overload._handle.redispatch_boxed
    operator = Arguments(reader, overload._schema)
    logged = logged_callers()

    def c10d_kernel(keyset: Any, *args: Any) -> Any:
        try:
            caller = sys._getframe(1)
        except ValueError:  # a thread of C++'s: there is no frame of Python's
            caller = sys._getframe()
        entered = _enter(
            reader, args, caller, kernels.behind(caller) if id(caller.f_code) in logged else caller
        )
        if entered is None:
            return redispatch(keyset & after, *args)
        pending = _examine(reader, operator, entered, args, caller) if operator.examined else None
        try:
            result = redispatch(keyset & after, *args)
        except BaseException:
            kernels.failed(reader.spec.op, entered)
            raise
        _finish(reader.spec.op, entered, pending, result, caller)
        return result

    return c10d_kernel


def _enter(
    reader: CallReader, args: tuple[Any, ...], caller: FrameType, behind: FrameType
) -> Entered | None:
    try:
        recorder = kernels.current()
        return reader.enter(recorder, args, caller, behind) if recorder is not None else None
    except Exception as error:  # ours: the call goes on
        faults.fault(f"recording {reader.spec.op}", error)
        return None


def _examine(
    reader: CallReader,
    operator: Arguments,
    entered: Entered,
    args: tuple[Any, ...],
    caller: FrameType,
) -> Pending | None:
    try:
        recorder = kernels.current()
        if (
            recorder is None
            or recorder.checks is None
            or (track := reader.track(recorder, args)) is None
        ):
            return None
        with Unseen():
            return recorder.checks.before(entered, operator, args, track, caller)
    except Exception as error:  # as above
        faults.fault(f"examining {reader.spec.op}", error)
        return None


def _finish(
    op: str, entered: Entered, pending: Pending | None, result: Any, caller: FrameType
) -> None:
    try:
        boxed = result[-1] if type(result) is tuple else result
        if entered[5]:
            leave(entered)
        else:  # End.WORK
            entered[0].works.append((entered, boxed))
    except Exception as error:  # ours: the result stands
        faults.fault(f"recording the end of {op}", error)
    if pending is None:
        return
    try:
        recorder = kernels.current()
        if recorder is not None and recorder.checks is not None:
            recorder.checks.after(pending, kernels.unbox_work(boxed), caller)
    except Exception as error:  # as above
        faults.fault(f"examining the result of {op}", error)
