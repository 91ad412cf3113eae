"""The checks of `hangwatch doctor`: what a job that is started here needs (activation by torch, torch
itself, the folder for the rings, the recorder that it would use), what jobs on this host did not
record, and what this host offers (the devices' counters, the sources of hardware evidence, versions
that are known to hang, and py-spy and faulthandler, which take the stacks of a small process that is
started for it).
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hangwatch.model.hardware import Observation, UnavailableSource, find_known_problems
from hangwatch.report.text import abbreviate_list
from hangwatch.ring.layout import INITIAL_SIZE, DeviceStatusState, RingError

from ...environment import identity, run_dir
from ...node.discovery.rings import RingFile, find_ring_files
from ...node.hardware.host import Host
from ...node.hardware.reader import SOURCES, ReaderProcess, Source
from ...node.reporting.updates import find_missing_setting
from ...node.stacks import faulthandler_dumps
from ...node.stacks.pyspy import PySpy, PySpyError, locate_pyspy
from ...node.system import permission
from ...recorder.checks.settings import load_check_settings
from ...recorder.native import build, cache
from ...transport.client import TargetError, parse_targets

_TORCH_TIMEOUT_S = 120.0
_TESTED_RELEASES = ((2, 6), (2, 13))  # the first and the last release of torch
_TORCH_PROBE_CODE = "import torch; print(torch.__version__, int(torch.distributed.is_available()))"
_TYPICAL_RANKS = 8  # the ranks of a usual host
_MAX_PARTS_SHOWN = 4
# The distributions that install a component of `hangwatch.model.hardware`.
_PACKAGES = {"torch": ("torch",), "nccl": ("nvidia-nccl-cu12", "nvidia-nccl-cu13")}
_BUFFER_VARIABLES = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
# The first version that is known to have the Flight Recorder on by default. 2.9 has it off.
_ON_BY_DEFAULT = (2, 11)
_NCCL2_DEFAULT = (2, 15)  # the first version whose "nccl" is `nccl2`, which counts no starts


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """``ok`` is None for a warning. A finding is ``unreachable`` if no server answers."""

    name: str
    ok: bool | None
    detail: str
    remedy: str = ""
    unreachable: bool = False

    @property
    def verdict(self) -> str:
        return {True: "ok", None: "warn", False: "fail"}[self.ok]


def report_success(name: str, detail: str) -> Finding:
    return Finding(name=name, ok=True, detail=detail)


def report_warning(name: str, detail: str, remedy: str = "") -> Finding:
    return Finding(name=name, ok=None, detail=detail, remedy=remedy)


def report_failure(name: str, detail: str, remedy: str) -> Finding:
    return Finding(name=name, ok=False, detail=detail, remedy=remedy)


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
    yield check_torch(*_run_command(command, bare_env, _TORCH_TIMEOUT_S))


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


def check_torch(status: int, last_line: str) -> Finding:
    """The finding for the exit status and the last line of output of the probe: torch's version, and
    1 if it has torch.distributed.
    """
    name = "torch"
    if "No module named 'torch'" in last_line:
        return report_warning(name, "not installed here: nothing to watch in this environment")
    if status:
        detail = f"cannot be imported: {last_line or f'it ended with status {status}'}"
        return report_failure(name, detail, "repair torch first: see `python -c 'import torch'`")
    version, _, distributed = last_line.partition(" ")
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


def check_space(folder: Path, free_bytes: int) -> Finding:
    """Each rank needs space for its ring and a few kB for stacks."""
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
    if max_ranks < _TYPICAL_RANKS:
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


def check_hardware(
    env: Mapping[str, str], sources: Sequence[Source] = SOURCES
) -> Iterator[Finding]:
    """One finding for each source. None of them fails: a host without a source has no such part."""
    with contextlib.closing(ReaderProcess()) as reader:
        reading = reader.read_sources(sources, Host.from_environ((), env))
    unavailable = {missing.source: missing for missing in reading.unavailable}
    for source in sources:
        observations = [item for item in reading.observations if item.source == source.name]
        yield judge_source(source.name, observations, unavailable.get(source.name))


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
        remedy = f"upgrade {component} to {'.'.join(map(str, known.fixed))} or later"
        yield report_warning("known problem", known.describe(version), remedy)


def judge_source(
    name: str, observations: Sequence[Observation], unavailable: UnavailableSource | None
) -> Finding:
    title = f"evidence: {name}"
    if unavailable is not None:
        detail = f"not available: {unavailable.reason}"
        if unavailable.remedy:
            return report_warning(title, detail, unavailable.remedy)
        return report_success(title, detail)  # nothing is wrong with a host that has none
    parts = list(dict.fromkeys(observation.about for observation in observations))
    return report_success(title, abbreviate_list(parts, _MAX_PARTS_SHOWN) or "readable")


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchBuild:
    """The installed torch."""

    version: str
    has_nccl: bool  # built for CUDA

    @property
    def release(self) -> tuple[int, int]:
        match = re.match(r"(\d+)\.(\d+)", self.version)
        return (int(match[1]), int(match[2])) if match else (0, 0)


def check_devices(env: Mapping[str, str]) -> Iterator[Finding]:
    """One finding on what torch counts of the devices, if it was built with NCCL."""
    build = find_torch()
    if build is not None and build.has_nccl:
        yield judge_torch(build, env)


def judge_torch(build: TorchBuild, env: Mapping[str, str]) -> Finding:
    """The finding on what this torch counts in a job with this environment."""
    has_buffer = build.release >= _ON_BY_DEFAULT
    if size := next(filter(None, map(env.get, _BUFFER_VARIABLES)), None):
        has_buffer = size.strip().isdecimal() and int(size) > 0
    if has_buffer:
        detail = "torch counts how far they have come, in its Flight Recorder"
        if build.release >= _NCCL2_DEFAULT and env.get("TORCH_DIST_USE_NCCL2") != "0":
            detail += ", but not the collectives that they have begun"
        return report_success("devices", detail)
    setting = find_missing_setting(DeviceStatusState.OFF, build.version)
    return report_warning(
        "devices",
        f"torch {build.version} does not count how far they have come in NCCL's collectives",
        f"set {setting} in the job's environment: then hangwatch can name a device that lags",
    )


def find_torch() -> TorchBuild | None:
    """The installed torch, without importing it, which takes seconds."""
    try:
        spec = importlib.util.find_spec("torch")
        if spec is None or spec.origin is None:
            return None
        source = Path(spec.origin).with_name("version.py").read_text()
    except (ImportError, ValueError, OSError):
        return None
    return parse_torch_build(source)


def parse_torch_build(source: str) -> TorchBuild | None:
    """The build that a ``torch/version.py`` describes.

    >>> parse_torch_build("__version__ = '2.9.1+cu128'\\ncuda: Optional[str] = '12.8'\\nhip = None")
    TorchBuild(version='2.9.1+cu128', has_nccl=True)
    """
    assigned = dict(re.findall(r"^(\w+)(?:\s*:[^=\n]+)?\s*=\s*['\"](.+?)['\"]", source, re.M))
    if "__version__" not in assigned:
        return None
    return TorchBuild(version=assigned["__version__"], has_nccl="cuda" in assigned)


_READY_S = 20.0
_SLEEPER_CODE = """
import sys
sys.path[:] = [p for p in sys.path if p]
import json, os, threading, time
from pathlib import Path
from hangwatch.agent.environment.run_dir import read_start_ticks
from hangwatch.agent.recorder.stack_dumps import StackDumper
from hangwatch.agent.recorder.writer import RingWriter
path = Path(sys.argv[1])
ring = RingWriter(path, pid=os.getpid(), start_ticks=read_start_ticks(os.getpid()))
dumper = StackDumper(ring)
def answer():
    dumper.start_answering()
    while True:
        ring.write_pulse(0)
        dumper.answer_request()
        time.sleep(0.05)
