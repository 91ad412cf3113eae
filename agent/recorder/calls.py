"""Reads one call of a ``c10d`` operator, or of one on symmetric memory: its stream, its signature, its
site, and how its completion is found.

Every call of every rank pays for this code, so known values are looked up instead of computed.

A call that raises an exception before it communicates is no call to the peers: the script may catch
the exception and make the call again. gloo and NCCL check the arguments before they queue a
call, and report later failures when the Work is waited for, or by an exception of their own type.
"""

from __future__ import annotations

import enum
import os
from _thread import get_ident
from collections.abc import Iterator
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any

import torch
from torch._C._distributed_c10d import (
    DebugLevel,
    ProcessGroup,
    _resolve_process_group,
    get_debug_level,
)
from torch.distributed import DistError

from hangwatch.model.calls import Signature, StreamKind, encode_signature, with_agreement_hash
from hangwatch.model.groups import REPORTING_BACKENDS
from hangwatch.model.operators import (
    LOCAL_OPERATORS,
    OPERATORS_BY_LIBRARY,
    MustMatch,
    OperatorSpec,
    P2pRole,
)
from hangwatch.ring.layout import RecordFlag

from . import faults
from .callers import ReduceOpReader, find_message_flag, find_named_reduce_ops, make_reduce_op_reader
from .faults import Arguments
from .groups import GroupTrack
from .recorder import MAX_CACHED_CALLS, Recorder, call_caches
from .streams import CallDetails, CompletionMode, EnteredCall, StreamRecorder
from .writer import RingWriter

_MAX_SHAPES = 8  # tensors of a list whose shapes are kept
_COMPARED_PER_END = 32  # tensors at either end of a longer list; its length is always compared
_REDUCE_OPS = ("sum", "avg", "product", "min", "max", "band", "bor", "bxor", "premul_sum")
_unbox_group = ProcessGroup.unbox
_GROUP_TYPE = "c10d.ProcessGroup"
_WORK_TYPE = "c10d.Work"
_REDUCE_OP_TYPE = "c10d.ReduceOp"
_MAX_REDUCE_OP_CHARS = 32  # of one that is named
_CHECKING_BACKENDS = ("gloo", "nccl")
# The exceptions that torch raises for wrong arguments, whichever backend is used.
_ARGUMENT_ERRORS = (TypeError, ValueError, IndexError, NotImplementedError)
# Parts of the messages of RuntimeErrors that are no check of an argument: gloo's own errors, which
# name the line that raised them, and errors of a device, which an earlier kernel may have caused.
_OTHER_MESSAGES = ("/gloo/", "CUDA error")

# (stream, arguments of its `enter_call`: agreement hash, record body, blocked thread, completion
# mode; the code whose id is in the plan's key, and unique as long as the code exists)
CallPlan = tuple[StreamRecorder, int, bytes, int, int, CodeType]
# (its number in the ring, the hash of what must agree, the size in bytes)
InternedSignature = tuple[int, int, int]


