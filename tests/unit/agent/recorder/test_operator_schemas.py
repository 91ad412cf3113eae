"""Operators of torch without an entry are described by their schema."""

from __future__ import annotations

import torch

from hangwatch.agent.recorder.calls import (
    CallReader,
    describe_unknown_operator,
    iter_communicating_operators,
)
from hangwatch.model.operators import OPERATORS, MustMatch

GROUP = "__torch__.torch.classes.c10d.ProcessGroup process_group"
REDUCE_OP = "__torch__.torch.classes.c10d.ReduceOp reduce_op"
WORK = "__torch__.torch.classes.c10d.Work"


def parse_schema(text: str) -> torch._C.FunctionSchema:
    return torch._C.parse_schema(text)


def test_all_communicating_operators_of_torch_are_found() -> None:
    found = [operator for operator in iter_communicating_operators() if operator.library == "c10d"]
    specs = {operator.name: operator.spec for operator in found}
    assert set(OPERATORS) <= set(specs)
    assert not any("nan" in name for name in specs)
    assert all(spec.is_generic for name, spec in specs.items() if name not in OPERATORS)


def test_unknown_collective() -> None:
    schema = parse_schema(
        f"c10d::_fold_(Tensor output, Tensor[][] inputs, Tensor? mask, {GROUP}, {REDUCE_OP},"
        f" int root_rank, bool async_op=True) -> (Tensor, {WORK})"
    )
    spec = describe_unknown_operator("_fold_", schema)
    assert (spec.op, spec.must_match, spec.is_generic) == ("fold", MustMatch.NOTHING, True)
    reader = CallReader(spec, schema, lambda boxed, caller: None)
    assert (reader.reduce_op_index, reader.root_index, spec.p2p_role) == (4, 5, None)
    assert spec.returns_work
    assert (reader._tensor_indices, reader._group_index) == ([0, 1, 2], 3)


def test_unknown_point_to_point_operators() -> None:
    schema = parse_schema(f"c10d::put(Tensor tensor, {GROUP}, int dst) -> ()")
    put = describe_unknown_operator("put", schema)
    assert (put.p2p_role, put.returns_work) == ("send", False)
    assert CallReader(put, schema, lambda boxed, caller: None)._peer_index == 2
    schema = parse_schema(f"c10d::take_(Tensor tensor, {GROUP}, int src, int tag) -> {WORK}")
    take = describe_unknown_operator("take_", schema)
    assert (take.p2p_role, take.returns_work) == ("recv", True)
    assert CallReader(take, schema, lambda boxed, caller: None)._peer_index == 2
