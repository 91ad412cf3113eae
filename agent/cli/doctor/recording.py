"""Checks of what a job that is started here needs: activation by torch, torch itself, the folder
for the rings, the recorder that it would use. The last check is of what jobs on this host did not
record.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from hangwatch.ring.layout import INITIAL_SIZE, RingError
from hangwatch.ring.snapshot import RingSnapshot

from ...environment import identity, run_dir
from ...node.discovery.rings import RingFile, find_ring_files
from ...recorder.checks.settings import load_check_settings
from ...recorder.native import build, cache
from ...transport.client import TargetError, parse_targets
from .findings import Finding, report_failure, report_success, report_warning

TORCH_TIMEOUT_S = 120.0
_TESTED_RELEASES = ((2, 6), (2, 13))  # the first and the last release of torch
_TORCH_PROBE_CODE = "import torch; print(torch.__version__, int(torch.distributed.is_available()))"


def check_start(env: Mapping[str, str]) -> Iterator[Finding]:
    """Checks activation and torch."""
    yield check_python(sys.version_info[:2])
    points = importlib.metadata.entry_points(group="torch.backends")
    yield check_entry_point([point.value for point in points if point.name == "hangwatch"])
    yield check_autoload(env)
    yield check_url(env)
    if importlib.util.find_spec("ray") is not None:
        yield make_ray_finding()
    yield check_torch(*_probe_torch(env))


def check_python(version: tuple[int, ...]) -> Finding:
    shown = platform.python_version()
    if version < (3, 10):
        return report_failure("python", shown, "hangwatch needs Python 3.10 or later")
    return report_success("python", shown)


def check_entry_point(values: list[str]) -> Finding:
    """``values`` are the entry points named hangwatch in the group that torch loads."""
    if values:
        return report_success("activation", f"`import torch` calls {values[0]}")
    return report_failure(
        "activation",
        "torch's entry point is not installed: `import torch` starts nothing of hangwatch",
        "pip install hangwatch, into the environment that runs the training",
    )


def check_autoload(env: Mapping[str, str]) -> Finding:
    name = "environment"
    if env.get("TORCH_DEVICE_BACKEND_AUTOLOAD") == "0":
        detail = "TORCH_DEVICE_BACKEND_AUTOLOAD=0: torch calls no entry points"
        return report_failure(name, detail, "unset TORCH_DEVICE_BACKEND_AUTOLOAD")
    if identity.is_switched_off(env):
        detail = f"HANGWATCH_DISABLE={env['HANGWATCH_DISABLE']}: hangwatch is switched off"
        return report_failure(name, detail, "unset HANGWATCH_DISABLE")
    return report_success(name, "no variable switches hangwatch off")


def check_url(env: Mapping[str, str]) -> Finding:
    name = "HANGWATCH_URL"
    url = env.get(name)
    if not url:
        return report_warning(
            name,
            "not set: jobs started from here are not watched",
            "start the job with the HANGWATCH_URL=... line that hangwatch-server prints",
        )
    try:
        targets = parse_targets(url, env.get("HANGWATCH_TOKEN", ""))
    except TargetError as error:
        return report_failure(name, "not the address of a server", str(error))
    tokens = [f"{target}, {'with' if target.token else 'without'} a token" for target in targets]
    return report_success(name, "; ".join(tokens))


def make_ray_finding() -> Finding:
    """Ray's workers do not inherit the environment of the driver."""
    detail = (
        "installed: its workers get the variables of hangwatch by ray.init(runtime_env="
        "hangwatch.integrations.ray.make_runtime_env())"
    )
    return report_success("ray", detail)


def check_torch(output: str, error: str) -> Finding:
    """``output`` is torch's version and 1 if it has torch.distributed; ``error`` says why it could
    not be imported.
    """
    name = "torch"
    if error:
        if "No module named 'torch'" in error:
            return report_warning(name, "not installed here: nothing to watch in this environment")
        remedy = "repair torch first: see `python -c 'import torch'`"
        return report_failure(name, f"cannot be imported: {error}", remedy)
    version, _, distributed = output.partition(" ")
    if distributed != "1":
        detail = f"{version}, built without torch.distributed"
        return report_failure(name, detail, "install a build that has it")
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
    first, last = ("{}.{}".format(*release) for release in _TESTED_RELEASES)
    if numbers < _TESTED_RELEASES[0]:
        return report_failure(name, version, f"hangwatch needs torch {first} or later")
    if numbers > _TESTED_RELEASES[1]:
        detail = f"{version} is later than {last}, the last one that was tested"
        return report_warning(name, detail, "it will probably work")
    return report_success(name, version)


def check_run_dir(url: str) -> Iterator[Finding]:
    """Checks that the run dir can be created and has enough space."""
    try:
        folder = run_dir.ensure_run_dir(url)
        space = os.statvfs(folder)
    except OSError as error:
        remedy = "set HANGWATCH_RUN_DIR to a writable folder"
        yield report_failure("run dir", str(error), remedy)
        return
    yield check_space(folder, space.f_bavail * space.f_frsize)
    for empty in (folder, folder.parent):
        with contextlib.suppress(OSError):  # a job uses it
            empty.rmdir()


