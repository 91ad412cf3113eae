"""Every ``c10d`` operator: where its tensors, group, root and peer are, and what must agree across
ranks.

Arguments are named, not numbered: torch 2.6 and 2.13 differ in the position and presence of some
(``async_op`` came with 2.8), and the recorder looks the names up in the schema of the torch that
runs. Source of names and schemas: ``torch/csrc/distributed/c10d/Ops.cpp``.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass


class MustMatch(enum.Flag):
    """The arguments that must be equal on all members. The operator itself always must be."""

    NOTHING = 0
    DTYPE = enum.auto()
    SHAPE = enum.auto()
    REDUCE_OP = enum.auto()
    ROOT = enum.auto()


_SAME_DATA = MustMatch.DTYPE | MustMatch.SHAPE
_SAME_REDUCTION = _SAME_DATA | MustMatch.REDUCE_OP
# Gloo implements reduce-scatter with other works, from torch 2.6 to 2.13.
_SILENT_BACKENDS = ("gloo",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Operator:
    """One operator of the ``c10d`` library. ``None`` means that it has no such argument."""

    op: str  # what users call it: the name in torch.distributed
    tensors_arg: str  # the argument whose shapes are shown and, with MustMatch.SHAPE, compared
    must_match: MustMatch
    reduce_op_arg: str | None = None
    root_arg: str | None = None  # group rank
    peer_arg: str | None = None  # group rank; "" receives from any source
    is_send: bool = False
    is_recv: bool = False
    split_args: tuple[str, str] | None = None  # (sent, received) sizes per member
    returns_work: bool = True  # False: the call itself blocks until it is complete
    # Backends whose Work never reports completion, not even after wait().
    silent_backends: tuple[str, ...] = ()


OPERATORS: dict[str, Operator] = {
    "allreduce_": Operator(
        op="all_reduce",
        tensors_arg="tensors",
        must_match=_SAME_REDUCTION,
        reduce_op_arg="reduce_op",
    ),
    "allreduce_coalesced_": Operator(
        op="all_reduce_coalesced",
        tensors_arg="tensors",
        must_match=_SAME_REDUCTION,
        reduce_op_arg="reduce_op",
    ),
    "reduce_": Operator(
        op="reduce",
        tensors_arg="tensors",
        must_match=_SAME_REDUCTION | MustMatch.ROOT,
        reduce_op_arg="reduce_op",
        root_arg="root_rank",
    ),
    "broadcast_": Operator(
        op="broadcast",
        tensors_arg="tensors",
        must_match=_SAME_DATA | MustMatch.ROOT,
        root_arg="root_rank",
    ),
    # The list holds a tensor per member and is the same everywhere, even where the members' inputs
    # are uneven.
    "allgather_": Operator(op="all_gather", tensors_arg="output_tensors", must_match=_SAME_DATA),
    "_allgather_base_": Operator(
        op="all_gather_into_tensor", tensors_arg="input_tensor", must_match=_SAME_DATA
    ),
    "allgather_coalesced_": Operator(
        op="all_gather_coalesced", tensors_arg="input_list", must_match=_SAME_DATA
    ),
    "allgather_into_tensor_coalesced_": Operator(
        op="all_gather_into_tensor_coalesced", tensors_arg="inputs", must_match=_SAME_DATA
    ),
    # Each member's output may differ in size; the list of inputs may not.
    "reduce_scatter_": Operator(
        op="reduce_scatter",
        tensors_arg="input_tensors",
        must_match=_SAME_REDUCTION,
        reduce_op_arg="reduce_op",
        silent_backends=_SILENT_BACKENDS,
    ),
    "_reduce_scatter_base_": Operator(
        op="reduce_scatter_tensor",
        tensors_arg="input_tensor",
        must_match=_SAME_REDUCTION,
        reduce_op_arg="reduce_op",
        silent_backends=_SILENT_BACKENDS,
    ),
    "reduce_scatter_tensor_coalesced_": Operator(
        op="reduce_scatter_tensor_coalesced",
        tensors_arg="inputs",
        must_match=_SAME_REDUCTION,
        reduce_op_arg="reduce_op",
        silent_backends=_SILENT_BACKENDS,
    ),
    # Only the root has the list, and its entries may be uneven.
    "gather_": Operator(
        op="gather",
        tensors_arg="input_tensors",
        must_match=MustMatch.DTYPE | MustMatch.ROOT,
        root_arg="root_rank",
    ),
    "scatter_": Operator(
        op="scatter",
        tensors_arg="output_tensors",
        must_match=MustMatch.DTYPE | MustMatch.ROOT,
        root_arg="root_rank",
    ),
    # Split sizes only need to agree pairwise, between each sender and receiver.
    "alltoall_": Operator(
        op="all_to_all",
        tensors_arg="input_tensors",
        must_match=MustMatch.DTYPE,
        split_args=("input_tensors", "output_tensors"),
    ),
    "alltoall_base_": Operator(
        op="all_to_all_single",
        tensors_arg="input",
        must_match=MustMatch.DTYPE,
        split_args=("input_split_sizes", "output_split_sizes"),
    ),
    "barrier": Operator(op="barrier", tensors_arg="", must_match=MustMatch.NOTHING),
    "monitored_barrier_": Operator(
        op="monitored_barrier", tensors_arg="", must_match=MustMatch.NOTHING, returns_work=False
    ),
    "send": Operator(
        op="send", tensors_arg="tensors", must_match=_SAME_DATA, peer_arg="dst", is_send=True
    ),
    "recv_": Operator(
        op="recv", tensors_arg="tensors", must_match=_SAME_DATA, peer_arg="src", is_recv=True
    ),
    "recv_any_source_": Operator(
        op="recv_any_source",
        tensors_arg="tensors",
        must_match=_SAME_DATA,
        peer_arg="",
        is_recv=True,
    ),
}

# Operators of the library that do not communicate.
LOCAL_OPERATORS = frozenset({"check_for_nan"})
