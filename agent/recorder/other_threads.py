"""What another thread of this process does at this moment."""

from __future__ import annotations

import gc
import operator
import os
import sys
import sysconfig
from types import FrameType

_STDLIB = sysconfig.get_path("stdlib")
_CHECKS_DIR = os.path.join(os.path.dirname(__file__), "checks", "")
_NEEDS_GC_PAUSE = sys.version_info[:2] == (3, 11)
_call_function = operator.methodcaller("__call__")


def inspect_thread(thread: int) -> tuple[bool, bool]:
    """Whether it is in torch.distributed, and whether in something of its own."""
    frame = get_current_frames().get(thread)
    while frame is not None and frame.f_code.co_filename.startswith(
        _CHECKS_DIR
    ):  # the call goes on, and is examined
        frame = frame.f_back
    file = frame.f_code.co_filename if frame is not None else ""
    return "/torch/distributed/" in file, frame is not None and not file.startswith(
        _STDLIB
    ) and "/torch/autograd/" not in file


def get_current_frames() -> dict[int, FrameType]:
    """``sys._current_frames``, during which no garbage is collected.

    Python 3.11 makes objects there while it holds the lock of its list of threads. Where a
    destructor then lets go of the GIL, as those of torch do, and the thread that takes it starts or
    ends a thread, the process stands still for good
    (https://github.com/python/cpython/issues/106883; its last releases do as is done here).
    """
    if not (_NEEDS_GC_PAUSE and gc.isenabled()):
        return sys._current_frames()
    found: dict[int, FrameType]
    _, found, _ = map(
        _call_function, (gc.disable, sys._current_frames, gc.enable)
    )  # in C, so that no other thread comes between
    return found
