"""Every ``c10d`` operator, with one entry that declares all of its properties.

The names and schemas are those of ``torch/csrc/distributed/c10d/Ops.cpp``. The recorder looks
arguments up by name in the schema of the running torch. An operator of torch without an entry here
is recorded generically, see `hangwatch.agent.recorder.operator_schemas`.
"""

from __future__ import annotations

from .operator_spec import BusFactor, ListSide, MustMatch, OperatorSpec, OutputScale, P2pRole

_SAME_DATA = MustMatch.DTYPE | MustMatch.SHAPE
_SAME_REDUCTION = _SAME_DATA | MustMatch.REDUCE_OP
# Gloo implements reduce-scatter with other works, from torch 2.6 to 2.13.
_SILENT_BACKENDS = ("gloo",)

OPERATORS: dict[str, OperatorSpec] = {
    "allreduce_": OperatorSpec(
        op="all_reduce",
        tensors_arg="tensors",
        must_match=_SAME_REDUCTION,
        reduce_op_arg="reduce_op",
        passes_one_tensor=True,
        input_arg="tensors",
        replicated_arg="tensors",
        bus_factor=BusFactor.TWICE_OTHERS_SHARE,
        flight_names=("ALLREDUCE_coalesced",),
        analyzer_name="all_reduce",
        output_scale=OutputScale.SAME,
    ),
    "allreduce_coalesced_": OperatorSpec(
        op="all_reduce_coalesced",
        tensors_arg="tensors",
        must_match=_SAME_REDUCTION,
        reduce_op_arg="reduce_op",
        input_arg="tensors",
        replicated_arg="tensors",
        bus_factor=BusFactor.TWICE_OTHERS_SHARE,
        flight_names=("allreduce_coalesced",),
        analyzer_name="allreduce_coalesced",
        output_scale=OutputScale.SAME,
    ),
    "reduce_": OperatorSpec(
        op="reduce",
        tensors_arg="tensors",
        must_match=_SAME_REDUCTION | MustMatch.ROOT,
        reduce_op_arg="reduce_op",
        root_arg="root_rank",
        passes_one_tensor=True,
        input_arg="tensors",
        bus_factor=BusFactor.ONE,
        flight_names=("_reduce_oop",),
        analyzer_name="reduce",
    ),
    "broadcast_": OperatorSpec(
        op="broadcast",
        tensors_arg="tensors",
        must_match=_SAME_DATA | MustMatch.ROOT,
        root_arg="root_rank",
        root_is_source=True,
        passes_one_tensor=True,
        input_arg="tensors",
        replicated_arg="tensors",
        bus_factor=BusFactor.ONE,
        flight_names=("_broadcast_oop", "BROADCAST_coalesced"),
        analyzer_name="broadcast",
    ),
    # The list holds a tensor per member and is the same everywhere, even where the members' inputs
    # are uneven.
    "allgather_": OperatorSpec(
        op="all_gather",
        tensors_arg="output_tensors",
        must_match=_SAME_DATA,
        input_arg="input_tensors",
        replicated_arg="output_tensors",
        bus_factor=BusFactor.OTHERS_SHARE,
        flight_names=("ALLGATHER_coalesced",),
        analyzer_name="all_gather",
        list_side=ListSide.OUTPUTS,
        output_scale=OutputScale.TIMES_MEMBERS,
    ),
    "_allgather_base_": OperatorSpec(
        op="all_gather_into_tensor",
        tensors_arg="input_tensor",
        must_match=_SAME_DATA,
        passes_one_tensor=True,
        input_arg="input_tensor",
        replicated_arg="output_tensor",
        size_is_per_rank=True,
        bus_factor=BusFactor.OTHERS_SHARE,
        flight_names=("_all_gather_base",),
        analyzer_name="_all_gather_base",
        output_scale=OutputScale.TIMES_MEMBERS,
    ),
    "allgather_coalesced_": OperatorSpec(
        op="all_gather_coalesced",
        tensors_arg="input_list",
        must_match=_SAME_DATA,
        input_arg="input_list",
        replicated_arg="output_lists",
        size_is_per_rank=True,
        bus_factor=BusFactor.OTHERS_SHARE,
        analyzer_name="all_gather_into_tensor_coalesced",
        output_scale=OutputScale.TIMES_MEMBERS,
    ),
    "allgather_into_tensor_coalesced_": OperatorSpec(
        op="all_gather_into_tensor_coalesced",
        tensors_arg="inputs",
        must_match=_SAME_DATA,
        input_arg="inputs",
        replicated_arg="outputs",
        size_is_per_rank=True,
        bus_factor=BusFactor.OTHERS_SHARE,
        analyzer_name="all_gather_into_tensor_coalesced",
        output_scale=OutputScale.TIMES_MEMBERS,
    ),
    # Each member's output may differ in size; the list of inputs may not.
    "reduce_scatter_": OperatorSpec(
        op="reduce_scatter",
        tensors_arg="input_tensors",
        must_match=_SAME_REDUCTION,
        reduce_op_arg="reduce_op",
        silent_backends=_SILENT_BACKENDS,
        input_arg="input_tensors",
        bus_factor=BusFactor.OTHERS_SHARE,
        flight_names=("REDUCE_SCATTER_coalesced",),
        analyzer_name="reduce_scatter",
        list_side=ListSide.INPUTS,
        output_scale=OutputScale.PER_MEMBER,
    ),
    "_reduce_scatter_base_": OperatorSpec(
        op="reduce_scatter_tensor",
        tensors_arg="input_tensor",
        must_match=_SAME_REDUCTION,
        reduce_op_arg="reduce_op",
        passes_one_tensor=True,
        silent_backends=_SILENT_BACKENDS,
        input_arg="input_tensor",
        bus_factor=BusFactor.OTHERS_SHARE,
        flight_names=("_reduce_scatter_base",),
        analyzer_name="_reduce_scatter_base",
        output_scale=OutputScale.PER_MEMBER,
    ),
    "reduce_scatter_tensor_coalesced_": OperatorSpec(
        op="reduce_scatter_tensor_coalesced",
        tensors_arg="inputs",
        must_match=_SAME_REDUCTION,
        reduce_op_arg="reduce_op",
        silent_backends=_SILENT_BACKENDS,
        input_arg="inputs",
        bus_factor=BusFactor.OTHERS_SHARE,
        analyzer_name="reduce_scatter_tensor_coalesced",
        output_scale=OutputScale.PER_MEMBER,
    ),
    # Only the root has the list, and its entries may be uneven.
    "gather_": OperatorSpec(
        op="gather",
        tensors_arg="input_tensors",
        must_match=MustMatch.DTYPE | MustMatch.ROOT,
        root_arg="root_rank",
        input_arg="input_tensors",
        size_is_per_rank=True,
        bus_factor=BusFactor.OTHERS_SHARE,
        analyzer_name="gather",
        list_side=ListSide.OUTPUTS,
    ),
    "scatter_": OperatorSpec(
        op="scatter",
        tensors_arg="output_tensors",
        must_match=MustMatch.DTYPE | MustMatch.ROOT,
        root_arg="root_rank",
        input_arg="input_tensors",
        size_is_per_rank=True,
        bus_factor=BusFactor.OTHERS_SHARE,
        analyzer_name="scatter",
        list_side=ListSide.INPUTS,
    ),
    # Split sizes only need to agree pairwise, between each sender and receiver.
    "alltoall_": OperatorSpec(
        op="all_to_all",
        tensors_arg="input_tensors",
        must_match=MustMatch.DTYPE,
        split_args=("input_tensors", "output_tensors"),
        input_arg="input_tensors",
        bus_factor=BusFactor.OTHERS_SHARE,
        analyzer_name="all_to_all",
    ),
    "alltoall_base_": OperatorSpec(
        op="all_to_all_single",
        tensors_arg="input",
        must_match=MustMatch.DTYPE,
        split_args=("input_split_sizes", "output_split_sizes"),
        input_arg="input",
        bus_factor=BusFactor.OTHERS_SHARE,
        analyzer_name="all_to_all",
    ),
    "barrier": OperatorSpec(
        op="barrier",
        tensors_arg="",
        must_match=MustMatch.NOTHING,
        flight_names=("all_reduce_barrier",),
        analyzer_name="barrier",
    ),
    "monitored_barrier_": OperatorSpec(
        op="monitored_barrier",
        tensors_arg="",
        must_match=MustMatch.NOTHING,
        returns_work=False,
        analyzer_name="barrier",
    ),
    "send": OperatorSpec(
        op="send",
        tensors_arg="tensors",
        must_match=_SAME_DATA,
        p2p_role=P2pRole.SEND,
        peer_arg="dst",
        input_arg="tensors",
        bus_factor=BusFactor.ONE,
    ),
    "recv_": OperatorSpec(
        op="recv",
        tensors_arg="tensors",
        must_match=_SAME_DATA,
        p2p_role=P2pRole.RECV,
        peer_arg="src",
        bus_factor=BusFactor.ONE,
    ),
    "recv_any_source_": OperatorSpec(
        op="recv_any_source",
        tensors_arg="tensors",
        must_match=_SAME_DATA,
        p2p_role=P2pRole.RECV,
        bus_factor=BusFactor.ONE,
    ),
}
# Operators of the library that do not communicate.
LOCAL_OPERATORS = frozenset({"check_for_nan"})

# Operations that Flight Recorder dumps contain although c10d has no operator of that name.
_FLIGHT_RECORDER_OPERATIONS = (
    OperatorSpec(
        op="all_gather_v", tensors_arg="", must_match=_SAME_DATA, list_side=ListSide.OUTPUTS
    ),
    OperatorSpec(
        op="all_gather_single",
        tensors_arg="",
        must_match=_SAME_DATA,
        output_scale=OutputScale.TIMES_MEMBERS,
    ),
    OperatorSpec(
        op="reduce_scatter_v", tensors_arg="", must_match=_SAME_DATA, list_side=ListSide.INPUTS
    ),
    OperatorSpec(
        op="reduce_scatter_single",
        tensors_arg="",
        must_match=_SAME_DATA,
        output_scale=OutputScale.PER_MEMBER,
    ),
    OperatorSpec(
        op="all_to_all_v_single",
        tensors_arg="",
        must_match=MustMatch.DTYPE,
        split_args=("input_split_sizes", "output_split_sizes"),
    ),
)

# By the name that users know.
OPERATIONS = {spec.op: spec for spec in OPERATORS.values()}
FLIGHT_OPERATIONS = OPERATIONS | {spec.op: spec for spec in _FLIGHT_RECORDER_OPERATIONS}
