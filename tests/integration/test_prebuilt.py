"""The wheel with prebuilt recorders: where it and a torch are all that is installed, the first job of a host
records natively, without a compiler.
"""

from __future__ import annotations

import json
import sys
import zipfile
from pathlib import Path

import pytest

from tests.harness.native import BUILD_ARGUMENTS
from tests.harness.wheel import build_wheel, make_environment, record_first_call

from .test_deploy import find_tool, run_command

MAX_WHEEL_BYTES = 8_000_000
PREBUILT = "hangwatch/agent/recorder/native/prebuilt"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel([Path(sys.executable)], tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_environment(tmp_path_factory.mktemp("environment") / "venv", wheel)


@pytest.mark.timeout(600)
def test_first_call_is_recorded_natively(python: Path, tmp_path: Path) -> None:
    found = record_first_call(python, tmp_path / "job", {})
    assert "site-packages" in found["hangwatch"], "the one of the wheel"
    assert found["recorder"] == "native" and not found["without"]
    assert "all_reduce" in found["calls"]
    assert found["took_s"] < 1.0
    assert not list((tmp_path / "job").glob("cache/*.so")), "nothing was built"


def test_with_an_unknown_release_it_is_tried_first(python: Path, tmp_path: Path) -> None:
    (manifest,) = python.parents[1].glob(f"lib/python3*/site-packages/{PREBUILT}/manifest.json")
    text = manifest.read_text()
    tested = json.loads(text)
    for releases in tested["recorders"].values():
        for release in releases:
            release["torch"] = "of another commit"
    try:
        manifest.write_text(json.dumps(tested))
        found = record_first_call(python, tmp_path / "job", {})
        assert found["recorder"] == "python" and "not built yet" in found["without"]
        cache = tmp_path / "cache"
        env = {"PATH": "/nowhere", "HANGWATCH_CACHE_DIR": str(cache)}
        copied = Path(run_python(python, *BUILD_ARGUMENTS, env=env))
        assert copied.parent == cache
        (prebuilt,) = manifest.parent.glob("recorder_*.so")
        assert copied.read_bytes() == prebuilt.read_bytes(), "no compiler was needed"
    finally:
        manifest.write_text(text)


def test_plugin_for_nccl_is_found(python: Path, tmp_path: Path) -> None:
    code = "import os; from hangwatch.agent.recorder.native import cache; print(cache.find_plugin(os.environ))"
    env = {"PATH": "/nowhere", "HANGWATCH_CACHE_DIR": str(tmp_path)}
    assert PREBUILT in run_python(python, "-c", code, env=env), "nothing was built"


def run_python(python: Path, *arguments: str, env: dict[str, str]) -> str:
    command = ["/usr/bin/env", "-i", *(f"{name}={value}" for name, value in env.items())]
    return run_command(*command, python, *arguments).strip()


def test_wheel_is_small_and_portable(wheel: Path) -> None:
    assert wheel.name.endswith(f"-py3-none-manylinux_2_28_{wheel.stem.rpartition('_28_')[2]}.whl")
    assert wheel.stat().st_size < MAX_WHEEL_BYTES
    with zipfile.ZipFile(wheel) as archive:
        libraries = sorted(name for name in archive.namelist() if name.endswith(".so"))
    kinds = [library.removeprefix(f"{PREBUILT}/").split("_")[0] for library in libraries]
    assert kinds == ["nccl", "recorder"]
    for tool in ("twine", "check-wheel-contents", "auditwheel"):
        assert find_tool(tool, f"pip's {tool}")
    run_command(find_tool("twine", "pip"), "check", "--strict", wheel)
    run_command(find_tool("check-wheel-contents", "pip"), wheel)
    shown = run_command(find_tool("auditwheel", "pip"), "show", wheel)
    minors = [int(part.split("_")[0]) for part in shown.split("manylinux_2_")[2:]]
    assert minors and min(minors) <= 28, "the symbols of glibc 2.28 suffice"
