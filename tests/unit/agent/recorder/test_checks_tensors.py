"""What is seen in tensors: every flipped bit, every NaN, and the user's modes see nothing of it."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from hangwatch.agent.recorder.checks.settings import asked
from hangwatch.agent.recorder.checks.tensors import Unseen, checksum, nonfinite, readable, values

FLOAT_TYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 3000), st.data())
def test_a_flipped_bit_changes_the_checksum(size: int, data: st.DataObject) -> None:
    whole = torch.zeros(size, dtype=torch.uint8)
    before = checksum([whole])
    at, bit = data.draw(st.integers(0, size - 1)), data.draw(st.integers(0, 7))
    whole[at] ^= 1 << bit
    assert checksum([whole]) != before
    whole[at] ^= 1 << bit
    assert checksum([whole]) == before


def test_the_checksum_is_of_bytes_and_their_order() -> None:
    assert checksum([torch.tensor([0.0])]) != checksum([torch.tensor([-0.0])])
    assert checksum([torch.tensor([1, 2])]) != checksum([torch.tensor([2, 1])])
    assert checksum([torch.tensor([1.0]), torch.tensor([2.0])]) == checksum(
        [torch.tensor([1.0, 2.0])]
    )
    quiet, other = (
        torch.tensor([number]).view(torch.float32) for number in (0x7FC00000, 0x7FC00001)
    )
    assert checksum([quiet]) != checksum([other])


def test_unreadable_tensor_has_no_checksum() -> None:
    assert checksum([torch.ones(4, 4).t()]) is None
    assert checksum([torch.empty(3, device="meta")]) is None
    assert checksum([torch.ones(2, dtype=torch.complex64).conj()]) is None
    assert checksum([torch.ones(3).to_sparse()]) is None
    assert checksum([]) is None
    freed = torch.ones(8)
    freed.untyped_storage().resize_(0)
    assert checksum([freed]) is None


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
        with Unseen():
            assert nonfinite([view]) == (len(bad) - infs, infs)


def test_a_sum_too_large_for_its_type_is_no_inf() -> None:
    with Unseen():
        assert nonfinite([torch.full((10_000,), 60000.0, dtype=torch.float16)]) == (0, 0)
        assert nonfinite([torch.full((100,), 3e38)]) == (0, 0)
        assert nonfinite([torch.tensor([1, 2]), torch.tensor(True)]) == (0, 0)
        assert nonfinite([torch.tensor([complex(math.nan, 1.0)])]) == (1, 0)


@settings(max_examples=20, deadline=None)
@given(
    st.lists(st.floats(-(2.0**99), 2.0**99, width=32), min_size=1, max_size=300), st.integers(0, 5)
)
def test_values_are_those_of_the_finite_elements(numbers: list[float], others: int) -> None:
    with Unseen():
        found = values([torch.tensor(numbers + [math.nan] * others)])
    assert found is not None
    (mean, low, high, norm), count = found
    assert count == others and (low, high) == (min(numbers), max(numbers))
    assert mean == pytest.approx(
        sum(numbers) / len(numbers), rel=1e-6, abs=1e-6 * max(map(abs, numbers))
    )
    assert norm == pytest.approx(math.sqrt(sum(n * n for n in numbers)), rel=1e-6)


def test_values_of_anything() -> None:
    with Unseen():
        assert values([torch.empty(0)]) is None
        assert values([torch.full((2,), math.inf)]) == ((0.0, 0.0, 0.0, 0.0), 2)
        assert values([torch.tensor([True, False])]) == ((0.5, 0.0, 1.0, 1.0), 0)
        large = torch.ones(600_000)
        assert values([large, large.view(600, 1000).t()]) == (
            (1.0, 1.0, 1.0, math.sqrt(1_200_000)),
            0,
        )
        over = values([torch.full((2,), 1.7e308, dtype=torch.float64)])
    assert over is not None and all(math.isfinite(number) for number in over[0])


def test_examination_is_invisible_to_tensor_hooks() -> None:
    class DispatchedTensor(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            raise AssertionError(f"{func} was seen")

    class FunctionTensor(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            raise AssertionError(f"{func} was seen")

    tensor = torch.nn.Parameter(torch.tensor([1.0, math.nan]))
    before = torch.get_rng_state()
    with DispatchedTensor(), FunctionTensor(), Unseen():
        assert nonfinite([tensor]) == (1, 0)
        assert values([tensor]) is not None and checksum([tensor]) is not None
    assert tensor.grad_fn is None and tensor._version == 0
    assert torch.equal(before, torch.get_rng_state())
    assert not readable(torch._subclasses.FakeTensorMode().from_tensor(torch.ones(2)))


def test_environment_parsing_is_tolerant() -> None:
    assert not asked({}).anything and not asked({"HANGWATCH_CHECKS": " , "}).problems
    told = asked({"HANGWATCH_CHECKS": "Replicas, values", "HANGWATCH_CHECK_EVERY": "4"})
    assert (told.names, told.every, told.problems) == ("replicas, values", 4, ())
    wrong = asked({"HANGWATCH_CHECKS": "nan,nonfinite", "HANGWATCH_CHECK_EVERY": "0"})
    assert (wrong.names, wrong.every, len(wrong.problems)) == ("nonfinite", 16, 2)
    assert "'nan'" in wrong.problems[0] and "replicas, nonfinite, values" in wrong.problems[0]
