"""Which recorder serves: the native one from the second job on, and the Python one where anything
is wrong.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from hangwatch.ring.sampling import MIN_TIMED_LEVEL, sampling_level
from tests.harness import job, native
from tests.harness.processes import clean_environment
from tests.harness.server import running_server
from tests.simulation.waiting import wait_until

CASES_SCRIPT = Path(__file__).with_name("recorder_cases") / "cases.py"
FAKE_COMPILER_CODE = (
    "import shutil, sys; shutil.copy({built!r}, sys.argv[sys.argv.index('-o') + 1])"
)
CHOOSE_CODE = (
    "import os, torch; from hangwatch.agent.recorder.native.library import choose_recorder; chosen"
    " = choose_recorder(os.environ)"
)


@pytest.fixture
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The native recorder of this torch."""
    (library,) = Path(native.recorder_env("native", tmp_path_factory)["HANGWATCH_CACHE_DIR"]).glob(
        "*.so"
    )
    return library


def choose_recorder(**env: str) -> tuple[str, str]:
    """The recorder in use, or why it is not the native one; and the text on stderr."""
    code = f"{CHOOSE_CODE}; print('native' if chosen[0] else chosen[1])"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=clean_environment(**env),
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return done.stdout.strip(), done.stderr


def test_native_recorder_is_built_in_background(built: Path, tmp_path: Path) -> None:
    """The compiler has the result at hand; the library is tried as usual."""
    compiler = tmp_path / "compiler.py"
    compiler.write_text(FAKE_COMPILER_CODE.format(built=str(built)))
    cache = tmp_path / "cache"
    env = {
        "HANGWATCH_RECORDER": "auto",
        "HANGWATCH_CACHE_DIR": str(cache),
        "CXX": shlex.join([sys.executable, str(compiler)]),
    }
    with running_server(tmp_path / "server", stall_after_s=60) as server:
        for number, recorder in enumerate(("python", "native")):
            folder = tmp_path / f"job{number}"
            variables = {"CASES": "subgroups", "SEEN_AT": str(folder), **env}
            with job.running_job(
                CASES_SCRIPT, 2, folder, server.url, name=folder.name, env=variables
            ) as running:
                assert running.process.wait(90) == 0, running.stderr
                assert wait_until(
                    lambda: [path.name for path in cache.glob("*.so")] == [built.name], 60.0
                )
            assert [
                json.loads((folder / f"seen{rank}.json").read_text())["subgroups"]["recorder"]
                for rank in range(2)
            ] == [recorder] * 2


def test_python_recorder_is_the_fallback(built: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    cache.mkdir(mode=0o700)
    variables = {"HANGWATCH_RECORDER": "native", "HANGWATCH_CACHE_DIR": str(cache)}
    reason, message = choose_recorder(**variables)
    assert "not built yet" in reason
    assert "the Python one is used" in message
    copy = cache / built.name
    for content in (b"", built.read_bytes()[:4096], built.read_bytes()[:-16]):
        copy.write_bytes(content)
        assert "is incomplete" in choose_recorder(**variables)[0]
    copy.write_bytes(built.read_bytes())
    cache.chmod(0o777)
    assert "can be written by other users" in choose_recorder(**variables)[0]
    cache.chmod(0o700)
    assert choose_recorder(**variables) == ("native", "")
    assert choose_recorder(**variables | {"HANGWATCH_RECORDER": "python"}) == (
        "HANGWATCH_RECORDER=python",
        "",
    )


def test_failed_build_records_reason(tmp_path: Path) -> None:
    variables = {"HANGWATCH_CACHE_DIR": str(tmp_path), "HANGWATCH_RECORDER": "auto"}
    with pytest.raises(AssertionError, match="ended with status 1"):
        native.build_recorder(tmp_path, CXX="false")
    reason, message = choose_recorder(**variables)
    assert "false ended with status 1" in reason
    assert not message
    assert not list(tmp_path.glob("*.so"))


def test_both_recorders_sample_the_same_calls(built: Path) -> None:
    """The recorders agree in the level of every call, and in that from which calls are timed."""
    seqs = [*range(1, 2000), (1 << 32) + 7, (1 << 63) + 1]
    code = (
        "import ctypes, json, sys, torch; lib = ctypes.CDLL(sys.argv[1]); seqs ="
        " json.loads(sys.argv[2]); print(json.dumps([lib.hw_get_min_timed_level(),"
        " *(lib.hw_compute_sampling_level(ctypes.c_uint64(seq)) for seq in seqs)]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(built), json.dumps(seqs)],
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert json.loads(done.stdout) == [MIN_TIMED_LEVEL, *map(sampling_level, seqs)]
