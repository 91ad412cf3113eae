"""Which of torch.distributed's functions made a call."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

import pytest
from torch.distributed import c10d_logger, distributed_c10d

from hangwatch.agent.recorder.callers import CallSites, is_left_pending
from hangwatch.agent.recorder.writer import RingWriter
from hangwatch.ring.reader import RingReader

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


@pytest.mark.parametrize(("has_file", "function"), [(True, "test_line"), (False, "made")])
def test_line_of_a_call_in_generated_code(
    has_file: bool, function: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Code without a file is the user's only in a program without one, as in ``python -c``."""
    main = ModuleType("__main__")
    if has_file:
        main.__file__ = "train.py"
    monkeypatch.setitem(sys.modules, "__main__", main)
    path = tmp_path / "x.ring"
    sites = CallSites(RingWriter(path, pid=1, start_ticks=1))
    numbers: list[int] = []
    code = "def made():\n    numbers.append(sites.find_site(sys._getframe()))\n"
    made: dict[str, Any] = {"numbers": numbers, "sites": sites, "sys": sys}
    exec(code, made)

    def test_line() -> None:
        made["made"]()

    test_line()
    reader = RingReader(path.read_bytes())
    site = reader.read_interned(reader.sites, numbers[0])
    assert site is not None and str(site["function"]).endswith(function)
