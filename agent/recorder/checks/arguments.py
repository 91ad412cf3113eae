"""Finds the arguments of a ``c10d`` operator that hold a rank's input, and those that hold a result
which must be equal on every rank.
"""

from __future__ import annotations

from types import FrameType
from typing import Any

from ..call_reader import CallReader
from ..groups import GroupTrack
from .tensors import flatten_tensors

# An Inf in the input makes their result non-finite. Inputs of MIN and MAX may legally be Inf.
_SUMMING_OPS = frozenset({0, 1, 2, 8})  # SUM, AVG, PRODUCT, PREMUL_SUM


class TensorArguments:
    """The tensor arguments of one operator, by their positions in the schema of this torch."""

    def __init__(self, reader: CallReader, schema: Any) -> None:
        names = [argument.name for argument in schema.arguments]
        self.name = schema.name.partition("::")[2]
        self._reader = reader
        spec = reader.spec
        self._input_index = names.index(spec.input_arg) if spec.input_arg in names else -1
        self.replicated_output_index = (
            names.index(spec.replicated_arg) if spec.replicated_arg in names else -1
        )
        self.is_reduction = reader.reduce_op_index >= 0 and self.replicated_output_index >= 0
        self._root_is_source = spec.root_is_source

    @property
    def is_examined(self) -> bool:
        return self._input_index >= 0

    def get_inputs(self, args: tuple[Any, ...], track: GroupTrack) -> list[Any]:
        """The input tensors of this rank."""
        if self._root_is_source and (
            (group := track.group_ref()) is None or group.rank() != args[self._reader.root_index]
        ):
            return []
        return flatten_tensors(args[self._input_index])

    def has_summing_op(self, args: tuple[Any, ...], caller: FrameType) -> bool:
        """Whether the call adds up or multiplies the inputs of the ranks."""
        if self._reader.reduce_op_index < 0:
            return False
        return self._reader.read_reduce_op(args, caller) in _SUMMING_OPS
