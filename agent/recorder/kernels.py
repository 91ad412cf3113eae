"""A Python kernel for each ``c10d`` operator, at dispatch key BackendSelect.

Every collective passes there, whoever starts it: Python, DDP's reducer in C++, compiled code; and whichever backend runs it.
A kernel notes the call, hands it on unchanged, and notes what came back. Whatever goes wrong in the noting is ours alone.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from types import CodeType, FrameType, FunctionType
from typing import Any

from hangwatch.operators import LOCAL_OPERATORS, OPERATORS, Agree, Operator
from hangwatch.ring import Flag, encode_signature
from hangwatch.signature import with_agreement
from hangwatch.types import SequenceKind, Signature

from . import faults
from .callsite import CallSites
from .groups import Groups
from .sequence import Sequence
from .writer import RingWriter

_SHOWN = 8  # tensors of a list whose shapes are kept
_COMPARED = 32  # at either end of a longer list; its length always is
_ASYNC_NAMES = ("async_op", "asyncOp")  # torch 2.6 and 2.7 know only the latter, on few operators
_REDUCE_OPS = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "PREMUL_SUM")
_ASYNC, _BLOCKING = int(Flag.ASYNC), int(Flag.BLOCKING)
_CACHE = 4096  # different signatures of one operator


class Recorder:
    """What all kernels of a process share. ``on`` is False in a forked child and once the ring has failed."""

    def __init__(self, ring: RingWriter) -> None:
        self.ring = ring
        self.groups = Groups(ring)
        self.sites = CallSites(ring)
        self.on = True


_current: Recorder | None = None
_kernels: list[_Kernel] = []
_library: Any = None  # the registration lasts as long as this object


def use(recorder: Recorder | None) -> None:
    """Directs the kernels of this process, registering them first if need be."""
    global _current
    _current = recorder
    for kernel in _kernels:
        kernel.forget()
    if recorder is not None and _library is None:
        _register()


def _register() -> None:
    global _library
    import torch
    from torch._C import DispatchKey, _dispatch_keyset_full_after

    after = _dispatch_keyset_full_after(DispatchKey.BackendSelect)
    # No fragment of ours may outlive or shadow another's: torch warns of an override only where a kernel was there before.
    library = torch.library.Library("c10d", "IMPL")
    for name in sorted(_names()):
        if (spec := OPERATORS.get(name)) is None:
            if name not in LOCAL_OPERATORS:
                faults.note(f"this torch has an operator c10d::{name} that this hangwatch does not know: its calls are not watched")
            continue
        overload = getattr(torch.ops.c10d, name).default
        kernel = _Kernel(spec, overload._schema, _unboxers())
        _kernels.append(kernel)
        library.impl(name, _passing(kernel, overload, after), "BackendSelect", with_keyset=True)
    _library = library


def _names() -> set[str]:
    import torch

    return {schema.name[6:] for schema in torch._C._jit_get_all_schemas() if schema.name.startswith("c10d::")}


def _unboxers() -> tuple[Callable[[Any], Any], Callable[[Any], Any]]:
    from torch._C._distributed_c10d import ProcessGroup, Work

    return ProcessGroup.unbox, Work.unbox


def _passing(kernel: _Kernel, overload: Any, after: Any) -> Callable[..., Any]:
    """The function that torch calls. Only the user's own exceptions leave it."""
    redispatch = overload._handle.redispatch_boxed
    enter, leave, fail = kernel.enter, kernel.leave, kernel.fail
    frame_of = sys._getframe
    logged = _logged_callers()
    masked: dict[int, Any] = {}  # a key set's own operators cost more than this

    def c10d_kernel(keyset: Any, *args: Any) -> Any:
        below = masked.get(keyset.raw_repr())
        if below is None:
            below = masked[keyset.raw_repr()] = keyset & after
        recorder = _current
        entered = None
        if recorder is not None and recorder.on:
            try:
                caller = frame_of(1)
                entered = enter(recorder, args, caller, frame_of(3) if id(caller.f_code) in logged else caller)
            except Exception as error:  # ours: the call goes on
                faults.fault(f"recording {kernel.spec.op}", error)
        if entered is None:
            return redispatch(below, *args)
        try:
            result = redispatch(below, *args)
        except BaseException:
            fail(entered)
            raise
        try:
            leave(entered, result)
        except Exception as error:  # ours: the result stands
            faults.fault(f"recording the end of {kernel.spec.op}", error)
        return result

    return c10d_kernel


