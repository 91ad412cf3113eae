"""A kernel for each ``c10d`` operator, at dispatch key BackendSelect: Python's, or where it was
built the one in C++.

Every collective passes there, whoever starts it: Python, DDP's reducer in C++, compiled code; and
whichever backend runs it. A kernel notes the call, hands it on unchanged, and notes what came back.
Whatever goes wrong in the noting is ours alone.
"""

from __future__ import annotations

import os
import sys
from _thread import get_ident
from collections.abc import Callable
from time import monotonic_ns
from types import FrameType
from typing import TYPE_CHECKING, Any

from hangwatch.model.operators import LOCAL_OPERATORS, OPERATORS

from . import faults
from .call_reader import CallReader, find_logged_callers, find_quick_callers
from .callsite import CallSites
from .groups import GroupRegistry
from .native.library import NativeLibrary, NativeStreamRecorder, encode_plan
from .other_threads import inspect_thread
from .safe_import import PATCHED_BUILTINS
from .streams import EnteredCall, StreamRecorder, leave_call
from .writer import RingWriter

if TYPE_CHECKING:
    from .checks.inspection import CallChecker


__builtins__ = PATCHED_BUILTINS  # type: ignore[assignment]  # a module in __main__, a dict of its names elsewhere


class Recorder:
    """What all kernels of a process share."""

    def __init__(
        self,
        ring: RingWriter,
        native: NativeLibrary | None = None,
        checker: CallChecker | None = None,
    ) -> None:
        """``native``: what records in Python's place; ``checks``: what examines beside recording,
        which Python alone can.
        """
        self.ring = ring
        self.checker = checker
        self.native = native
        ring.set_rollover_callback(_clear_interned)
        if native is None:
            unbox = _get_unboxers()[1]
            self.groups = GroupRegistry(
                ring, lambda uid, slot: StreamRecorder(ring, uid, slot, unbox), _clear_interned
            )
            self.sites = CallSites(ring)
        else:
            native.attach_ring(ring)
            self.groups = GroupRegistry(
                ring,
                lambda uid, slot: NativeStreamRecorder(native, ring, uid, slot),
                _clear_interned,
            )
            self.sites = CallSites(ring, native.set_code_verdict)

    def update_streams(self) -> int:
        """Brings the sequences in the ring up to date; gives the number of records that they then
        tell of.
        """
        if self.native is not None:
            return self.native.update_streams()
        now, written = monotonic_ns(), self.ring.written_count
        for sequence in self.groups.streams:
            sequence.update_ring(now)
        return written


_current_recorder: Recorder | None = None
_call_readers: list[CallReader] = []
_torch_library: Any = None  # the registration lasts as long as this object


def set_recorder(recorder: Recorder | None) -> None:
    """Directs the kernels of this process, registering them first if need be."""
    global _current_recorder
    _current_recorder = recorder
    _clear_interned()
    if recorder is not None and _torch_library is None:
        _register_kernels(recorder.native, recorder.checker is not None)
    if recorder is not None and recorder.native is not None:
        recorder.native.start_recording()


def get_recorder() -> Recorder | None:
    """Where the calls of this process go."""
    return _current_recorder


def unbox_work(boxed: Any) -> Any:
    """The Work of a call; None where the backend gave none."""
    return None if boxed is None else _get_unboxers()[1](boxed)


def _clear_interned() -> None:
    for reader in _call_readers:
        reader.clear_caches()
    if _current_recorder is not None and _current_recorder.native is not None:
        _current_recorder.native.forget_plans()


def _register_kernels(native: NativeLibrary | None, with_checks: bool) -> None:
    global _torch_library
    import torch
    from torch._C import DispatchKey, _dispatch_keyset_full_after

    make_kernel = _make_kernel
    if with_checks:
        from .checks.kernel import make_checking_kernel as make_kernel

    after = _dispatch_keyset_full_after(DispatchKey.BackendSelect)
    # No fragment of ours may outlive or shadow another's: torch warns of an override only where a
    # kernel was there before.
    library: Any = torch.library.Library(
        *(("c10d", "IMPL") if native is None else ("hangwatch", "FRAGMENT"))
    )  # type: ignore[no-untyped-call]
    for name in sorted(_list_operators()):
        if (spec := OPERATORS.get(name)) is None:
            if name not in LOCAL_OPERATORS:
                faults.record_message(
                    f"this torch has an operator c10d::{name} that this hangwatch does not know:"
                    " its calls are not watched"
                )
            continue
        overload = getattr(torch.ops.c10d, name).default
        reader = CallReader(spec, overload._schema, _get_unboxers()[0])
        _call_readers.append(reader)
        if native is None:
            library.impl(
                name, make_kernel(reader, overload, after), "BackendSelect", with_keyset=True
            )
        else:
            library.define(
                f"{str(overload._schema).partition('::')[2].rpartition('->')[0]}-> int[]"
            )
            library.impl(name, _make_planner(reader), "BackendSelect")
            native.register_operator(name)
    if native is not None:
        for schema, answer in (
            ("_site() -> int", _find_site),
            ("_meanwhile(int thread) -> int", _inspect_thread),
        ):
            library.define(schema)
            library.impl(schema.partition("(")[0], answer, "BackendSelect")
    _torch_library = library


