"""The folder in which the ranks of a host and their node agent meet, and the names of what lies in
it.

Standard library only: the training process imports this.
"""

from __future__ import annotations

import hashlib
import os
import socket
import stat
from pathlib import Path

# flock held by the node agent as long as it lives; holds its pid as text
AGENT_LOCK_NAME = "agent.lock"
START_LOCK_NAME = "start.lock"  # flock held by the rank that is starting a node agent
AGENT_LOG_NAME = "agent.log"
# one line that the node agent wants the user to see; a rank prints it and takes it away
NOTICE_NAME = "notice"
RING_SUFFIX = ".ring"
STACKS_SUFFIX = ".stacks"  # faulthandler's output


class RunDirError(OSError):
    """No folder can be used. The message says why and what to do."""


def format_process_key(pid: int, start_ticks: int) -> str:
    """Names a process for good: a pid alone comes back."""
    return f"{pid}-{start_ticks}"


def read_start_ticks(pid: int, proc: str = "/proc") -> int:
    """When a process started, in clock ticks since boot (proc(5): field 22 of stat). Raises OSError
    once it is gone.
    """
    with open(f"{proc}/{pid}/stat", "rb") as f:
        return int(f.read().rpartition(b")")[2].split()[19])


def ensure_run_dir(url: str) -> Path:
    """The folder for one user, one server and one set of namespaces, made if need be.

    Containers may share /dev/shm; what they call a host or a pid they do not.

    Raises RunDirError where it cannot be made, or where somebody else owns it.
    """
    namespaces = [_read_namespace(name) for name in ("net", "pid")]
    name = hashlib.blake2b(
        f"{url}|{socket.gethostname()}|{namespaces}".encode(), digest_size=6
    ).hexdigest()
    problems = []
    for root in _list_roots():
        path = Path(root, f"hangwatch-{os.getuid()}", name)
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            for folder in (path.parent, path):
                found = os.lstat(folder)
                if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
                    raise PermissionError(f"{folder} belongs to somebody else")
            probe = path / f".probe-{os.getpid()}"
            probe.touch()
            probe.unlink()
        except OSError as error:
            problems.append(f"{path}: {error.strerror or error}")
        else:
            return path
    raise RunDirError(
        f"no folder for the rings ({'; '.join(problems)}): set HANGWATCH_RUN_DIR to one that can be"
        " written"
    )


def _read_namespace(name: str) -> int:
    try:
        return os.stat(f"/proc/self/ns/{name}").st_ino
    except OSError:  # a kernel without it has only one
        return 0


def _list_roots() -> list[str]:
    if given := os.environ.get("HANGWATCH_RUN_DIR"):
        return [given]
    return ["/dev/shm", os.environ.get("TMPDIR", "/tmp")]
