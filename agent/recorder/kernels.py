"""The kernels of all ``c10d`` operators, and of those on symmetric memory, registered at dispatch key
BackendSelect: the Python ones, or the native ones if the native recorder was built.

Every collective passes there, whether Python, DDP's reducer in C++ or compiled code starts it, and
whichever backend executes it. The native recorder calls three functions in Python, which return the
plan of a new kind of call, the site of a call, and what another thread does. Each of them is an
operator of the library ``hangwatch``, which native/python_calls.h calls.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from time import monotonic_ns
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch._C._distributed_c10d import ProcessGroup

from hangwatch.model.calls import LossReason
from hangwatch.model.operators import OPERATORS_BY_LIBRARY

from . import faults
from .callers import find_caller, inspect_thread
from .calls import CallReader, TorchOperator, iter_communicating_operators
from .dynamo import run_uncompiled
from .native.library import NativeLibrary, encode_plan, run_callback
from .python_kernel import (
    get_recorder,
    make_kernel,
    make_keyword_kernel,
    record_loss,
    use_recorder,
)
from .recorder import Recorder, clear_call_caches
from .streams import current_batch

if TYPE_CHECKING:
    from .checks.tensors import TensorArguments

# The kernels stay registered as long as this object exists.
_registry: KernelRegistry | None = None


def set_recorder(recorder: Recorder | None) -> None:
    """Directs the kernels of this process to ``recorder``, after registering them if necessary."""
    use_recorder(recorder)
    if recorder is None:
        clear_call_caches()
        return
    recorder.clear_caches()
    if recorder.groups.streams:  # calls that were made since it was detached are lost
        recorder.groups.mark_incomplete(LossReason.LATE)
    register_operators()
    if recorder.native is not None:
        recorder.native.start_recording()


def register_operators() -> None:
    """Registers kernels for operators that have none yet, which other libraries may have added."""
    global _registry
    recorder = get_recorder()
    if recorder is None:
        return
    if _registry is None:
        _registry = KernelRegistry(recorder.native, with_checks=recorder.checker is not None)
    _registry.register_new_operators()


def track_definitions() -> None:
    """Registers kernels for operators that Python defines from now on, as the module
    torch.distributed._symmetric_memory does when it is imported.
    """
    where = "registering kernels for new operators"
    faults.extend_method(torch.library.Library, "define", _register_defined, where)


def _register_defined(library: Any, _args: faults.Arguments, _: faults.KeywordArguments) -> None:
    if library.ns in OPERATORS_BY_LIBRARY:
        register_operators()


def track_batches() -> None:
    """Records when ``batch_isend_irecv`` begins a batch on a backend that executes it as a whole."""
    where = "recording the beginning of a batch"
    faults.extend_method(ProcessGroup, "_start_coalescing", _begin_batch, where)


def _begin_batch(_pg: Any, _args: faults.Arguments, _kwargs: faults.KeywordArguments) -> None:
    recorder = get_recorder()
    if recorder is not None and recorder.native is not None:
        recorder.native.begin_batch()
    else:
        current_batch.began_ns = monotonic_ns()


class KernelRegistry:
    """The kernels of one process."""

    def __init__(self, native: NativeLibrary | None, *, with_checks: bool) -> None:
        self._native = native
        self._with_checks = with_checks
        self._registered: set[str] = set()
        # No fragment of ours may outlive or shadow that of others: torch warns of an override only
        # where a kernel was registered before.
        names = {"hangwatch": "FRAGMENT"}
        if native is None:
            names = dict.fromkeys(OPERATORS_BY_LIBRARY, "IMPL")
        self._libraries: dict[str, Any] = {
            name: torch.library.Library(name, kind)  # type: ignore[no-untyped-call]
            for name, kind in names.items()
        }
        if native is not None:
            self._define("_site() -> int", find_site)
            self._define("_inspect_thread(int thread) -> int", inspect_thread_bits)

    def register_new_operators(self) -> None:
        """Raises RuntimeError if torch refuses a kernel."""
        for operator in iter_communicating_operators():
            name = operator.qualified_name
            if name in self._registered:
                continue
            self._registered.add(name)
            if self._native is not None:
                read_reduce_op = self._native.read_planned_reduce_op
                reader = CallReader(operator.spec, operator.schema, read_reduce_op)
                planner = name.replace("::", "_")
                arguments = str(operator.schema).partition("(")[2].rpartition("->")[0]
                self._define(f"{planner}({arguments}-> int[]", make_planner(reader))
                # Each size of a split is compared with a size on another rank.
                compares_all = operator.spec.split_args is not None
                self._native.register_operator(name, planner, compares_all_tensors=compares_all)
                continue
            reader = CallReader(operator.spec, operator.schema)
            if operator.takes_keywords:
                kernel = make_keyword_kernel(reader, operator.overload)
            else:
                kernel = make_kernel(
                    reader, operator.overload, self._find_checked(operator, reader)
                )
            library = self._libraries[operator.library]
            library.impl(operator.name, kernel, "BackendSelect", with_keyset=True)

    def _find_checked(self, operator: TorchOperator, reader: CallReader) -> TensorArguments | None:
        """The arguments whose data is examined; None if there are none."""
        if not self._with_checks or operator.spec.is_symmetric:
            return None
        from .checks.tensors import TensorArguments  # most jobs need not load it

        arguments = TensorArguments(reader, operator.schema)
        return arguments if arguments.input_index >= 0 else None

    def _define(self, schema: str, implementation: Any) -> None:
        """Defines an operator that the native recorder calls."""
        library = self._libraries["hangwatch"]
        library.define(schema)
        library.impl(schema.partition("(")[0], implementation, "BackendSelect")


def make_planner(reader: CallReader) -> Callable[..., list[int]]:
    """Makes the function that the native kernel calls with the arguments of a new kind of call."""

    def make_plan(recorder: Recorder, args: tuple[Any, ...], caller: FrameType) -> list[int]:
        details = reader.read_call(recorder, args, caller)
        if details is None:
            return encode_plan(None, 0)
        mode = reader.choose_native_mode(recorder, details[-1], args)
        rule = reader.find_failure_rule(recorder, args)
        return encode_plan((*details[:-1], mode), int(rule))

    def plan_call(*args: Any, **_: Any) -> list[int]:
        try:
            recorder = get_recorder()
            if recorder is not None:
                return run_uncompiled(make_plan, recorder, args, find_caller())
        except Exception as error:  # our error: the call continues
            record_loss(reader, args, error)
        return []

    return plan_call


def find_site() -> int:
    """The number of the site of the call that this thread makes; 0 if unknown."""
    recorder = get_recorder()
    if recorder is None:
        return 0
    where = "finding the line of a call"
    return run_callback(where, recorder.sites.find_site, sys._getframe()) or 0


def inspect_thread_bits(thread: int) -> int:
    """The results of `inspect_thread` as bits, the first one as bit 0."""
    found = run_callback("inspecting another thread", inspect_thread, thread)
    is_in_torch, is_independent = found or (False, False)
    return is_in_torch | is_independent << 1
