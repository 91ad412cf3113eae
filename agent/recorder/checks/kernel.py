"""The kernel that records calls and checks their data. It replaces the Python kernel if the
environment enables checks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import CodeType, FrameType
from typing import Any

from torch._C._distributed_c10d import Work

from ..callers import find_caller, find_logged_callers, skip_logger_frames
from ..calls import CallReader
from ..dynamo import run_uncompiled
from ..faults import run_guarded
from ..python_kernel import (
    can_communicate,
    get_recorder,
    record_failure,
    record_loss,
    record_lost_completion,
)
from ..streams import EnteredCall, get_holding_locals, leave_call
from .inspection import PendingCheck
from .tensors import DispatchBypass, TensorArguments


def make_checking_kernel(
    reader: CallReader, overload: Any, lower_keyset: Any
) -> Callable[..., Any]:
    """Makes the function that torch calls. Only the user's own exceptions leave it."""
    redispatch = overload._handle.redispatch_boxed
    operator = TensorArguments(reader, overload._schema)
    logged = find_logged_callers()
    input_fault = f"examining {reader.spec.op}"
    result_fault = f"examining the result of {reader.spec.op}"

    def c10d_kernel(keyset: Any, *args: Any) -> Any:
        if not can_communicate(keyset):
            return redispatch(keyset & lower_keyset, *args)
        entered = run_uncompiled(_enter_call, reader, args, find_caller(), logged)
        if entered is None:
            return redispatch(keyset & lower_keyset, *args)
        pending = None
        if operator.is_examined:
            pending = run_guarded(
                input_fault, _check_inputs, reader, operator, entered, args, find_caller()
            )
        try:
            result = redispatch(keyset & lower_keyset, *args)
        except BaseException as error:
            record_failure(reader, args, entered, error)
            args, pending = (), None  # the exception keeps this frame, and must not keep tensors
            raise
        run_uncompiled(_leave_call, reader, entered, result, find_caller())
        if pending is not None:
            run_guarded(result_fault, _check_result, pending, result, find_caller())
        return result

    return c10d_kernel


def _enter_call(
    reader: CallReader, args: tuple[Any, ...], caller: FrameType, logged: Mapping[int, CodeType]
) -> EnteredCall | None:
    try:
        recorder = get_recorder()
        if recorder is None:
            return None
        site_frame = skip_logger_frames(caller) if id(caller.f_code) in logged else caller
        return reader.enter_call(recorder, args, caller, site_frame)
    except Exception as error:  # our error: the call continues
        record_loss(reader, args, error)
        return None


def _check_inputs(
    reader: CallReader,
    arguments: TensorArguments,
    entered: EnteredCall,
    args: tuple[Any, ...],
    caller: FrameType,
) -> PendingCheck | None:
    recorder = get_recorder()
    if (
        recorder is None
        or recorder.checker is None
        or (track := reader.find_track(recorder, args)) is None
    ):
        return None
    with DispatchBypass():
        return recorder.checker.check_inputs(entered, arguments, args, track, caller)


def _leave_call(reader: CallReader, entered: EnteredCall, result: Any, caller: FrameType) -> None:
    try:
        if entered[5]:
            leave_call(entered)
        else:  # CompletionMode.WORK
            entered[0].add_pending_call(
                entered,
                _get_boxed_work(result),
                get_holding_locals(caller),
                backend_keeps_it=not reader.spec.is_p2p,
            )
    except Exception as error:  # our error: the call's result is returned all the same
        record_lost_completion(reader.spec.op, entered, error)


def _check_result(pending: PendingCheck, result: Any, caller: FrameType) -> None:
    recorder = get_recorder()
    if recorder is not None and recorder.checker is not None:
        boxed = _get_boxed_work(result)
        work = None if boxed is None else Work.unbox(boxed)
        recorder.checker.check_result(pending, work, caller)


def _get_boxed_work(result: Any) -> Any:
    """The Work among the results of an operator, which is the last of them."""
    return result[-1] if type(result) is tuple else result