class CallReader:
    """Reads one operator's arguments, at the positions that the schema of this torch gives them."""

    def __init__(
        self, spec: OperatorSpec, schema: Any, read_reduce_op: ReduceOpReader | None = None
    ) -> None:
        self.spec = spec
        indices = {}
        tensor_indices = []
        for index, argument in enumerate(schema.arguments):
            indices[argument.name] = index
            if "Tensor" in str(argument.type):
                tensor_indices.append(index)
        self._is_symmetric = spec.is_symmetric
        self._group_index = (
            indices.get("group_name", -1) if spec.is_symmetric else _find_type(schema, _GROUP_TYPE)
        )
        self.tensors_index = indices.get(spec.tensors_arg or "tensor", -1)
        self._tensor_indices = tensor_indices if spec.is_generic else None
        self.reduce_op_index = _find_type(schema, _REDUCE_OP_TYPE)
        self._read_reduce_op = read_reduce_op or make_reduce_op_reader()
        # Operators on symmetric memory name the reduce op, and some have a default for it.
        self._reduce_op_name_index = indices.get("reduce_op", indices.get("red_op", -1))
        self.root_index = indices.get("root_rank", indices.get("root", -1))
        is_send = spec.p2p_role == "send"
        # A receive from any source has no peer.
        self._peer_index = indices.get("dst" if is_send else "src", -1)
        self._tag_index = indices.get("tag", -1)
        self._split_indices: tuple[int, int] | None = None
        if spec.split_args:
            sent_arg, received_arg = spec.split_args
            self._split_indices = indices.get(sent_arg, -1), indices.get(received_arg, -1)
        self._output_index = indices.get("output", -1)
        # torch 2.6 and 2.7 know only the second name, on few operators.
        self._async_index = indices.get("async_op", indices.get("asyncOp", -1))
        self.is_p2p = spec.is_p2p
        self._p2p_kind = StreamKind.SEND if is_send else StreamKind.RECV
        # The keys hold everything that is in a signature.
        self._interned_signatures: dict[Any, InternedSignature] = {}
        self.plans: dict[Any, CallPlan] = {}  # one for each kind of call that was entered before
        call_caches.extend((self._interned_signatures, self.plans))

    def enter_call(
        self,
        recorder: Recorder,
        args: Arguments,
        caller: FrameType,
        site_frame: FrameType,
        plan_key: Any = None,
        reduce_op: Any = None,
    ) -> EnteredCall | None:
        """Records the call, if it is watched, and plans the next calls with this ``plan_key``.

        The search for its site begins at ``site_frame``. Trailing arguments with their default
        value are absent from ``args``. The key has the id of the Python object ``reduce_op``.
        """
        details = self.read_call(recorder, args, caller)
        if details is None:
            return None
        stream, agree, signature, size, peer, tag, flags, blocks, mode = details
        site = recorder.sites.get_cached_site(site_frame) or recorder.sites.find_site(site_frame)
        record_body = stream.pack_record_body(signature, site, flags, size, peer, tag)
        blocked_thread = get_ident() if blocks else 0
        entered = stream.enter_call(agree, record_body, blocked_thread, mode)
        if plan_key is not None and self._is_plannable(recorder, caller, site_frame, reduce_op):
            plan = stream, agree, record_body, blocked_thread, mode, site_frame.f_code
            self.plans[plan_key] = plan
        return entered

    def _is_plannable(
        self, recorder: Recorder, caller: FrameType, site_frame: FrameType, reduce_op: Any
    ) -> bool:
        track = recorder.groups.tracks.get(id(caller.f_locals["group"]))
        if track is None or track.has_device_backend or len(self.plans) >= MAX_CACHED_CALLS:
            return False
        # The id of another reduce op may be reused.
        if reduce_op is not None and id(reduce_op) not in find_named_reduce_ops():
            return False
        return bool(recorder.sites.get_cached_site(site_frame))

    def read_call(
        self, recorder: Recorder, args: Arguments, caller: FrameType
    ) -> CallDetails | None:
        """The details of the call; None if it is not watched."""
        track = self.open_track(recorder, args)
        if track is None:
            return None
        if self._tensor_indices is None:
            tensors = args[self.tensors_index]
        else:
            given = [args[index] for index in self._tensor_indices if index < len(args)]
            tensors = [tensor for tensor in flatten_tensors(given) if tensor is not None]
        is_single = type(tensors) is list and len(tensors) == 1 and type(tensors[0]) is not list
        first = tensors[0] if is_single else find_first_tensor(tensors)
        reduce_op: int | str | None = None
        if self.reduce_op_index >= 0:
            reduce_op = self._read_reduce_op(args[self.reduce_op_index], caller)
        elif self._is_symmetric:
            reduce_op = self._read_reduce_op_name(args)
        root = args[self.root_index] if self.root_index >= 0 else None
        if is_single and self._split_indices is None:
            key = (first.shape, first.dtype, reduce_op, root)
        else:
            key = self._make_key(tensors, first, reduce_op, root, args)
        interned = self._interned_signatures.get(key)
        if interned is None or not recorder.ring.is_signature_fresh(interned[0]):
            if len(self._interned_signatures) >= MAX_CACHED_CALLS:
                self._interned_signatures.clear()
            splits = self._read_split_sizes(args)
            interned = self._intern_signature(
                recorder.ring, tensors, first, reduce_op, root, splits
            )
            self._interned_signatures[key] = interned
        signature, agree, size = interned
        peer, tag = -1, 0
        stream = track.collective_stream
        if self.is_p2p:
            group_peer = args[self._peer_index] if self._peer_index >= 0 else None
            tag = args[self._tag_index] if self._tag_index >= 0 else 0
            stream = recorder.groups.get_channel(track, self._p2p_kind, group_peer, tag)
            peer = -1 if group_peer is None else group_peer
        if stream is None:
            return None
        flags, blocks, mode = self._find_completion(track, stream, first, args, caller)
        return stream, agree, signature, size, peer, tag, flags, blocks, mode

    def open_track(self, recorder: Recorder, args: Arguments) -> GroupTrack | None:
        """The group of a call, which is opened at its first call; None if the call has no group."""
        if self._tensor_indices is not None and not self._has_group(args):
            return None
        pg = self._find_process_group(args)
        if pg is None:
            return None
        groups = recorder.groups
        return groups.find_symmetric_group(pg) if self._is_symmetric else groups.find_group(pg)

    def _find_completion(
        self,
        track: GroupTrack,
        stream: StreamRecorder,
        first: Any,
        args: Arguments,
        caller: FrameType,
    ) -> tuple[int, bool, int]:
        """(flags, whether the calling thread blocks, completion mode)"""
        spec = self.spec
        if track.has_device_backend and first is not None and not first.is_cpu:
            stream.mark_completion_unknown()
            flags = find_message_flag(caller) if self.is_p2p else 0
            return flags, False, CompletionMode.UNOBSERVABLE
        # Nothing will report that the thread has left the call.
        if spec.silent_backends and track.runs_on(spec.silent_backends):
            return 0, False, CompletionMode.NEXT
        mode = CompletionMode.WORK if spec.returns_work else CompletionMode.RETURN
        if self._async_index >= 0:
            if len(args) <= self._async_index or args[self._async_index]:
                return RecordFlag.ASYNC, False, mode
            return RecordFlag.BLOCKING, True, mode
        return 0 if spec.returns_work else RecordFlag.BLOCKING, False, mode

    def find_failure_rule(self, recorder: Recorder, args: Arguments) -> FailureRule:
        """Finds which exceptions show that the call, which was entered, did not communicate."""
        track = self.find_track(recorder, args) if self._has_group(args) else None
        if track is not None and self._is_symmetric:
            return FailureRule.CHECKS  # the arguments are checked before the kernel is launched
        # torch compares the calls of all members first at debug level DETAIL, and raises an
        # exception on all of them. An operator without a Work communicates itself.
        is_compared = get_debug_level() == DebugLevel.DETAIL
        if track is None or is_compared or not self.spec.returns_work:
            return FailureRule.NONE
        for part in track.group.backend.split(","):
            if part.rpartition(":")[2] not in _CHECKING_BACKENDS:
                return FailureRule.ARGUMENT_ERRORS
        return FailureRule.CHECKS

    def find_track(self, recorder: Recorder, args: Arguments) -> GroupTrack | None:
        """The group of a call that was entered."""
        groups = recorder.groups
        tracks = groups.symmetric_tracks if self._is_symmetric else groups.tracks
        return tracks.get(id(self._find_process_group(args)))

    def _find_process_group(self, args: Arguments) -> Any:
        """The process group of a call; None if torch has none of the name that the call gives."""
        group = args[self._group_index]
        if not self._is_symmetric:
            return _unbox_group(group)
        try:
            return _resolve_process_group(group)
        except RuntimeError:  # other code has given symmetric memory a communicator of its own
            return None

    def _read_reduce_op_name(self, args: Arguments) -> str | None:
        index = self._reduce_op_name_index
        if index < 0:
            return None
        return str(args[index])[:_MAX_REDUCE_OP_CHARS] if index < len(args) else _REDUCE_OPS[0]

    def read_reduce_op(self, args: Arguments, caller: FrameType) -> int | None:
        """The number of the reduce op; None where this torch offers no way to read it."""
        return self._read_reduce_op(args[self.reduce_op_index], caller)

    def choose_native_mode(self, recorder: Recorder, mode: int, args: Arguments) -> int:
        """How the native recorder detects the completion of a call with this `CompletionMode`.

        It publishes the time of completion of collectives: by default on gloo; with
        HANGWATCH_TIMING=1 on any backend that computes on the CPU; with HANGWATCH_TIMING=0 never.
        """
        track = self.find_track(recorder, args) if mode == CompletionMode.WORK else None
        if track is None:
            return mode
        setting = os.environ.get("HANGWATCH_TIMING")
        is_timed = not self.is_p2p and setting != "0"
        if track.runs_on(REPORTING_BACKENDS):
            return CompletionMode.REPORTED_TIMED if is_timed else CompletionMode.REPORTED
        return CompletionMode.TIMED if is_timed and setting == "1" else mode

    def _has_group(self, args: Arguments) -> bool:
        """Whether the group, which is an optional argument of some operators, is given."""
        return self._group_index < len(args) and args[self._group_index] is not None

    def _make_key(
        self,
        tensors: Any,
        first: Any,
        reduce_op: int | str | None,
        root: int | None,
        args: Arguments,
    ) -> Any:
        if first is None:
            return (None, None, reduce_op, root)
        if type(tensors) is list:
            flat = flatten_tensors(tensors)
            shapes = (len(flat), *(tensor.shape for tensor in select_ends(flat)))
        else:
            shapes = first.shape
        return (shapes, first.dtype, reduce_op, root, self._read_split_sizes(args))

    def _intern_signature(
        self,
        ring: RingWriter,
        tensors: Any,
        first: Any,
        reduce_op: int | str | None,
        root: int | None,
        splits: Any,
    ) -> InternedSignature:
        """Interns a signature that is new or was overwritten. ``first`` is the first tensor."""
        flat: list[Any] = []
        dtype = None
        must_match = self.spec.must_match
        if first is not None and (self.spec.tensors_arg or self.spec.is_generic):
            flat = flatten_tensors(tensors)
            dtype = str(first.dtype).removeprefix("torch.")
        else:
            must_match &= ~(MustMatch.DTYPE | MustMatch.SHAPE)
        numels = [tensor.numel() for tensor in select_ends(flat)]
        shapes = [tuple(tensor.shape) for tensor in flat[:_MAX_SHAPES]]
        if len(flat) > _MAX_SHAPES:
            shapes.append(())
        reduce_op_name = reduce_op if isinstance(reduce_op, str) else None
        if isinstance(reduce_op, int) and reduce_op < len(_REDUCE_OPS):
            reduce_op_name = _REDUCE_OPS[reduce_op]
        signature = Signature(
            op=self.spec.op,
            shapes=tuple(shapes),
            dtype=dtype,
            reduce_op=reduce_op_name,
            root=root,
            splits=splits,
            numel=sum(numels),
        )
        signature = with_agreement_hash(signature, must_match, (len(flat), *numels))
        number = ring.intern_signature(encode_signature(signature))
        # Each member may send another number of values of a sparse tensor, which counts as 0 bytes.
        size = sum(int(t.nbytes) for t in flat if not (t.is_sparse or t.is_sparse_csr))
        return number, signature.agree, size

    def _read_split_sizes(self, args: Arguments) -> Any:
        """(sent, received), in elements: see `Signature.splits`."""
        if self._split_indices is None or find_first_tensor(args[self.tensors_index]) is None:
            return None
        sent = args[self._split_indices[0]]
        received = args[self._split_indices[1]]
        if self._output_index < 0:  # lists of tensors
            return (
                tuple(tensor.numel() for tensor in flatten_tensors(sent)),
                tuple(tensor.numel() for tensor in flatten_tensors(received)),
            )
        return (
            count_split_elements(args[self.tensors_index], sent),
            count_split_elements(args[self._output_index], received),
        )


