"""The host as its sources see it: every path, variable and clock that they read is a parameter."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from hangwatch.model.hardware import Observation, ObservedValue, UnavailableSource, Weight

from ..system.processes import read_text

HOST_ROOT_VARIABLE = "HANGWATCH_HOST_ROOT"


class SourceUnavailableError(Exception):
    """A source cannot be read on this host. ``remedy`` is empty where there is nothing to repair."""

    def __init__(self, reason: str, remedy: str = "") -> None:
        super().__init__(reason)
        self.reason, self.remedy = reason, remedy

    def describe(self, source: str) -> UnavailableSource:
        """The error of the source with this name."""
        return UnavailableSource(source=source, reason=self.reason, remedy=self.remedy)


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """``pids`` are the ranks on this host, and ``environ`` is the environment of one of them."""

    proc: Path = Path("/proc")
    sys: Path = Path("/sys")
    kernel_log: Path = Path("/dev/kmsg")
    environ: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    pids: tuple[int, ...] = ()
    # Seconds since the host was started, as in the kernel log.
    uptime_s: Callable[[], float] = lambda: time.clock_gettime(time.CLOCK_BOOTTIME)

    @classmethod
    def from_environ(cls, pids: tuple[int, ...], environ: Mapping[str, str] = os.environ) -> Host:
        """The host of these ranks. In a container, HANGWATCH_HOST_ROOT is where the host's /sys and
        /dev/kmsg are mounted; the ranks' processes are in the container's own /proc all the same.
        """
        root = Path(environ.get(HOST_ROOT_VARIABLE) or "/")
        return cls(sys=root / "sys", kernel_log=root / "dev/kmsg", environ=dict(environ), pids=pids)


def observe(
    source: str,
    about: str,
    what: str,
    now: ObservedValue,
    weight: Weight = Weight.HINT,
    **flags: bool,
) -> Observation:
    """An observation of the present state of a part of the host. ``flags``: ``is_counter``,
    ``is_abnormal``.
    """
    return Observation(source=source, about=about, what=what, now=now, weight=weight, **flags)


def read_counters(
    source: str, about: str, folder: Path, names: Iterable[str], weight: Weight = Weight.HINT
) -> Iterator[Observation]:
    """The counters that have a file of their own in a folder, as far as they can be read."""
    for name in names:
        try:
            value = int(read_text(folder / name))
        except ValueError:  # the file cannot be read, or has no number
            continue
        yield observe(source, about, name, value, weight, is_counter=True)


def list_names(folder: Path) -> list[str]:
    """The names in a folder, sorted; empty if it cannot be listed."""
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []
