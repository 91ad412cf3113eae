"""A Python kernel for each ``c10d`` operator, at dispatch key BackendSelect.

Every collective passes there, whoever starts it: Python, DDP's reducer in C++, compiled code; and whichever backend runs it.
A kernel notes the call, hands it on unchanged, and notes what came back. Whatever goes wrong in the noting is ours alone.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
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
_CACHE = 4096  # different signatures of one operator


class Recorder:
    """What all kernels of a process share. ``on`` is False in a forked child and once the ring has failed."""

    def __init__(self, ring: RingWriter) -> None:
        self.ring = ring
        self.groups = Groups(ring)
        self.sites = CallSites(ring)
        self.on = True


_current: Recorder | None = None
_library: Any = None  # the registration lasts as long as this object


def use(recorder: Recorder | None) -> None:
    """Directs the kernels of this process, registering them first if need be."""
    global _current
    _current = recorder
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

    def c10d_kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        recorder = _current
        entered = None
        if recorder is not None and recorder.on:
            try:
                entered = enter(recorder, args, kwargs, frame_of(1))
            except Exception as error:  # ours: the call goes on
                faults.fault(f"recording {kernel.spec.op}", error)
        if entered is None:
            return redispatch(keyset & after, *args, **kwargs)
        try:
            result = redispatch(keyset & after, *args, **kwargs)
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
        self._names = names

        def at(name: str | None) -> int:
            return names.index(name) if name in names else -1

        self._group = at("process_group")
        self._tensors = at(spec.tensors or "tensor")
        self._reduce_op = at(spec.reduce_op) if _has_op() else -1
        self._root = at(spec.root)
        self._peer, self._tag = at(spec.peer or None), at("tag")
        self._splits = (at(spec.splits[0]), at(spec.splits[1])) if spec.splits else None
        self._async = max(at(name) for name in _ASYNC_NAMES)
        self._p2p = spec.sends or spec.receives
        self._known: dict[Any, tuple[int, int, int]] = {}

    def enter(
        self, recorder: Recorder, args: tuple[Any, ...], kwargs: dict[str, Any], caller: FrameType
    ) -> tuple[Sequence, int, int, bool] | None:
        """Notes the call: (sequence, record, flags, whether its Work may be asked); None where it is not watched."""
        if kwargs:  # never from torch's own callers
            args = self._positional(args, kwargs)
        track = recorder.groups.track(self._unbox_group(args[self._group]))
        peer, tag = -1, 0
        if self._p2p:
            peer = args[self._peer] if self._peer >= 0 else -1
            tag = args[self._tag]
            kind = SequenceKind.SEND if self.spec.sends else SequenceKind.RECV
            sequence = recorder.groups.channel(track, kind, peer, tag)
        else:
            sequence = track.collective
        if sequence is None:
            return None
        tensors = args[self._tensors]
        first = _first(tensors)
        signature, agree, size = self._signature(recorder, tensors, first, args)
        ask = not track.device_backend or first is None or first.is_cpu
        flags = 0
        # Trailing arguments that hold their default are left out: async_op is then True.
        if self._async >= 0 and ask:
            flags = Flag.ASYNC if len(args) <= self._async or args[self._async] else Flag.BLOCKING
        elif not self.spec.returns_work:
            flags = Flag.BLOCKING
        if not ask:
            sequence.unknown()
        index = sequence.enter(agree, signature, recorder.sites.find(caller), flags, size, peer, tag)
        return sequence, index, flags, ask

    def leave(self, entered: tuple[Sequence, int, int, bool], result: Any) -> None:
        sequence, index, _, ask = entered
        if not self.spec.returns_work:
            sequence.finish(index)
        elif ask:
            sequence.track(index, self._unbox_work(result[-1] if isinstance(result, tuple) else result))

    def fail(self, entered: tuple[Sequence, int, int, bool]) -> None:
        try:
            entered[0].fail(entered[1], entered[2])
        except Exception as error:  # ours: the user's exception is on its way
            faults.fault(f"recording the failure of {self.spec.op}", error)

    def _positional(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        rest = self._names[len(args) :]
        while rest and rest[-1] not in kwargs:
            rest.pop()
        return (*args, *(kwargs.get(name) for name in rest))

    def _signature(self, recorder: Recorder, tensors: Any, first: Any, args: tuple[Any, ...]) -> tuple[int, int, int]:
        """(its number in the ring, what must agree, bytes)."""
        reduce_op = args[self._reduce_op].op() if self._reduce_op >= 0 else None
        root = args[self._root] if self._root >= 0 else None
        splits = self._split_sizes(args) if self._splits else None
        if first is None:
            shapes: Any = None
        elif type(tensors) is list and (len(tensors) > 1 or type(tensors[0]) is list):
            shapes = _shapes(tensors)
        else:
            shapes = first.shape
        key = (shapes, first.dtype if first is not None else None, reduce_op, root, splits)
        known = self._known.get(key)
        if known is not None and recorder.ring.signature_fresh(known[0]):
            return known
        if len(self._known) >= _CACHE:
            self._known.clear()
        made = self._known[key] = self._new_signature(recorder, tensors, first, reduce_op, root, splits)
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
        assert self._splits is not None
        sent, received = args[self._splits[0]], args[self._splits[1]]
        if sent and type(sent[0]) is not int:  # lists of tensors
            return tuple(t.numel() for t in sent), tuple(t.numel() for t in received)
        if not sent and not received:
            return None
        unit = args[self._tensors][0].numel() if len(args[self._tensors]) else 1
        return tuple(n * unit for n in sent), tuple(n * unit for n in received)


def _has_op() -> bool:
    """Whether this torch lets a boxed reduce op be read: 2.6 does not."""
    import torch

    try:
        made = torch.classes.c10d.ReduceOp()
        return isinstance(made.op(), int)
    except (AttributeError, RuntimeError):
        return False


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
