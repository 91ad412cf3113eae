"""Finds the ``c10d`` operators of the running torch that communicate, and describes those that
`hangwatch.model.operators` has no entry for.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from hangwatch.model.operator_spec import MustMatch, OperatorSpec, P2pRole
from hangwatch.model.operators import LOCAL_OPERATORS, OPERATORS

from . import faults

_NAMESPACE = "c10d::"
_GROUP_TYPE, _WORK_TYPE, _REDUCE_OP_TYPE = "c10d.ProcessGroup", "c10d.Work", "c10d.ReduceOp"


@dataclass(frozen=True, slots=True)
class TorchOperator:
    """One overload of an operator. ``name`` is without namespace, as in ``gather_`` or ``put.out``."""

    name: str
    overload: Any  # a torch._ops.OpOverload
    spec: OperatorSpec

    @property
    def schema(self) -> Any:
        return self.overload._schema


def iter_communicating_operators() -> Iterator[TorchOperator]:
    """All operators of torch's ``c10d`` library that take a process group, ordered by name."""
    import torch

    for qualified_name in sorted(torch._C._dispatch_get_all_op_names()):
        if not qualified_name.startswith(_NAMESPACE):
            continue
        name = qualified_name.removeprefix(_NAMESPACE)
        base_name, _, overload_name = name.partition(".")
        overload = getattr(getattr(torch.ops.c10d, base_name), overload_name or "default")
        if base_name in LOCAL_OPERATORS or find_group_index(overload._schema) < 0:
            continue
        if any(argument.kwarg_only for argument in overload._schema.arguments):
            # A kernel gets such arguments by name, and what has none of these must not pay for it.
            faults.record_message(f"calls of {qualified_name} are not watched: {overload._schema}")
            continue
        spec = OPERATORS.get(name) or describe_unknown_operator(base_name, overload._schema)
        yield TorchOperator(name, overload, spec)


def find_group_index(schema: Any) -> int:
    """The position of the argument that holds the process group; -1 if there is none."""
    return _find_type(schema.arguments, _GROUP_TYPE)


def find_tensor_indices(schema: Any) -> tuple[int, ...]:
    """The positions of all arguments that hold tensors."""
    types = [str(argument.type) for argument in schema.arguments]
    return tuple(index for index, kind in enumerate(types) if "Tensor" in kind)


def describe_unknown_operator(name: str, schema: Any) -> OperatorSpec:
    """An entry for an operator of which only the schema is known.

    Only the operator itself must agree on all members, since its shapes may legally differ. c10d
    calls the peers of point-to-point operators ``dst`` and ``src``.
    """
    arguments = [argument.name for argument in schema.arguments]
    reduce_op_index = _find_type(schema.arguments, _REDUCE_OP_TYPE)
    role, peer_arg = None, None
    if ("dst" in arguments) != ("src" in arguments):
        peer_arg = "dst" if "dst" in arguments else "src"
        role = P2pRole.SEND if peer_arg == "dst" else P2pRole.RECV
    returns = schema.returns
    return OperatorSpec(
        op=name.strip("_"),
        tensors_arg="",
        must_match=MustMatch.NOTHING,
        reduce_op_arg=arguments[reduce_op_index] if reduce_op_index >= 0 else None,
        root_arg="root_rank" if "root_rank" in arguments else None,
        p2p_role=role,
        peer_arg=peer_arg,
        # The recorder takes the Work from the end of what the operator returns.
        returns_work=bool(returns) and _WORK_TYPE in str(returns[-1].type),
        is_generic=True,
    )


def _find_type(values: Any, type_name: str) -> int:
    for index, value in enumerate(values):
        if type_name in str(value.type):
            return index
    return -1
