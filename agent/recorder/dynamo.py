"""Keeps torch.compile away from hangwatch's own Python code.

While a compiled function runs, Dynamo evaluates every Python frame of its thread, and compiles
those of a collective's kernel and hooks too: graphs, guards and recompilations that the job would
not have without us. It skips a code object that carries its mark, and evaluates no frame while its
callback is None. Both belong to the C extension of torch, so Dynamo itself is not imported, and a
job that never compiles pays nothing for the marks.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType
from typing import Any, TypeVar

_PACKAGE = "hangwatch"

Result = TypeVar("Result")


def exempt_own_code() -> None:
    """Makes Dynamo skip the code of our loaded modules; for what it calls, see `run_uncompiled`."""
    from torch._C._dynamo import eval_frame

    skip_code: Any = getattr(eval_frame, "skip_code", None)  # torch 2.6 and earlier have it
    if skip_code is None:
        action = eval_frame._FrameAction
        strategy = eval_frame._FrameExecStrategy(action.SKIP, action.DEFAULT)
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] != _PACKAGE or module is None:
            continue
        for code in _iter_codes(vars(module).values(), name):
            if skip_code is None:
                eval_frame.set_code_exec_strategy(code, strategy)
            else:
                skip_code(code)


def run_uncompiled(function: Callable[..., Result], *args: Any) -> Result:
    """Calls the function while Dynamo compiles nothing, not even what it calls outside this package,
    and the job's ``__torch_function__`` sees no access to tensors. Costs half a microsecond.
    """
    set_callback, disable_torch_function = _load_switches()
    callback = set_callback(None)
    try:
        with disable_torch_function():
            return function(*args)
    finally:
        set_callback(callback)


def _iter_codes(values: Any, module_name: str) -> Iterator[CodeType]:
    """The code of the module's functions among ``values``, its methods, and functions in these."""
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


@functools.cache
def _load_switches() -> tuple[Callable[[Any], Any], Callable[[], Any]]:
    """A function that replaces the thread's callback; a context without ``__torch_function__``."""
    from torch._C import DisableTorchFunction

    try:
        from torch._C._dynamo import eval_frame

        return eval_frame.set_eval_frame, DisableTorchFunction
    except (ImportError, AttributeError):  # a torch without Dynamo
        return lambda _: None, DisableTorchFunction
