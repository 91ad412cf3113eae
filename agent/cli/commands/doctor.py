"""`hangwatch doctor`: runs all checks and prints their findings: what a job that is started here needs,
what jobs on this host did not record, what this host offers, and whether the servers answer.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import select
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from hangwatch.model.hardware import find_known_problems
from hangwatch.protocol.commands import allows_abort
from hangwatch.protocol.heartbeat import PROOF_PATH
from hangwatch.report.text import abbreviate_list
from hangwatch.ring.layout import INITIAL_SIZE, DeviceStatusState, RingError

from ...environment import identity, run_dir
from ...node.discovery.rings import RingFile, find_ring_files
from ...node.hardware.host import Host
from ...node.hardware.reader import SOURCES, ReaderProcess, Source
from ...node.reporting.updates import find_missing_setting, parse_release
from ...node.stacks import faulthandler_dumps
from ...node.stacks.cuda_gdb import locate_cuda_gdb
from ...node.stacks.pyspy import PySpy, PySpyError, locate_pyspy
from ...node.system import permission
from ...recorder.checks.settings import load_check_settings
from ...recorder.native import build, cache
from ...recorder.native.cache import PLUGIN_VARIABLE, Environment
from ...transport.client import (
    Reply,
    ServerTarget,
    SignedClient,
    TargetError,
    TransportError,
    parse_targets,
)
from ..arguments import DEFAULT_URL, add_format_option, add_server_options
from ..errors import ERROR, OK, UNREACHABLE
from ..terminal import print_result

_TORCH_TIMEOUT_S = 120.0
_FIRST_TESTED, _LAST_TESTED = (2, 6), (2, 13)  # releases of torch
# It prints torch's version, and 1 or 0 for torch.distributed and for a build with CUDA and NCCL.
_TORCH_PROBE_CODE = (
    "import torch; has_nccl = torch.version.cuda is not None;"
    " print(torch.__version__, int(torch.distributed.is_available()), int(has_nccl))"
)
_TYPICAL_RANKS = 8  # the ranks of a usual host
_MAX_PARTS_SHOWN = 4
# The distributions that install a component of `hangwatch.model.hardware`.
_PACKAGES = {"torch": ("torch",), "nccl": ("nvidia-nccl-cu12", "nvidia-nccl-cu13")}
_BUFFER_VARIABLES = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
# The first version that is known to have the Flight Recorder on by default. 2.9 has it off.
_ON_BY_DEFAULT = (2, 11)
_NCCL2_DEFAULT = (2, 15)  # the first version whose "nccl" is `nccl2`, which counts no starts
_SERVER_TIMEOUT_S = 5.0


def add_doctor_arguments(parser: argparse.ArgumentParser) -> None:
    add_server_options(parser)
    add_format_option(parser)


def run_doctor(args: argparse.Namespace) -> int:
    """Runs the checks and returns the exit code of `print_findings`."""
    env = os.environ
    url = args.url or env.get("HANGWATCH_URL") or DEFAULT_URL
    # torch is imported in a separate process, since that may take seconds, or crash.
    command = [sys.executable, "-c", _TORCH_PROBE_CODE]
    torch = _run_command(command, build.make_bare_environment(env), _TORCH_TIMEOUT_S)
    findings = [
        *check_activation(env),
        check_torch(torch),
        *check_run_dir(url),
        *check_recorder(env),
        *check_plugin(env),
        *check_recordings(url),
        *check_devices(torch, env),
        *check_stacks(),
        *check_kernels(env),
        *check_hardware(env),
        *check_known_problems(),
        *check_server(url, args.token, env),
    ]
    return print_findings(args, findings)


def print_findings(args: argparse.Namespace, findings: Sequence[Finding]) -> int:
    """Prints the findings, each with its remedy below. Returns `OK` if nothing failed, `UNREACHABLE`
    if only servers cannot be reached, else `ERROR`.
    """
    failed = [finding for finding in findings if finding.ok is False]
    keys = ("name", "verdict", "ok", "detail", "remedy")
    documents = [{key: getattr(finding, key) for key in keys} for finding in findings]
    lines = []
    for finding in findings:
        lines.append(f"{finding.verdict:4} {finding.name}: {finding.detail}")
        if finding.remedy:
            lines.append(f"     {finding.remedy}")
    print_result(args, {"ok": not failed, "findings": documents}, lines)
    if not failed:
        return OK
    return UNREACHABLE if all(finding.unreachable for finding in failed) else ERROR


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


def check_activation(env: Environment) -> Iterator[Finding]:
    """Checks whether `import torch` activates hangwatch, and whether the job then has a server."""
    yield report_success("python", platform.python_version())
    points = importlib.metadata.entry_points(group="torch.backends")
    own_points = [point.value for point in points if point.name == "hangwatch"]
    if own_points:
        yield report_success("activation", f"`import torch` calls {own_points[0]}")
    else:
        yield report_failure(
            "activation",
            "torch's entry point is not installed: `import torch` starts nothing of hangwatch",
            "pip install hangwatch, into the environment that runs the training",
        )
    if env.get("TORCH_DEVICE_BACKEND_AUTOLOAD") == "0":
        detail = "TORCH_DEVICE_BACKEND_AUTOLOAD=0: torch calls no entry points"
        yield report_failure("environment", detail, "unset TORCH_DEVICE_BACKEND_AUTOLOAD")
    elif identity.is_switched_off(env):
        detail = f"HANGWATCH_DISABLE={env['HANGWATCH_DISABLE']}: hangwatch is switched off"
        yield report_failure("environment", detail, "unset HANGWATCH_DISABLE")
    else:
        yield report_success("environment", "no variable switches hangwatch off")
    name = "HANGWATCH_URL"
    if not env.get(name):
        yield report_warning(
            name,
            "not set: jobs started from here are not watched",
            "start the job with the HANGWATCH_URL=... line that hangwatch-server prints",
        )
    else:
        try:
            targets = parse_targets(env[name], env.get("HANGWATCH_TOKEN", ""))
        except TargetError as error:
            yield report_failure(name, "not the address of a server", str(error))
        else:
            tokens = [f"{x}, {'with' if x.token else 'without'} a token" for x in targets]
            yield report_success(name, "; ".join(tokens))
    if importlib.util.find_spec("ray") is not None:
        # Ray's workers do not inherit the environment of the driver.
        yield report_success(
            "ray",
            "installed: its workers get the variables of hangwatch by ray.init(runtime_env="
            "hangwatch.integrations.ray.make_runtime_env())",
        )


def check_torch(probe: CommandResult) -> Finding:
    """Whether torch can be imported and has torch.distributed, by the result of the probe."""
    name = "torch"
    status, last_line = probe
    if "No module named 'torch'" in last_line:
        return report_warning(name, "not installed here: nothing to watch in this environment")
    if status:
        detail = f"cannot be imported: {last_line or f'it ended with status {status}'}"
        return report_failure(name, detail, "repair torch first: see `python -c 'import torch'`")
    version, _, parts = last_line.partition(" ")
    if not parts.startswith("1"):
        detail = f"{version}, built without torch.distributed"
        return report_failure(name, detail, "install a build that has it")
    release = parse_release(version)
    if release < _FIRST_TESTED:
        first = ".".join(map(str, _FIRST_TESTED))
        return report_failure(name, version, f"hangwatch needs torch {first} or later")
    if release > _LAST_TESTED:
        last = ".".join(map(str, _LAST_TESTED))
        detail = f"{version} is later than {last}, the last one that was tested"
        return report_warning(name, detail, "it will probably work")
    return report_success(name, version)


def check_devices(probe: CommandResult, env: Environment) -> Iterator[Finding]:
    """One finding on what torch counts of the devices, if it was built with NCCL."""
    version, _, parts = probe.last_line.partition(" ")
    if probe.status or not parts.endswith(" 1"):
        return
    release = parse_release(version)
    has_buffer = release >= _ON_BY_DEFAULT
    sizes = [env[name] for name in _BUFFER_VARIABLES if env.get(name)]
    if sizes:
        has_buffer = sizes[0].strip().isdecimal() and int(sizes[0]) > 0
    if has_buffer:
        detail = "torch counts how far they have come, in its Flight Recorder"
        if release >= _NCCL2_DEFAULT and env.get("TORCH_DIST_USE_NCCL2") != "0":
            detail += ", but not the collectives that they have begun"
        yield report_success("devices", detail)
        return
    setting = find_missing_setting(DeviceStatusState.OFF, version)
    yield report_warning(
        "devices",
        f"torch {version} does not count how far they have come in NCCL's collectives",
        f"set {setting} in the job's environment: then hangwatch can name a device that lags",
    )


def check_run_dir(url: str) -> Iterator[Finding]:
    """Checks that the run dir can be created and has enough space for rings and stacks."""
    name = "run dir"
    try:
        folder = run_dir.ensure_run_dir(url)
        space = os.statvfs(folder)
    except OSError as error:
        yield report_failure(name, str(error), "set HANGWATCH_RUN_DIR to a writable folder")
        return
    free_bytes = space.f_bavail * space.f_frsize
    rank_bytes = max(4 << 20, INITIAL_SIZE + (1 << 20))
    max_ranks = free_bytes // rank_bytes
    detail = f"{folder} has {free_bytes >> 20} MB free"
    remedy = (
        "give the container more: docker run --shm-size=1g; or set HANGWATCH_RUN_DIR to a folder"
        " with enough space"
    )
    if max_ranks < 1:
        detail = f"{detail}, and one rank needs {rank_bytes >> 20} MB"
        yield report_failure(name, detail, remedy)
    elif max_ranks < _TYPICAL_RANKS:
        yield report_warning(name, f"{detail}, enough for {max_ranks} ranks only", remedy)
    else:
        yield report_success(name, detail)
    for empty in (folder, folder.parent):
        with contextlib.suppress(OSError):  # a job uses it
            empty.rmdir()


class CommandResult(NamedTuple):
    """The exit status of a command, and the last line of its output or, if it failed, of its errors."""

    status: int
    last_line: str


def _run_command(command: Sequence[str], env: Environment, timeout_s: float) -> CommandResult:
    try:
        done = subprocess.run(
            command, env=env, cwd="/", capture_output=True, text=True, errors="replace",
            timeout=timeout_s, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        return CommandResult(1, f"{type(error).__name__}: {error}")
    lines = (done.stderr if done.returncode else done.stdout).strip().splitlines()
    return CommandResult(done.returncode, lines[-1] if lines else "")


def check_recorder(env: Environment) -> Iterator[Finding]:
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
    mode = cache.get_recorder_mode(env)
    if mode == "python":
        yield report_success("recorder", "Python's, as HANGWATCH_RECORDER says")
        return
    # `check_plugin` builds the plugin for NCCL.
    status, last_line = _run_command(
        build.get_build_command(),
        {**build.make_bare_environment(env), "HANGWATCH_NCCL": "off"},
        build.COMPILE_TIMEOUT_S + build.CHECK_TIMEOUT_S,
    )
    reason = last_line.removeprefix("hangwatch: ") or f"the build ended with status {status}"
    if status == 0:
        yield report_success("recorder", f"native, {last_line.strip()}")
    elif "No module named 'torch'" in reason:
        yield report_warning("recorder", "no torch, so none is needed")
    elif mode != "native":
        yield report_success("recorder", f"Python's: {reason}")
    else:
        yield report_warning(
            "recorder",
            f"Python's: {reason}",
            "it takes about 8 µs per collective, the native one 0.4; HANGWATCH_RECORDER=python"
            " selects it",
        )


def check_plugin(env: Environment) -> Iterator[Finding]:
    """Checks the plugin for NCCL if HANGWATCH_NCCL asks for it, and builds it if it is missing."""
    name = "nccl plugin"
    value = env.get("HANGWATCH_NCCL", "")
    if value and value not in cache.NCCL_LEVELS:
        levels = ", ".join(cache.NCCL_LEVELS)
        yield report_failure(
            name, f"HANGWATCH_NCCL={value} counts as off", f"set it to one of {levels}"
        )
    level = cache.get_nccl_level(env)
    if level == "off":
        return
    present = env.get(PLUGIN_VARIABLE)
    try:
        path = build.build_plugin(env)
    except build.BuildError as error:
        yield report_warning(name, f"none: {error}", "without it, HANGWATCH_NCCL has no effect")
        return
    if present and present != str(path):
        detail = f"{PLUGIN_VARIABLE} names another plugin, and NCCL loads one alone"
        yield report_warning(name, detail, f"unset {PLUGIN_VARIABLE}, or HANGWATCH_NCCL")
    else:
        yield report_success(name, f"{path}, for HANGWATCH_NCCL={level}")


def check_recordings(url: str) -> Iterator[Finding]:
    """One finding for each live rank of this host whose calls are not completely recorded."""
    folder = run_dir.find_run_dir(url)
    if folder is None:  # no job has run here
        return
    try:
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
    problems = []
    losses = [(stream, stream.loss) for stream in snapshot.streams if stream.loss is not None]
    if losses:
        stream, loss = losses[0]
        streams = f"group {stream.group.desc}"
        if len(losses) > 1:
            streams += f" and {len(losses) - 1} more"
        problems.append(
            f"calls of {streams} are not completely recorded since call {loss.from_seq}"
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


def check_hardware(env: Environment, sources: Sequence[Source] = SOURCES) -> Iterator[Finding]:
    """One finding for each source that leaves the job alone. None of them fails: a host without a source
    has no such part.
    """
    sources = [source for source in sources if not source.examines_job]
    with contextlib.closing(ReaderProcess()) as reader:
        reading = reader.read_sources(sources, Host.from_environ((), env))
    unavailable = {missing.source: missing for missing in reading.unavailable}
    for source in sources:
        title = f"evidence: {source.name}"
        missing = unavailable.get(source.name)
        if missing is None:
            observed = [item.about for item in reading.observations if item.source == source.name]
            parts = list(dict.fromkeys(observed))
            yield report_success(title, abbreviate_list(parts, _MAX_PARTS_SHOWN) or "readable")
        elif missing.remedy:
            yield report_warning(title, f"not available: {missing.reason}", missing.remedy)
        else:  # nothing is wrong with a host that has none
            yield report_success(title, f"not available: {missing.reason}")


def check_known_problems() -> Iterator[Finding]:
    """One finding for each installed version that is known to hang."""
    machine = os.uname().machine
    for component, packages in _PACKAGES.items():
        for package in packages:
            try:
                version = importlib.metadata.version(package)
            except importlib.metadata.PackageNotFoundError:
                continue
            for known in find_known_problems(component, version, machine):
                remedy = f"upgrade {component} to {'.'.join(map(str, known.fixed))} or later"
                yield report_warning("known problem", known.describe(version), remedy)


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
        with subprocess.Popen(
            [sys.executable, "-c", _SLEEPER_CODE, str(ring_path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=build.make_bare_environment(os.environ),
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


def check_kernels(env: Environment) -> Iterator[Finding]:
    """Checks what the job's settings for the kernels on its GPUs need. Most jobs have none."""
    if identity.is_switched_on(env, "HANGWATCH_GPU_STACKS"):
        path = locate_cuda_gdb()
        if path is None:
            detail = "HANGWATCH_GPU_STACKS is set, and cuda-gdb is not installed"
            remedy = "install the CUDA toolkit's package cuda-gdb, and add its folder to PATH"
            yield report_warning("cuda-gdb", detail, remedy)
        else:
            yield report_success("cuda-gdb", path)
    if identity.is_switched_on(env, "HANGWATCH_GPU_CORE"):
        if allows_abort(env.get("HANGWATCH_ON_HANG", "")):
            detail = "written before a rank is ended: an error in a kernel ends it by SIGABRT"
            yield report_success("core dumps of GPUs", detail)
        else:
            detail = "HANGWATCH_GPU_CORE has no effect: no rank may be ended"
            remedy = "set HANGWATCH_ON_HANG=abort as well"
            yield report_warning("core dumps of GPUs", detail, remedy)


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
        threads = pyspy.dump_stacks(pid, run_dir.read_start_ticks(pid))
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


