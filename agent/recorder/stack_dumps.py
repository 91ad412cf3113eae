"""Stacks on request, for hosts that do not permit py-spy. The recorder's thread writes those of all
threads when the node agent requests them in the ring: nothing is stopped or interrupted.

While another thread keeps the GIL in native code, the recorder's thread cannot run; for this state
alone, faulthandler is registered on a signal, which the node agent sends to the recorder's thread.
A signal to the process would end the system call of some thread of the job.

`hangwatch doctor` tries this module in a process without torch.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import threading
from io import FileIO
from pathlib import Path
from time import monotonic_ns
from typing import Any

from hangwatch.ring.layout import LiveWord

from ..environment import run_dir
from .writer import RingWriter

_MIN_LIST_INTERVAL_NS = 500_000_000  # the interval of two versions of the list of threads

_dump_file: Any = None  # faulthandler writes to its descriptor as long as the process lives


class StackDumper:
    """Answers the node agent's requests for stacks, in the thread that calls `answer_request`."""

    def __init__(self, ring: RingWriter) -> None:
        """The stacks go to a file beside the ring. Raises OSError if it cannot be created."""
        self._ring = ring
        self._path = ring.path.with_suffix(run_dir.STACKS_SUFFIX)
        self._list_path = ring.path.with_suffix(run_dir.THREADS_SUFFIX)
        self._answered = 0
        self._listed_idents: tuple[int, ...] = ()
        self._listed_at_ns = 0
        self.registration = register_dump_signal(self._path)

    def start_answering(self) -> None:
        """Publishes that the calling thread is the one that answers requests."""
        self._ring.set_word(LiveWord.RECORDER_THREAD, threading.get_native_id())

    def answer_request(self) -> None:
        """Writes the stacks if the node agent has requested them since the last call. Raises
        OSError if they cannot be written; the request then stays unanswered.
        """
        request = self._ring.get_word(LiveWord.STACKS_REQUEST)
        if request != self._answered:
            self._answered = request
            self._write_thread_list()
            is_gil_enabled = getattr(sys, "_is_gil_enabled", lambda: True)
            with _open_private(self._path) as file:
                if is_gil_enabled():
                    # This keeps the GIL and makes no objects: no frame or local outlives its
                    # function.
                    faulthandler.dump_traceback(file.fileno(), all_threads=True)
                else:
                    # Threads run Python at the same time. To read their stacks, all of them would
                    # have to be stopped, and a thread in native code may not stop for long.
                    file.write(run_dir.NO_GIL_TEXT.encode())
            self._ring.set_word(LiveWord.STACKS_ANSWER, request)
        elif (
            self._listed_idents != tuple(threading._active)  # type: ignore[attr-defined]
            and monotonic_ns() - self._listed_at_ns > _MIN_LIST_INTERVAL_NS
        ):
            self._write_thread_list()

    def _write_thread_list(self) -> None:
        """Writes the threads' ids and names, which faulthandler lacks, before one keeps the GIL."""
        self._listed_at_ns = monotonic_ns()
        # `threading.enumerate` takes a lock; a copy of the dictionary is made under the GIL.
        active: dict[int, threading.Thread] = threading._active.copy()  # type: ignore[attr-defined]
        self._listed_idents = tuple(active)
        entries = [[ident, each.native_id, each.name] for ident, each in active.items()]
        new_path = self._list_path.with_suffix(".new")
        with _open_private(new_path) as file:
            file.write(json.dumps(entries).encode())
        os.replace(new_path, self._list_path)


def _open_private(path: Path) -> FileIO:
    """Opens a file for writing, which only this user may read."""
    return open(path, "wb", buffering=0, opener=lambda name, flags: os.open(name, flags, 0o600))


def register_dump_signal(path: Path) -> dict[str, Any]:
    """Registers the highest free real-time signal; returns its number and the descriptor of the
    file that the stacks are written to, or nothing if no signal is free.

    Before sending the signal, check that the process still catches it and still has the file open:
    a signal that is not caught kills, and a descriptor that was closed may have been reused.
    """
    global _dump_file
    if "free-threading" in sys.version:  # the handler of such builds shows only its own thread
        return {}
    for number in range(signal.SIGRTMAX - 2, signal.SIGRTMIN, -1):
        if signal.getsignal(number) is signal.SIG_DFL:
            _dump_file = open(path, "a+b", buffering=0)  # noqa: SIM115  # the file stays open
            os.set_inheritable(_dump_file.fileno(), False)
            faulthandler.register(number, file=_dump_file, all_threads=True, chain=False)
            return {"stacks_signal": number, "stacks_fd": _dump_file.fileno()}
    return {}
