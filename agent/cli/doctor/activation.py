"""Checks what a job needs to start: activation by torch, torch itself, the folder for the rings."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import os
import platform
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from hangwatch.ring.layout import RingGeometry

from ...environment import identity, run_dir
from ...transport.servers import parse_targets
from ...transport.target import TargetError
from .findings import Finding

TORCH_TIMEOUT_S = 120.0
_TESTED_RELEASES = ((2, 6), (2, 13))  # the first and the last release of torch
_TORCH_PROBE_CODE = "import torch; print(torch.__version__, int(torch.distributed.is_available()))"


def check_start(env: Mapping[str, str]) -> Iterator[Finding]:
    """Checks activation and torch."""
    yield check_python(sys.version_info[:2])
    yield check_entry_point(_list_entry_points())
    yield check_autoload(env)
    yield check_url(env)
    if importlib.util.find_spec("ray") is not None:
        yield make_ray_finding()
    yield check_torch(*_probe_torch(env))


def check_python(version: tuple[int, ...]) -> Finding:
    name, shown = "python", platform.python_version()
    if version < (3, 10):
        return Finding(
            name=name, ok=False, detail=shown, remedy="hangwatch needs Python 3.10 or later"
        )
    return Finding(name=name, ok=True, detail=shown)


def check_entry_point(values: list[str]) -> Finding:
    """``values`` are the entry points named hangwatch in the group that torch loads."""
    name = "activation"
    if not values:
        detail = "torch's entry point is not installed: `import torch` starts nothing of hangwatch"
        return Finding(
            name=name,
            ok=False,
            detail=detail,
            remedy="pip install hangwatch, into the environment that runs the training",
        )
    return Finding(name=name, ok=True, detail=f"`import torch` calls {values[0]}")


def check_autoload(env: Mapping[str, str]) -> Finding:
    name = "environment"
    if env.get("TORCH_DEVICE_BACKEND_AUTOLOAD") == "0":
        detail = "TORCH_DEVICE_BACKEND_AUTOLOAD=0: torch calls no entry points"
        return Finding(
            name=name, ok=False, detail=detail, remedy="unset TORCH_DEVICE_BACKEND_AUTOLOAD"
        )
    if identity.is_switched_off(env):
        detail = f"HANGWATCH_DISABLE={env['HANGWATCH_DISABLE']}: hangwatch is switched off"
        return Finding(name=name, ok=False, detail=detail, remedy="unset HANGWATCH_DISABLE")
    return Finding(name=name, ok=True, detail="no variable switches hangwatch off")


def check_url(env: Mapping[str, str]) -> Finding:
    name = "HANGWATCH_URL"
    url = env.get(name)
    if not url:
        remedy = "start the job with the HANGWATCH_URL=... line that hangwatch-server prints"
        return Finding(
            name=name,
            ok=None,
            detail="not set: jobs started from here are not watched",
            remedy=remedy,
        )
    try:
        targets = parse_targets(url, env.get("HANGWATCH_TOKEN", ""))
    except TargetError as error:
        detail = "not the address of a server"
        return Finding(name=name, ok=False, detail=detail, remedy=str(error))
    return Finding(
        name=name,
        ok=True,
        detail="; ".join(
            f"{target}, {'with' if target.token else 'without'} a token" for target in targets
        ),
    )


def make_ray_finding() -> Finding:
    """Ray's workers do not inherit the environment of the driver."""
    detail = (
        "installed: its workers get the variables of hangwatch by ray.init(runtime_env="
        "hangwatch.integrations.ray.make_runtime_env())"
    )
    return Finding(name="ray", ok=True, detail=detail)


def check_torch(output: str, error: str) -> Finding:
    """``output`` is torch's version and 1 if it has torch.distributed; ``error`` says why it could
    not be imported.
    """
    name = "torch"
    if error:
        if "No module named 'torch'" in error:
            return Finding(
                name=name,
                ok=None,
                detail="not installed here: nothing to watch in this environment",
            )
        return Finding(
            name=name,
            ok=False,
            detail=f"cannot be imported: {error}",
            remedy="repair torch first: see `python -c 'import torch'`",
        )
    version, _, distributed = output.partition(" ")
    if distributed != "1":
        return Finding(
            name=name,
            ok=False,
            detail=f"{version}, built without torch.distributed",
            remedy="install a build that has it",
        )
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
    first, last = ("{}.{}".format(*release) for release in _TESTED_RELEASES)
    if numbers < _TESTED_RELEASES[0]:
        return Finding(
            name=name, ok=False, detail=version, remedy=f"hangwatch needs torch {first} or later"
        )
    if numbers > _TESTED_RELEASES[1]:
        return Finding(
            name=name,
            ok=None,
            detail=f"{version} is later than {last}, the last one that was tested",
            remedy="it will probably work",
        )
    return Finding(name=name, ok=True, detail=version)


def check_run_dir(url: str) -> Iterator[Finding]:
    """Checks that the run dir can be created and has enough space."""
    try:
        folder = run_dir.ensure_run_dir(url)
        space = os.statvfs(folder)
    except OSError as error:
        yield Finding(
            name="run dir",
            ok=False,
            detail=str(error),
            remedy="set HANGWATCH_RUN_DIR to a writable folder",
        )
        return
    yield check_space(folder, space.f_bavail * space.f_frsize)
    for empty in (folder, folder.parent):
        with contextlib.suppress(OSError):  # a job uses it
            empty.rmdir()


def check_space(folder: Path, free_bytes: int, rank_count: int = 8) -> Finding:
    """Each of ``rank_count`` ranks needs space for its ring and a few kB for stacks."""
    name = "run dir"
    rank_bytes = max(4 << 20, RingGeometry.default().initial_size + (1 << 20))
    max_ranks = free_bytes // rank_bytes
    detail = f"{folder} has {free_bytes >> 20} MB free"
    remedy = (
        "give the container more: docker run --shm-size=1g; or set HANGWATCH_RUN_DIR to a folder"
        " with enough space"
    )
    if max_ranks < 1:
        detail = f"{detail}, and one rank needs {rank_bytes >> 20} MB"
        return Finding(name=name, ok=False, detail=detail, remedy=remedy)
    if max_ranks < rank_count:
        detail = f"{detail}, enough for {max_ranks} ranks only"
        return Finding(name=name, ok=None, detail=detail, remedy=remedy)
    return Finding(name=name, ok=True, detail=detail)


def _list_entry_points() -> list[str]:
    return [
        point.value
        for point in importlib.metadata.entry_points(group="torch.backends")
        if point.name == "hangwatch"
    ]


def _probe_torch(env: Mapping[str, str]) -> tuple[str, str]:
    """The output of importing torch, and the error. In a separate process, since the import may
    take seconds, or crash.
    """
    bare_env = {k: v for k, v in env.items() if k not in ("HANGWATCH_URL", "RANK")}
    bare_env["PYTHONSAFEPATH"] = "1"
    try:
        done = subprocess.run(
            [sys.executable, "-c", _TORCH_PROBE_CODE],
            capture_output=True,
            text=True,
            timeout=TORCH_TIMEOUT_S,
            env=bare_env,
            cwd="/",
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return "", f"{type(error).__name__}: {error}"
    if done.returncode:
        messages = done.stderr.strip().splitlines()
        return "", messages[-1] if messages else f"it ended with status {done.returncode}"
    return done.stdout.strip().splitlines()[-1], ""
