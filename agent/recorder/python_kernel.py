"""The kernel in Python: it records a call, passes it on unchanged, and records its completion.

The way of a call: torch calls `c10d_kernel`, whose `enter_call` looks for the plan that an earlier
call like this one has left. If there is none, `CallReader.enter_call` reads the arguments, and may
leave a plan. With either, `StreamRecorder.enter_call` writes the record into the ring. Once the
operator has returned its Work, the stream keeps it as pending, until a later call or the poller
finds it complete.

Every call of every rank pays for each line here. No error of ours reaches the caller.
"""

from __future__ import annotations

import functools
import sys
from _thread import get_native_id
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch
from torch._C import (
    DispatchKey,
    DispatchKeySet,
    _dispatch_keyset_full_after,
    _is_torch_function_mode_enabled,
)
from torch._C._distributed_c10d import Work

from hangwatch.model.calls import LossReason

from . import faults
from .callers import find_caller, find_logged_callers, find_quick_callers
from .calls import CallReader, FailureOutcome, FailureRule, judge_failure
from .dynamo import run_uncompiled
from .faults import Arguments
from .recorder import Recorder
from .streams import FRAME_KEY, EnteredCall, find_holding_file, leave_call

if TYPE_CHECKING:
    from .checks.inspection import PendingCheck
    from .checks.tensors import TensorArguments
    from .nccl import MarkCall

# (the call, None if it is not watched; the local variables of its caller, if that holds the Work)
EnterResult = tuple[EnteredCall | None, dict[str, Any] | None]

_current_recorder: Recorder | None = None
_mark_call: MarkCall | None = None  # `Recorder.mark_call` of the current recorder
_lower_keyset = _dispatch_keyset_full_after(DispatchKey.BackendSelect)
_dense_bits, _sparse_bits, _nested_bits = (
    DispatchKeySet(key).raw_repr()
    for key in (DispatchKey.Meta, DispatchKey.SparseMeta, DispatchKey.NestedTensor)
)
# The bits of the key sets with which no call communicates: meta and fake tensors, which have no
# data, and nested tensors, for which no backend has an operator.
_SILENT_BITS = _dense_bits & _sparse_bits | _nested_bits


def get_recorder() -> Recorder | None:
    """The recorder of this process's calls."""
    return _current_recorder


def use_recorder(recorder: Recorder | None) -> None:
    """Directs the calls of this process to ``recorder``."""
    global _current_recorder, _mark_call
    _current_recorder = recorder
    _mark_call = recorder.mark_call if recorder is not None else None


def record_loss(reader: CallReader, args: Arguments, error: Exception) -> None:
    """Records that an error of ours kept a call from being recorded: the streams of its group are
    incomplete or, if the group cannot be found, all streams.
    """
    if (recorder := _current_recorder) is not None:
        try:
            track = reader.open_track(recorder, args)
            if track is not None:
                # The channel of a message may have been a new one, which now looks unused.
                recorder.groups.dropped_count += reader.is_p2p
                track.mark_incomplete(messages=reader.is_p2p)
        except Exception:  # most likely the error that caused the loss
            recorder.groups.mark_incomplete(LossReason.FAULT)
    faults.record_fault(f"recording {reader.spec.op}", error)


def _record_failure(
    reader: CallReader, args: Arguments, entered: EnteredCall, error: BaseException
) -> None:
    """Records that the operator raised an exception. A call without communication is taken back."""
    rule = FailureRule.NONE
    if _current_recorder is not None:
        rule = reader.find_failure_rule(_current_recorder, args)
    outcome = judge_failure(error, rule)
    stream = entered[0]
    if outcome is FailureOutcome.NOT_MADE:
        stream.retract_call(entered)
        return
    if outcome is FailureOutcome.UNKNOWN:
        stream.mark_incomplete(LossReason.RAISED, entered[1])
    stream.fail_call(entered)


def _record_failure_guarded(
    reader: CallReader, args: Arguments, entered: EnteredCall, error: BaseException
) -> None:
    try:
        run_uncompiled(_record_failure, reader, args, entered, error)
    except Exception as own_error:  # our error: the user's exception is being raised
        entered[0].mark_incomplete(LossReason.FAULT, entered[1])
        faults.record_fault(f"recording the failure of {reader.spec.op}", own_error)


