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
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from hangwatch.ring.layout import INITIAL_SIZE, RingError

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
    yield report_success("python", platform.python_version())
    points = importlib.metadata.entry_points(group="torch.backends")
    yield check_entry_point([point.value for point in points if point.name == "hangwatch"])
    yield check_autoload(env)
    yield check_url(env)
    if importlib.util.find_spec("ray") is not None:
        yield make_ray_finding()
    # torch is imported in a separate process, since that may take seconds, or crash.
    bare_env = {k: v for k, v in env.items() if k not in ("HANGWATCH_URL", "RANK")}
    bare_env["PYTHONSAFEPATH"] = "1"
    command = [sys.executable, "-c", _TORCH_PROBE_CODE]
    status, last_line = _run_command(command, bare_env, TORCH_TIMEOUT_S)
    if status:
        yield check_torch("", last_line or f"it ended with status {status}")
    else:
        yield check_torch(last_line, "")


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


def _run_command(
    command: Sequence[str], env: Mapping[str, str], timeout_s: float
) -> tuple[int, str]:
    """The exit status of a command, and the last line of its output or, if it failed, of its errors."""
    try:
        done = subprocess.run(
            command, env=env, cwd="/", capture_output=True, text=True, errors="replace",
            timeout=timeout_s, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        return 1, f"{type(error).__name__}: {error}"
    lines = (done.stderr if done.returncode else done.stdout).strip().splitlines()
    return done.returncode, lines[-1] if lines else ""


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
    status, last_line = _run_command(
        build.get_build_command(),
        build.make_build_environment(env),
        build.COMPILE_TIMEOUT_S + build.CHECK_TIMEOUT_S,
    )
    yield judge_build(status, last_line, env)


def judge_build(status: int, last_line: str, env: Mapping[str, str]) -> Finding:
    """The finding for the exit status and the last line of output of the build."""
    if status == 0:
        return report_success("recorder", f"native, {last_line.strip()}")
    reason = f"the build ended with status {status}"
    if last_line:
        reason = last_line.removeprefix("hangwatch: ")
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
    reader = file.open_reader()
    snapshot = reader.read_snapshot(time.monotonic_ns())
    problems: list[str] = []
    losses = [(stream, stream.loss) for stream in snapshot.streams if stream.loss is not None]
    if losses:
        stream, loss = losses[0]
        more = f" and {len(losses) - 1} more" if len(losses) > 1 else ""
        problems.append(
            f"calls of group {stream.group.desc}{more} are not completely recorded since call"
            f" {loss.from_seq}"
        )
    if snapshot.dropped:
        problems.append(f"{snapshot.dropped} calls, groups or channels are not recorded")
    if problems:
        rank = f"rank {snapshot.identity.get('rank')} of {snapshot.identity.get('job')}"
        faults = f" ({'; '.join(snapshot.faults)})" if snapshot.faults else ""
        yield report_warning(
            "recording",
            f"{rank}, pid {file.pid}: {'; '.join(problems)}{faults}",
            "nothing is concluded by counting these calls; stacks and exits still are",
        )