class _Kernel:
    """Reads one operator's arguments, by the positions that the schema of this torch gives them."""

    def __init__(self, spec: Operator, schema: Any, unboxers: tuple[Callable[[Any], Any], Callable[[Any], Any]]) -> None:
        self.spec = spec
        self._unbox_group, self._unbox_work = unboxers
        names = [argument.name for argument in schema.arguments]

        def at(name: str | None) -> int:
            return names.index(name) if name in names else -1

        self._group = at("process_group")
        self._tensors = at(spec.tensors or "tensor")
        self._reduce_op = at(spec.reduce_op)
        self._read_reduce_op = _reduce_op_reader()
        self._root = at(spec.root)
        self._peer, self._tag = at(spec.peer or None), at("tag")
        self._splits = (at(spec.splits[0]), at(spec.splits[1])) if spec.splits else None
        self._async = max(at(name) for name in _ASYNC_NAMES)
        self._p2p = spec.sends or spec.receives
        self._known: dict[Any, tuple[int, int, int]] = {}

    def enter(
        self, recorder: Recorder, args: tuple[Any, ...], caller: FrameType, behind: FrameType
    ) -> tuple[Sequence, int, int, bool] | None:
        """Notes the call: (sequence, record, flags, whether its Work may be asked); None where it is not watched.

        The search for its site begins at ``behind``.

        Trailing arguments that hold their default are left out of ``args``. Every call pays for every line here.
        """
        pg = self._unbox_group(args[self._group])
        track = recorder.groups.tracks.get(id(pg))
        if track is None or track.ref() is not pg:
            track = recorder.groups.open(pg)
        tensors = args[self._tensors]
        plain = type(tensors) is list and len(tensors) == 1 and type(tensors[0]) is not list
        first = tensors[0] if plain else _first(tensors)
        reduce_op = self._read_reduce_op(args[self._reduce_op], caller) if self._reduce_op >= 0 else None
        root = args[self._root] if self._root >= 0 else None
        if plain and self._splits is None:
            key = (first.shape, first.dtype, reduce_op, root)
        else:
            key = self._key(tensors, first, reduce_op, root, args)
        known = self._known.get(key)
        if known is None or not recorder.ring.signature_fresh(known[0]):
            known = self._learn(key, recorder, tensors, first, reduce_op, root, args)
        signature, agree, size = known
        if self._p2p:
            peer = args[self._peer] if self._peer >= 0 else -1
            tag = args[self._tag]
            sequence = recorder.groups.channel(track, SequenceKind.SEND if self.spec.sends else SequenceKind.RECV, peer, tag)
        else:
            peer, tag, sequence = -1, 0, track.collective
        if sequence is None:
            return None
        flags, ask = 0, not track.device_backend or first is None or first.is_cpu
        if not ask:
            sequence.unknown()
        elif self.spec.silent_on and track.runs_on(self.spec.silent_on):
            pass  # nothing will say when the thread is out of it again
        elif self._async >= 0:
            flags = _ASYNC if len(args) <= self._async or args[self._async] else _BLOCKING
        elif not self.spec.returns_work:
            flags = _BLOCKING
        site = recorder.sites.known(behind) or recorder.sites.find(behind)
        index = sequence.enter(agree, signature, site, flags, size, peer, tag)
        return sequence, index, flags, ask

    def leave(self, entered: tuple[Sequence, int, int, bool], result: Any) -> None:
        sequence, index, flags, ask = entered
        if not self.spec.returns_work:
            sequence.finish(index)
        elif ask:
            silent = not flags and self.spec.silent_on
            sequence.track(index, flags, None if silent else result[-1] if type(result) is tuple else result, self._unbox_work)

    def fail(self, entered: tuple[Sequence, int, int, bool]) -> None:
        try:
            entered[0].fail(entered[1], entered[2])
        except Exception as error:  # ours: the user's exception is on its way
            faults.fault(f"recording the failure of {self.spec.op}", error)

    def forget(self) -> None:
        """What was interned belongs to a ring that this process no longer writes."""
        self._known.clear()

    def _key(self, tensors: Any, first: Any, reduce_op: int | None, root: int | None, args: tuple[Any, ...]) -> Any:
        if first is None:
            return (None, None, reduce_op, root)
        shapes = _shapes(tensors) if type(tensors) is list else first.shape
        return (shapes, first.dtype, reduce_op, root, self._split_sizes(args))

    def _learn(
        self, key: Any, recorder: Recorder, tensors: Any, first: Any, reduce_op: int | None, root: int | None, args: tuple[Any, ...]
    ) -> tuple[int, int, int]:
        """(its number in the ring, the hash of what must agree, bytes) of a signature that is new or was forgotten."""
        if len(self._known) >= _CACHE:
            self._known.clear()
        made = self._known[key] = self._new_signature(recorder, tensors, first, reduce_op, root, self._split_sizes(args))
        return made

    def _new_signature(
        self, recorder: Recorder, tensors: Any, first: Any, reduce_op: int | None, root: int | None, splits: Any
    ) -> tuple[int, int, int]:
        flat = _flat(tensors) if first is not None and self.spec.tensors else []
        numels = (len(flat), *(t.numel() for t in _ends(flat)))
        shapes = [tuple(t.shape) for t in flat[:_SHOWN]]
        signature = Signature(
            op=self.spec.op,
            shapes=(*shapes, ()) if len(flat) > _SHOWN else tuple(shapes),
            dtype=str(first.dtype).removeprefix("torch.") if flat else None,
            reduce_op=_REDUCE_OPS[reduce_op].lower() if reduce_op is not None and reduce_op < len(_REDUCE_OPS) else None,
            root=root,
            splits=splits,
            numel=sum(numels[1:]),
        )
        agree = self.spec.agree if flat else self.spec.agree & ~(Agree.DTYPE | Agree.SHAPE)
        signature = with_agreement(signature, agree, numels)
        return recorder.ring.signature(encode_signature(signature)), signature.agree, sum(t.nbytes for t in _ends(flat))

    def _split_sizes(self, args: tuple[Any, ...]) -> Any:
        """(sent, received) per member, in elements; None where torch splits evenly."""
        if self._splits is None or _first(args[self._tensors]) is None:
            return None
        sent, received = args[self._splits[0]], args[self._splits[1]]
        if sent and type(sent[0]) is not int:  # lists of tensors
            return tuple(t.numel() for t in sent), tuple(t.numel() for t in received)
        if not sent and not received:
            return None
        unit = args[self._tensors][0].numel() if len(args[self._tensors]) else 1
        return tuple(n * unit for n in sent), tuple(n * unit for n in received)


