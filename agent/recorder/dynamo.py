"""Keeps torch.compile away from hangwatch's own Python code.

While a compiled function runs, Dynamo evaluates every Python frame of its thread, and compiles
those of a collective's kernel and hooks too: graphs, guards and recompilations that the job would
not have without us. It skips a code object that carries its mark, and evaluates no frame while its
callback is None. Both belong to the C extension of torch, so Dynamo itself is not imported, and a
job that never compiles pays nothing for the marks.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType
from typing import Any, TypeVar

_PACKAGE = "hangwatch"

Result = TypeVar("Result")


def exempt_own_code() -> None:
    """Marks the code of all modules of this package that are loaded by now, so that Dynamo skips
    it. What they call is not marked: see `run_uncompiled`.
    """
    skip = _make_skip_function()
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == _PACKAGE and module is not None:
            for code in _iter_codes(vars(module).values(), name):
                skip(code)


def run_uncompiled(function: Callable[..., Result], *args: Any) -> Result:
    """Calls the function while Dynamo compiles nothing, not even what the function calls outside
    this package, and while the job's own ``__torch_function__`` sees no attribute of a tensor that
    it reads. Costs half a microsecond.
    """
    set_callback, disable_torch_function = _load_switches()
    callback = set_callback(None)
    try:
        with disable_torch_function():
            return function(*args)
    finally:
        set_callback(callback)


def _iter_codes(values: Any, module_name: str) -> Iterator[CodeType]:
    """Yields the code of the functions among ``values`` that the module defines, of its classes'
    methods, and of the functions inside these.
    """
    for value in values:
        if isinstance(value, FunctionType):
            # An imported function belongs to others, as does contextlib's around a context manager.
            if value.__globals__.get("__name__") == module_name:
                yield from _iter_nested_codes(value.__code__)
            yield from _iter_codes((getattr(value, "__wrapped__", None),), module_name)
        elif isinstance(value, staticmethod | classmethod | functools._lru_cache_wrapper):
            yield from _iter_codes((value.__wrapped__,), module_name)
        elif isinstance(value, property):
            yield from _iter_codes((value.fget, value.fset), module_name)
        elif isinstance(value, type) and value.__module__ == module_name:
            yield from _iter_codes(vars(value).values(), module_name)


def _iter_nested_codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _iter_nested_codes(constant)


def _make_skip_function() -> Callable[[CodeType], None]:
    """The function that marks a code object."""
    from torch._C._dynamo import eval_frame

    if hasattr(eval_frame, "skip_code"):  # torch 2.6 and earlier have it
        skip: Callable[[CodeType], None] = eval_frame.skip_code
        return skip
    action = eval_frame._FrameAction
    strategy = eval_frame._FrameExecStrategy(action.SKIP, action.DEFAULT)
    return lambda code: eval_frame.set_code_exec_strategy(code, strategy)


@functools.cache
def _load_switches() -> tuple[
    Callable[[Any], Any], Callable[[], contextlib.AbstractContextManager[object]]
]:
    """The function that sets the thread's callback and returns the one before, and the context in
    which no ``__torch_function__`` is called.
    """
    from torch._C import DisableTorchFunction

    try:
        from torch._C._dynamo import eval_frame

        return eval_frame.set_eval_frame, DisableTorchFunction
    except (ImportError, AttributeError):  # a torch without Dynamo
        return lambda _: None, DisableTorchFunction
