"""The byte offsets of a thread's frames in the interpreter's structs, which stay the same in all
patch releases of a Python version.
"""

from __future__ import annotations

import ctypes
import sys
import sysconfig


class FrameLayout(ctypes.Structure):
    """The offsets, as in python_frames.h."""

    _fields_ = (
        # In PyThreadState: the pointer to the struct that holds the newest frame; -1: it is held by
        # PyThreadState itself.
        ("indirect", ctypes.c_int32),
        ("newest", ctypes.c_int32),  # in that struct: the pointer to the newest frame
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
    """The layout of this interpreter; None if it is not known."""
    is_standard_build = (
        sys.implementation.name == "cpython"
        and sys.abiflags == ""
        and not sysconfig.get_config_var("Py_GIL_DISABLED")
    )
    return _FRAME_LAYOUTS.get(sys.version_info[:2]) if is_standard_build else None
