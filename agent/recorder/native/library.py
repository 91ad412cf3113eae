"""The Python side of the native recorder: it chooses the recorder and wraps the library's
functions. `recorder.cpp` describes how the library works.
"""

from __future__ import annotations

import ctypes
import functools
import sys
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from types import FrameType
from typing import Any

from hangwatch.model.calls import LossReason
from hangwatch.ring.layout import RECORD_BODY_STRUCT, RECORDS

from .. import faults
from ..dynamo import Result
from ..streams import CallDetails, EnteredCall, PlannedCalls, StreamRecorder
from ..writer import RingWriter
from . import cache
from .cache import Environment, FrameLayout, get_frame_layout

_INT64_SIGN_BIT = 1 << 63
_MAX_FRAMES = 256
_MAX_CALLBACK_FRAMES = 8  # between the library's function and its callback


class _NativeCall(ctypes.Structure):
    """A call in progress: `Call` in streams.h."""

    _fields_ = (
        ("stream", ctypes.c_void_p), ("seq", ctypes.c_uint64), ("index", ctypes.c_uint64),
        ("entered_ns", ctypes.c_uint64), ("blocked_thread", ctypes.c_uint64),
        ("completion_mode", ctypes.c_int), ("agreement_hash", ctypes.c_uint64),
        ("failure_rule", ctypes.c_int),
    )  # fmt: skip


class _PlannedCall(ctypes.Structure):
    """A call of which all but the thread and the site is known: `PlannedCall` in call_plans.h."""

    _fields_ = (
        ("stream", ctypes.c_void_p), ("agreement_hash", ctypes.c_uint64),
        ("record_body", ctypes.c_ubyte * RECORD_BODY_STRUCT.size), ("seq", ctypes.c_uint64),
    )  # fmt: skip


_RECORDER = _STREAM = ctypes.c_void_p
_CALL = ctypes.POINTER(_NativeCall)
_U8, _U32, _U64 = ctypes.c_uint8, ctypes.c_uint32, ctypes.c_uint64
# The types of each function's result and arguments, as in recorder.cpp. The first functions are
# called without the GIL, since they may wait for its owner.
_WAITING_FUNCTIONS: dict[str, tuple[Any, ...]] = {
    "hw_initialize_library": (None, FrameLayout),
    "hw_register_kernel": (ctypes.c_char_p, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_bool),
    "hw_create_recorder": (_RECORDER, ctypes.c_void_p, _U64, _U64),
    "hw_set_current_recorder": (None, _RECORDER),
    "hw_set_call_marker": (None, ctypes.c_void_p),
    "hw_update_streams": (_U64, _RECORDER),
    "hw_get_fault_count": (_U64,),
    "hw_get_last_fault": (ctypes.c_char_p,),
    "hw_get_lost_count": (_U64, _RECORDER),
    "hw_open_stream": (_STREAM, _RECORDER, _U32, _U64, _U64),
    "hw_mark_incomplete": (None, _RECORDER, _STREAM, _U64, _U64),
    "hw_close_stream": (None, _RECORDER, _STREAM),
    "hw_enter_call": (
        None, _RECORDER, _STREAM, _U64, ctypes.c_char_p, _U64, ctypes.c_int, _CALL
    ),
    "hw_finish_call": (None, _RECORDER, _CALL, ctypes.c_bool),
    "hw_retract_call": (None, _RECORDER, _CALL),
}  # fmt: skip
# The other functions are called with the GIL, and never wait for a thread that needs it.
_QUICK_FUNCTIONS: dict[str, tuple[Any, ...]] = {
    "hw_get_planned_reduce_op": (ctypes.c_int64,),
    "hw_begin_batch": (None,),
    "hw_clear_plans": (None, _RECORDER),
    "hw_set_code_origin": (None, _RECORDER, _U64, _U8),
    "hw_clear_code_origins": (None, _RECORDER),
    "hw_enter_planned_calls": (ctypes.c_bool, _RECORDER, ctypes.c_void_p, _U64),
    "hw_read_frames": (
        ctypes.c_int, ctypes.POINTER(_U64), ctypes.POINTER(_U32), ctypes.c_int
    ),
}  # fmt: skip


def choose_recorder(
    env: Environment, *, has_checks: bool = False
) -> tuple[NativeLibrary | None, str]:
    """The native recorder, or None and the reason, which a user who requested it is shown."""
    mode = cache.get_recorder_mode(env)
    if mode == "python":
        return None, "HANGWATCH_RECORDER=python"
    native: NativeLibrary | None = None
    reason = "only the Python recorder supports HANGWATCH_CHECKS"
    if not has_checks:
        native, reason = _find_library(env)
    if native is None and mode == "native":
        faults.record_message(
            f"the native recorder is not available, the Python one is used: {reason}"
        )
    return native, reason


