"""The kernel that records calls and checks their data. It replaces the Python kernel if the
environment enables checks.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

from .. import faults
from ..call_reader import CallReader
from ..callers import find_logged_callers, skip_logger_frames
from ..python_kernel import get_recorder, record_failure, record_loss, record_lost_completion
from ..recorder import unbox_work
from ..streams import EnteredCall, leave_call
from .arguments import TensorArguments
from .inspection import PendingCheck
from .tensors import DispatchBypass


def make_checking_kernel(
    reader: CallReader, overload: Any, lower_keyset: Any
) -> Callable[..., Any]:
    """Makes the function that torch calls. Only the user's own exceptions leave it."""
    redispatch = overload._handle.redispatch_boxed
    operator = TensorArguments(reader, overload._schema)
    logged = find_logged_callers()

    def c10d_kernel(keyset: Any, *args: Any) -> Any:
        try:
            caller = sys._getframe(1)
        except ValueError:  # a thread of C++: there is no Python frame
            caller = sys._getframe()
        entered = _enter_call(
            reader,
            args,
            caller,
            skip_logger_frames(caller) if id(caller.f_code) in logged else caller,
        )
        if entered is None:
            return redispatch(keyset & lower_keyset, *args)
        pending = (
            _check_inputs(reader, operator, entered, args, caller) if operator.is_examined else None
        )
        try:
            result = redispatch(keyset & lower_keyset, *args)
        except BaseException:
            record_failure(reader.spec.op, entered)
            raise
        _finish_call(reader.spec.op, entered, pending, result, caller)
        return result

    return c10d_kernel


def _enter_call(
    reader: CallReader, args: tuple[Any, ...], caller: FrameType, site_frame: FrameType
) -> EnteredCall | None:
    try:
        recorder = get_recorder()
        return (
            reader.enter_call(recorder, args, caller, site_frame) if recorder is not None else None
        )
    except Exception as error:  # ours: the call goes on
        record_loss(reader, args, error)
        return None


def _check_inputs(
    reader: CallReader,
    arguments: TensorArguments,
    entered: EnteredCall,
    args: tuple[Any, ...],
    caller: FrameType,
) -> PendingCheck | None:
    try:
        recorder = get_recorder()
        if (
            recorder is None
            or recorder.checker is None
            or (track := reader.find_track(recorder, args)) is None
        ):
            return None
        with DispatchBypass():
            return recorder.checker.check_inputs(entered, arguments, args, track, caller)
    except Exception as error:  # ours: the call goes on
        faults.record_fault(f"examining {reader.spec.op}", error)
        return None


def _finish_call(
    op: str, entered: EnteredCall, pending: PendingCheck | None, result: Any, caller: FrameType
) -> None:
    try:
        boxed = result[-1] if type(result) is tuple else result
        if entered[5]:
            leave_call(entered)
        else:  # CompletionMode.WORK
            entered[0].pending_works.append((entered, boxed))
    except Exception as error:  # ours: the call's result is returned all the same
        record_lost_completion(op, entered, error)
    if pending is None:
        return
    try:
        recorder = get_recorder()
        if recorder is not None and recorder.checker is not None:
            recorder.checker.check_result(pending, unbox_work(boxed), caller)
    except Exception as error:  # ours: the call's result is returned all the same
        faults.record_fault(f"examining the result of {op}", error)
