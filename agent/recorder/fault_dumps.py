"""Stack dumps made by the process itself, for hosts that do not permit py-spy: faulthandler, on a
signal that works without the GIL.
"""

from __future__ import annotations

import faulthandler
import os
import signal
from pathlib import Path
from typing import Any

_dump_file: Any = None  # faulthandler writes to its descriptor as long as the process lives


def register_stack_dumps(path: Path) -> dict[str, Any]:
    """Registers the highest free real-time signal; returns its number and the descriptor of the
    file that the stacks are written to, or nothing if no signal is free.

    Before sending the signal, check that the process still catches it and still has the file open:
    a signal that is not caught kills, and a descriptor that was closed may have been reused.
    """
    global _dump_file
    number = next(
        (
            n
            for n in range(signal.SIGRTMAX - 2, signal.SIGRTMIN, -1)
            if signal.getsignal(n) is signal.SIG_DFL
        ),
        None,
    )
    if number is None:
        return {}
    _dump_file = open(path, "a+b", buffering=0)  # noqa: SIM115  # it stays open as long as the process lives
    os.set_inheritable(_dump_file.fileno(), False)
    faulthandler.register(number, file=_dump_file, all_threads=True, chain=False)
    return {"stacks_signal": number, "stacks_fd": _dump_file.fileno()}
