"""Where the interpreter keeps a thread's frames: byte offsets in its own structs, which no release
changes after its first.
"""

from __future__ import annotations

import ctypes
import sys
import sysconfig


class FrameLayout(ctypes.Structure):
    """As in recorder.cpp."""

    _fields_ = (
        (
            "indirect",
            ctypes.c_int32,
        ),  # in PyThreadState: a pointer to what holds the newest frame; -1: it does so itself
        ("newest", ctypes.c_int32),  # in that
        ("back", ctypes.c_int32),  # in a frame, as are the next two
        ("code", ctypes.c_int32),
        ("instruction", ctypes.c_int32),
    )


# Source: Include/cpython/pystate.h, Include/cpython/frameobject.h (3.10),
# Include/internal/pycore_frame.h of each release.
_FRAME_LAYOUTS = {
    (3, 10): FrameLayout(-1, 24, 24, 32, 96),
    (3, 11): FrameLayout(56, 8, 48, 32, 56),
    (3, 12): FrameLayout(56, 0, 8, 0, 56),
    (3, 13): FrameLayout(-1, 72, 8, 0, 56),
}


def get_frame_layout() -> FrameLayout | None:
    """This interpreter's; None where it is not known."""
    usual = (
        sys.implementation.name == "cpython"
        and sys.abiflags == ""
        and not sysconfig.get_config_var("Py_GIL_DISABLED")
    )
    return _FRAME_LAYOUTS.get(sys.version_info[:2]) if usual else None
