"""The callers of an operator: the functions of torch.distributed, which hold its arguments in local
variables, the user's line behind them, and what another thread of this process is doing.

The user's line is the innermost frame outside torch, the standard library and site-packages.
"""

from __future__ import annotations

import functools
import gc
import inspect
import operator
import os
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType, FunctionType
from typing import Any

import hangwatch
from hangwatch.model.operators import OPERATIONS, MustMatch
from hangwatch.ring.layout import RecordFlag

from .writer import RingWriter

_PENDING_CALLS = ("isend", "irecv")
_BATCH_FUNCTION = "batch_isend_irecv"
_WRAPPERS = ("func_wrapper", "wrapper")  # torch/distributed/c10d_logger.py
_MAX_CACHED = 4096  # code objects; beyond that all caches are cleared
# The origins of a frame's code, as `CodeOrigin` in native/call_sites.h. Machinery is torch and the
# standard library, and this package.
_USER, _LIBRARY, _MACHINERY = 0, 1, 2
_STDLIB = sysconfig.get_path("stdlib")
_STDLIB_PREFIXES = (f"{_STDLIB}/", f"{sysconfig.get_path('platstdlib')}/")
_LIBRARY_PARTS = ("/site-packages/", "/dist-packages/")
_OWN_DIR = os.path.join(os.path.dirname(__file__), "")
_NEEDS_GC_PAUSE = sys.version_info[:2] == (3, 11)
_call_function: Callable[..., Any] = operator.methodcaller("__call__")

ReduceOpReader = Callable[[Any, FrameType], "int | None"]


@functools.cache
def find_quick_callers() -> dict[int, CodeType]:
    """The code of torch.distributed's functions of one tensor, ``group`` and ``op``, by its id."""
    names = [op for op, spec in OPERATIONS.items() if spec.passes_one_tensor]
    logged = find_logged_callers()
    return {
        id(code): code
        for code in _find_codes(names)
        if id(code) in logged and "group" in code.co_varnames
    }


@functools.cache
def find_logged_callers() -> dict[int, CodeType]:
    """The code of torch.distributed's functions that only torch's logger wraps, by its id."""
    from torch.distributed import distributed_c10d as c10d

    codes = {}
    for function in vars(c10d).values():
        # isinstance would access a deprecated alias, which warns.
        if type(function) is not FunctionType:
            continue
        wrapped = getattr(function, "__wrapped__", None)
        if type(wrapped) is FunctionType and not hasattr(wrapped, "__wrapped__"):
            codes[id(wrapped.__code__)] = wrapped.__code__
    return codes


@functools.cache
def find_named_reduce_ops() -> dict[int, int]:
    """The numbers of the reduce ops that are never deleted, such as ``ReduceOp.SUM``, by id. Others
    hold data of the job, such as the factor of a premultiplied sum.
    """
    from torch.distributed import distributed_c10d as c10d

    members = c10d.ReduceOp.RedOpType.__members__.values()
    return {id(member): member.value for member in members}


@functools.cache
def make_reduce_op_reader() -> ReduceOpReader:
    """Makes a function that returns the number of a reduce op, from the boxed object and the
    calling frame; None where this torch cannot read it (such as 2.6 and 2.9, in calls from C++).

    Reading the boxed object takes 1.7 microseconds. If the caller is one of torch.distributed's own
    functions, its argument ``op`` is read instead, in a tenth of that time.
    """
    import torch

    names = [op for op, spec in OPERATIONS.items() if MustMatch.REDUCE_OP in spec.must_match]
    callers = {id(code): code for code in _find_codes(names) if "op" in code.co_varnames}
    numbers = find_named_reduce_ops()
    can_read_boxed = hasattr(torch.classes.c10d.ReduceOp(), "op")

    def read_number(boxed: Any, caller: FrameType) -> int | None:
        if id(caller.f_code) in callers:
            number = numbers.get(id(caller.f_locals["op"]))
            if number is not None:
                return number
        return int(boxed.op()) if can_read_boxed else None

    return read_number


def find_caller() -> FrameType:
    """The frame that called the function that calls this one. In a thread of C++, where no Python
    function did, it is the frame of the function itself.

    Pass the frame on instead of keeping it: a local variable with its own frame is a reference
    cycle, which keeps the arguments of the call until a garbage collection.
    """
    try:
        return sys._getframe(2)
    except ValueError:
        return sys._getframe(1)


def find_message_flag(caller: FrameType) -> int:
    """The flag of a send or a receive on a device: `RecordFlag.ASYNC` if the user's own code called
    ``isend`` or ``irecv``, so that it decides when anything waits for the message; BATCHED if
    ``batch_isend_irecv`` did; 0 for torch's other functions. These leave no message behind that later
    calls could overtake.
    """
    if caller.f_code.co_name not in _PENDING_CALLS:
        return 0
    folder = os.path.dirname(caller.f_code.co_filename)
    frame = caller.f_back
    while frame is not None and os.path.dirname(frame.f_code.co_filename) == folder:
        name = frame.f_code.co_name
        if name not in _WRAPPERS:
            return RecordFlag.BATCHED if name == _BATCH_FUNCTION else 0
        frame = frame.f_back
    return RecordFlag.ASYNC


def _find_codes(names: list[str]) -> list[CodeType]:
    """The code of torch.distributed's functions of these names, without their wrappers."""
    from torch.distributed import distributed_c10d as c10d

    functions = [getattr(c10d, name) for name in names if hasattr(c10d, name)]
    return [inspect.unwrap(function).__code__ for function in functions]


