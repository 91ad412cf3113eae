"""Reads one ``c10d`` call: which sequence it belongs to, what it is about, where it comes from, and
how it ends.

Every call of every rank pays for what is here, so it is written for speed: what is known is looked
up, not computed.
"""

from __future__ import annotations

import functools
import inspect
from _thread import get_ident
from collections.abc import Callable, Mapping
from types import CodeType, FrameType, FunctionType
from typing import TYPE_CHECKING, Any, Protocol

from hangwatch.model.calls import Signature, StreamKind
from hangwatch.model.operator_spec import MustMatch, OperatorSpec, P2pRole
from hangwatch.model.signatures import encode_signature, with_agreement_hash
from hangwatch.ring.layout import RecordFlag

from .streams import CompletionMode, EnteredCall, StreamRecorder

if TYPE_CHECKING:
    from .callsite import CallSites
    from .groups import GroupRegistry, GroupTrack
    from .writer import RingWriter


class RecorderState(Protocol):
    """What reading a call needs of the process's recorder."""

    ring: RingWriter
    groups: GroupRegistry
    sites: CallSites


_MAX_SHAPES = 8  # tensors of a list whose shapes are kept
_COMPARED_PER_END = 32  # at either end of a longer list; its length always is
_ASYNC_NAMES = ("async_op", "asyncOp")  # torch 2.6 and 2.7 know only the latter, on few operators
_REDUCE_OPS = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "PREMUL_SUM")
_ASYNC, _BLOCKING = int(RecordFlag.ASYNC), int(RecordFlag.BLOCKING)
_MAX_CACHED = 4096  # different signatures of one operator

# (the sequence, the four arguments of `Sequence.enter`, what must live on for the ids in its key to
# stay unique)
CallPlan = tuple[StreamRecorder, int, bytes, int, int, tuple[CodeType, Any]]
# (the sequence, the hash of what must agree, the signature's number, bytes, peer, tag, flags,
# whether its thread waits, `End`)
CallDetails = tuple[StreamRecorder, int, int, int, int, int, int, bool, int]


