"""Which users are trusted: this one and root. Whatever only they can change may be run."""

from __future__ import annotations

import functools
import os
import stat
from pathlib import Path

_DEFAULT_OVERFLOW_UID = 65534
_ALL_UIDS = (1 << 32) - 1  # -1 is none


def is_trusted_uid(uid: int | None) -> bool:
    """Whether a user id that the kernel reports is that of this user or of root.

    In a user namespace, the kernel reports one id for all users that the namespace does not map, so
    there it identifies nobody: see user_namespaces(7).
    """
    if uid not in (0, os.geteuid()):
        return False
    if uid != _read_overflow_uid():
        return True
    try:
        rows = Path("/proc/self/uid_map").read_text(encoding="ascii").splitlines()
    except FileNotFoundError:  # a kernel without user namespaces
        return True
    mapped_count = sum(int(row.split()[2]) for row in rows)
    return mapped_count == _ALL_UIDS


@functools.cache
def _read_overflow_uid() -> int:
    try:
        return int(Path("/proc/sys/kernel/overflowuid").read_text(encoding="ascii"))
    except OSError:  # systemd can hide /proc/sys
        return _DEFAULT_OVERFLOW_UID


def check_ownership(path: Path) -> None:
    """Raises PermissionError if other users could change or replace a file, and OSError if that cannot
    be found out.
    """
    path = path.absolute()
    target = path.resolve()
    for part in (path, target, path.parent, target.parent):
        status = os.lstat(part)
        if not is_trusted_uid(status.st_uid):
            raise PermissionError(f"{part} belongs to another user")
        mode = status.st_mode
        # Other users can replace none of our files in a folder with the sticky bit.
        is_safe = stat.S_ISLNK(mode) or (stat.S_ISDIR(mode) and mode & stat.S_ISVTX)
        if mode & (stat.S_IWGRP | stat.S_IWOTH) and not is_safe:
            raise PermissionError(f"{part} can be written by other users (chmod go-w)")
    for folder in (*path.parents, *target.parents):
        if os.stat(folder).st_mode & (stat.S_IWOTH | stat.S_ISVTX) == stat.S_IWOTH:
            raise PermissionError(f"{folder} can be written by all users (chmod o-w)")
