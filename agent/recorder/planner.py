"""The functions that the native recorder calls in Python. They return the plan of a new kind of
call, the site of a call, and what another thread does.

Each is an operator of the library ``hangwatch``, which native/python_calls.h calls.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

from . import faults
from .call_reader import CallReader
from .callers import find_caller
from .dynamo import run_uncompiled
from .failures import FailureRule
from .native.library import encode_plan
from .other_threads import inspect_thread
from .python_kernel import get_recorder, record_loss
from .recorder import Recorder


def make_planner(reader: CallReader) -> Callable[..., list[int]]:
    """Makes the function that the native kernel calls with the arguments of a new kind of call."""

    def plan_call(*args: Any) -> list[int]:
        try:
            recorder = get_recorder()
            if recorder is not None:
                return run_uncompiled(_make_plan, reader, recorder, args, find_caller())
        except Exception as error:  # ours: the call goes on
            record_loss(reader, args, error)
        return []

    return plan_call


def _make_plan(
    reader: CallReader, recorder: Recorder, args: tuple[Any, ...], caller: FrameType
) -> list[int]:
    details = reader.read_call(recorder, args, caller)
    if details is None:
        return encode_plan(None, FailureRule.NONE)
    mode = reader.choose_native_mode(recorder, details[-1], args, os.environ)
    rule = reader.find_failure_rule(recorder, args)
    return encode_plan((*details[:-1], mode), rule)


def find_site() -> int:
    """The number of the site of the call that this thread makes; 0 if unknown."""
    try:
        recorder = get_recorder()
        if recorder is None:
            return 0
        return run_uncompiled(recorder.sites.find_site, sys._getframe())
    except Exception as error:  # ours: the call goes on
        faults.record_fault("finding the line of a call", error)
        return 0


def inspect_thread_bits(thread: int) -> int:
    """What another thread does: bit 0, it is in torch.distributed; bit 1, in code of its own."""
    try:
        is_in_torch, is_independent = run_uncompiled(inspect_thread, thread)
    except Exception as error:  # ours: the call goes on
        faults.record_fault("inspecting another thread", error)
        return 0
    return is_in_torch | is_independent << 1
