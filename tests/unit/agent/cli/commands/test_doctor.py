"""What the doctor makes of facts."""

from __future__ import annotations

import importlib.metadata
import os
from argparse import Namespace
from http.client import HTTPMessage
from pathlib import Path
from types import SimpleNamespace

import pytest

from hangwatch.agent.cli.commands import doctor
from hangwatch.agent.cli.commands.doctor import (
    CommandResult,
    Finding,
    check_server,
    judge_responses,
)
from hangwatch.agent.environment import run_dir
from hangwatch.agent.node.stacks import cuda_gdb
from hangwatch.agent.recorder.native import build
from hangwatch.agent.transport.client import Reply, ServerTarget

GOOD = Finding(name="a", ok=True, detail="fine")
WARN = Finding(name="b", ok=None, detail="hm", remedy="perhaps")
BAD = Finding(name="c", ok=False, detail="no", remedy="do this")
UNREACHABLE = Finding(name="server", ok=False, detail="away", unreachable=True)


def test_exit_codes_and_lines(capsys: pytest.CaptureFixture[str]) -> None:
    args = Namespace(json=False)
    assert [
        doctor.print_findings(args, f)
        for f in ([GOOD, WARN], [GOOD, BAD], [GOOD, UNREACHABLE], [BAD, UNREACHABLE])
    ] == [0, 1, 3, 1]
    capsys.readouterr()
    doctor.print_findings(args, [GOOD, BAD])
    assert capsys.readouterr().out.splitlines() == [
        "ok   a: fine",
        "fail c: no",
        "     do this",
    ]


def check_activation(env: dict[str, str]) -> dict[str, Finding]:
    return {finding.name: finding for finding in doctor.check_activation(env)}


def test_activation(monkeypatch: pytest.MonkeyPatch) -> None:
    for points, ok in (([], False), ([SimpleNamespace(name="hangwatch", value="x:y")], True)):
        monkeypatch.setattr(importlib.metadata, "entry_points", lambda group, p=points: p)
        assert check_activation({})["activation"].ok is ok
    autoload = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    assert check_activation(autoload)["environment"].ok is False
    assert check_activation({"HANGWATCH_DISABLE": "1"})["environment"].ok is False
    assert check_activation({"HANGWATCH_DISABLE": "0"})["environment"].ok
    assert check_activation({})["HANGWATCH_URL"].ok is None
    assert check_activation({"HANGWATCH_URL": "master"})["HANGWATCH_URL"].ok is False
    finding = check_activation({"HANGWATCH_URL": "http://:hidden@m:1"})["HANGWATCH_URL"]
    assert finding.ok and "hidden" not in finding.detail
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    assert "make_runtime_env" in check_activation({})["ray"].detail


def test_torch() -> None:
    verdicts = {
        "2.6.0+cu124 1 1": True,
        "2.13.0 1 0": True,
        "2.5.1 1 0": False,
        "2.14.0 1 0": None,
        "2.8.0 0 0": False,
    }

    def check(status: int, last_line: str) -> bool | None:
        return doctor.check_torch(CommandResult(status, last_line)).ok

    assert {line: check(0, line) for line in verdicts} == verdicts
    assert check(1, "ModuleNotFoundError: No module named 'torch'") is None
    assert check(1, "ImportError: libcudart.so") is False


