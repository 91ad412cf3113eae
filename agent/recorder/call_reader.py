"""Reads one ``c10d`` call: its stream, its signature, its site, and how its completion is found.

Every call of every rank pays for this code, so it looks up what is known instead of computing it.
"""

from __future__ import annotations

from _thread import get_ident
from collections.abc import Callable, Mapping
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any, Protocol

from hangwatch.model.backends import REPORTING_BACKENDS
from hangwatch.model.calls import StreamKind
from hangwatch.model.operator_spec import OperatorSpec, P2pRole
from hangwatch.ring.layout import RecordFlag

from .call_signatures import MAX_CACHED_CALLS, SignatureCache
from .callers import (
    ReduceOpReader,
    find_named_reduce_ops,
    is_left_pending,
    make_reduce_op_reader,
)
from .failures import FailureRule, choose_rule
from .operator_schemas import find_group_index, find_tensor_indices
from .streams import CompletionMode, EnteredCall, StreamRecorder
from .tensor_lists import (
    count_split_elements,
    find_first_tensor,
    flatten_tensors,
    list_shapes,
)

if TYPE_CHECKING:
    from .callsite import CallSites
    from .groups import GroupRegistry, GroupTrack
    from .writer import RingWriter


class RecorderState(Protocol):
    """What reading a call needs of the process's recorder."""

    ring: RingWriter
    groups: GroupRegistry
    sites: CallSites


_ASYNC_NAMES = ("async_op", "asyncOp")  # torch 2.6 and 2.7 know only the latter, on few operators
_ASYNC, _BLOCKING = int(RecordFlag.ASYNC), int(RecordFlag.BLOCKING)

# (stream, arguments of its `enter_call`: agreement hash, record body, blocked thread, completion
# mode; the code whose id is in the plan's key, and unique as long as the code exists)
CallPlan = tuple[StreamRecorder, int, bytes, int, int, CodeType]
# (stream, agreement hash, number of the signature, bytes, peer, tag, flags, whether its thread
# blocks, completion mode)
CallDetails = tuple[StreamRecorder, int, int, int, int, int, int, bool, int]


