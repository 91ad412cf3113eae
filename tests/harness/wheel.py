"""The wheel with prebuilt recorders, and environments with nothing but it and a torch."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import subprocess
import sys
import venv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .processes import clean_environment

ROOT = Path(__file__).parents[2]
_FIRST_CALL = """
import glob, json, os, time, torch, torch.distributed as dist
dist.init_process_group("gloo", init_method="file://" + os.environ["MEETING"], rank=0, world_size=1)
began = time.monotonic()
dist.all_reduce(torch.ones(2))
took_s = time.monotonic() - began
import hangwatch
from hangwatch.ring.reader import RingReader
(ring,) = glob.glob(os.environ["HANGWATCH_RUN_DIR"] + f"/**/{os.getpid()}-*.ring", recursive=True)
reader = RingReader(open(ring, "rb").read())
identity = reader.read_snapshot(0).identity
calls = [c.signature.op for calls in reader.read_last_calls(0).values() for c in calls]
print(json.dumps({
    "hangwatch": hangwatch.__file__, "torch": torch.__version__, "recorder": identity["recorder"],
    "without": identity.get("without"), "took_s": took_s, "calls": calls,
}))
os._exit(0)
"""


def build_wheel(pythons: Sequence[Path], out: Path, **env: str) -> Path:
    """Builds a wheel by deploy/wheel.py, for the torch of each interpreter."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "deploy/wheel.py"), *map(str, pythons), "--out", str(out)],
        env=clean_environment(**env),
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return Path(done.stdout.strip())


def make_environment(folder: Path, wheel: Path) -> Path:
    """The interpreter of an environment with the wheel, and with this interpreter's torch, linked."""
    venv.create(folder, with_pip=False, symlinks=True)
    (site,) = folder.glob("lib/python3*/site-packages")
    install_wheel(wheel, site)
    for name in _list_distributions(("torch", "numpy", "httpx")):
        distribution = importlib.metadata.distribution(name)
        for top in {Path(file).parts[0] for file in distribution.files or ()}:
            source = Path(str(distribution.locate_file(top)))
            if top not in ("..", "__pycache__") and not (site / top).exists():
                (site / top).symlink_to(source)
    return folder / "bin/python"


def _list_distributions(names: Sequence[str]) -> set[str]:
    """The named distributions and all that they need."""
    from packaging.requirements import Requirement

    found: set[str] = set()
    pending = list(names)
    while pending:
        name = pending.pop()
        if name in found:
            continue
        found.add(name)
        for text in importlib.metadata.distribution(name).requires or ():
            requirement = Requirement(text)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                pending.append(requirement.name)
    return found


def install_wheel(wheel: Path, folder: Path) -> None:
    subprocess.run(
        [
            *(sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile"),
            *("--target", str(folder), str(wheel)),
        ],
        check=True,
        timeout=120,
    )


def record_first_call(python: Path, folder: Path, env: Mapping[str, str]) -> dict[str, Any]:
    """What a first job on a host without a compiler records of its first call."""
    folder.mkdir()
    run_dir = folder / "run"
    variables = {
        **env,
        "HANGWATCH_URL": "http://127.0.0.1:9",
        "HANGWATCH_RUN_DIR": str(run_dir),
        "HANGWATCH_CACHE_DIR": str(folder / "cache"),
        "HANGWATCH_RECORDER": "auto",
        "MEETING": str(folder / "meeting"),
        "PATH": str(python.parent),
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
    }
    done = subprocess.run(
        [str(python), "-c", _FIRST_CALL],
        env=clean_environment(**variables),
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found