def _redispatch_marked(
    mark_call: MarkCall, entered: EnteredCall, redispatch: Callable[..., Any], args: Arguments
) -> Any:
    """Passes the call on; the plugin for NCCL knows meanwhile which call it is."""
    mark_call(entered[0].uid, entered[1])
    try:
        return redispatch(*args)
    finally:
        args = ()  # an exception keeps this frame, not the tensors
        mark_call(0, 0)


def can_communicate(keyset: Any) -> bool:
    """Whether a call with this key set may communicate. If not, its tensors must not be read: a
    shape may be symbolic, and reading it would change what is traced.
    """
    return not keyset.raw_repr() & _SILENT_BITS


def make_keyword_kernel(reader: CallReader, overload: Any) -> Callable[..., Any]:
    """Makes the function that torch calls for an operator with arguments that are passed by name, for
    which the kernels of other operators need not pay.
    """

    def keyword_kernel(keyset: Any, *args: Any, **keywords: Any) -> Any:
        redispatch = functools.partial(overload._handle.redispatch_boxed, **keywords)
        return make_kernel(reader, overload, None, redispatch)(keyset, *args)

    return keyword_kernel


def make_kernel(
    reader: CallReader,
    overload: Any,
    checked: TensorArguments | None,
    redispatch: Callable[..., Any] | None = None,
) -> Callable[..., Any]:
    """Makes the function that torch calls. Only the user's own exceptions leave it.

    ``checked`` are the arguments whose data the recorder's `CallChecker` examines.
    """
    enter_call = _make_enter_function(reader)
    redispatch = redispatch or overload._handle.redispatch_boxed
    returns_only_work = len(overload._schema.returns) == 1
    is_p2p = reader.spec.is_p2p
    # The operators of a key set cost more than a look-up, bound methods more than functions.
    bits_of: Callable[[Any], int] = DispatchKeySet.raw_repr.__func__  # type: ignore[attr-defined]  # pybind11's methods have it
    lower_keysets: dict[int, tuple[Any]] = {}

    def c10d_kernel(keyset: Any, *args: Any) -> Any:
        try:
            lower = lower_keysets[bits_of(keyset)]
        except KeyError:
            lower = (keyset & _lower_keyset,)
            if not can_communicate(keyset):
                return redispatch(*(lower + args))
            lower_keysets[bits_of(keyset)] = lower
        entered = frame_locals = pending_check = None
        if _current_recorder is not None:
            try:
                entered, frame_locals = enter_call(_current_recorder, args)
            except Exception as error:  # our error: the call continues
                record_loss(reader, args, error)
        if entered is None:
            return redispatch(*(lower + args))  # (*lower, *args) would create a list
        if checked is not None:
            where = f"examining {reader.spec.op}"
            pending_check = faults.run_guarded(
                where, _check_inputs, reader, checked, entered, args, find_caller()
            )
        try:
            if _mark_call is None:
                result = redispatch(*(lower + args))
            else:
                result = _redispatch_marked(_mark_call, entered, redispatch, lower + args)
        except BaseException as error:
            _record_failure_guarded(reader, args, entered, error)
            args, pending_check = (), None  # the exception keeps this frame, not the tensors
            raise
        try:
            if entered[5]:
                leave_call(entered)
            else:  # CompletionMode.WORK, the most frequent one
                work = result if returns_only_work else result[-1]
                if frame_locals is not None and entered[4] and work is not None:
                    # Most calls are like this, so `add_pending_call` and its cost are avoided.
                    frame_locals[FRAME_KEY] = work
                    entered[0].pending_works.append((entered, ref(work)))
                else:
                    entered[0].add_pending_call(
                        entered, work, frame_locals, backend_keeps_it=not is_p2p
                    )
        except Exception as error:  # our error: the call's result is returned all the same
            entered[0].mark_completion_unknown()
            faults.record_fault(f"recording the completion of {reader.spec.op}", error)
        if pending_check is not None:
            where = f"examining the result of {reader.spec.op}"
            faults.run_guarded(where, _check_result, pending_check, result, find_caller())
        return result

    return c10d_kernel


