"""What the doctor makes of facts."""

from __future__ import annotations

from pathlib import Path

import pytest

from hangwatch.agent.cli.commands import doctor, doctor_checks
from hangwatch.agent.cli.commands.doctor import check_server, judge_responses
from hangwatch.agent.cli.commands.doctor_checks import Finding
from hangwatch.agent.transport.client import Reply, ServerTarget

GOOD = Finding(name="a", ok=True, detail="fine")
WARN = Finding(name="b", ok=None, detail="hm", remedy="perhaps")
BAD = Finding(name="c", ok=False, detail="no", remedy="do this")
UNREACHABLE = Finding(name="server", ok=False, detail="away", unreachable=True)


def test_exit_codes_and_lines() -> None:
    assert [
        doctor.choose_exit_code(f)
        for f in ([GOOD, WARN], [GOOD, BAD], [GOOD, UNREACHABLE], [BAD, UNREACHABLE])
    ] == [0, 1, 3, 1]
    assert list(doctor.format_findings([GOOD, BAD])) == [
        "ok   a: fine",
        "fail c: no",
        "     do this",
    ]


def test_activation() -> None:
    assert doctor_checks.check_entry_point([]).ok is False
    assert doctor_checks.check_entry_point(["x:y"]).ok
    assert doctor_checks.check_autoload({"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}).ok is False
    assert doctor_checks.check_autoload({"HANGWATCH_DISABLE": "1"}).ok is False
    assert doctor_checks.check_autoload({"HANGWATCH_DISABLE": "0"}).ok
    assert doctor_checks.check_url({}).ok is None
    assert "make_runtime_env" in doctor_checks.make_ray_finding().detail
    assert doctor_checks.check_url({"HANGWATCH_URL": "master"}).ok is False
    finding = doctor_checks.check_url({"HANGWATCH_URL": "http://:hidden@m:1"})
    assert finding.ok and "hidden" not in finding.detail


def test_torch() -> None:
    verdicts = {
        "2.6.0+cu124 1": True,
        "2.13.0 1": True,
        "2.5.1 1": False,
        "2.14.0 1": None,
        "2.8.0 0": False,
    }
    assert {said: doctor_checks.check_torch(0, said).ok for said in verdicts} == verdicts
    assert doctor_checks.check_torch(1, "ModuleNotFoundError: No module named 'torch'").ok is None
    assert doctor_checks.check_torch(1, "ImportError: libcudart.so").ok is False


def test_disk_space() -> None:
    assert [
        doctor_checks.check_space(Path("/x"), free).ok for free in (1 << 20, 16 << 20, 1 << 30)
    ] == [False, None, True]


def test_server_check_detects_other_services() -> None:
    def judge(health: int, jobs: int, body: bytes = b"", token: str = "t") -> Finding:
        return judge_responses(
            Reply(health, {}, b""),
            Reply(jobs, {}, body),
            ServerTarget(base_url="http://m", token=token),
        )

    assert judge(200, 200, b'{"items": []}').ok
    assert "the token is wrong" in judge(200, 401).detail
    assert "requires a token" in judge(200, 401, token="").detail
    assert "not as a hangwatch server" in judge(200, 200, b"<html>").detail
    assert judge(404, 404).ok is False


def test_unreachable_server() -> None:
    (finding,) = check_server("http://127.0.0.1:9", None, {})
    assert (finding.ok, finding.unreachable) == (False, True)
    assert "refuses connections" in finding.detail and "start hangwatch-server" in finding.remedy


def test_recorder() -> None:
    """The Python recorder is a reason to warn only if the native one was requested."""
    for mode, ok in (("auto", True), ("native", None)):
        finding = doctor_checks.judge_build(
            1, "hangwatch: there is no C++ compiler", {"HANGWATCH_RECORDER": mode}
        )
        assert (finding.ok, finding.detail) == (ok, "Python's: there is no C++ compiler")
        assert bool(finding.remedy) == (mode == "native")
    assert (
        doctor_checks.judge_build(0, "/cache/recorder.so\n", {}).detail
        == "native, /cache/recorder.so"
    )
    assert (
        doctor_checks.judge_build(1, "ModuleNotFoundError: No module named 'torch'", {}).ok is None
    )
    assert "status 3" in doctor_checks.judge_build(3, "", {}).detail


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
    finding = doctor_checks.judge_torch(
        doctor_checks.TorchBuild(version=version, has_nccl=True), env
    )
    assert finding.ok is (True if setting is None else None)
    assert (setting or "") in finding.remedy


def test_torch_without_nccl_has_no_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    build = doctor_checks.parse_torch_build("__version__ = '2.13.0+cpu'\ncuda: str | None = None\n")
    assert build == doctor_checks.TorchBuild(version="2.13.0+cpu", has_nccl=False)
    monkeypatch.setattr(doctor_checks, "find_torch", lambda: build)
    assert list(doctor_checks.check_devices({})) == []