threading.Thread(target=answer, daemon=True).start()
def hangwatch_doctor_sleeps():
    print(json.dumps({**dumper.registration, "main_thread": threading.main_thread().ident}), flush=True)
    sys.stdin.read()
hangwatch_doctor_sleeps()
"""


def check_stacks() -> Iterator[Finding]:
    """Checks py-spy and faulthandler."""
    with tempfile.TemporaryDirectory(prefix="hangwatch-doctor-") as folder:
        ring_path = Path(folder, f"sleeper{run_dir.RING_SUFFIX}")
        env = {k: v for k, v in os.environ.items() if k not in ("HANGWATCH_URL", "RANK")}
        env["PYTHONSAFEPATH"] = "1"
        with subprocess.Popen(
            [sys.executable, "-c", _SLEEPER_CODE, str(ring_path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=env,
            cwd="/",
        ) as sleeper:
            try:
                registered = _await_registration(sleeper)
                pyspy_finding = check_pyspy(PySpy(path=locate_pyspy()), sleeper.pid)
                yield pyspy_finding
                is_needed = not pyspy_finding.ok
                yield check_faulthandler(sleeper.pid, registered, ring_path, needed=is_needed)
            except (OSError, ValueError) as error:
                detail = f"the test process did not start: {error}"
                yield report_failure("stacks", detail, "check whether Python itself works here")
            finally:
                with contextlib.suppress(OSError):  # the process has ended already
                    sleeper.kill()


def check_pyspy(pyspy: PySpy, pid: int) -> Finding:
    """Takes the stacks of the process ``pid`` with py-spy."""
    name = "py-spy"
    if pyspy.path is None:
        detail = "not installed: stacks come from faulthandler"
        return report_warning(name, detail, "pip install py-spy")
    ptrace = permission.read_ptrace_facts()
    yama = "none" if ptrace.yama_scope is None else ptrace.yama_scope
    facts = f"CAP_SYS_PTRACE {'held' if ptrace.has_capability else 'missing'}, Yama scope {yama}"
    if ptrace.has_seccomp_filter:
        facts += ", a seccomp filter"
    upgrade = "pip install --upgrade py-spy"
    try:
        threads = pyspy.dump_stacks(pid, run_dir.read_start_ticks(pid)).threads
    except PySpyError as error:
        text = str(error)
        # The message includes the remedy, since it is also shown with the stacks of a rank.
        reason, _, remedy = text.partition(". " if permission.PTRACE_REMEDY in text else ": ")
        return report_failure(name, f"{reason} ({facts})", remedy or upgrade)
    functions = [frame.function for thread in threads for frame in thread.frames]
    if not any("hangwatch_doctor_sleeps" in function for function in functions):
        return report_failure(name, f"it reads wrong stacks ({facts})", upgrade)
    return report_success(name, f"{pyspy.path} reads the stacks of another process ({facts})")


def check_faulthandler(
    pid: int, registered: dict[str, Any], ring_path: Path, *, needed: bool
) -> Finding:
    """Lets the process ``pid`` write its own stacks with faulthandler, as a rank does."""
    name = "faulthandler"
    registration = faulthandler_dumps.FaulthandlerRegistration.from_identity(registered)
    remedy = "without it, py-spy must work" if needed else "py-spy works, so it is not needed"
    try:
        dump = faulthandler_dumps.request_stacks(
            pid, run_dir.read_start_ticks(pid), ring_path, registration
        )
    except faulthandler_dumps.FaultStacksError as error:
        report = report_failure if needed else report_warning
        return report(name, str(error), remedy)
    if registration.signal is None:
        detail = "no signal is free for it: a rank that keeps the GIL in native code has no stack"
        return report_warning(name, detail, remedy)
    role = "replaces py-spy" if needed else "used where py-spy is not permitted"
    threads = len(dump.threads)
    return report_success(name, f"a process writes the stacks of its {threads} threads: {role}")


def _await_registration(sleeper: subprocess.Popen[bytes]) -> dict[str, Any]:
    """The registration that the process prints when it is ready. Raises ValueError if it fails."""
    assert sleeper.stdout is not None
    readable, _, _ = select.select([sleeper.stdout], [], [], _READY_S)
    if not readable:
        raise ValueError(f"it was not ready within {_READY_S:g} s")
    registered = json.loads(sleeper.stdout.readline() or b"null")
    if not isinstance(registered, dict):
        raise ValueError("it ended immediately")
    return registered
