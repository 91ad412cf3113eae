"""Checks of this host: the sources of hardware evidence, versions that are known to hang, the
devices' counters, and py-spy and faulthandler, which take the stacks of a small process that is
started for it.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import json
import os
import re
import select
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hangwatch.model.hardware import Observation, UnavailableSource, find_known_problems
from hangwatch.report.text import abbreviate_list
from hangwatch.ring.layout import DeviceStatusState

from ...environment import run_dir
from ...node.hardware.host import Host
from ...node.hardware.reader import SOURCES, ReaderProcess, Source
from ...node.reporting.updates import find_missing_setting
from ...node.stacks import faulthandler_dumps
from ...node.stacks.pyspy import PySpy, PySpyError, locate_pyspy
from ...node.system import permission
from .findings import Finding, report_failure, report_success, report_warning

_MAX_PARTS_SHOWN = 4
# The distributions that install a component of `hangwatch.model.hardware`.
_PACKAGES = {"torch": ("torch",), "nccl": ("nvidia-nccl-cu12", "nvidia-nccl-cu13")}
_BUFFER_VARIABLES = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
# The first version that is known to have the Flight Recorder on by default. 2.9 has it off.
_ON_BY_DEFAULT = (2, 11)
_NCCL2_DEFAULT = (2, 15)  # the first version whose "nccl" is `nccl2`, which counts no starts


def check_hardware(
    env: Mapping[str, str], sources: Sequence[Source] = SOURCES
) -> Iterator[Finding]:
    """One finding for each source. None of them fails: a host without a source has no such part."""
    with contextlib.closing(ReaderProcess()) as reader:
        reading = reader.read_sources(sources, Host.from_environ(env, ()))
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
    if _has_buffer(build, env):
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


def _has_buffer(build: TorchBuild, env: Mapping[str, str]) -> bool:
    for name in _BUFFER_VARIABLES:
        if size := env.get(name):
            return size.strip().isdecimal() and int(size) > 0
    return build.release >= _ON_BY_DEFAULT


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
dumper = StackDumper(path, ring)
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
