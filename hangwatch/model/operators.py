"""Every ``c10d`` operator: where its tensors, group, root and peer are, and what must agree across ranks.

Arguments are named, not numbered: torch 2.6 and 2.13 differ in the position and presence of some (``async_op`` came with
2.8), and the recorder looks the names up in the schema of the torch that runs. Source of names and schemas:
``torch/csrc/distributed/c10d/Ops.cpp``.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Agree(enum.Flag):
    """What must be equal on all members of the group. The operator itself always must."""

    NOTHING = 0
    DTYPE = enum.auto()
    SHAPE = enum.auto()
    REDUCE_OP = enum.auto()
    ROOT = enum.auto()


_DATA = Agree.DTYPE | Agree.SHAPE
_REDUCED = _DATA | Agree.REDUCE_OP
_GLOO = ("gloo",)  # its reduce-scatter is made of other works: torch 2.6 to 2.13


@dataclass(frozen=True, slots=True, kw_only=True)
class Operator:
    """One operator of the ``c10d`` library. ``None`` means that it has no such argument."""

    op: str  # what users call it: the name in torch.distributed
    tensors: str  # the argument whose shapes are shown and, under Agree.SHAPE, compared
    agree: Agree
    reduce_op: str | None = None
    root: str | None = None  # group rank
    peer: str | None = None  # group rank; "" receives from any source
    sends: bool = False
    receives: bool = False
    splits: tuple[str, str] | None = None  # (sent, received) sizes per member
    returns_work: bool = True  # False: the call itself blocks until it is complete
    silent_on: tuple[str, ...] = ()  # backends whose Work never says that it is complete, not even after wait()


OPERATORS: dict[str, Operator] = {
    "allreduce_": Operator(op="all_reduce", tensors="tensors", agree=_REDUCED, reduce_op="reduce_op"),
    "allreduce_coalesced_": Operator(op="all_reduce_coalesced", tensors="tensors", agree=_REDUCED, reduce_op="reduce_op"),
    "reduce_": Operator(op="reduce", tensors="tensors", agree=_REDUCED | Agree.ROOT, reduce_op="reduce_op", root="root_rank"),
    "broadcast_": Operator(op="broadcast", tensors="tensors", agree=_DATA | Agree.ROOT, root="root_rank"),
    # The list holds a tensor per member and is the same everywhere, even where the members' inputs are uneven.
    "allgather_": Operator(op="all_gather", tensors="output_tensors", agree=_DATA),
    "_allgather_base_": Operator(op="all_gather_into_tensor", tensors="input_tensor", agree=_DATA),
    "allgather_coalesced_": Operator(op="all_gather_coalesced", tensors="input_list", agree=_DATA),
    "allgather_into_tensor_coalesced_": Operator(op="all_gather_into_tensor_coalesced", tensors="inputs", agree=_DATA),
    # Each member's output may differ in size; the list of inputs may not.
    "reduce_scatter_": Operator(op="reduce_scatter", tensors="input_tensors", agree=_REDUCED, reduce_op="reduce_op", silent_on=_GLOO),
    "_reduce_scatter_base_": Operator(
        op="reduce_scatter_tensor", tensors="input_tensor", agree=_REDUCED, reduce_op="reduce_op", silent_on=_GLOO
    ),
    "reduce_scatter_tensor_coalesced_": Operator(
        op="reduce_scatter_tensor_coalesced", tensors="inputs", agree=_REDUCED, reduce_op="reduce_op", silent_on=_GLOO
    ),
    # Only the root has the list, and its entries may be uneven.
    "gather_": Operator(op="gather", tensors="input_tensors", agree=Agree.DTYPE | Agree.ROOT, root="root_rank"),
    "scatter_": Operator(op="scatter", tensors="output_tensors", agree=Agree.DTYPE | Agree.ROOT, root="root_rank"),
    # What one sends to another is what that one expects: agreement is pairwise.
    "alltoall_": Operator(op="all_to_all", tensors="input_tensors", agree=Agree.DTYPE, splits=("input_tensors", "output_tensors")),
    "alltoall_base_": Operator(
        op="all_to_all_single", tensors="input", agree=Agree.DTYPE, splits=("input_split_sizes", "output_split_sizes")
    ),
    "barrier": Operator(op="barrier", tensors="", agree=Agree.NOTHING),
    "monitored_barrier_": Operator(op="monitored_barrier", tensors="", agree=Agree.NOTHING, returns_work=False),
    "send": Operator(op="send", tensors="tensors", agree=_DATA, peer="dst", sends=True),
    "recv_": Operator(op="recv", tensors="tensors", agree=_DATA, peer="src", receives=True),
    "recv_any_source_": Operator(op="recv_any_source", tensors="tensors", agree=_DATA, peer="", receives=True),
}

# In the library, yet no communication.
LOCAL_OPERATORS = frozenset({"check_for_nan"})
