"""The findings of `hangwatch doctor` on the sources of hardware evidence."""

from __future__ import annotations

import importlib.metadata
import os
from types import SimpleNamespace

import pytest

from hangwatch.agent.cli.commands.doctor import (
    Finding,
    check_hardware,
    check_known_problems,
)
from hangwatch.agent.node.hardware.host import Host, SourceUnavailableError
from hangwatch.agent.node.hardware.reader import SOURCES, Probe, Source
from hangwatch.model.hardware import Observation


def observe(about: str) -> Observation:
    return Observation(source="infiniband", about=about, what="state", now="ACTIVE")


def check_source(name: str, probe: Probe) -> Finding:
    (finding,) = check_hardware({}, [Source(name=name, probe=probe)])
    return finding


def test_source_that_can_be_read_lists_its_parts() -> None:
    finding = check_source("infiniband", lambda host: [observe(f"mlx5_{n}/1") for n in range(6)])
    assert (finding.name, finding.ok) == ("evidence: infiniband", True)
    assert finding.detail == "mlx5_0/1, mlx5_1/1, mlx5_2/1, mlx5_3/1 and 2 more"


def test_source_without_parts() -> None:
    assert check_source("storage", lambda host: []).detail == "readable"


def test_source_that_cannot_be_read_has_the_remedy() -> None:
    def fail(host: Host) -> tuple[Observation, ...]:
        raise SourceUnavailableError("/dev/kmsg may not be read", "give it CAP_SYSLOG")

    finding = check_source("kernel log", fail)
    assert finding.ok is None, "no job fails for that"
    assert finding.detail == "not available: /dev/kmsg may not be read"
    assert finding.remedy == "give it CAP_SYSLOG"


def test_every_source_has_a_finding() -> None:
    findings = list(check_hardware({}))
    names = [source.name for source in SOURCES if not source.examines_job]
    assert [finding.name for finding in findings] == [f"evidence: {name}" for name in names]
    assert not any(finding.ok is False for finding in findings)


def test_absent_source_starts_no_process() -> None:
    def refuse(host: Host) -> None:
        raise SourceUnavailableError("this host has none")

    def fail(host: Host) -> tuple[Observation, ...]:
        raise AssertionError("it was read")

    source = Source(name="none", probe=fail, may_block=True, check=refuse)
    (finding,) = check_hardware({}, [source])
    assert (finding.ok, finding.detail) == (True, "not available: this host has none")


@pytest.mark.parametrize(
    ("component", "version", "remedy"),
    [("torch", "2.7.0", "upgrade torch to 2.7.1 or later"), ("torch", "2.13.0", None)],
)
def test_version_that_is_known_to_hang(
    component: str, version: str, remedy: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def find_version(package: str) -> str:
        if package != component:
            raise importlib.metadata.PackageNotFoundError(package)
        return version

    monkeypatch.setattr(importlib.metadata, "version", find_version)
    machine = SimpleNamespace(machine="x86_64")
    monkeypatch.setattr(os, "uname", lambda: machine)
    findings = list(check_known_problems())
    assert [finding.remedy for finding in findings] == ([remedy] if remedy else [])
