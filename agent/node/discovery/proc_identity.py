"""What /proc says of a rank that has no ring: its identity, and why its calls are not recorded."""

from __future__ import annotations

import os

from hangwatch.protocol.heartbeat import ProcessIdentity

from ...environment import identity
from ..system import processes

# Importing torch takes seconds, or much longer from a slow disk; the recorder starts at its end.
TORCH_IMPORT_S = 30.0
_TORCH_LIBRARY = b"/torch/lib/libtorch"


def measure_age_s(start_ticks: int, proc: str = processes.PROC_ROOT) -> float:
    """How long ago a process was started, in seconds."""
    return round(max(0.0, processes.read_uptime_s(proc) - start_ticks / processes.TICKS_PER_S), 2)


def read_identity(
    pid: int,
    start_ticks: int,
    launch: identity.LaunchInfo | None = None,
    proc: str = processes.PROC_ROOT,
) -> ProcessIdentity | None:
    """The identity of a process from its launcher's environment variables, unless ``launch`` says what
    they mean; None if it is not a rank.
    """
    try:
        if launch is None:
            launch = identity.parse_environ(processes.read_environ(pid, proc))
        program = " ".join(processes.read_cmdline(pid, proc))[:300]
    except OSError:
        return None
    if launch.rank is None:
        return None
    return ProcessIdentity(
        job=launch.job,
        restart=launch.restart,
        rank=launch.rank,
        world_size=launch.world_size,
        local_rank=launch.local_rank,
        pid=pid,
        start_ticks=start_ticks,
        program=program,
        on_hang=launch.on_hang,
        started_s=measure_age_s(start_ticks, proc),
    )


def find_unrecorded_reason(pid: int, watched_s: float, proc: str = processes.PROC_ROOT) -> str:
    """The reason with its remedy; empty if it may still be starting. ``watched_s``: how long it has
    been watched.
    """
    try:
        environ = processes.read_environ(pid, proc)
        if not environ.get("HANGWATCH_URL"):
            return "HANGWATCH_URL is not in its environment: have the launcher pass it on"
        if identity.is_switched_off(environ):
            return "HANGWATCH_DISABLE=1 is in its environment: remove it"
        if watched_s < TORCH_IMPORT_S or not _has_loaded_torch(pid, proc):
            return ""
        python = os.readlink(f"{proc}/{pid}/exe")
    except OSError:  # it has ended
        return ""
    return (
        f"it uses torch without hangwatch: {python} -m pip install hangwatch, into the environment of"
        " its torch"
    )


def _has_loaded_torch(pid: int, proc: str) -> bool:
    with open(f"{proc}/{pid}/maps", "rb") as maps:
        return _TORCH_LIBRARY in maps.read()