class CallSites:
    """Finds and interns call sites. Each code object is classified once."""

    def __init__(
        self, ring: RingWriter, on_origin: Callable[[int, int | None], None] | None = None
    ) -> None:
        """``on_origin(id(code), origin)`` is called for each new code object; None revokes all."""
        import torch

        self._ring = ring
        self._on_origin = on_origin
        # The origin of each code object by its id, which is unique while the object is kept here.
        self._origins: dict[int, tuple[int, CodeType]] = {}
        self._site_numbers: dict[tuple[int, int], int] = {}
        self._user_site_numbers: dict[tuple[int, int], int] = {}
        self._machinery_prefixes = (
            f"{Path(torch.__file__).parent}/",
            f"{Path(__file__).resolve().parent}/",
            str(hangwatch.__file__),
            "<frozen ", "<eval_with_key>", "<torch_package",
        )  # fmt: skip

    def get_cached_site(self, frame: FrameType) -> int:
        """A faster `find_site`: it returns 0 if the frame is not the user's, or its site is new."""
        number = self._user_site_numbers.get((id(frame.f_code), frame.f_lasti), 0)
        return number if number and self._ring.is_site_fresh(number) else 0

    def find_site(self, frame: FrameType | None) -> int:
        """The site's number in the ring; 0 if the stack has neither user nor library frames."""
        origins = self._origins
        library: FrameType | None = None
        while frame is not None:
            code = frame.f_code
            cached = origins.get(id(code))
            origin = cached[0] if cached is not None else self._classify_code(code)
            if origin == _USER:
                number = self._intern_site(frame)
                self._user_site_numbers[(id(code), frame.f_lasti)] = number
                return number
            if origin == _LIBRARY and library is None:
                library = frame
            frame = frame.f_back
        return self._intern_site(library) if library is not None else 0

    def is_user_code(self, code: CodeType) -> bool:
        cached = self._origins.get(id(code))
        origin = cached[0] if cached is not None else self._classify_code(code)
        return origin == _USER

    def _intern_site(self, frame: FrameType) -> int:
        key = (id(frame.f_code), frame.f_lasti)
        number = self._site_numbers.get(key, 0)
        if number and self._ring.is_site_fresh(number):
            return number
        code = frame.f_code
        name = getattr(code, "co_qualname", code.co_name)  # Python 3.10 has only the latter
        site = {"file": code.co_filename[-240:], "line": frame.f_lineno, "function": name[-80:]}
        number = self._site_numbers[key] = self._ring.intern_site(site)
        return number

    def _classify_code(self, code: CodeType) -> int:
        if len(self._origins) >= _MAX_CACHED:
            self._origins.clear()
            self._site_numbers.clear()
            self._user_site_numbers.clear()
            if self._on_origin is not None:
                self._on_origin(0, None)
        file = code.co_filename
        # Code without a file was made by ``exec``. In ``python -c``, it is the user's program.
        is_generated = file.startswith("<") and hasattr(sys.modules.get("__main__"), "__file__")
        if file.startswith(self._machinery_prefixes) or "torchinductor_" in file:
            origin = _MACHINERY
        elif is_generated or any(part in file for part in _LIBRARY_PARTS):
            origin = _LIBRARY
        else:
            origin = _MACHINERY if file.startswith(_STDLIB_PREFIXES) else _USER
        self._origins[id(code)] = (origin, code)
        if self._on_origin is not None:
            self._on_origin(id(code), origin)
        return origin


def inspect_thread(thread: int) -> tuple[bool, bool]:
    """Whether the thread is in torch.distributed, and whether it is in code of its own: not in a
    wait of the standard library, and not in autograd.
    """
    frame = find_frame(thread)
    # Our code runs inside a call: the frame below it shows where the thread is.
    while frame is not None and frame.f_code.co_filename.startswith(_OWN_DIR):
        frame = frame.f_back
    if frame is None:
        return False, False
    file = frame.f_code.co_filename
    is_independent = not file.startswith(_STDLIB) and "/torch/autograd/" not in file
    return "/torch/distributed/" in file, is_independent


def find_frame(thread: int) -> FrameType | None:
    """The innermost frame of another thread; None if the thread has ended.

    `sys._current_frames` returns the frame of this function as well. A local variable with its
    result would therefore be a reference cycle, which keeps the frames of all threads, and all of
    their local variables, until a garbage collection.
    """
    frame: FrameType | None = read_threads(sys._current_frames).get(thread)
    return frame


def read_threads(function: Callable[[], dict[int, Any]]) -> dict[int, Any]:
    """The result of `sys._current_frames` or `sys._current_exceptions`, by the thread's identifier.

    Python 3.11 creates objects there while it holds the lock of its list of threads. If a garbage
    collection runs a destructor that releases the GIL, as torch's do, and the thread that gets the
    GIL starts or ends a thread, the process is deadlocked. The last releases of 3.11 do the same as
    here (https://github.com/python/cpython/issues/106883).
    """
    if not (_NEEDS_GC_PAUSE and gc.isenabled()):
        return function()
    # `map` calls the three functions from C, so that no other thread runs in between.
    return tuple(map(_call_function, (gc.disable, function, gc.enable)))[1]  # type: ignore[no-any-return]
