"""Every operator that communicates has one complete entry, from which all other tables follow."""

from __future__ import annotations

import pytest
import torch
import torch.distributed
import torch.distributed._symmetric_memory

from hangwatch.model.operators import (
    FLIGHT_OPERATIONS,
    LOCAL_OPERATORS,
    NCCL_OPERATIONS,
    OPERATIONS,
    OPERATORS,
    SYMMETRIC_OPERATORS,
    BusFactor,
    MustMatch,
)


def find_schemas(library: str) -> dict[str, torch._C.FunctionSchema]:
    """The schemas of a library's operators, by their names in it."""
    prefix = f"{library}::"
    return {
        schema.name.removeprefix(prefix): schema
        for schema in torch._C._jit_get_all_schemas()
        if schema.name.startswith(prefix)
    }


SCHEMAS = find_schemas("c10d")
SYMMETRIC_SCHEMAS = find_schemas("symm_mem")


def has_group(schema: torch._C.FunctionSchema) -> bool:
    return any("c10d.ProcessGroup" in str(argument.type) for argument in schema.arguments)


def test_every_operator_of_torch_is_known_or_local_or_recorded_generically() -> None:
    without_group = {name for name, schema in SCHEMAS.items() if not has_group(schema)}
    assert without_group - set(OPERATORS) <= LOCAL_OPERATORS


def test_names_are_unique() -> None:
    known = (*OPERATORS.values(), *SYMMETRIC_OPERATORS.values(), *NCCL_OPERATIONS)
    assert len(OPERATIONS) == len(known)
    aliases = [name for spec in FLIGHT_OPERATIONS.values() for name in spec.flight_names]
    assert len(aliases) == len(set(aliases))
    assert not set(aliases) & set(FLIGHT_OPERATIONS)


@pytest.mark.parametrize("name", sorted(set(OPERATORS) & set(SCHEMAS)))
def test_entry_is_complete_and_fits_the_schema(name: str) -> None:
    spec = OPERATORS[name]
    arguments = {argument.name: str(argument.type) for argument in SCHEMAS[name].arguments}
    named = [spec.tensors_arg, spec.input_arg]
    named += [spec.replicated_arg, *(spec.split_args or ())]
    assert {argument for argument in named if argument} <= set(arguments)
    reduce_ops = [argument for argument, kind in arguments.items() if "c10d.ReduceOp" in kind]
    assert len(reduce_ops) == (MustMatch.REDUCE_OP in spec.must_match)
    assert ("root_rank" in arguments) == spec.is_rooted
    assert ("tag" in arguments) == spec.is_p2p
    assert ("dst" in arguments) == (spec.p2p_role == "send")
    assert ("src" in arguments) == (name == "recv_")
    returned = [str(value.type) for value in SCHEMAS[name].returns]
    assert spec.returns_work == any("c10d.Work" in kind for kind in returned)
    moves_data = bool(spec.tensors_arg)
    assert (spec.bus_factor is not None) == moves_data
    assert (spec.must_match is not MustMatch.NOTHING) == moves_data
    assert bool(spec.input_arg) == (moves_data and not name.startswith("recv"))
    assert bool(spec.analyzer_name) != spec.is_p2p


def test_operators_on_symmetric_memory_that_name_a_group_are_known() -> None:
    grouped = {
        name
        for name, schema in SYMMETRIC_SCHEMAS.items()
        if any(
            str(argument.type) == "str" and argument.name == "group_name"
            for argument in schema.arguments
        )
    }
    # This one returns the buffers of the other members, which is local from the second call on.
    assert grouped - set(SYMMETRIC_OPERATORS) == {"get_remote_tensors"}


@pytest.mark.parametrize("name", sorted(set(SYMMETRIC_OPERATORS) & set(SYMMETRIC_SCHEMAS)))
def test_entry_of_symmetric_memory_fits_the_schema(name: str) -> None:
    spec = SYMMETRIC_OPERATORS[name]
    arguments = {
        argument.name: str(argument.type) for argument in SYMMETRIC_SCHEMAS[name].arguments
    }
    assert "Tensor" in arguments[spec.tensors_arg]
    assert ("root" in arguments) == spec.is_rooted
    assert (not arguments.keys().isdisjoint({"reduce_op", "red_op"})) == (
        MustMatch.REDUCE_OP in spec.must_match
    )
    assert not spec.returns_work
    assert not spec.analyzer_name


def test_bus_factors() -> None:
    assert [factor.for_ranks(4) for factor in BusFactor] == [1.0, 0.75, 1.5]