def find_first_tensor(tensors: Any) -> Any:
    """The first tensor of an argument: one, a list, or a list of lists. None for an empty list."""
    while type(tensors) is list:
        if not tensors:
            return None
        tensors = tensors[0]
    return tensors


def flatten_tensors(tensors: Any) -> list[Any]:
    """All tensors of an argument, in order."""
    if type(tensors) is not list:
        return [tensors]
    return [tensor for part in tensors for tensor in flatten_tensors(part)]


def select_ends(flat: list[Any]) -> list[Any]:
    """The tensors of a list that are compared: all, or those at both ends of a long list."""
    if len(flat) <= 2 * _COMPARED_PER_END:
        return flat
    return flat[:_COMPARED_PER_END] + flat[-_COMPARED_PER_END:]


def count_split_elements(tensor: Any, rows: list[int]) -> tuple[int, ...]:
    """The elements per member, from split sizes in rows of ``tensor``; one number for even splits."""
    if not rows:
        return (tensor.numel(),)
    elements_per_row = tensor.numel() // max(1, len(tensor))
    return tuple(row_count * elements_per_row for row_count in rows)


@dataclass(frozen=True, slots=True)
class TorchOperator:
    """One overload of an operator. ``name`` is without namespace, as in ``gather_`` or ``put.out``."""

    library: str  # its namespace
    name: str
    overload: Any  # a torch._ops.OpOverload
    spec: OperatorSpec

    @property
    def qualified_name(self) -> str:
        return f"{self.library}::{self.name}"

    @property
    def schema(self) -> Any:
        return self.overload._schema

    @property
    def takes_keywords(self) -> bool:
        """Whether some arguments can only be passed by name."""
        return any(argument.kwarg_only for argument in self.schema.arguments)


