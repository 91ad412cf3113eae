"""Which sources of hardware evidence can be read here."""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Iterator, Mapping, Sequence

from hangwatch.model.hardware import Observation, UnavailableSource
from hangwatch.model.known_problems import find_known_problems

from ...node.hardware.host import Host
from ...node.hardware.reader import TIME_LIMIT_S, ReaderProcess, find_absence, read_source
from ...node.hardware.sources import SOURCES, Source
from .findings import Finding

_MAX_PARTS_SHOWN = 4
# By component of `hangwatch.model.known_problems`: the distributions that install it.
_PACKAGES = {"torch": ("torch",), "nccl": ("nvidia-nccl-cu12", "nvidia-nccl-cu13")}


def check_hardware(
    env: Mapping[str, str], sources: Sequence[Source] = SOURCES
) -> Iterator[Finding]:
    """One finding for each source. None of them fails: a host without a source has no such part."""
    host = Host.from_environ(env, ())
    reader = ReaderProcess()
    for source in sources:
        absence = find_absence(source, host)
        if absence is not None:
            yield judge_source(source.name, (), absence)
            continue
        if not source.may_block:
            yield judge_source(source.name, *read_source(source, host))
            continue
        try:
            reader.start_reading([source], host)
            (result,) = reader.collect(TIME_LIMIT_S)
            yield judge_source(source.name, *result)
        except OSError as error:
            reason = f"its reader cannot be started: {error.strerror}"
            yield judge_source(
                source.name, (), UnavailableSource(source=source.name, reason=reason)
            )
    reader.close()


def check_known_problems() -> Iterator[Finding]:
    """One finding for each installed version that is known to hang."""
    machine = os.uname().machine
    for component, packages in _PACKAGES.items():
        for package in packages:
            try:
                version = importlib.metadata.version(package)
            except importlib.metadata.PackageNotFoundError:
                continue
            yield from judge_version(component, version, machine)


def judge_version(component: str, version: str, machine: str) -> Iterator[Finding]:
    for known in find_known_problems(component, version, machine):
        yield Finding(
            name="known problem",
            ok=None,
            detail=known.describe(version),
            remedy=f"upgrade {component} to {'.'.join(map(str, known.fixed))} or later",
        )


def judge_source(
    name: str, observations: Sequence[Observation], unavailable: UnavailableSource | None
) -> Finding:
    title = f"evidence: {name}"
    if unavailable is not None:
        return Finding(
            name=title,
            ok=None if unavailable.remedy else True,  # nothing is wrong with a host that has none
            detail=f"not available: {unavailable.reason}",
            remedy=unavailable.remedy,
        )
    parts = list(dict.fromkeys(observation.about for observation in observations))
    shown = ", ".join(parts[:_MAX_PARTS_SHOWN])
    more = f" and {len(parts) - _MAX_PARTS_SHOWN} more" if len(parts) > _MAX_PARTS_SHOWN else ""
    return Finding(name=title, ok=True, detail=f"{shown}{more}" if parts else "readable")