def _check_inputs(
    reader: CallReader,
    checked: TensorArguments,
    entered: EnteredCall,
    args: Arguments,
    caller: FrameType,
) -> PendingCheck | None:
    """Examines the data that this rank sends; returns what to examine of the result."""
    recorder = _current_recorder
    if recorder is None or recorder.checker is None:
        return None
    track = reader.find_track(recorder, args)
    if track is None:
        return None
    return recorder.checker.check_inputs(entered, checked, args, track, caller)


def _check_result(pending: PendingCheck, result: Any, caller: FrameType) -> None:
    boxed_work = result[-1] if type(result) is tuple else result
    if _current_recorder is not None and _current_recorder.checker is not None:
        work = None if boxed_work is None else Work.unbox(boxed_work)
        _current_recorder.checker.check_result(pending, work, caller)


def _make_enter_function(reader: CallReader) -> Callable[[Recorder, Arguments], EnterResult]:
    """Makes the function that records a call about to be made. That function also returns the local
    variables of the caller, if the caller holds the Work until it returns.

    The kernel must call it directly, because it counts the frames from there to the caller. Without
    these look-ups, a call would cost 4 to 5 microseconds more.
    """
    # A mode or a subclass of the job would see the attributes of tensors that a look-up reads.
    quick_types = frozenset((torch.Tensor, torch.nn.Parameter))

    frame_of = sys._getframe
    is_function_mode_enabled = _is_torch_function_mode_enabled
    logged = find_logged_callers()
    # Only known operators have all of their arguments in a plan's key.
    quick = {} if reader.spec.is_generic else find_quick_callers()
    plans = reader.plans
    tensors_index, root_index = reader.tensors_index, reader.root_index
    has_reduce_op = reader.reduce_op_index >= 0

    def enter_unplanned(recorder: Recorder, args: Arguments, caller: FrameType) -> EnterResult:
        site_frame = caller
        if id(caller.f_code) in logged:  # one frame of the logger lies before that of its caller
            wrapper = caller.f_back
            site_frame = (wrapper and wrapper.f_back) or caller
        entered = run_uncompiled(reader.enter_call, recorder, args, caller, site_frame)
        holds_work = caller.f_code.co_filename == find_holding_file()
        return entered, caller.f_locals if holds_work else None

    def enter_call(recorder: Recorder, args: Arguments) -> EnterResult:
        """Reads group and reduce op from the caller's local variables, if these hold them, which is
        faster than unboxing. A call like an earlier one then needs only one look-up.
        """
        try:
            caller = frame_of(2)
        except ValueError:  # a thread of C++ has no Python caller, as autograd's for a device
            caller = frame_of(1)
        if id(caller.f_code) not in quick or is_function_mode_enabled():
            return enter_unplanned(recorder, args, caller)
        try:
            user = frame_of(4)
        except ValueError:  # a thread that began in torch's own function
            return enter_unplanned(recorder, args, caller)
        tensors = args[tensors_index]
        first = tensors[0] if type(tensors) is list else tensors
        if type(first) not in quick_types:
            return enter_unplanned(recorder, args, caller)
        caller_locals = caller.f_locals
        pg = caller_locals["group"]
        reduce_op = caller_locals["op"] if has_reduce_op else None
        root = args[root_index] if root_index >= 0 else None
        key = (
            id(user.f_code),
            user.f_lasti,
            id(pg),
            first.shape,
            first.dtype,
            id(reduce_op),
            root,
            caller_locals["async_op"],
            get_native_id(),  # unlike `get_ident`, it is not reused soon after a thread has ended
        )
        try:
            stream, agree, record_body, blocked_thread, mode, _ = plans[key]
        except KeyError:
            entered = run_uncompiled(
                reader.enter_call, recorder, args, caller, user, key, reduce_op
            )
            return entered, caller_locals
        return stream.enter_call(agree, record_body, blocked_thread, mode), caller_locals

    return enter_call