class CallReader:
    """Reads one operator's arguments, at the positions that the schema of this torch gives them."""

    def __init__(
        self,
        spec: OperatorSpec,
        schema: Any,
        unbox_group: Callable[[Any], Any],
        read_reduce_op: ReduceOpReader | None = None,
    ) -> None:
        self.spec = spec
        self._unbox_group = unbox_group
        names = [argument.name for argument in schema.arguments]

        def index_of(name: str | None) -> int:
            return names.index(name) if name in names else -1

        self._group_index = find_group_index(schema)
        self.tensors_index = index_of(spec.tensors_arg or "tensor")
        self._tensor_indices = find_tensor_indices(schema) if spec.is_generic else None
        self.reduce_op_index = index_of(spec.reduce_op_arg)
        self._read_reduce_op = read_reduce_op or make_reduce_op_reader()
        self.root_index = index_of(spec.root_arg)
        self._peer_index, self._tag_index = index_of(spec.peer_arg), index_of("tag")
        self._split_indices: tuple[int, int] | None = None
        if spec.split_args:
            self._split_indices = index_of(spec.split_args[0]), index_of(spec.split_args[1])
        self._output_index = index_of("output")
        self._async_index = max(index_of(name) for name in _ASYNC_NAMES)
        self.is_p2p = spec.is_p2p
        self._p2p_kind = StreamKind.SEND if spec.p2p_role is P2pRole.SEND else StreamKind.RECV
        self._signatures = SignatureCache(spec)
        self.plans: dict[Any, CallPlan] = {}  # of calls that were entered before

    def enter_call(
        self,
        recorder: RecorderState,
        args: tuple[Any, ...],
        caller: FrameType,
        site_frame: FrameType,
    ) -> EnteredCall | None:
        """Records the call; None if it is not watched.

        The search for its site begins at ``site_frame``. Trailing arguments that have their default
        value are absent from ``args``.
        """
        plan = self._plan_call(recorder, args, caller, site_frame)
        return None if plan is None else plan[0].enter_call(*plan[1:])

    def _plan_call(
        self,
        recorder: RecorderState,
        args: tuple[Any, ...],
        caller: FrameType,
        site_frame: FrameType,
    ) -> tuple[StreamRecorder, int, bytes, int, int] | None:
        """The stream of the call, and the arguments of `StreamRecorder.enter_call`."""
        details = self.read_call(recorder, args, caller)
        if details is None:
            return None
        stream, agree, signature, size, peer, tag, flags, blocks, mode = details
        site = recorder.sites.get_cached_site(site_frame) or recorder.sites.find_site(site_frame)
        record_body = stream.pack_record_body(signature, site, flags, size, peer, tag)
        return stream, agree, record_body, get_ident() if blocks else 0, mode

    def read_call(
        self, recorder: RecorderState, args: tuple[Any, ...], caller: FrameType
    ) -> CallDetails | None:
        """The details of the call; None if it is not watched."""
        track = self.open_track(recorder, args)
        if track is None:
            return None
        if self._tensor_indices is None:
            tensors = args[self.tensors_index]
        else:
            tensors = self._collect_tensors(args)
        is_single = type(tensors) is list and len(tensors) == 1 and type(tensors[0]) is not list
        first = tensors[0] if is_single else find_first_tensor(tensors)
        reduce_op = None
        if self.reduce_op_index >= 0:
            reduce_op = self._read_reduce_op(args[self.reduce_op_index], caller)
        root = args[self.root_index] if self.root_index >= 0 else None
        if is_single and self._split_indices is None:
            key = (first.shape, first.dtype, reduce_op, root)
        else:
            key = self._make_key(tensors, first, reduce_op, root, args)
        interned = self._signatures.interned.get(key)
        if interned is None or not recorder.ring.is_signature_fresh(interned[0]):
            splits = self._read_split_sizes(args)
            interned = self._signatures.add_signature(
                key, recorder.ring, tensors, first, reduce_op, root, splits
            )
        signature, agree, size = interned
        peer, tag = -1, 0
        stream: StreamRecorder | None
        if self.is_p2p:
            peer = args[self._peer_index] if self._peer_index >= 0 else -1
            tag = args[self._tag_index] if self._tag_index >= 0 else 0
            stream = recorder.groups.get_channel(track, self._p2p_kind, peer, tag)
        else:
            stream = track.collective_stream
        if stream is None:
            return None
        flags, blocks, mode = self._find_completion(track, stream, first, args, caller)
        return stream, agree, signature, size, peer, tag, flags, blocks, mode

    def open_track(self, recorder: RecorderState, args: tuple[Any, ...]) -> GroupTrack | None:
        """The group of a call, which is opened at its first call; None if the call has no group."""
        if self._tensor_indices is not None and not self._has_group(args):
            return None
        pg = self._unbox_group(args[self._group_index])
        track = recorder.groups.tracks.get(id(pg))
        if track is None or track.group_ref() is not pg:
            track = recorder.groups.open_group(pg)
        return track

    def _find_completion(
        self,
        track: GroupTrack,
        stream: StreamRecorder,
        first: Any,
        args: tuple[Any, ...],
        caller: FrameType,
    ) -> tuple[int, bool, int]:
        """(flags, whether the calling thread blocks, completion mode)"""
        spec = self.spec
        if track.has_device_backend and first is not None and not first.is_cpu:
            stream.mark_completion_unknown()
            flags = _ASYNC if self.is_p2p and is_left_pending(caller) else 0
            return flags, False, int(CompletionMode.UNOBSERVABLE)
        # Nothing will report that the thread has left the call.
        if spec.silent_backends and track.runs_on(spec.silent_backends):
            return 0, False, int(CompletionMode.NEXT)
        mode = int(CompletionMode.WORK if spec.returns_work else CompletionMode.RETURN)
        if self._async_index >= 0:
            is_async = len(args) <= self._async_index or args[self._async_index]
            return (_ASYNC, False, mode) if is_async else (_BLOCKING, True, mode)
        return (0 if spec.returns_work else _BLOCKING), False, mode

    def enter_planned(
        self,
        recorder: RecorderState,
        args: tuple[Any, ...],
        caller: FrameType,
        site_frame: FrameType,
        key: Any,
        reduce_op: Any,
    ) -> EnteredCall | None:
        """`enter_call`, and plans the next call that has this ``key``, unless the id of its reduce
        op, which is in the key, may be reused.
        """
        plan = self._plan_call(recorder, args, caller, site_frame)
        if plan is None:
            return None
        entered = plan[0].enter_call(*plan[1:])
        pg = caller.f_locals["group"]
        track = recorder.groups.tracks.get(id(pg))
        if track is None or track.has_device_backend or len(self.plans) >= MAX_CACHED_CALLS:
            return entered
        if reduce_op is not None and id(reduce_op) not in find_named_reduce_ops():
            return entered
        if recorder.sites.get_cached_site(site_frame):
            self.plans[key] = (*plan, site_frame.f_code)
        return entered

    def find_failure_rule(self, recorder: RecorderState, args: tuple[Any, ...]) -> FailureRule:
        """Which exceptions show that the call, which was entered, did not communicate."""
        track = self.find_track(recorder, args) if self._has_group(args) else None
        return FailureRule.NONE if track is None else choose_rule(self.spec, track)

    def find_track(self, recorder: RecorderState, args: tuple[Any, ...]) -> GroupTrack | None:
        """The group of a call that was entered."""
        return recorder.groups.tracks.get(id(self._unbox_group(args[self._group_index])))

    def read_reduce_op(self, args: tuple[Any, ...], caller: FrameType) -> int | None:
        """The number of the reduce op; None where this torch offers no way to read it."""
        return self._read_reduce_op(args[self.reduce_op_index], caller)

    def choose_native_mode(
        self, recorder: RecorderState, mode: int, args: tuple[Any, ...], env: Mapping[str, str]
    ) -> int:
        """How the native recorder detects the completion of a call with this `CompletionMode`.

        It publishes the time of completion of collectives: by default on gloo; with
        HANGWATCH_TIMING=1 on any backend that computes on the CPU; with HANGWATCH_TIMING=0 never.
        """
        track = self.find_track(recorder, args) if mode == CompletionMode.WORK else None
        if track is None:
            return mode
        setting = env.get("HANGWATCH_TIMING")
        is_timed = not self.is_p2p and setting != "0"
        if track.runs_on(REPORTING_BACKENDS):
            return CompletionMode.REPORTED_TIMED if is_timed else CompletionMode.REPORTED
        return CompletionMode.TIMED if is_timed and setting == "1" else mode

    def clear_caches(self) -> None:
        """The interned data is about to be overwritten, or belongs to another ring, or a group is
        gone.
        """
        self._signatures.interned.clear()
        self.plans.clear()

    def _has_group(self, args: tuple[Any, ...]) -> bool:
        """Whether the group, which is an optional argument of some operators, is given."""
        return self._group_index < len(args) and args[self._group_index] is not None

    def _collect_tensors(self, args: tuple[Any, ...]) -> list[Any]:
        """All tensors of an unknown operator."""
        assert self._tensor_indices is not None
        given = [args[index] for index in self._tensor_indices if index < len(args)]
        return [tensor for tensor in flatten_tensors(given) if tensor is not None]

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
        shapes = list_shapes(tensors) if type(tensors) is list else first.shape
        return (shapes, first.dtype, reduce_op, root, self._read_split_sizes(args))

    def _read_split_sizes(self, args: tuple[Any, ...]) -> Any:
        """(sent, received) per member, in elements; a single number where torch splits evenly."""
        if self._split_indices is None or find_first_tensor(args[self.tensors_index]) is None:
            return None
        sent, received = args[self._split_indices[0]], args[self._split_indices[1]]
        if sent and type(sent[0]) is not int:  # lists of tensors
            return tuple(t.numel() for t in sent), tuple(t.numel() for t in received)
        return (
            count_split_elements(args[self.tensors_index], sent),
            count_split_elements(args[self._output_index], received),
        )