def check_space(folder: Path, free_bytes: int, rank_count: int = 8) -> Finding:
    """Each of ``rank_count`` ranks needs space for its ring and a few kB for stacks."""
    name = "run dir"
    rank_bytes = max(4 << 20, INITIAL_SIZE + (1 << 20))
    max_ranks = free_bytes // rank_bytes
    detail = f"{folder} has {free_bytes >> 20} MB free"
    remedy = (
        "give the container more: docker run --shm-size=1g; or set HANGWATCH_RUN_DIR to a folder"
        " with enough space"
    )
    if max_ranks < 1:
        detail = f"{detail}, and one rank needs {rank_bytes >> 20} MB"
        return report_failure(name, detail, remedy)
    if max_ranks < rank_count:
        return report_warning(name, f"{detail}, enough for {max_ranks} ranks only", remedy)
    return report_success(name, detail)


def _probe_torch(env: Mapping[str, str]) -> tuple[str, str]:
    """The output of importing torch, and the error. torch is imported in a separate process, since
    that may take seconds, or crash.
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


def check_recorder(env: Mapping[str, str]) -> Iterator[Finding]:
    """Checks HANGWATCH_CHECKS, then the recorder.

    Builds the native recorder if it would be used and is missing, as a node agent would: that takes
    about 20 s, once.
    """
    check_settings = load_check_settings(env)
    for problem in check_settings.problems:
        yield report_warning("checks", "HANGWATCH_CHECKS is partly invalid", problem)
    if check_settings.any_enabled:
        detail = (
            f"Python's, since only it can check {check_settings.enabled_names}: one call in"
            f" {check_settings.sample_every} is sampled"
        )
        yield report_success("recorder", detail)
        return
    if cache.get_recorder_mode(env) == "python":
        yield report_success("recorder", "Python's, as HANGWATCH_RECORDER says")
        return
    try:
        done = subprocess.run(
            build.get_build_command(), env=build.make_build_environment(env), cwd="/", capture_output=True, text=True, errors="replace",
            timeout=build.COMPILE_TIMEOUT_S + build.CHECK_TIMEOUT_S, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        yield judge_build(1, str(error), env)
    else:
        output = done.stdout if done.returncode == 0 else done.stderr
        yield judge_build(done.returncode, output.strip(), env)


def judge_build(status: int, output: str, env: Mapping[str, str]) -> Finding:
    """The finding for the exit status and the output of the build."""
    if status == 0:
        return report_success("recorder", f"native, {output.splitlines()[-1]}")
    reason = f"the build ended with status {status}"
    if output:
        reason = output.splitlines()[-1].removeprefix("hangwatch: ")
    if "No module named 'torch'" in reason:
        return report_warning("recorder", "no torch, so none is needed")
    detail = f"Python's: {reason}"
    if cache.get_recorder_mode(env) != "native":
        return report_success("recorder", detail)
    remedy = (
        "it takes about 8 µs per collective, the native one 0.4; HANGWATCH_RECORDER=python selects"
        " it"
    )
    return report_warning("recorder", detail, remedy)


def check_recordings(url: str) -> Iterator[Finding]:
    """One finding for each live rank of this host whose calls are not completely recorded."""
    folder = run_dir.find_run_dir(url)
    if folder is None:  # no job has run here
        return
    try:
        run_dir.check_owner(folder)
        files, _ = find_ring_files(folder)
    except OSError:  # `check_run_dir` reports it
        return
    for file in files:
        try:
            if run_dir.read_start_ticks(file.pid) == file.start_ticks:
                yield from check_ring(file)
        except (OSError, ValueError, RingError):  # the process has exited, or is just starting
            continue


def check_ring(file: RingFile) -> Iterator[Finding]:
    """Raises OSError or RingError if the ring cannot be read."""
    _, reader = file.open_reader()
    snapshot = file.read_snapshot(reader, time.monotonic_ns())
    problems = list(_iter_problems(snapshot))
    if problems:
        rank = f"rank {snapshot.identity.get('rank')} of {snapshot.identity.get('job')}"
        faults = f" ({'; '.join(snapshot.faults)})" if snapshot.faults else ""
        yield report_warning(
            "recording",
            f"{rank}, pid {snapshot.pid}: {'; '.join(problems)}{faults}",
            "nothing is concluded by counting these calls; stacks and exits still are",
        )


def _iter_problems(snapshot: RingSnapshot) -> Iterator[str]:
    lossy = [stream for stream in snapshot.streams if stream.loss is not None]
    if lossy:
        first = lossy[0]
        assert first.loss is not None
        more = f" and {len(lossy) - 1} more" if len(lossy) > 1 else ""
        yield (
            f"calls of group {first.group.desc}{more} are not completely recorded since call"
            f" {first.loss.from_seq}"
        )
    if snapshot.dropped:
        yield f"{snapshot.dropped} calls, groups or channels are not recorded"