class CallReader:
    """Reads one operator's arguments, by the positions that the schema of this torch gives them."""

    def __init__(self, spec: OperatorSpec, schema: Any, unbox_group: Callable[[Any], Any]) -> None:
        self.spec = spec
        self._unbox_group = unbox_group
        names = [argument.name for argument in schema.arguments]

        def index_of(name: str | None) -> int:
            return names.index(name) if name in names else -1

        self._group_index = index_of("process_group")
        self.tensors_index = index_of(spec.tensors_arg or "tensor")
        self.reduce_op_index = index_of(spec.reduce_op_arg)
        self._read_reduce_op = _make_reduce_op_reader()
        self.root_index = index_of(spec.root_arg)
        self._peer_index, self._tag_index = index_of(spec.peer_arg), index_of("tag")
        self._split_indices = (
            (index_of(spec.split_args[0]), index_of(spec.split_args[1]))
            if spec.split_args
            else None
        )
        self._output_index = index_of("output")
        self._async_index = max(index_of(name) for name in _ASYNC_NAMES)
        self._is_p2p = spec.is_p2p
        self._p2p_kind = StreamKind.SEND if spec.p2p_role is P2pRole.SEND else StreamKind.RECV
        self._signatures: dict[Any, tuple[int, int, int]] = {}
        # What `enter` found for a call, for when it is made again
        self.plans: dict[Any, CallPlan] = {}
        self._last_enter_args: tuple[int, bytes, int, int] | None = None

    def enter_call(
        self,
        recorder: RecorderState,
        args: tuple[Any, ...],
        caller: FrameType,
        site_frame: FrameType,
    ) -> EnteredCall | None:
        """Notes the call; None where it is not watched.

        The search for its site begins at ``behind``.

        Trailing arguments that hold their default are left out of ``args``. Every call pays for
        every line here.
        """
        read = self.read_call(recorder, args, caller)
        if read is None:
            return None
        sequence, agree, signature, size, peer, tag, flags, blocks, end = read
        site = recorder.sites.get_cached_site(site_frame) or recorder.sites.find_site(site_frame)
        blocked = get_ident() if blocks else 0
        described = sequence.pack_record_body(signature, site, flags, size, peer, tag)
        self._last_enter_args = (agree, described, blocked, end)
        return sequence.enter_call(agree, described, blocked, end)

    def read_call(
        self, recorder: RecorderState, args: tuple[Any, ...], caller: FrameType
    ) -> CallDetails | None:
        """What the call is; None where it is not watched."""
        pg = self._unbox_group(args[self._group_index])
        track = recorder.groups.tracks.get(id(pg))
        if track is None or track.group_ref() is not pg:
            track = recorder.groups.open_group(pg)
        tensors = args[self.tensors_index]
        plain = type(tensors) is list and len(tensors) == 1 and type(tensors[0]) is not list
        first = tensors[0] if plain else _find_first_tensor(tensors)
        reduce_op = (
            self._read_reduce_op(args[self.reduce_op_index], caller)
            if self.reduce_op_index >= 0
            else None
        )
        root = args[self.root_index] if self.root_index >= 0 else None
        if plain and self._split_indices is None:
            key = (first.shape, first.dtype, reduce_op, root)
        else:
            key = self._make_key(tensors, first, reduce_op, root, args)
        known = self._signatures.get(key)
        if known is None or not recorder.ring.is_signature_fresh(known[0]):
            known = self._add_signature(key, recorder, tensors, first, reduce_op, root, args)
        signature, agree, size = known
        if self._is_p2p:
            peer = args[self._peer_index] if self._peer_index >= 0 else -1
            tag = args[self._tag_index]
            sequence = recorder.groups.get_channel(track, self._p2p_kind, peer, tag)
        else:
            peer, tag, sequence = -1, 0, track.collective_stream
        if sequence is None:
            return None
        flags, blocks, end = (
            0,
            False,
            CompletionMode.WORK if self.spec.returns_work else CompletionMode.RETURN,
        )
        if track.has_device_backend and first is not None and not first.is_cpu:
            sequence.mark_completion_unknown()
            end = CompletionMode.UNOBSERVABLE
        elif self.spec.silent_backends and track.runs_on(self.spec.silent_backends):
            end = CompletionMode.NEXT  # nothing will say when the thread is out of it again
        elif self._async_index >= 0:
            flags = (
                _ASYNC if len(args) <= self._async_index or args[self._async_index] else _BLOCKING
            )
            blocks = flags == _BLOCKING
        elif not self.spec.returns_work:
            flags = _BLOCKING
        return sequence, agree, signature, size, peer, tag, flags, blocks, int(end)

    def enter_planned(
        self,
        recorder: RecorderState,
        args: tuple[Any, ...],
        caller: FrameType,
        site_frame: FrameType,
        key: Any,
        kept_alive: Any,
    ) -> EnteredCall | None:
        """`enter`, and plans the next call that has this ``key``; ``held`` must live on for the ids
        in it to stay unique.
        """
        entered = self.enter_call(recorder, args, caller, site_frame)
        pg = caller.f_locals["group"]
        track = recorder.groups.tracks.get(id(pg))
        plain = track is not None and not track.has_device_backend and len(self.plans) < _MAX_CACHED
        if (
            plain
            and track is not None
            and entered is not None
            and self._last_enter_args is not None
            and recorder.sites.get_cached_site(site_frame)
        ):
            self.plans[key] = (entered[0], *self._last_enter_args, (site_frame.f_code, kept_alive))
        return entered

    def find_track(self, recorder: RecorderState, args: tuple[Any, ...]) -> GroupTrack | None:
        """The group of a call that was entered."""
        return recorder.groups.tracks.get(id(self._unbox_group(args[self._group_index])))

    def read_reduce_op(self, args: tuple[Any, ...], caller: FrameType) -> int | None:
        """The number of the reduce op; None where this torch offers no way to read it."""
        return self._read_reduce_op(args[self.reduce_op_index], caller)

    def can_time_completion(
        self, recorder: RecorderState, args: tuple[Any, ...], env: Mapping[str, str]
    ) -> bool:
        """Whether its Work can be had to tell the moment when it is complete: a collective's on
        gloo; with HANGWATCH_TIMING=1 that of any backend which computes on the CPU, with
        HANGWATCH_TIMING=0 nobody's.
        """
        track = self.find_track(recorder, args)
        wanted = env.get("HANGWATCH_TIMING")
        return (
            track is not None
            and not self._is_p2p
            and wanted != "0"
            and (wanted == "1" or track.runs_on(("gloo",)))
        )

    def clear_caches(self) -> None:
        """What was interned is about to be overwritten, or belongs to another ring, or to a group
        that is gone.
        """
        self._signatures.clear()
        self.plans.clear()

    def _make_key(
        self,
        tensors: Any,
        first: Any,
        reduce_op: int | None,
        root: int | None,
        args: tuple[Any, ...],
    ) -> Any:
        if first is None:
            return (None, None, reduce_op, root)
        shapes = _list_shapes(tensors) if type(tensors) is list else first.shape
        return (shapes, first.dtype, reduce_op, root, self._read_split_sizes(args))

    def _add_signature(
        self,
        key: Any,
        recorder: RecorderState,
        tensors: Any,
        first: Any,
        reduce_op: int | None,
        root: int | None,
        args: tuple[Any, ...],
    ) -> tuple[int, int, int]:
        """(its number in the ring, the hash of what must agree, bytes) of a signature that is new
        or was forgotten.
        """
        if len(self._signatures) >= _MAX_CACHED:
            self._signatures.clear()
        made = self._signatures[key] = self._intern_signature(
            recorder, tensors, first, reduce_op, root, self._read_split_sizes(args)
        )
        return made

    def _intern_signature(
        self,
        recorder: RecorderState,
        tensors: Any,
        first: Any,
        reduce_op: int | None,
        root: int | None,
        splits: Any,
    ) -> tuple[int, int, int]:
        flat = _flatten_tensors(tensors) if first is not None and self.spec.tensors_arg else []
        numels = (len(flat), *(t.numel() for t in _select_ends(flat)))
        shapes = [tuple(t.shape) for t in flat[:_MAX_SHAPES]]
        signature = Signature(
            op=self.spec.op,
            shapes=(*shapes, ()) if len(flat) > _MAX_SHAPES else tuple(shapes),
            dtype=str(first.dtype).removeprefix("torch.") if flat else None,
            reduce_op=(
                _REDUCE_OPS[reduce_op].lower()
                if reduce_op is not None and reduce_op < len(_REDUCE_OPS)
                else None
            ),
            root=root,
            splits=splits,
            numel=sum(numels[1:]),
        )
        agree = (
            self.spec.must_match
            if flat
            else self.spec.must_match & ~(MustMatch.DTYPE | MustMatch.SHAPE)
        )
        signature = with_agreement_hash(signature, agree, numels)
        return (
            recorder.ring.intern_signature(encode_signature(signature)),
            signature.agree,
            sum(t.nbytes for t in flat),
        )

    def _read_split_sizes(self, args: tuple[Any, ...]) -> Any:
        """(sent, received) per member, in elements; a single number where torch splits evenly."""
        if self._split_indices is None or _find_first_tensor(args[self.tensors_index]) is None:
            return None
        sent, received = args[self._split_indices[0]], args[self._split_indices[1]]
        if sent and type(sent[0]) is not int:  # lists of tensors
            return tuple(t.numel() for t in sent), tuple(t.numel() for t in received)
        return _count_split_elements(args[self.tensors_index], sent), _count_split_elements(
            args[self._output_index], received
        )


