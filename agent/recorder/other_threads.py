"""Inspects what another thread of this process is doing."""

from __future__ import annotations

import gc
import operator
import os
import sys
import sysconfig
from collections.abc import Callable
from types import FrameType
from typing import Any

_STDLIB = sysconfig.get_path("stdlib")
_CHECKS_DIR = os.path.join(os.path.dirname(__file__), "checks", "")
_NEEDS_GC_PAUSE = sys.version_info[:2] == (3, 11)
_call_function: Callable[..., Any] = operator.methodcaller("__call__")


def inspect_thread(thread: int) -> tuple[bool, bool]:
    """Whether the thread is in torch.distributed, and whether it is in code of its own rather than in a
    wait of the standard library or in autograd.
    """
    frame = find_frame(thread)
    # Our checks run inside a call: the frame below them tells where the thread is.
    while frame is not None and frame.f_code.co_filename.startswith(_CHECKS_DIR):
        frame = frame.f_back
    if frame is None:
        return False, False
    file = frame.f_code.co_filename
    is_independent = not file.startswith(_STDLIB) and "/torch/autograd/" not in file
    return "/torch/distributed/" in file, is_independent


def find_frame(thread: int) -> FrameType | None:
    """The innermost frame of another thread; None if the thread has ended.

    `sys._current_frames` returns the frame of this function as well. A local variable that held its
    result would therefore be a reference cycle, which keeps the frames of all threads, and all of
    their local variables, until a garbage collection.

    Python 3.11 creates objects there while it holds the lock of its list of threads. If a garbage
    collection runs a destructor that releases the GIL, as torch's do, and the thread that gets the
    GIL starts or ends a thread, the process is deadlocked
    (https://github.com/python/cpython/issues/106883; the last releases of 3.11 do the same as here).
    """
    if not (_NEEDS_GC_PAUSE and gc.isenabled()):
        return sys._current_frames().get(thread)
    # `map` calls the three from C, so that no other thread runs in between.
    functions = (gc.disable, sys._current_frames, gc.enable)
    frame: FrameType | None = tuple(map(_call_function, functions))[1].get(thread)
    return frame
