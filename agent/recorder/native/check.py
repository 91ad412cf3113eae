"""Tries a new recorder, in a process of its own, so that a broken one crashes no training."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from types import FrameType
from typing import Any

from hangwatch.ring.reader import RingReader

from .. import kernels
from ..recorder import Recorder
from ..writer import RingWriter
from .library import NativeLibrary

_CALLER_CODE = """
def nested(depth, call):
    return nested(depth - 1, call) if depth else call()
def calls(dist, tensor):
    for _ in range(2):
        dist.all_reduce(tensor)
    dist.all_reduce(tensor)
    dist.broadcast(tensor, src=0)
"""


def main(path: str) -> None:
    """Raises AssertionError if the library at ``path`` does not work."""
    import torch  # noqa: F401  # loads the libraries that the recorder needs

    native = NativeLibrary(Path(path))
    user: dict[str, Any] = {}
    exec(compile(_CALLER_CODE, "/caller.py", "exec"), user)
    user["nested"](3, lambda: _check_frames(native))
    _check_records(native, user["calls"])


def _check_frames(native: NativeLibrary) -> None:
    """Checks that the library finds Python's frames, in order, and distinguishes their lines."""
    native_frames = native.read_frames()
    expected_codes = []
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        expected_codes.append(id(frame.f_code))
        frame = frame.f_back
    # The library also sees the frame of `read_frames`, and frames of the interpreter that Python
    # does not show.
    codes = [code for code, _ in native_frames if code in expected_codes]
    assert codes == expected_codes, f"frames: {len(codes)} of {len(expected_codes)} found"
    later_frames = native.read_frames()
    own_code = id(sys._getframe().f_code)
    assert dict(native_frames)[own_code] != dict(later_frames)[own_code], (
        "frames: it cannot tell one line from another"
    )


def _check_records(native: NativeLibrary, calls: Any) -> None:
    """Checks that the library records calls of two kinds, from several lines, with their sites."""
    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import FakeProcessGroup, HashStore

    # The class has a constructor before torch 2.10.
    make_group: Any = getattr(FakeProcessGroup, "_create_internal", FakeProcessGroup)
    dist.Backend.register_backend(
        "nothing", lambda _, rank, size, __: make_group(rank, size), devices=["cpu"]
    )
    dist.init_process_group("nothing", store=HashStore(), rank=0, world_size=2)
    with tempfile.TemporaryDirectory() as folder:
        recorder = Recorder(
            RingWriter(Path(folder, "ring"), pid=os.getpid(), start_ticks=1), native
        )
        kernels.set_recorder(recorder)
        calls(dist, torch.ones(3))
        recorder.ring.write_pulse(recorder.update_streams())
        recorder.ring.write_identity({})
        (calls_read,) = RingReader(recorder.ring.map).read_last_calls(0).values()
        records = [
            (call.seq, call.signature.op, call.site and call.site.line) for call in calls_read
        ]
        assert records == [
            (1, "all_reduce", 6),
            (2, "all_reduce", 6),
            (3, "all_reduce", 7),
            (4, "broadcast", 8),
        ], f"records: {records}"