@functools.cache
def find_quick_callers() -> dict[int, CodeType]:
    """By id: the code of torch.distributed's functions that call with one tensor and have their
    arguments in ``group`` and ``op``.
    """
    from torch.distributed import distributed_c10d as c10d

    names = ("all_reduce", "broadcast", "reduce", "all_gather_into_tensor", "reduce_scatter_tensor")
    codes: list[CodeType] = [inspect.unwrap(getattr(c10d, name)).__code__ for name in names]
    return {
        id(code): code
        for code in codes
        if id(code) in find_logged_callers() and "group" in code.co_varnames
    }


@functools.cache
def find_logged_callers() -> dict[int, CodeType]:
    """By id: the code of torch.distributed's functions that run inside exactly one wrapper of
    torch's, its logger's.
    """
    from torch.distributed import distributed_c10d as c10d

    functions = [
        f for f in vars(c10d).values() if type(f) is FunctionType
    ]  # isinstance would wake a deprecated alias that warns
    wrapped = [
        inner for f in functions if type(inner := getattr(f, "__wrapped__", None)) is FunctionType
    ]
    codes = [f.__code__ for f in wrapped if not hasattr(f, "__wrapped__")]
    return {id(code): code for code in codes}


@functools.cache
def _make_reduce_op_reader() -> Callable[[Any, FrameType], int | None]:
    """Reads a boxed reduce op: (it, the calling frame) to its number; None where this torch offers
    no way (2.6, from C++).

    Asking the boxed object takes 1.7 microseconds and torch 2.6 cannot, so where the caller is one
    of torch.distributed's own functions its argument ``op`` is read instead, in a tenth of that.
    """
    import torch
    from torch.distributed import distributed_c10d as c10d

    names = (
        "all_reduce",
        "all_reduce_coalesced",
        "reduce",
        "reduce_scatter",
        "reduce_scatter_tensor",
    )
    codes: list[CodeType] = [inspect.unwrap(getattr(c10d, name)).__code__ for name in names]
    callers = {id(code): code for code in codes}
    numbers: dict[int, int] = {
        id(member): member.value for member in c10d.ReduceOp.RedOpType.__members__.values()
    }
    asked = hasattr(torch.classes.c10d.ReduceOp(), "op")

    def read_number(boxed: Any, caller: FrameType) -> int | None:
        if id(caller.f_code) in callers:
            number = numbers.get(id(caller.f_locals["op"]))
            if number is not None:
                return number
        return int(boxed.op()) if asked else None

    return read_number


def _count_split_elements(tensor: Any, rows: list[int]) -> tuple[int, ...]:
    if not rows:
        return (tensor.numel(),)
    unit = tensor.numel() // max(1, len(tensor))
    return tuple(n * unit for n in rows)


def _find_first_tensor(tensors: Any) -> Any:
    while type(tensors) is list:
        if not tensors:
            return None
        tensors = tensors[0]
    return tensors


def _flatten_tensors(tensors: Any) -> list[Any]:
    if type(tensors) is not list:
        return [tensors]
    return [t for part in tensors for t in _flatten_tensors(part)]


def _select_ends(flat: list[Any]) -> list[Any]:
    return (
        flat
        if len(flat) <= 2 * _COMPARED_PER_END
        else flat[:_COMPARED_PER_END] + flat[-_COMPARED_PER_END:]
    )


def _list_shapes(tensors: list[Any]) -> tuple[Any, ...]:
    flat = _flatten_tensors(tensors)
    return (len(flat), *(t.shape for t in _select_ends(flat)))
