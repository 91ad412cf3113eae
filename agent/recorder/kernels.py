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
from .call_reader import CallReader, logged_callers, quick_callers
from .callsite import CallSites
from .groups import Groups
from .native.library import Native, NativeSequence, planned
from .other_threads import meanwhile
from .safe_import import BUILTINS
from .streams import Entered, Sequence, leave
from .writer import RingWriter

if TYPE_CHECKING:
    from .checks.inspection import Look


__builtins__ = BUILTINS  # type: ignore[assignment]  # a module in __main__, a dict of its names elsewhere


class Recorder:
    """What all kernels of a process share."""

    def __init__(
        self, ring: RingWriter, native: Native | None = None, checks: Look | None = None
    ) -> None:
        """``native``: what records in Python's place; ``checks``: what examines beside recording,
        which Python alone can.
        """
        self.ring = ring
        self.checks = checks
        self.native = native
        ring.on_rollover(_forget_interned)
        if native is None:
            unbox = _unboxers()[1]
            self.groups = Groups(
                ring, lambda uid, slot: Sequence(ring, uid, slot, unbox), _forget_interned
            )
            self.sites = CallSites(ring)
        else:
            native.attach(ring)
            self.groups = Groups(
                ring, lambda uid, slot: NativeSequence(native, ring, uid, slot), _forget_interned
            )
            self.sites = CallSites(ring, native.judge)

    def settle(self) -> int:
        """Brings the sequences in the ring up to date; gives the number of records that they then
        tell of.
        """
        if self.native is not None:
            return self.native.settle()
        now, written = monotonic_ns(), self.ring.written
        for sequence in self.groups.sequences:
            sequence.settle(now)
        return written


_current: Recorder | None = None
_readers: list[CallReader] = []
_library: Any = None  # the registration lasts as long as this object


def use(recorder: Recorder | None) -> None:
    """Directs the kernels of this process, registering them first if need be."""
    global _current
    _current = recorder
    _forget_interned()
    if recorder is not None and _library is None:
        _register(recorder.native, recorder.checks is not None)
    if recorder is not None and recorder.native is not None:
        recorder.native.use()


def current() -> Recorder | None:
    """Where the calls of this process go."""
    return _current


def unbox_work(boxed: Any) -> Any:
    """The Work of a call; None where the backend gave none."""
    return None if boxed is None else _unboxers()[1](boxed)


def _forget_interned() -> None:
    for reader in _readers:
        reader.forget()
    if _current is not None and _current.native is not None:
        _current.native.forget()


def _register(native: Native | None, checks: bool) -> None:
    global _library
    import torch
    from torch._C import DispatchKey, _dispatch_keyset_full_after

    passing = _passing
    if checks:
        from .checks.kernel import passing

    after = _dispatch_keyset_full_after(DispatchKey.BackendSelect)
    # No fragment of ours may outlive or shadow another's: torch warns of an override only where a
    # kernel was there before.
    library: Any = torch.library.Library(
        *(("c10d", "IMPL") if native is None else ("hangwatch", "FRAGMENT"))
    )  # type: ignore[no-untyped-call]
    for name in sorted(_names()):
        if (spec := OPERATORS.get(name)) is None:
            if name not in LOCAL_OPERATORS:
                faults.note(
                    f"this torch has an operator c10d::{name} that this hangwatch does not know:"
                    " its calls are not watched"
                )
            continue
        overload = getattr(torch.ops.c10d, name).default
        reader = CallReader(spec, overload._schema, _unboxers()[0])
        _readers.append(reader)
        if native is None:
            library.impl(name, passing(reader, overload, after), "BackendSelect", with_keyset=True)
        else:
            library.define(
                f"{str(overload._schema).partition('::')[2].rpartition('->')[0]}-> int[]"
            )
            library.impl(name, _planning(reader), "BackendSelect")
            native.watch(name)
    if native is not None:
        for schema, answer in (
            ("_site() -> int", _site),
            ("_meanwhile(int thread) -> int", _meanwhile),
        ):
            library.define(schema)
            library.impl(schema.partition("(")[0], answer, "BackendSelect")
    _library = library


