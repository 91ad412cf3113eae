"""What the recorder knows about the functions of torch.distributed that call the operators."""

from __future__ import annotations

import functools
import inspect
import os
import sys
from collections.abc import Callable
from types import CodeType, FrameType, FunctionType
from typing import Any

from hangwatch.model.operators import OPERATIONS

_PENDING_CALLS = ("isend", "irecv")
_WRAPPERS = ("func_wrapper", "wrapper")  # torch/distributed/c10d_logger.py

ReduceOpReader = Callable[[Any, FrameType], "int | None"]


@functools.cache
def find_quick_callers() -> dict[int, CodeType]:
    """By id: the code of torch.distributed's functions that call with one tensor and have their
    arguments in ``group`` and ``op``.
    """
    names = [op for op, spec in OPERATIONS.items() if spec.passes_one_tensor]
    logged = find_logged_callers()
    codes = {id(code): code for code in _find_codes(names)}
    return {
        key: code for key, code in codes.items() if key in logged and "group" in code.co_varnames
    }


@functools.cache
def find_logged_callers() -> dict[int, CodeType]:
    """By id: the code of torch.distributed's functions that run inside exactly one wrapper of
    torch's, its logger's.
    """
    from torch.distributed import distributed_c10d as c10d

    codes: dict[int, CodeType] = {}
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
    """By id: the numbers of the reduce ops that exist as long as the process does, such as
    ``ReduceOp.SUM``. Others hold data of the job, such as the factor of a premultiplied sum.
    """
    from torch.distributed import distributed_c10d as c10d

    members = c10d.ReduceOp.RedOpType.__members__.values()
    return {id(member): member.value for member in members}


@functools.cache
def make_reduce_op_reader() -> ReduceOpReader:
    """Makes a function that returns the number of a reduce op, from the boxed object and the
    calling frame; None where this torch has no way to read it (such as 2.6 and 2.9, in calls from C++).

    Reading the boxed object takes 1.7 microseconds, and these versions cannot. Where the caller is one
    of torch.distributed's own functions, its argument ``op`` is read instead, in a tenth of that.
    """
    import torch

    names = [op for op, spec in OPERATIONS.items() if spec.reduce_op_arg]
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
    """The frame that called the function that calls this one; in a thread of C++, where no Python
    function did, that of the function itself.

    It is to be passed on, not kept: a local variable that held its own frame would be a reference
    cycle, which keeps the arguments of the call until a garbage collection.
    """
    try:
        return sys._getframe(2)
    except ValueError:
        return sys._getframe(1)


def skip_logger_frames(caller: FrameType) -> FrameType:
    """The caller of the function that torch has wrapped to log its calls."""
    wrapper = caller.f_back
    return (wrapper and wrapper.f_back) or caller


def is_left_pending(caller: FrameType) -> bool:
    """Whether the user's own code called ``isend`` or ``irecv``, so that it decides when anything
    waits for the message. torch's own functions, such as ``send`` and ``batch_isend_irecv``, leave
    no message behind that later calls could overtake.
    """
    if caller.f_code.co_name not in _PENDING_CALLS:
        return False
    folder = os.path.dirname(caller.f_code.co_filename)
    frame = caller.f_back
    while frame is not None and os.path.dirname(frame.f_code.co_filename) == folder:
        if frame.f_code.co_name not in _WRAPPERS:
            return False
        frame = frame.f_back
    return True


def _find_codes(names: list[str]) -> list[CodeType]:
    """The code of torch.distributed's functions of these names, without their wrappers."""
    from torch.distributed import distributed_c10d as c10d

    functions = [getattr(c10d, name) for name in names if hasattr(c10d, name)]
    return [inspect.unwrap(function).__code__ for function in functions]