def test_disk_space(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(run_dir, "ensure_run_dir", lambda url: tmp_path / "run")
    for free, ok in ((1 << 20, False), (16 << 20, None), (1 << 30, True)):
        space = SimpleNamespace(f_bavail=free, f_frsize=1)
        monkeypatch.setattr(os, "statvfs", lambda folder, space=space: space)
        (finding,) = doctor.check_run_dir("http://m")
        assert finding.ok is ok


def test_server_check_detects_other_services() -> None:
    def judge(health: int, proof: int, body: bytes = b"", token: str = "t") -> Finding:
        return judge_responses(
            Reply(health, HTTPMessage(), b""),
            Reply(proof, HTTPMessage(), body),
            ServerTarget(base_url="http://m", token=token),
        )

    assert judge(200, 200, b"{}").ok
    assert "not as a hangwatch server" in judge(200, 200, b'{"items": []}').detail
    assert "the token is wrong" in judge(200, 401).detail
    assert "requires a token" in judge(200, 401, token="").detail
    assert "not as a hangwatch server" in judge(200, 200, b"<html>").detail
    assert judge(404, 404).ok is False


def test_unreachable_server() -> None:
    (finding,) = check_server("http://127.0.0.1:9", None, {})
    assert (finding.ok, finding.unreachable) == (False, True)
    assert "refuses connections" in finding.detail and "start hangwatch-server" in finding.remedy


def test_nccl_plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is built for a job that asks for it, and a job's own profiler is left alone."""

    def check(env: dict[str, str]) -> list[tuple[bool | None, str]]:
        return [(finding.ok, finding.detail) for finding in doctor.check_plugin(env)]

    monkeypatch.setattr(build, "build_plugin", lambda env: Path("/cache/plugin.so"))
    assert check({}) == check({"HANGWATCH_NCCL": "off"}) == []
    assert check({"HANGWATCH_NCCL": "calls"}) == [
        (True, "/cache/plugin.so, for HANGWATCH_NCCL=calls")
    ]
    assert check({"HANGWATCH_NCCL": "all"}) == [(False, "HANGWATCH_NCCL=all counts as off")]
    own = {"HANGWATCH_NCCL": "device", "NCCL_PROFILER_PLUGIN": "/opt/inspector.so"}
    ((ok, detail),) = check(own)
    assert ok is None and "another plugin" in detail

    def fail(env: dict[str, str]) -> Path:
        raise build.BuildError("no compiler")

    monkeypatch.setattr(build, "build_plugin", fail)
    assert check({"HANGWATCH_NCCL": "calls"}) == [(None, "none: no compiler")]


def test_recorder(monkeypatch: pytest.MonkeyPatch) -> None:
    """The Python recorder is a reason to warn only if the native one was requested."""

    def check(status: int, last_line: str, env: dict[str, str]) -> Finding:
        result = CommandResult(status, last_line)
        monkeypatch.setattr(doctor, "_run_command", lambda *args: result)
        (finding,) = doctor.check_recorder(env)
        return finding

    for mode, ok in (("auto", True), ("native", None)):
        finding = check(1, "hangwatch: there is no C++ compiler", {"HANGWATCH_RECORDER": mode})
        assert (finding.ok, finding.detail) == (ok, "Python's: there is no C++ compiler")
        assert bool(finding.remedy) == (mode == "native")
    assert check(0, "/cache/recorder.so\n", {}).detail == "native, /cache/recorder.so"
    assert check(1, "ModuleNotFoundError: No module named 'torch'", {}).ok is None
    assert "status 3" in check(3, "", {}).detail


@pytest.mark.parametrize(
    ("version", "env", "setting"),
    [
        ("2.6.0", {}, "TORCH_NCCL_TRACE_BUFFER_SIZE=2000"),
        ("2.9.1+cu128", {}, "TORCH_FR_BUFFER_SIZE=2000"),
        ("2.9.1+cu128", {"TORCH_NCCL_TRACE_BUFFER_SIZE": "2000"}, None),
        ("2.9.1+cu128", {"TORCH_FR_BUFFER_SIZE": "0"}, "TORCH_FR_BUFFER_SIZE=2000"),
        ("2.14.1", {}, None),
        ("2.14.1", {"TORCH_FR_BUFFER_SIZE": "0"}, "TORCH_FR_BUFFER_SIZE=2000"),
        ("2.15.0", {}, None),
        ("2.15.0", {"TORCH_FR_BUFFER_SIZE": "0"}, "TORCH_FR_BUFFER_SIZE=2000"),
    ],
)
def test_setting_that_makes_torch_count_devices(
    version: str, env: dict[str, str], setting: str | None
) -> None:
    (finding,) = doctor.check_devices(CommandResult(0, f"{version} 1 1"), env)
    assert finding.ok is (True if setting is None else None)
    assert (setting or "") in finding.remedy


@pytest.mark.parametrize(
    "probe",
    [
        CommandResult(0, "2.13.0+cpu 1 0"),
        CommandResult(1, "ModuleNotFoundError: 1"),
        CommandResult(0, ""),
    ],
)
def test_torch_without_nccl_has_no_finding(probe: CommandResult) -> None:
    assert list(doctor.check_devices(probe, {})) == []


def test_kernels_are_checked_only_where_the_job_wants_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(cuda_gdb, "_TOOLKIT_PATHS", ())
    assert list(doctor.check_kernels({})) == []
    (finding,) = doctor.check_kernels({"HANGWATCH_GPU_STACKS": "1"})
    assert finding.ok is None and "cuda-gdb" in finding.remedy
    (tmp_path / "cuda-gdb").touch(0o755)
    (finding,) = doctor.check_kernels({"HANGWATCH_GPU_STACKS": "1"})
    assert finding.ok and finding.detail == f"{tmp_path}/cuda-gdb"
    (finding,) = doctor.check_kernels({"HANGWATCH_GPU_CORE": "1"})
    assert finding.ok is None and "HANGWATCH_ON_HANG=abort" in finding.remedy
    env = {"HANGWATCH_GPU_CORE": "1", "HANGWATCH_ON_HANG": "abort"}
    assert [finding.ok for finding in doctor.check_kernels(env)] == [True]