def iter_communicating_operators() -> Iterator[TorchOperator]:
    """The operators of torch's library ``c10d`` that take a process group, and the known ones on
    symmetric memory, ordered by name.
    """
    for qualified_name in sorted(torch._C._dispatch_get_all_op_names()):
        library, _, name = qualified_name.partition("::")
        known_operators = OPERATORS_BY_LIBRARY.get(library, {})
        spec = known_operators.get(name)
        if spec is None and library != "c10d":
            continue
        base_name, _, overload_name = name.partition(".")
        packet = getattr(getattr(torch.ops, library), base_name)
        overload = getattr(packet, overload_name or "default")
        schema = overload._schema
        if spec is None or not spec.is_symmetric:
            if base_name in LOCAL_OPERATORS or _find_type(schema, _GROUP_TYPE) < 0:
                continue
            spec = spec or describe_unknown_operator(base_name, schema)
        elif not _fits_schema(spec, schema):
            continue
        operator = TorchOperator(library, name, overload, spec)
        if operator.takes_keywords and spec.is_generic:  # the group may be one of them
            faults.record_message(f"calls of {qualified_name} are not watched: {schema}")
            continue
        yield operator


def _fits_schema(spec: OperatorSpec, schema: Any) -> bool:
    """Whether this torch has the operator on symmetric memory as it is known: their API may change."""
    return {spec.tensors_arg, "group_name"} <= {argument.name for argument in schema.arguments}