def _list_operators() -> set[str]:
    import torch

    return {
        schema.name[6:]
        for schema in torch._C._jit_get_all_schemas()
        if schema.name.startswith("c10d::")
    }


def _get_unboxers() -> tuple[Callable[[Any], Any], Callable[[Any], Any]]:
    from torch._C._distributed_c10d import ProcessGroup, Work

    return ProcessGroup.unbox, Work.unbox


def _make_planner(reader: CallReader) -> Callable[..., list[int]]:
    """The function that the native kernel calls with the arguments of a call of a new kind."""

    def plan_call(*args: Any) -> list[int]:
        try:
            if _current_recorder is not None:
                own = sys._getframe()
                read = reader.read_call(
                    _current_recorder, args, own.f_back or own
                )  # in a thread of C++'s nobody of Python's called
                return encode_plan(
                    read, is_timed=reader.can_time_completion(_current_recorder, args, os.environ)
                )
        except Exception as error:  # ours: the call goes on
            faults.record_fault(f"recording {reader.spec.op}", error)
        return []

    return plan_call


def _find_site() -> int:
    """Where the call comes from that this thread makes."""
    try:
        return (
            _current_recorder.sites.find_site(sys._getframe())
            if _current_recorder is not None
            else 0
        )
    except Exception as error:  # ours: the call goes on
        faults.record_fault("finding the line of a call", error)
        return 0


def _inspect_thread(thread: int) -> int:
    """What another thread does, as bits."""
    try:
        calls, free = inspect_thread(thread)
    except Exception as error:  # ours: the call goes on
        faults.record_fault("looking at another thread", error)
        return 0
    return calls | free << 1


def skip_logger_frames(caller: FrameType) -> FrameType:
    """Who called the function that torch has wrapped to log its calls."""
    wrapper = caller.f_back
    return (wrapper and wrapper.f_back) or caller


def record_failure(op: str, entered: EnteredCall) -> None:
    """Notes that the call raised."""
    try:
        entered[0].fail_call(entered)
    except Exception as error:  # ours: the user's exception is on its way
        faults.record_fault(f"recording the failure of {op}", error)


def _make_kernel(reader: CallReader, overload: Any, lower_keyset: Any) -> Callable[..., Any]:
    """The function that torch calls. Only the user's own exceptions leave it. Every call of every
    rank pays for each line.
    """
    from torch._C import DispatchKeySet

    redispatch = overload._handle.redispatch_boxed
    frame_of = sys._getframe
    logged, quick = find_logged_callers(), find_quick_callers()
    plans, tensors_at, root_at, reduces = (
        reader.plans,
        reader.tensors_index,
        reader.root_index,
        reader.reduce_op_index >= 0,
    )
    alone = len(overload._schema.returns) == 1  # the Work comes back with no tensors
    # A key set's own operators cost more than a look-up, its bound methods more than the function
    # behind them.
    bits_of: Callable[[Any], int] = DispatchKeySet.raw_repr.__func__  # type: ignore[attr-defined]  # pybind11's methods have it
    masked: dict[int, tuple[Any]] = {}

    def enter_call(recorder: Recorder, args: tuple[Any, ...]) -> EnteredCall | None:
        """Where the caller's local variables give the group and the reduce op, in a fraction of
        what unboxing them takes, one look-up serves for a call like one that was met before.
        """
        try:
            caller = frame_of(2)
        except (
            ValueError
        ):  # nobody of Python's called: a thread of C++'s, as autograd has for a device
            caller = frame_of(1)
        code = id(caller.f_code)
        if code not in quick:
            return reader.enter_call(
                recorder, args, caller, skip_logger_frames(caller) if code in logged else caller
            )
        try:
            user = frame_of(4)
        except ValueError:  # a thread that began in torch's own function
            return reader.enter_call(recorder, args, caller, caller)
        told = caller.f_locals
        pg = told["group"]
        tensors = args[tensors_at]
        first = tensors[0] if type(tensors) is list else tensors
        op = told["op"] if reduces else None
        root = args[root_at] if root_at >= 0 else None
        key = (
            id(user.f_code),
            user.f_lasti,
            id(pg),
            first.shape,
            first.dtype,
            id(op),
            root,
            told["async_op"],
            get_ident(),
        )
        try:
            sequence, agree, described, blocked, end, _ = plans[key]
        except KeyError:
            return reader.enter_planned(recorder, args, caller, user, key, op)
        return sequence.enter_call(agree, described, blocked, end)

    def c10d_kernel(keyset: Any, *args: Any) -> Any:
        try:
            below = masked[bits_of(keyset)]
        except KeyError:
            below = masked[bits_of(keyset)] = (keyset & lower_keyset,)
        entered = None
        if _current_recorder is not None:
            try:
                entered = enter_call(_current_recorder, args)
            except Exception as error:  # ours: the call goes on
                faults.record_fault(f"recording {reader.spec.op}", error)
        if entered is None:
            return redispatch(*(below + args))  # (*below, *args) would go through a list
        try:
            result = redispatch(*(below + args))
        except BaseException:
            record_failure(reader.spec.op, entered)
            raise
        try:
            if entered[5]:
                leave_call(entered)
            else:  # End.WORK, the common one
                entered[0].pending_works.append((entered, result if alone else result[-1]))
        except Exception as error:  # ours: the result stands
            faults.record_fault(f"recording the end of {reader.spec.op}", error)
        return result

    return c10d_kernel
