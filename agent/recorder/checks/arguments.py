"""Which arguments of a ``c10d`` operator hold what a rank puts in, and which a result that must be
equal on every rank.
"""

from __future__ import annotations

from types import FrameType
from typing import Any

from ..call_reader import CallReader
from ..groups import GroupTrack
from .tensors import tensors_of

# By operator: (what this rank puts in, what must be equal on all members afterwards)
_ARGUMENTS: dict[str, tuple[str, str]] = {
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
_SUMS = frozenset(
    {0, 1, 2, 8}
)  # SUM, AVG, PRODUCT, PREMUL_SUM: an Inf spoils these, while MIN and MAX may well begin from one


class Arguments:
    """One operator's, by the positions that the schema of this torch gives them."""

    def __init__(self, reader: CallReader, schema: Any) -> None:
        names = [argument.name for argument in schema.arguments]
        self.name = schema.name.partition("::")[2]
        self._reader = reader
        given, equal = _ARGUMENTS.get(self.name, ("", ""))
        self._given_at = names.index(given) if given in names else -1
        self.equal_at = names.index(equal) if equal in names else -1
        self.reduces = reader.reduce_op_at >= 0 and self.equal_at >= 0
        self._from_root = self.name == "broadcast_"

    @property
    def examined(self) -> bool:
        return self._given_at >= 0

    def given(self, args: tuple[Any, ...], track: GroupTrack) -> list[Any]:
        """The tensors that this rank puts in."""
        if self._from_root and (
            (group := track.ref()) is None or group.rank() != args[self._reader.root_at]
        ):
            return []
        return tensors_of(args[self._given_at])

    def sums(self, args: tuple[Any, ...], caller: FrameType) -> bool:
        """It adds up what the ranks put in."""
        return self._reader.reduce_op_at >= 0 and self._reader.reduce_op(args, caller) in _SUMS
