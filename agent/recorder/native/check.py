"""Tries a recorder that was just built, in a process of its own: what does not work here crashes
nobody's training.
"""

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
    """Raises AssertionError where it does not do what it should."""
    import torch  # noqa: F401  # whose libraries it needs

    native = NativeLibrary(Path(path))
    user: dict[str, Any] = {}
    exec(compile(_CALLER_CODE, "/caller.py", "exec"), user)
    user["nested"](3, lambda: _check_frames(native))
    _check_records(native, user["calls"])


def _check_frames(native: NativeLibrary) -> None:
    """It finds the interpreter's frames: all that Python shows, in the same order, and one line
    from the next.
    """
    seen = native.read_frames()
    shown = []
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        shown.append(id(frame.f_code))
        frame = frame.f_back
    # `frames` itself is newer than this function, and the interpreter has frames of its own that
    # Python does not show.
    found = [code for code, _ in seen if code in shown]
    assert found == shown, f"frames: {len(found)} of {len(shown)} found"
    again = native.read_frames()
    here = id(sys._getframe().f_code)
    assert dict(seen)[here] != dict(again)[here], "frames: it cannot tell one line from another"


def _check_records(native: NativeLibrary, calls: Any) -> None:
    """It records calls of a kind from one line and from another, and one of another kind, and where
    they were made.
    """
    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import FakeProcessGroup, HashStore

    dist.Backend.register_backend(
        "nothing",
        lambda _, rank, size, __: FakeProcessGroup._create_internal(rank, size),
        devices=["cpu"],
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
        (tail,) = RingReader(recorder.ring.map).read_last_calls(0).values()
        found = [(call.seq, call.signature.op, call.site and call.site.line) for call in tail]
        assert found == [
            (1, "all_reduce", 6),
            (2, "all_reduce", 6),
            (3, "all_reduce", 7),
            (4, "broadcast", 8),
        ], f"records: {found}"
