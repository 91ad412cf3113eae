"""The folder that the ranks of a host share with their node agent, and the names of its files.

Standard library only: the training process imports this.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

# The node agent holds its flock as long as it lives; its content is the agent's pid.
AGENT_LOCK_NAME = "agent.lock"
OWNER_NAME = "owner"  # a secret that only the node agents of this run dir know
START_LOCK_NAME = "start.lock"  # flock held by the rank that is starting a node agent
AGENT_LOG_NAME = "agent.log"
# One line that the node agent wants the user to see; a rank prints it and removes the file.
NOTICE_NAME = "notice"
RING_SUFFIX = ".ring"
STACKS_SUFFIX = ".stacks"  # the stacks that a rank writes of itself
NO_GIL_TEXT = "without GIL\n"  # a rank without a GIL writes this instead of its stacks
THREADS_SUFFIX = ".threads"  # the ids and names of its threads
# After the pid of a process: the core dump of its GPUs, and the pipe by which one is requested.
GPU_CORE_SUFFIX, GPU_PIPE_SUFFIX = ".gpucore", ".gpupipe"


# What the folder's name may end in, where all users may create names, such as in /dev/shm.
_NAME_SUFFIXES = ("", *[f"-{number}" for number in range(1, 16)])


class TakenNameError(PermissionError):
    """Another user has a folder, a file or a link of this name."""


class RunDirError(OSError):
    """No folder is usable. The message says why and what to do."""


def format_process_key(pid: int, start_ticks: int) -> str:
    """A unique name of a process: a pid alone is reused."""
    return f"{pid}-{start_ticks}"


def read_start_ticks(pid: int) -> int:
    """The start of a process, in clock ticks since boot (proc(5): stat). Raises OSError."""
    with open(f"/proc/{pid}/stat", "rb") as f:
        return int(f.read().rpartition(b")")[2].split()[19])


def ensure_run_dir(url: str) -> Path:
    """The folder for one user, one server and one set of namespaces; created if necessary.

    Containers may share /dev/shm, but not hosts and pids: hence the namespaces. There, other users
    may have taken the name, so there are further ones.

    Raises RunDirError if no folder can be used.
    """
    problems: dict[Path, str] = {}  # the key is the root
    taken: dict[Path, str] = {}  # the key is the root
    for path in _list_candidates(url):
        root = path.parent.parent
        if root in problems:
            continue
        try:
            _prepare_run_dir(path)
        except TakenNameError as error:
            taken.setdefault(root, str(error))
        except OSError as error:
            problems[root] = f"{path}: {error.strerror or error}"
        else:
            return path
    raise RunDirError(
        f"no folder for the rings ({'; '.join({**taken, **problems}.values())}): set"
        " HANGWATCH_RUN_DIR to a writable one"
    )


def _prepare_run_dir(path: Path) -> None:
    """Raises OSError if the folder cannot be used, TakenNameError if one of another name may be."""
    root = path.parent.parent
    make_private_folder(root)
    # No other user may be able to replace a folder in this one.
    status = os.stat(root)
    is_foreign = status.st_uid not in (os.getuid(), 0)
    if not status.st_mode & stat.S_ISVTX and (is_foreign or status.st_mode & stat.S_IWOTH):
        raise PermissionError(f"{root} belongs to another user, or can be written by all")
    for folder in (path.parent, path):
        with contextlib.suppress(FileExistsError):  # no link is followed
            folder.mkdir(mode=0o700)
        check_owner(folder)
    probe = path / f".probe-{os.getpid()}"
    probe.touch()
    probe.unlink()


def _is_own_run_dir(path: Path) -> bool:
    try:
        check_owner(path.parent)
        check_owner(path)
    except OSError:
        return False
    return True


def find_run_dir(url: str) -> Path | None:
    """The folder that `ensure_run_dir` has created earlier; None if there is none."""
    return next(filter(_is_own_run_dir, _list_candidates(url)), None)


def make_private_folder(folder: Path) -> None:
    """Creates a folder and its missing parents so that only this user can read or change them,
    whatever the umask. An existing folder stays as it is. Raises OSError.
    """
    if folder.is_dir():
        return
    if folder.parent != folder:
        make_private_folder(folder.parent)
    try:
        folder.mkdir(mode=0o700)
    except FileExistsError:
        if not folder.is_dir():
            raise


def check_owner(folder: Path) -> None:
    """Raises PermissionError if another user could replace what is in the folder."""
    status = os.lstat(folder)
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
        raise TakenNameError(f"{folder} belongs to another user")
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError(f"{folder} can be written by other users (chmod go-w)")


def _list_candidates(url: str) -> Iterator[Path]:
    """The places where the folder may be, the preferred one first. That is one that exists already: its
    name may have been the first one that was free, and all ranks must find it.
    """
    namespaces = []
    for kind in ("net", "pid"):
        try:
            namespaces.append(os.stat(f"/proc/self/ns/{kind}").st_ino)
        except OSError:  # the kernel does not support it
            namespaces.append(0)
    name = hashlib.blake2b(
        f"{url}|{socket.gethostname()}|{namespaces}".encode(), digest_size=6
    ).hexdigest()
    run_dir = os.environ.get("HANGWATCH_RUN_DIR")
    roots = [run_dir] if run_dir else ["/dev/shm", os.environ.get("TMPDIR", "/tmp")]
    for root in roots:
        parents = [Path(root, f"hangwatch-{os.getuid()}{suffix}") for suffix in _NAME_SUFFIXES]
        paths = [parent / name for parent in parents]
        yield from filter(_is_own_run_dir, paths)
        yield from paths