def describe_unknown_operator(name: str, schema: Any) -> OperatorSpec:
    """Makes an entry for an operator of which only the schema is known.

    Members must agree on the operator alone, since its shapes may legally differ. c10d names the
    peers of point-to-point operators ``dst`` and ``src``.
    """
    arguments = [argument.name for argument in schema.arguments]
    role: P2pRole | None = None
    if ("dst" in arguments) != ("src" in arguments):
        role = "send" if "dst" in arguments else "recv"
    returns = schema.returns
    return OperatorSpec(
        op=name.strip("_"),
        p2p_role=role,
        # The recorder takes the Work from the end of the operator's results.
        returns_work=bool(returns) and _WORK_TYPE in str(returns[-1].type),
        is_generic=True,
    )


def _find_type(schema: Any, type_name: str) -> int:
    """The position of the first argument of a type; -1 if there is none."""
    for index, argument in enumerate(schema.arguments):
        if type_name in str(argument.type):
            return index
    return -1


class FailureRule(enum.IntEnum):
    """The exceptions that show that a call did not communicate. Native plans have the numbers."""

    NONE = 0
    ARGUMENT_ERRORS = 1  # the exceptions that torch raises for wrong arguments
    CHECKS = 2  # argument errors, and failed checks, which are plain RuntimeErrors


class FailureOutcome(enum.IntEnum):
    UNKNOWN = 0
    COMMUNICATED = 1
    NOT_MADE = 2


def judge_failure(error: BaseException, rule: FailureRule) -> FailureOutcome:
    """Decides whether a call had communicated when an exception left its operator, as does
    native/failures.h. The first entry of the exception's traceback is the kernel's.
    """
    if rule is FailureRule.NONE or not isinstance(error, Exception):
        return FailureOutcome.COMMUNICATED
    if error.__traceback__ is not None and error.__traceback__.tb_next is not None:
        # Python code raised it: a signal handler that ran after the operator, or, unless only
        # backends that check arguments are in use, a backend in Python.
        is_handler = rule is FailureRule.CHECKS
        return FailureOutcome.COMMUNICATED if is_handler else FailureOutcome.UNKNOWN
    if isinstance(error, _ARGUMENT_ERRORS):
        return FailureOutcome.NOT_MADE
    if isinstance(error, DistError):
        return FailureOutcome.COMMUNICATED
    if type(error) is RuntimeError and rule is FailureRule.CHECKS:
        message = str(error)
        if not any(part in message for part in _OTHER_MESSAGES):
            return FailureOutcome.NOT_MADE
        if _OTHER_MESSAGES[0] in message:
            return FailureOutcome.COMMUNICATED
    return FailureOutcome.UNKNOWN
