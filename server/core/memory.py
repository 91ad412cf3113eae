"""How much memory this process uses."""

from __future__ import annotations

import functools
import resource
import time
from pathlib import Path


def read_resident_bytes() -> int:
    """The resident memory of this process, at most a second old; 0 where /proc does not say."""
    return _read_resident_bytes(int(time.monotonic()))


@functools.lru_cache(maxsize=1)
def _read_resident_bytes(_second: int) -> int:
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    except (OSError, ValueError, IndexError):
        return 0
    return pages * resource.getpagesize()
