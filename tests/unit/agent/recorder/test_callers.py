"""Which of torch.distributed's functions made a call."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
from torch.distributed import c10d_logger, distributed_c10d

from hangwatch.agent.recorder.callers import is_left_pending

# As torch nests them: each public function is wrapped, and `send` and `batch_isend_irecv` call `isend`.
_CALLS = """
def isend():
    return inspect_caller()

def wrap(function):
    def func_wrapper():
        return function()
    return func_wrapper

wrapped_isend = wrap(isend)

def send():
    return wrapped_isend()

def batch_isend_irecv():
    return wrapped_isend()

def all_reduce():
    return inspect_caller()
"""


@pytest.fixture
def torch_functions() -> dict[str, Callable[[], bool]]:
    def inspect_caller() -> bool:
        frame: FrameType | None = sys._getframe(1)
        assert frame is not None
        return is_left_pending(frame)

    functions: dict[str, Any] = {"inspect_caller": inspect_caller}
    exec(compile(_CALLS, str(distributed_c10d.__file__), "exec"), functions)
    return functions


def test_isend_of_the_users_code_is_left_pending(
    torch_functions: dict[str, Callable[[], bool]],
) -> None:
    assert torch_functions["wrapped_isend"]()


@pytest.mark.parametrize("function", ["send", "batch_isend_irecv", "all_reduce"])
def test_other_functions_leave_nothing_pending(
    torch_functions: dict[str, Callable[[], bool]], function: str
) -> None:
    assert not torch_functions[function]()


def test_torch_still_wraps_its_functions_in_the_same_folder() -> None:
    assert os.path.dirname(str(c10d_logger.__file__)) == os.path.dirname(
        str(distributed_c10d.__file__)
    )