def check_server(url: str, token: str | None, env: Environment) -> Iterator[Finding]:
    """One finding for each server, which must answer as a hangwatch server and accept the token."""
    try:
        targets = parse_targets(url, env.get("HANGWATCH_TOKEN", ""))
    except TargetError as error:
        yield report_failure("server", "not the address of a server", str(error))
        return
    for target in targets:
        if token:
            target = ServerTarget(base_url=target.base_url, token=token)
        try:
            with contextlib.closing(SignedClient(target, _SERVER_TIMEOUT_S)) as client:
                health = client.send_request("GET", "/healthz")
                proof = client.send_request("GET", PROOF_PATH)  # signed: the token is not sent
            yield judge_responses(health, proof, target)
        except TransportError as error:
            yield explain_error(error, target)


def judge_responses(health: Reply, proof: Reply, target: ServerTarget) -> Finding:
    """The finding for the two responses."""
    use_printed_url = "use the HANGWATCH_URL= line that hangwatch-server printed when it started"
    if proof.status in (401, 403):
        problem = "it requires a token, and none is given"
        if target.token:
            problem = "the token is wrong"
        return report_failure("server", f"{target} answers, but {problem}", use_printed_url)
    try:
        document = proof.parse_json() if proof.status == 200 else None
    except ValueError:
        document = None
    if health.status != 200 or document != {}:
        detail = (
            f"{target} answers, but not as a hangwatch server ({health.status}, {proof.status})"
        )
        remedy = f"is another service on that port, or a path prefix missing? {use_printed_url}"
        return report_failure("server", detail, remedy)
    token_result = "accepts the token" if target.token else "requires no token"
    return report_success("server", f"{target} answers and {token_result}")


def explain_error(error: TransportError, target: ServerTarget) -> Finding:
    """Why the server did not respond, and the remedy."""
    detail = f"{target} cannot be reached: {error}"
    remedy = "check HANGWATCH_URL and the network to the master node"
    cause = error.__cause__
    if isinstance(cause, socket.gaierror):
        detail = f"the name {target.host} cannot be resolved here"
        remedy = f"check the name in HANGWATCH_URL, or DNS: getent hosts {target.host}"
    elif isinstance(cause, TimeoutError):
        detail = f"{target} does not answer in time"
        remedy = "check for a firewall: the port must be reachable from every node"
    elif isinstance(cause, ConnectionRefusedError):
        detail = f"{target} refuses connections"
        remedy = "start hangwatch-server there; with --host 0.0.0.0 if it runs on another node"
    return Finding(name="server", ok=False, detail=detail, remedy=remedy, unreachable=True)