def _find_library(env: Environment) -> tuple[NativeLibrary | None, str]:
    if reason := cache.explain_unsupported():
        return None, reason
    try:
        path = cache.find_library(env)
        if path is not None:
            return _load_library(path), ""
    except OSError as error:
        return None, str(error)
    return None, cache.read_build_failure(env) or cache.NOT_BUILT_REASON


class NativeLibrary:
    """The loaded library, of which a process has one."""

    def __init__(self, path: Path) -> None:
        """Raises OSError if it cannot be loaded."""
        self.lib = ctypes.CDLL(str(path))
        self._gil_lib = ctypes.PyDLL(str(path))
        for lib, functions in ((self.lib, _WAITING_FUNCTIONS), (self._gil_lib, _QUICK_FUNCTIONS)):
            for name, (result, *arguments) in functions.items():
                function = getattr(lib, name)
                function.restype = result
                function.argtypes = arguments
        self.recorder: int | None = None
        self._ring_buffers: list[Any] = []
        self._fault_count = 0
        self.lib.hw_initialize_library(get_frame_layout() or FrameLayout())

    def attach_ring(self, ring: RingWriter) -> None:
        """Records into ``ring`` from the next `start_recording` on."""
        base = ctypes.c_char.from_buffer(ring.map)
        # The ring is never unmapped: backends may record completions while the interpreter exits.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(ring.map))
        self._ring_buffers.append(base)  # a thread may still write into an earlier ring
        self.recorder = self.lib.hw_create_recorder(
            ctypes.byref(base), RECORDS.offset, RECORDS.count
        )

    def register_operator(self, name: str, planner: str, *, compares_all_tensors: bool) -> None:
        """Registers the kernel of an operator such as ``c10d::send``; hangwatch::``planner`` makes its
        plans. Raises RuntimeError if torch refuses it.

        Only the tensors at both ends of a long list are compared unless ``compares_all_tensors``.
        """
        problem = self.lib.hw_register_kernel(name.encode(), planner.encode(), compares_all_tensors)
        if problem:
            raise RuntimeError(problem.decode(errors="replace"))

    def set_call_marker(self, function: int) -> None:
        """Calls the function at this address before and after each call; see `nccl.MarkCall`."""
        self.lib.hw_set_call_marker(function)

    def start_recording(self) -> None:
        self.lib.hw_set_current_recorder(self.recorder)

    def update_streams(self) -> int:
        written: int = self.lib.hw_update_streams(self.recorder)
        count: int = self.lib.hw_get_fault_count()
        if count != self._fault_count:
            self._fault_count = count
            last_fault = self.lib.hw_get_last_fault().decode(errors="replace")
            faults.record_message(f"the native recorder: {last_fault}")
        return written

    def read_planned_reduce_op(self, boxed: Any, caller: FrameType) -> int | None:
        """The reduce op of the call that a planner reads; a `callers.ReduceOpReader`."""
        number: int = self._gil_lib.hw_get_planned_reduce_op()
        return number if number >= 0 else None

    def begin_batch(self) -> None:
        """Records that this thread begins a batch of sends and receives."""
        self._gil_lib.hw_begin_batch()

    def clear_plans(self) -> None:
        """Drops all plans, because interned data will be overwritten or a group was deleted."""
        self._gil_lib.hw_clear_plans(self.recorder)

    def set_code_origin(self, code: int, origin: int | None) -> None:
        """Passes on a code object's origin, by its id; None revokes all: see `CallSites`."""
        if origin is None:
            self._gil_lib.hw_clear_code_origins(self.recorder)
        else:
            self._gil_lib.hw_set_code_origin(self.recorder, code, origin)

    @property
    def enter_planned_calls(self) -> Callable[[int | None, int, int], bool]:
        """The function that enters calls; False if `take_interrupt` has an exception to raise."""
        function: Callable[[int | None, int, int], bool] = self._gil_lib.hw_enter_planned_calls
        return function

    def read_frames(self) -> list[tuple[int, int]]:
        """(Id of the code, offset of the instruction) of this thread's frames, newest first."""
        codes = (_U64 * _MAX_FRAMES)()
        instructions = (_U32 * _MAX_FRAMES)()
        count = self._gil_lib.hw_read_frames(codes, instructions, _MAX_FRAMES)
        return list(zip(codes[:count], instructions[:count], strict=True))


_load_library = functools.cache(NativeLibrary)


