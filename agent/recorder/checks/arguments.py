"""Which arguments of a ``c10d`` operator hold what a rank puts in, and which a result that must be
equal on every rank.
"""

from __future__ import annotations

from types import FrameType
from typing import Any

from ..call_reader import CallReader
from ..groups import GroupTrack
from .tensors import flatten_tensors

# By operator: (what this rank puts in, what must be equal on all members afterwards)
_TENSOR_ARGUMENTS: dict[str, tuple[str, str]] = {
    "allreduce_": ("tensors", "tensors"),
    "allreduce_coalesced_": ("tensors", "tensors"),
    "reduce_": ("tensors", ""),
    "broadcast_": ("tensors", "tensors"),  # put in by the root alone
    "allgather_": ("input_tensors", "output_tensors"),
    "_allgather_base_": ("input_tensor", "output_tensor"),
    "allgather_coalesced_": ("input_list", "output_lists"),
    "allgather_into_tensor_coalesced_": ("inputs", "outputs"),
    "reduce_scatter_": ("input_tensors", ""),
    "_reduce_scatter_base_": ("input_tensor", ""),
    "reduce_scatter_tensor_coalesced_": ("inputs", ""),
    "gather_": ("input_tensors", ""),
    "scatter_": ("input_tensors", ""),
    "alltoall_": ("input_tensors", ""),
    "alltoall_base_": ("input", ""),
    "send": ("tensors", ""),
}
_SUMMING_OPS = frozenset(
    {0, 1, 2, 8}
)  # SUM, AVG, PRODUCT, PREMUL_SUM: an Inf spoils these, while MIN and MAX may well begin from one


class TensorArguments:
    """One operator's, by the positions that the schema of this torch gives them."""

    def __init__(self, reader: CallReader, schema: Any) -> None:
        names = [argument.name for argument in schema.arguments]
        self.name = schema.name.partition("::")[2]
        self._reader = reader
        given, equal = _TENSOR_ARGUMENTS.get(self.name, ("", ""))
        self._input_index = names.index(given) if given in names else -1
        self.replicated_output_index = names.index(equal) if equal in names else -1
        self.is_reduction = reader.reduce_op_index >= 0 and self.replicated_output_index >= 0
        self._is_broadcast = self.name == "broadcast_"

    @property
    def is_examined(self) -> bool:
        return self._input_index >= 0

    def get_inputs(self, args: tuple[Any, ...], track: GroupTrack) -> list[Any]:
        """The tensors that this rank puts in."""
        if self._is_broadcast and (
            (group := track.group_ref()) is None or group.rank() != args[self._reader.root_index]
        ):
            return []
        return flatten_tensors(args[self._input_index])

    def has_summing_op(self, args: tuple[Any, ...], caller: FrameType) -> bool:
        """It adds up what the ranks put in."""
        return (
            self._reader.reduce_op_index >= 0
            and self._reader.read_reduce_op(args, caller) in _SUMMING_OPS
        )
