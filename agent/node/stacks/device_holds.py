"""Whether its device holds the thread that makes a rank's calls: it waits for its GPU.

A host does so at 100 % of a core, so that its use of the CPU does not tell it from one that works. It is in
the GPU's driver, at the same lines and with the same local variables, each time it is read. A loop that
evaluates is at one line of the driver nearly all the time, too, but changes variables.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from dataclasses import replace

from hangwatch.model.ranks import ThreadStack
from hangwatch.stacks.activities import find_calling_thread

from ..system.native_code import is_in_driver
from ..system.processes import ThreadStacks, read_mappings
from .pyspy import PySpy, PySpyError

# The pauses before the readings. They are uneven, so that a loop is not read at the same step each time.
_READING_GAPS_S = (0.0, 0.11, 0.23, 0.17, 0.29)
# There are two for each gap. Some fail on a host whose processors are all in use.
_MAX_FAILED_READINGS = 4


def mark_device_hold(threads: Sequence[ThreadStack], pid: int, pyspy: PySpy) -> ThreadStacks:
    """The stacks of a process, with `ThreadStack.device_hold`, unless too many readings failed."""
    caller = find_calling_thread(threads)
    hold: int | None = 0
    if caller is not None and (tid := pid if caller.main else caller.tid):
        try:
            hold = _read_hold(pid, tid, pyspy)
        # The process has ended, or may not be read.
        except (PySpyError, OSError, ValueError, RuntimeError):
            hold = 0
    if hold is None:
        return tuple(threads)
    return tuple(replace(stack, device_hold=hold if stack is caller else 0) for stack in threads)


def _read_hold(pid: int, tid: int, pyspy: PySpy) -> int | None:
    mappings = read_mappings(pid, pyspy.proc)
    places = set()
    readings = []
    for gap_s in _READING_GAPS_S:
        time.sleep(gap_s)
        readings.append(is_in_driver(pid, tid, mappings, pyspy.proc))
        places.add(pyspy.read_place(pid, tid))
        readings.append(is_in_driver(pid, tid, mappings, pyspy.proc))
        if False in readings or len(places) > 1:
            return 0
    if readings.count(None) > _MAX_FAILED_READINGS:
        return None
    digest = hashlib.blake2b(repr(places).encode(errors="replace"), digest_size=8).digest()
    return int.from_bytes(digest, "little") or 1