class NativeStreamRecorder(StreamRecorder):
    """A stream whose state is in the library, also for calls that Python records."""

    __slots__ = ("_native", "handle")

    def __init__(self, native: NativeLibrary, ring: RingWriter, uid: int, slot: int) -> None:
        self.uid = uid
        self.slot = slot
        self.ring = ring
        self._native = native
        self.handle: int = native.lib.hw_open_stream(
            native.recorder, uid, slot, ring.get_loss_word(slot)
        )

    def enter_call(
        self, agreement_hash: int, record_body: bytes, blocked_thread: int, completion_mode: int
    ) -> EnteredCall:
        native = self._native
        call = _NativeCall()
        native.lib.hw_enter_call(
            native.recorder, self.handle, agreement_hash, record_body, blocked_thread,
            completion_mode, call,
        )  # fmt: skip
        seq, index, entered_ns = call.seq, call.index, call.entered_ns
        return self, seq, index, entered_ns, blocked_thread, completion_mode, agreement_hash

    def finish_call(self, call: EnteredCall, *, has_raised: bool = False) -> None:
        native_call = _NativeCall(self.handle, *call[1:])
        self._native.lib.hw_finish_call(self._native.recorder, native_call, has_raised)

    def fail_call(self, call: EnteredCall) -> None:
        self.finish_call(call, has_raised=True)

    def retract_call(self, call: EnteredCall) -> None:
        native_call = _NativeCall(self.handle, *call[1:])
        self._native.lib.hw_retract_call(self._native.recorder, native_call)

    def mark_incomplete(self, reason: LossReason, from_seq: int = 0) -> None:
        self._native.lib.hw_mark_incomplete(self._native.recorder, self.handle, reason, from_seq)

    def mark_completion_unknown(self) -> None:
        """Does nothing: the library knows it by the `CompletionMode` of the calls."""

    def close_stream(self) -> None:
        self._native.lib.hw_close_stream(self._native.recorder, self.handle)
        super().close_stream()


class NativePlannedCalls(PlannedCalls):
    """Calls that the library enters, within some 100 ns each, and without releasing the GIL."""

    def __init__(
        self, native: NativeLibrary, planned: Iterable[tuple[StreamRecorder, int, int]]
    ) -> None:
        calls = []
        self._streams = []
        for stream, agreement_hash, signature in planned:
            assert isinstance(stream, NativeStreamRecorder)
            self._streams.append(stream)
            record_body = stream.pack_record_body(signature, 0, 0)
            packed = (ctypes.c_ubyte * len(record_body)).from_buffer_copy(record_body)
            calls.append(_PlannedCall(stream.handle, agreement_hash, packed))
        self._calls = (_PlannedCall * len(calls))(*calls)
        self._arguments = native.recorder, ctypes.addressof(self._calls), len(calls)
        self._enter = native.enter_planned_calls

    def enter(self) -> None:
        if not self._enter(*self._arguments):
            raise take_interrupt()

    def fail(self) -> None:
        for stream, call in zip(self._streams, self._calls, strict=True):
            stream.mark_incomplete(LossReason.RAISED, call.seq)


class _Interrupts(threading.local):
    error: BaseException | None = None


_interrupts = _Interrupts()


def run_callback(where: str, function: Callable[..., Result], *args: Any) -> Result | None:
    """Runs a function that the library calls in Python, as `faults.run_guarded` does. The exception of a
    signal handler is kept for `NativePlannedCalls`, because it cannot pass through what ctypes calls.
    """
    try:
        return faults.run_guarded(where, function, *args)
    except BaseException as error:
        if _is_entering_planned_calls(sys._getframe(1)):
            _interrupts.error = error
        raise


def _is_entering_planned_calls(frame: FrameType | None) -> bool:
    """Whether `NativePlannedCalls.enter` called the library, which called the function of the frame."""
    for _ in range(_MAX_CALLBACK_FRAMES):
        if frame is None:
            return False
        if frame.f_code is NativePlannedCalls.enter.__code__:
            return True
        frame = frame.f_back
    return False


def take_interrupt() -> BaseException:
    """The exception that left the last callback of this thread."""
    error, _interrupts.error = _interrupts.error, None
    return error or RuntimeError("a callback of the native recorder failed")


def encode_plan(details: CallDetails | None, failure_rule: int) -> list[int]:
    """The plan of a kind of calls, as the kernel expects it: the stream's handle (0: they are not
    recorded), the agreement hash as a signed number, the remaining details, and the failure rule.
    """
    if details is None:
        return [0] * 10
    stream, agreement_hash, *rest = details
    assert isinstance(stream, NativeStreamRecorder)
    if agreement_hash >= _INT64_SIGN_BIT:
        agreement_hash -= 2 * _INT64_SIGN_BIT
    return [stream.handle, agreement_hash, *map(int, rest), failure_rule]
