"""Every flipped bit and every NaN is found in tensors, invisibly to the user's modes."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from hangwatch.agent.recorder.checks.settings import load_check_settings
from hangwatch.agent.recorder.checks.tensors import (
    DispatchBypass,
    compute_checksum,
    compute_stats,
    count_nonfinite,
    is_readable,
)

FLOAT_TYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 3000), st.data())
def test_a_flipped_bit_changes_the_checksum(size: int, data: st.DataObject) -> None:
    whole = torch.zeros(size, dtype=torch.uint8)
    before = compute_checksum([whole])
    at, bit = data.draw(st.integers(0, size - 1)), data.draw(st.integers(0, 7))
    whole[at] ^= 1 << bit
    assert compute_checksum([whole]) != before
    whole[at] ^= 1 << bit
    assert compute_checksum([whole]) == before


def test_the_checksum_is_of_bytes_and_their_order() -> None:
    assert compute_checksum([torch.tensor([0.0])]) != compute_checksum([torch.tensor([-0.0])])
    assert compute_checksum([torch.tensor([1, 2])]) != compute_checksum([torch.tensor([2, 1])])
    assert compute_checksum([torch.tensor([1.0]), torch.tensor([2.0])]) == compute_checksum(
        [torch.tensor([1.0, 2.0])]
    )
    quiet, other = (
        torch.tensor([number]).view(torch.float32) for number in (0x7FC00000, 0x7FC00001)
    )
    assert compute_checksum([quiet]) != compute_checksum([other])


def test_unreadable_tensor_has_no_checksum() -> None:
    assert compute_checksum([torch.ones(4, 4).t()]) is None
    assert compute_checksum([torch.empty(3, device="meta")]) is None
    assert compute_checksum([torch.ones(2, dtype=torch.complex64).conj()]) is None
    assert compute_checksum([torch.ones(3).to_sparse()]) is None
    assert compute_checksum([]) is None
    freed = torch.ones(8)
    freed.untyped_storage().resize_(0)
    assert compute_checksum([freed]) is None


@settings(max_examples=25, deadline=None)
@given(st.sampled_from(FLOAT_TYPES), st.integers(1, 40), st.integers(1, 9), st.data())
def test_nonfinite_elements_are_counted_with_any_strides(
    dtype: torch.dtype, rows: int, columns: int, data: st.DataObject
) -> None:
    bad = data.draw(
        st.dictionaries(
            st.integers(0, rows * columns - 1),
            st.sampled_from((math.nan, math.inf, -math.inf)),
            max_size=6,
        )
    )
    flat = torch.linspace(-9, 9, rows * columns, dtype=torch.float64)
    for at, number in bad.items():
        flat[at] = number
    tensor = flat.to(dtype).view(rows, columns)
    infs = sum(math.isinf(number) for number in bad.values())
    for view in (tensor, tensor.t(), torch.stack((tensor, tensor))[0], torch.nn.Parameter(tensor)):
        with DispatchBypass():
            assert count_nonfinite([view]) == (len(bad) - infs, infs)


def test_a_sum_too_large_for_its_type_is_no_inf() -> None:
    with DispatchBypass():
        assert count_nonfinite([torch.full((10_000,), 60000.0, dtype=torch.float16)]) == (0, 0)
        assert count_nonfinite([torch.full((100,), 3e38)]) == (0, 0)
        assert count_nonfinite([torch.tensor([1, 2]), torch.tensor(True)]) == (0, 0)
        assert count_nonfinite([torch.tensor([complex(math.nan, 1.0)])]) == (1, 0)


@settings(max_examples=20, deadline=None)
@given(
    st.lists(st.floats(-(2.0**99), 2.0**99, width=32), min_size=1, max_size=300), st.integers(0, 5)
)
def test_values_are_those_of_the_finite_elements(numbers: list[float], others: int) -> None:
    with DispatchBypass():
        stats = compute_stats([torch.tensor(numbers + [math.nan] * others)])
    assert stats is not None
    (mean, low, high, norm), count = stats
    assert count == others and (low, high) == (min(numbers), max(numbers))
    assert mean == pytest.approx(
        sum(numbers) / len(numbers), rel=1e-6, abs=1e-6 * max(map(abs, numbers))
    )
    assert norm == pytest.approx(math.sqrt(sum(n * n for n in numbers)), rel=1e-6)


def test_values_of_anything() -> None:
    with DispatchBypass():
        assert compute_stats([torch.empty(0)]) is None
        assert compute_stats([torch.full((2,), math.inf)]) == ((0.0, 0.0, 0.0, 0.0), 2)
        assert compute_stats([torch.tensor([True, False])]) == ((0.5, 0.0, 1.0, 1.0), 0)
        large = torch.ones(600_000)
        assert compute_stats([large, large.view(600, 1000).t()]) == (
            (1.0, 1.0, 1.0, math.sqrt(1_200_000)),
            0,
        )
        over = compute_stats([torch.full((2,), 1.7e308, dtype=torch.float64)])
    assert over is not None and all(math.isfinite(number) for number in over[0])


def test_examination_is_invisible_to_tensor_hooks() -> None:
    class DispatchedTensor(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            raise AssertionError(f"{func} was seen")

    class FunctionTensor(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            raise AssertionError(f"{func} was seen")

    tensor = torch.nn.Parameter(torch.tensor([1.0, math.nan]))
    before = torch.get_rng_state()
    with DispatchedTensor(), FunctionTensor(), DispatchBypass():  # type: ignore[no-untyped-call]
        assert count_nonfinite([tensor]) == (1, 0)
        assert compute_stats([tensor]) is not None and compute_checksum([tensor]) is not None
    assert tensor.grad_fn is None and tensor._version == 0
    assert torch.equal(before, torch.get_rng_state())
    assert not is_readable(torch._subclasses.FakeTensorMode().from_tensor(torch.ones(2)))


def test_environment_parsing_is_tolerant() -> None:
    assert (
        not load_check_settings({}).any_enabled
        and not load_check_settings({"HANGWATCH_CHECKS": " , "}).problems
    )
    settings = load_check_settings(
        {"HANGWATCH_CHECKS": "Replicas, values", "HANGWATCH_CHECK_EVERY": "4"}
    )
    assert (settings.enabled_names, settings.sample_every, settings.problems) == (
        "replicas, values",
        4,
        (),
    )
    wrong = load_check_settings({"HANGWATCH_CHECKS": "nan,nonfinite", "HANGWATCH_CHECK_EVERY": "0"})
    assert (wrong.enabled_names, wrong.sample_every, len(wrong.problems)) == ("nonfinite", 16, 2)
    assert "'nan'" in wrong.problems[0] and "replicas, nonfinite, values" in wrong.problems[0]