@functools.cache
def _logged_callers() -> dict[int, CodeType]:
    """By id: the code of torch.distributed's functions that run inside exactly one wrapper of torch's, its logger's."""
    from torch.distributed import distributed_c10d as c10d

    functions = [f for f in vars(c10d).values() if type(f) is FunctionType]  # isinstance would wake a deprecated alias that warns
    wrapped = [f.__wrapped__ for f in functions if type(getattr(f, "__wrapped__", None)) is FunctionType]
    codes = [f.__code__ for f in wrapped if not hasattr(f, "__wrapped__")]
    return {id(code): code for code in codes}


@functools.cache
def _reduce_op_reader() -> Callable[[Any, FrameType], int | None]:
    """Reads a boxed reduce op: (it, the calling frame) to its number; None where this torch offers no way (2.6, from C++).

    Asking the boxed object takes 1.7 microseconds and torch 2.6 cannot, so where the caller is one of torch.distributed's own
    functions its argument ``op`` is read instead, in a tenth of that.
    """
    import torch
    from torch.distributed import distributed_c10d as c10d

    names = ("all_reduce", "all_reduce_coalesced", "reduce", "reduce_scatter", "reduce_scatter_tensor")
    callers = {id(code): code for name in names if (code := inspect.unwrap(getattr(c10d, name)).__code__)}
    numbers = {id(member): int(member) for member in c10d.ReduceOp.RedOpType.__members__.values()}
    asked = hasattr(torch.classes.c10d.ReduceOp(), "op")

    def read(boxed: Any, caller: FrameType) -> int | None:
        if id(caller.f_code) in callers:
            number = numbers.get(id(caller.f_locals["op"]))
            if number is not None:
                return number
        return int(boxed.op()) if asked else None

    return read


def _first(tensors: Any) -> Any:
    while type(tensors) is list:
        if not tensors:
            return None
        tensors = tensors[0]
    return tensors


def _flat(tensors: Any) -> list[Any]:
    if type(tensors) is not list:
        return [tensors]
    return [t for part in tensors for t in _flat(part)]


def _ends(flat: list[Any]) -> list[Any]:
    return flat if len(flat) <= 2 * _COMPARED else flat[:_COMPARED] + flat[-_COMPARED:]


def _shapes(tensors: list[Any]) -> tuple[Any, ...]:
    flat = _flat(tensors)
    return (len(flat), *(t.shape for t in _ends(flat)))
