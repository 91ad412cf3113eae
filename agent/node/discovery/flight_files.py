"""Finds and reads the Flight Recorder file that torch's watchdog writes before it ends a process.

The place of the file is recorded while the process lives. The file is read in a thread of its own,
once the process was ended by SIGABRT. A file of another user, a link, one from before the process
started and one that is too large are not read.
"""

from __future__ import annotations

import os
import stat
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from hangwatch.flight_recorder import pickles
from hangwatch.flight_recorder.calls import find_unfinished_calls
from hangwatch.model.incidents import FlightFile

from ..system import processes
from ..system.runtime import describe_error

MAX_FILE_BYTES = 16 << 20
_PREFIX_VARIABLES = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
# File times come from a coarser clock than the process's start.
_CLOCK_SLACK_S = 0.1


def find_prefixes(environ: Mapping[str, str]) -> list[str]:
    """The paths to which torch may append the rank, the most likely first.

    torch up to 2.6 writes to /tmp by default, later versions to the user's cache folder.
    """
    for name in _PREFIX_VARIABLES:
        if environ.get(name):
            return [environ[name]]
    home = environ.get("HOME", "/tmp")
    caches = [environ.get("XDG_CACHE_HOME"), f"{home}/.cache"]
    prefixes = [f"{cache}/torch/comm_lib_trace_rank_" for cache in caches if cache]
    return [*prefixes, "/tmp/nccl_trace_rank_"]


@dataclass(slots=True, kw_only=True)
class FlightFileReader:
    """The Flight Recorder file of one process. ``file`` is set once ``thread`` has read it."""

    prefixes: list[str]
    uid: int
    started_at: float  # seconds since the epoch
    file: FlightFile | None = None
    thread: threading.Thread | None = field(default=None, repr=False)

    def start_reading(self, rank: int) -> None:
        """Reads the file of this rank, if there is one, in another thread."""
        self.thread = threading.Thread(
            target=self.read_file, args=(rank,), name="flight-file", daemon=True
        )
        self.thread.start()

    def read_file(self, rank: int) -> None:
        for prefix in self.prefixes:
            path = f"{prefix}{rank}"
            try:
                fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
            except OSError:
                continue
            with open(fd, "rb") as opened:
                status = os.fstat(fd)
                is_own = stat.S_ISREG(status.st_mode) and status.st_uid == self.uid
                if not is_own or status.st_mtime < self.started_at - _CLOCK_SLACK_S:
                    continue
                if status.st_size > MAX_FILE_BYTES:
                    reason = f"larger than {MAX_FILE_BYTES >> 20} MB: it was not read"
                    self.file = FlightFile(path=path, error=reason)
                    return
                content = opened.read(MAX_FILE_BYTES)
            try:
                calls = find_unfinished_calls(pickles.safe_loads(content), status.st_mtime_ns)
                self.file = FlightFile(path=path, calls=calls)
            except Exception as error:  # whatever is wrong with a file, its process is reported
                reason = f"not readable: {describe_error(error)}"[:200]
                self.file = FlightFile(path=path, error=reason)
            return


def make_reader(pid: int, age_s: float) -> FlightFileReader | None:
    """A reader for a live process; None if its environment cannot be read."""
    try:
        environ = processes.read_environ(pid)
        uid = os.stat(f"{processes.PROC_ROOT}/{pid}").st_uid
        folder = os.readlink(f"{processes.PROC_ROOT}/{pid}/cwd")
    except OSError:
        return None
    prefixes = [os.path.join(folder, prefix) for prefix in find_prefixes(environ)]
    return FlightFileReader(prefixes=prefixes, uid=uid, started_at=time.time() - age_s)