def _names() -> set[str]:
    import torch

    return {
        schema.name[6:]
        for schema in torch._C._jit_get_all_schemas()
        if schema.name.startswith("c10d::")
    }


def _unboxers() -> tuple[Callable[[Any], Any], Callable[[Any], Any]]:
    from torch._C._distributed_c10d import ProcessGroup, Work

    return ProcessGroup.unbox, Work.unbox


def _planning(reader: CallReader) -> Callable[..., list[int]]:
    """The function that the native kernel calls with the arguments of a call of a new kind."""

    def plan(*args: Any) -> list[int]:
        try:
            if _current is not None:
                own = sys._getframe()
                read = reader.read(
                    _current, args, own.f_back or own
                )  # in a thread of C++'s nobody of Python's called
                return planned(read, timed=reader.timed(_current, args, os.environ))
        except Exception as error:  # ours: the call goes on
            faults.fault(f"recording {reader.spec.op}", error)
        return []

    return plan


def _site() -> int:
    """Where the call comes from that this thread makes."""
    try:
        return _current.sites.find(sys._getframe()) if _current is not None else 0
    except Exception as error:  # ours: the call goes on
        faults.fault("finding the line of a call", error)
        return 0


def _meanwhile(thread: int) -> int:
    """What another thread does, as bits."""
    try:
        calls, free = meanwhile(thread)
    except Exception as error:  # ours: the call goes on
        faults.fault("looking at another thread", error)
        return 0
    return calls | free << 1


def behind(caller: FrameType) -> FrameType:
    """Who called the function that torch has wrapped to log its calls."""
    wrapper = caller.f_back
    return (wrapper and wrapper.f_back) or caller


def failed(op: str, entered: Entered) -> None:
    """Notes that the call raised."""
    try:
        entered[0].fail(entered)
    except Exception as error:  # ours: the user's exception is on its way
        faults.fault(f"recording the failure of {op}", error)


def _passing(reader: CallReader, overload: Any, after: Any) -> Callable[..., Any]:
    """The function that torch calls. Only the user's own exceptions leave it. Every call of every
    rank pays for each line.
    """
    from torch._C import DispatchKeySet

    redispatch = overload._handle.redispatch_boxed
    frame_of = sys._getframe
    logged, quick = logged_callers(), quick_callers()
    plans, tensors_at, root_at, reduces = (
        reader.plans,
        reader.tensors_at,
        reader.root_at,
        reader.reduce_op_at >= 0,
    )
    alone = len(overload._schema.returns) == 1  # the Work comes back with no tensors
    # A key set's own operators cost more than a look-up, its bound methods more than the function
    # behind them.
    bits_of: Callable[[Any], int] = DispatchKeySet.raw_repr.__func__  # type: ignore[attr-defined]  # pybind11's methods have it
    masked: dict[int, tuple[Any]] = {}

    def enter(recorder: Recorder, args: tuple[Any, ...]) -> Entered | None:
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
            return reader.enter(
                recorder, args, caller, behind(caller) if code in logged else caller
            )
        try:
            user = frame_of(4)
        except ValueError:  # a thread that began in torch's own function
            return reader.enter(recorder, args, caller, caller)
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
        return sequence.enter(agree, described, blocked, end)

    def c10d_kernel(keyset: Any, *args: Any) -> Any:
        try:
            below = masked[bits_of(keyset)]
        except KeyError:
            below = masked[bits_of(keyset)] = (keyset & after,)
        entered = None
        if _current is not None:
            try:
                entered = enter(_current, args)
            except Exception as error:  # ours: the call goes on
                faults.fault(f"recording {reader.spec.op}", error)
        if entered is None:
            return redispatch(*(below + args))  # (*below, *args) would go through a list
        try:
            result = redispatch(*(below + args))
        except BaseException:
            failed(reader.spec.op, entered)
            raise
        try:
            if entered[5]:
                leave(entered)
            else:  # End.WORK, the common one
                entered[0].works.append((entered, result if alone else result[-1]))
        except Exception as error:  # ours: the result stands
            faults.fault(f"recording the end of {reader.spec.op}", error)
        return result

    return c10d_kernel
