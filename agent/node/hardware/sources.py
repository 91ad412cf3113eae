"""The list of sources. A new one is a module with a function `probe`, and a line here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hangwatch.model.hardware import Observation

from . import (
    cgroups,
    infiniband,
    kernel_log,
    nccl_ras,
    network,
    nvml,
    pressure,
    storage,
    versions,
)
from .host import Host


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """``probe`` raises SourceUnavailableError where the source cannot be read, and ``check`` where
    that can be said without reading it.
    """

    name: str
    probe: Callable[[Host], tuple[Observation, ...]]
    has_counters: bool = False  # it is also read once a minute, to know what changes
    may_block: bool = False  # in a driver, or on a network: it is read in a process of its own
    check: Callable[[Host], None] = lambda host: None


SOURCES = (
    Source(
        name=infiniband.SOURCE,
        probe=infiniband.probe,
        has_counters=True,
        may_block=True,
        check=infiniband.check,
    ),
    Source(name=network.SOURCE, probe=network.probe, has_counters=True),
    Source(name=nvml.SOURCE, probe=nvml.probe, has_counters=True, may_block=True, check=nvml.check),
    Source(name=nccl_ras.SOURCE, probe=nccl_ras.probe, may_block=True, check=nccl_ras.check),
    Source(name=kernel_log.SOURCE, probe=kernel_log.probe),
    Source(name=cgroups.SOURCE, probe=cgroups.probe, has_counters=True),
    Source(name=pressure.SOURCE, probe=pressure.probe),
    Source(name=storage.SOURCE, probe=storage.probe),
    Source(name=versions.SOURCE, probe=versions.probe),
)
