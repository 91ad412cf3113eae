"""Every ``c10d`` operator, and each operator on symmetric memory that waits for other ranks, with one
entry that declares all of its properties.

The names and schemas are those of ``torch/csrc/distributed/c10d/Ops.cpp``, and of
``SymmetricMemory.cpp`` and ``torch/distributed/_symmetric_memory``. The recorder looks arguments up
by name in the schema of the running torch. A ``c10d`` operator without an entry here is recorded
generically, see `hangwatch.agent.recorder.calls`; one on symmetric memory is not recorded.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Literal

P2pRole = Literal["send", "recv"]


class MustMatch(enum.Flag):
    """The arguments that must be equal on all members. The operator itself always must be."""

    NOTHING = 0
    DTYPE = enum.auto()
    SHAPE = enum.auto()
    REDUCE_OP = enum.auto()
    ROOT = enum.auto()


class BusFactor(enum.Enum):
    """The ratio of bus bandwidth to algorithm bandwidth, for n ranks.

    Source: github.com/NVIDIA/nccl-tests, doc/PERFORMANCE.md, and the ``…GetBw`` functions in
    ``src/*.cu``.
    """

    ONE = "1"
    OTHERS_SHARE = "(n-1)/n"
    TWICE_OTHERS_SHARE = "2(n-1)/n"

    def for_ranks(self, rank_count: int) -> float:
        """The ratio for a group of ``rank_count`` members."""
        if self is BusFactor.ONE:
            return 1.0
        others = rank_count - 1
        if self is BusFactor.TWICE_OTHERS_SHARE:
            others *= 2
        return others / rank_count


class ListSide(enum.Enum):
    """The side on which a call takes one tensor per member instead of a single tensor."""

    INPUTS = "inputs"
    OUTPUTS = "outputs"


class OutputScale(enum.Enum):
    """The number of elements in the output, compared with the input of the same rank."""

    SAME = "same"
    TIMES_MEMBERS = "times the number of members"
    PER_MEMBER = "divided by the number of members"


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorSpec:
    """All that hangwatch knows about one operator. A field whose default applies is absent from its
    entry; ``None`` and ``""`` mean that the operator has no such argument.

    Arguments are named, not numbered, because their positions depend on the version of torch. Those
    that have the same name or type in all operators (the group, the reduce op, the root, the peer)
    are found in the schema by `hangwatch.agent.recorder.calls`.
    """

    op: str  # what users call it: the name in torch.distributed
    tensors_arg: str = ""  # the argument whose shapes are shown and, with MustMatch.SHAPE, compared
    must_match: MustMatch = MustMatch.NOTHING
    root_is_source: bool = False  # the result is the root's data, and no other member gives any
    split_args: tuple[str, str] | None = None  # (sent, received) sizes, for each member or the root
    p2p_role: P2pRole | None = None  # the end of a channel on which the operator is called
    # What the recorder needs.
    returns_work: bool = True  # False: the call itself blocks until it is complete
    # Backends whose Work never reports completion, not even after wait().
    silent_backends: tuple[str, ...] = ()
    # The function of this name in torch.distributed passes exactly one tensor.
    passes_one_tensor: bool = False
    is_generic: bool = False  # derived from the schema of an operator that has no entry here
    # It names its group, and its kernels communicate through symmetric memory, without the backend.
    is_symmetric: bool = False
    # What the checks of HANGWATCH_CHECKS need.
    other_input_arg: str = ""  # what this rank contributes, if that is not ``tensors_arg``
    replicated_arg: str = ""  # what must be equal on all members afterwards
    # What performance figures need.
    size_is_per_rank: bool = False  # ``tensors_arg`` holds one rank's part of the whole array
    bus_factor: BusFactor | None = None  # None: it moves no data
    # What the analysis of PyTorch's Flight Recorder dumps needs.
    flight_names: tuple[str, ...] = ()  # the names in dumps, apart from ``op``
    analyzer_alias: str = ""  # the name in PyTorch's own analyzer, if that is not ``op``
    list_side: ListSide | None = None
    output_scale: OutputScale | None = None  # None: it does not follow from the input

    @property
    def is_p2p(self) -> bool:
        return self.p2p_role is not None

    @property
    def input_arg(self) -> str:
        """What this rank contributes; empty for a receive."""
        if self.p2p_role == "recv":
            return ""
        return self.other_input_arg or self.tensors_arg

    @property
    def analyzer_name(self) -> str:
        """The name in PyTorch's own analyzer, which fails on unknown ones, as of sends and receives."""
        return "" if self.is_p2p or self.is_symmetric else self.analyzer_alias or self.op

    @property
    def is_rooted(self) -> bool:
        return MustMatch.ROOT in self.must_match

    @property
    def is_mutual_wait(self) -> bool:
        """Whether each member waits for all others. In a broadcast or a reduce, a late rank need not
        delay another one.
        """
        return not self.is_rooted and not self.is_p2p

    @property
    def compares_shapes(self) -> bool:
        return MustMatch.SHAPE in self.must_match


_SAME_DATA = MustMatch.DTYPE | MustMatch.SHAPE
_SAME_REDUCTION = _SAME_DATA | MustMatch.REDUCE_OP
# Gloo implements reduce-scatter with other works, from torch 2.6 to 2.13.
_SILENT_BACKENDS = ("gloo",)

OPERATORS: dict[str, OperatorSpec] = {
    "allreduce_": OperatorSpec(
        op="all_reduce",
        tensors_arg="tensors",
        must_match=_SAME_REDUCTION,
        passes_one_tensor=True,
        replicated_arg="tensors",
        bus_factor=BusFactor.TWICE_OTHERS_SHARE,
        flight_names=("ALLREDUCE_coalesced",),
        output_scale=OutputScale.SAME,
    ),
    "allreduce_coalesced_": OperatorSpec(
        op="all_reduce_coalesced",
        tensors_arg="tensors",
        must_match=_SAME_REDUCTION,
        replicated_arg="tensors",
        bus_factor=BusFactor.TWICE_OTHERS_SHARE,
        flight_names=("allreduce_coalesced",),
        analyzer_alias="allreduce_coalesced",
        output_scale=OutputScale.SAME,
    ),
    "reduce_": OperatorSpec(
        op="reduce",
        tensors_arg="tensors",
        must_match=_SAME_REDUCTION | MustMatch.ROOT,
        passes_one_tensor=True,
        bus_factor=BusFactor.ONE,
        flight_names=("_reduce_oop",),
    ),
    "broadcast_": OperatorSpec(
        op="broadcast",
        tensors_arg="tensors",
        must_match=_SAME_DATA | MustMatch.ROOT,
        root_is_source=True,
        passes_one_tensor=True,
        replicated_arg="tensors",
        bus_factor=BusFactor.ONE,
        flight_names=("_broadcast_oop", "BROADCAST_coalesced"),
    ),
    # The list holds a tensor per member and is the same everywhere, even where the members' inputs
    # are uneven.
    "allgather_": OperatorSpec(
        op="all_gather",
        tensors_arg="output_tensors",
        must_match=_SAME_DATA,
        other_input_arg="input_tensors",
        replicated_arg="output_tensors",
        bus_factor=BusFactor.OTHERS_SHARE,
        flight_names=("ALLGATHER_coalesced",),
        list_side=ListSide.OUTPUTS,
        output_scale=OutputScale.TIMES_MEMBERS,
    ),
    "_allgather_base_": OperatorSpec(
        op="all_gather_into_tensor",
        tensors_arg="input_tensor",
        must_match=_SAME_DATA,
        passes_one_tensor=True,
        replicated_arg="output_tensor",
        size_is_per_rank=True,
        bus_factor=BusFactor.OTHERS_SHARE,
        flight_names=("_all_gather_base",),
        analyzer_alias="_all_gather_base",
        output_scale=OutputScale.TIMES_MEMBERS,
    ),
    "allgather_coalesced_": OperatorSpec(
        op="all_gather_coalesced",
        tensors_arg="input_list",
        must_match=_SAME_DATA,
        replicated_arg="output_lists",
        size_is_per_rank=True,
        bus_factor=BusFactor.OTHERS_SHARE,
        analyzer_alias="all_gather_into_tensor_coalesced",
        output_scale=OutputScale.TIMES_MEMBERS,
    ),
    "allgather_into_tensor_coalesced_": OperatorSpec(
        op="all_gather_into_tensor_coalesced",
        tensors_arg="inputs",
        must_match=_SAME_DATA,
        replicated_arg="outputs",
        size_is_per_rank=True,
        bus_factor=BusFactor.OTHERS_SHARE,
        output_scale=OutputScale.TIMES_MEMBERS,
    ),
    # Each member's output may differ in size; the list of inputs may not.
    "reduce_scatter_": OperatorSpec(
        op="reduce_scatter",
        tensors_arg="input_tensors",
        must_match=_SAME_REDUCTION,
        silent_backends=_SILENT_BACKENDS,
        bus_factor=BusFactor.OTHERS_SHARE,
        flight_names=("REDUCE_SCATTER_coalesced",),
        list_side=ListSide.INPUTS,
        output_scale=OutputScale.PER_MEMBER,
    ),
    "_reduce_scatter_base_": OperatorSpec(
        op="reduce_scatter_tensor",
        tensors_arg="input_tensor",
        must_match=_SAME_REDUCTION,
        passes_one_tensor=True,
        silent_backends=_SILENT_BACKENDS,
        bus_factor=BusFactor.OTHERS_SHARE,
        flight_names=("_reduce_scatter_base",),
        analyzer_alias="_reduce_scatter_base",
        output_scale=OutputScale.PER_MEMBER,
    ),
    "reduce_scatter_tensor_coalesced_": OperatorSpec(
        op="reduce_scatter_tensor_coalesced",
        tensors_arg="inputs",
        must_match=_SAME_REDUCTION,
        silent_backends=_SILENT_BACKENDS,
        bus_factor=BusFactor.OTHERS_SHARE,
        output_scale=OutputScale.PER_MEMBER,
    ),
    # Only the root has the list, and its entries may be uneven.
    "gather_": OperatorSpec(
        op="gather",
        tensors_arg="input_tensors",
        must_match=MustMatch.DTYPE | MustMatch.ROOT,
        split_args=("input_tensors", "output_tensors"),
        size_is_per_rank=True,
        bus_factor=BusFactor.OTHERS_SHARE,
        list_side=ListSide.OUTPUTS,
    ),
    "scatter_": OperatorSpec(
        op="scatter",
        tensors_arg="output_tensors",
        must_match=MustMatch.DTYPE | MustMatch.ROOT,
        split_args=("input_tensors", "output_tensors"),
        other_input_arg="input_tensors",
        size_is_per_rank=True,
        bus_factor=BusFactor.OTHERS_SHARE,
        list_side=ListSide.INPUTS,
    ),
    # Split sizes only need to agree pairwise, between each sender and receiver.
    "alltoall_": OperatorSpec(
        op="all_to_all",
        tensors_arg="input_tensors",
        must_match=MustMatch.DTYPE,
        split_args=("input_tensors", "output_tensors"),
        bus_factor=BusFactor.OTHERS_SHARE,
    ),
    "alltoall_base_": OperatorSpec(
        op="all_to_all_single",
        tensors_arg="input",
        must_match=MustMatch.DTYPE,
        split_args=("input_split_sizes", "output_split_sizes"),
        bus_factor=BusFactor.OTHERS_SHARE,
        analyzer_alias="all_to_all",
    ),
    "barrier": OperatorSpec(op="barrier", flight_names=("all_reduce_barrier",)),
    "monitored_barrier_": OperatorSpec(
        op="monitored_barrier", returns_work=False, analyzer_alias="barrier"
    ),
    "send": OperatorSpec(
        op="send",
        tensors_arg="tensors",
        must_match=_SAME_DATA,
        p2p_role="send",
        bus_factor=BusFactor.ONE,
    ),
    "recv_": OperatorSpec(
        op="recv",
        tensors_arg="tensors",
        must_match=_SAME_DATA,
        p2p_role="recv",
        bus_factor=BusFactor.ONE,
    ),
    "recv_any_source_": OperatorSpec(
        op="recv_any_source",
        tensors_arg="tensors",
        must_match=_SAME_DATA,
        p2p_role="recv",
        bus_factor=BusFactor.ONE,
    ),
}

# Operators of the library that do not communicate.
LOCAL_OPERATORS = frozenset({"check_for_nan"})

SYMMETRIC_PREFIX = "symm_mem."  # as in torch.ops.symm_mem


def _describe_symmetric(name: str, tensors_arg: str, must_match: MustMatch) -> OperatorSpec:
    return OperatorSpec(
        op=f"{SYMMETRIC_PREFIX}{name}",
        tensors_arg=tensors_arg,
        must_match=must_match,
        root_is_source=name == "nvshmem_broadcast",
        returns_work=False,
        is_symmetric=True,
    )


# The operators whose kernels wait for the same call of the other members. Those left out are local, or
# one-sided: they name a peer, and no group. The factors of a matrix multiplication that is reduced may
# be divided unevenly, and so may the rows of an ``all_to_all_vdev``.
SYMMETRIC_OPERATORS = {
    spec.op.removeprefix(SYMMETRIC_PREFIX): spec
    for spec in (
        _describe_symmetric("one_shot_all_reduce", "input", _SAME_REDUCTION),
        _describe_symmetric("one_shot_all_reduce_out", "input", _SAME_REDUCTION),
        _describe_symmetric("one_shot_all_reduce_copy", "local_input", _SAME_REDUCTION),
        _describe_symmetric("one_shot_all_reduce_copy_out", "local_input", _SAME_REDUCTION),
        _describe_symmetric("two_shot_all_reduce_", "input", _SAME_REDUCTION),
        _describe_symmetric("two_shot_all_reduce_out", "input", _SAME_REDUCTION),
        _describe_symmetric("multimem_all_reduce_", "input", _SAME_REDUCTION),
        _describe_symmetric("multimem_one_shot_all_reduce", "input", _SAME_REDUCTION),
        _describe_symmetric("multimem_one_shot_all_reduce_out", "input", _SAME_REDUCTION),
        _describe_symmetric(
            "multimem_one_shot_reduce_out", "input", _SAME_REDUCTION | MustMatch.ROOT
        ),
        _describe_symmetric("multimem_all_gather_out", "input", _SAME_DATA),
        _describe_symmetric("reduce_scatter_out", "input", _SAME_DATA),
        _describe_symmetric("nccl_reduce_scatter_offset", "input", _SAME_REDUCTION),
        _describe_symmetric("tile_reduce", "in_tile", _SAME_REDUCTION | MustMatch.ROOT),
        _describe_symmetric("multi_root_tile_reduce", "in_tiles", _SAME_REDUCTION),
        _describe_symmetric("nvshmem_broadcast", "input", _SAME_DATA | MustMatch.ROOT),
        _describe_symmetric("nvshmem_all_to_all", "input", _SAME_DATA),
        _describe_symmetric("all_to_all_vdev", "input", MustMatch.DTYPE),
        _describe_symmetric("all_to_all_vdev_2d", "input", MustMatch.DTYPE),
        _describe_symmetric("all_to_all_vdev_2d_offset", "input", MustMatch.DTYPE),
        _describe_symmetric("_low_contention_all_gather", "tensor", _SAME_DATA),
        _describe_symmetric("_low_contention_reduce_scatter", "tensor", _SAME_REDUCTION),
        _describe_symmetric("fused_all_gather_matmul", "A", _SAME_DATA),
        _describe_symmetric("fused_all_gather_scaled_matmul", "A", _SAME_DATA),
        _describe_symmetric(
            "fused_matmul_reduce_scatter", "A", MustMatch.DTYPE | MustMatch.REDUCE_OP
        ),
        _describe_symmetric(
            "fused_scaled_matmul_reduce_scatter", "A", MustMatch.DTYPE | MustMatch.REDUCE_OP
        ),
    )
}

# The known operators of each library of torch.
OPERATORS_BY_LIBRARY = {"c10d": OPERATORS, "symm_mem": SYMMETRIC_OPERATORS}

# Operations that Flight Recorder dumps contain although c10d has no operator of that name.
_FLIGHT_RECORDER_OPERATIONS = (
    OperatorSpec(op="all_gather_v", must_match=_SAME_DATA, list_side=ListSide.OUTPUTS),
    OperatorSpec(
        op="all_gather_single", must_match=_SAME_DATA, output_scale=OutputScale.TIMES_MEMBERS
    ),
    OperatorSpec(op="reduce_scatter_v", must_match=_SAME_DATA, list_side=ListSide.INPUTS),
    OperatorSpec(
        op="reduce_scatter_single", must_match=_SAME_DATA, output_scale=OutputScale.PER_MEMBER
    ),
    OperatorSpec(
        op="all_to_all_v_single",
        must_match=MustMatch.DTYPE,
        split_args=("input_split_sizes", "output_split_sizes"),
    ),
)

# The functions of NCCL that other libraries than torch call, as its profiler plugin reports them.
# The number of elements is what the caller passes: for an all-gather what it sends.
NCCL_OPERATIONS = (
    OperatorSpec(op="ncclAllReduce", must_match=_SAME_REDUCTION, output_scale=OutputScale.SAME),
    OperatorSpec(op="ncclReduce", must_match=_SAME_REDUCTION | MustMatch.ROOT),
    OperatorSpec(op="ncclBroadcast", must_match=_SAME_DATA | MustMatch.ROOT, root_is_source=True),
    OperatorSpec(op="ncclAllGather", must_match=_SAME_DATA),
    OperatorSpec(op="ncclReduceScatter", must_match=_SAME_REDUCTION),
    OperatorSpec(op="ncclAlltoAll", must_match=_SAME_DATA),
    OperatorSpec(op="ncclGather", must_match=_SAME_DATA | MustMatch.ROOT),
    OperatorSpec(op="ncclScatter", must_match=_SAME_DATA | MustMatch.ROOT),
)

# All operations by the name that users know.
_TORCH_OPERATORS = [
    spec for operators in OPERATORS_BY_LIBRARY.values() for spec in operators.values()
]
OPERATIONS = {spec.op: spec for spec in (*_TORCH_OPERATORS, *NCCL_OPERATIONS)}
FLIGHT_OPERATIONS = OPERATIONS | {spec.op: spec for spec in _FLIGHT_RECORDER_OPERATIONS}
