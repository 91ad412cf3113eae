"""Reads the kernels on the GPUs of a process with NVIDIA's cuda-gdb, where the job allows it.

cuda-gdb attaches with ptrace and stops the process and its kernels, which continue when it detaches.
That took 11 s on an H200 with driver 580, most of it for the symbols of the process's libraries. The
process continues whatever happens to cuda-gdb.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from hangwatch.model.kernels import CUDA_GDB, MAX_KERNEL_NAME_CHARS, MAX_KERNELS, Kernel, Kernels
from hangwatch.model.limits import NOT_RUNNING_STATES
from hangwatch.protocol.commands import Command
from hangwatch.protocol.heartbeat import KernelsReply

from ..system import permission, processes
from ..system.runtime import OrderWorker
from .sampler import ProcessLocks

READ_TIMEOUT_S = 30.0
# A reading that begins later would be replied to after the server has given it up.
MAX_WAIT_S = 80.0
MAX_WAITING_ORDERS = 64
_END_TIMEOUT_S = 3.0  # how long cuda-gdb may take to detach after SIGTERM
_MAX_OUTPUT_BYTES = 4 << 20
_MAX_LINE_CHARS = 4096
_TOOLKIT_PATHS = ("/usr/local/cuda/bin", "/opt/cuda/bin")

_PYTHON_VARIABLES = ("PYTHONHOME", "PYTHONPATH")
_COMMANDS = ("-ex", "info cuda kernels", "-ex", "detach")
_NO_KERNELS = "No CUDA kernels"
_REFUSAL_MARKS = ("operation not permitted", "could not attach", "permission denied")
# The columns of `info cuda kernels` up to the dimensions: the kernel's and its parent's number, the
# device, the grid's number (below zero if a kernel launched it), the status, and which SMs it is on.
_ROW = re.compile(
    r"\*?\s*-?\d{1,10}\s+(?:-|\d{1,10})\s+(?P<device>\d{1,9})\s+-?\d{1,20}\s+(?P<status>[A-Za-z]+)\s+"
    r"(?:0x[0-9a-fA-F]*\s+)?"
)
_DIMENSIONS = re.compile(r"\(\s*(\d{1,10}),\s*(\d{1,10}),\s*(\d{1,10})\)\s*")
_GRID_COLUMN, _BLOCK_COLUMN = "GridDim", "BlockDim"
_ABSENT_STATUSES = ("Pending", "Terminated")  # the kernel is not on the device
_ANONYMOUS = "(anonymous namespace)"


class CudaGdbError(Exception):
    """The kernels are not known. The message says why and what to do."""


def locate_cuda_gdb() -> str | None:
    """The path of cuda-gdb: on PATH, else in the CUDA toolkit; None if it is not installed."""
    folders = [os.environ.get("PATH", os.defpath)]
    if home := os.environ.get("CUDA_HOME"):
        folders.append(f"{home}/bin")
    return shutil.which("cuda-gdb", path=os.pathsep.join([*folders, *_TOOLKIT_PATHS]))


@dataclass(frozen=True, slots=True, kw_only=True)
class CudaGdb:
    """Runs the cuda-gdb at ``path``."""

    path: str | None
    proc: str = processes.PROC_ROOT
    timeout_s: float = READ_TIMEOUT_S

    def read_kernels(self, pid: int, start_ticks: int) -> Kernels:
        """The kernels on the devices of one process. Raises CudaGdbError."""
        if self.path is None:
            raise CudaGdbError(
                "cuda-gdb is not installed on its host: add the CUDA toolkit's package cuda-gdb to the"
                " job's image, and its folder to PATH"
            )
        stat = processes.read_live_stat(pid, start_ticks, self.proc)
        if stat is None:
            raise CudaGdbError("the process has ended")
        if stat.state in NOT_RUNNING_STATES:
            raise CudaGdbError(f"the process is in state {stat.state}: cuda-gdb cannot stop it")
        try:
            output = self._run_debugger(self.path, pid)
        finally:
            was_stopped = processes.continue_stopped(pid, start_ticks, self.proc)
        if output is None:
            ending = "; it left the process stopped, which was continued" if was_stopped else ""
            raise CudaGdbError(
                f"cuda-gdb took more than {self.timeout_s:g} s and was ended{ending}"
            )
        return self._parse_output(output)

    def _run_debugger(self, path: str, pid: int) -> str | None:
        """The output of cuda-gdb; None if it took too long. Raises CudaGdbError if it does not start."""
        # cuda-gdb has a Python of its own.
        env = {name: text for name, text in os.environ.items() if name not in _PYTHON_VARIABLES}
        # Without the user's initialisation files, which may contain any commands.
        command = [path, "-nx", "-p", str(pid), "-batch", *_COMMANDS]
        try:
            debugger = subprocess.Popen(
                command,
                cwd="/",
                env=env,
                start_new_session=True,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
        except OSError as error:
            raise CudaGdbError(f"{path} cannot be run: {error.strerror}") from error
        assert debugger.stdout is not None
        deadline = time.monotonic() + self.timeout_s
        output = bytearray()
        try:
            with debugger.stdout as pipe:
                while (left_s := deadline - time.monotonic()) > 0:
                    if not select.select([pipe], [], [], left_s)[0]:
                        continue
                    chunk = os.read(pipe.fileno(), 1 << 16)
                    if not chunk:
                        debugger.wait(left_s)
                        return output.decode(errors="replace")
                    output += chunk[: _MAX_OUTPUT_BYTES - len(output)]
        except subprocess.TimeoutExpired:
            pass
        finally:
            if debugger.returncode is None:
                _end_debugger(debugger)
        return None

    def _parse_output(self, output: str) -> Kernels:
        kernels = parse_kernels(output)
        if kernels is not None:
            return kernels
        if any(mark in output.lower() for mark in _REFUSAL_MARKS):
            raise CudaGdbError(permission.format_refusal(self.proc, "cuda-gdb"))
        words = output[-_MAX_LINE_CHARS:].strip().rpartition("\n")[2].split()
        reason = " ".join(words)[:200] or "no reason given"
        raise CudaGdbError(f"cuda-gdb shows no kernels: {reason}")


def _end_debugger(debugger: subprocess.Popen[bytes]) -> None:
    """Ends cuda-gdb, with all that it started. It detaches if SIGTERM ends it."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(debugger.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            debugger.wait(_END_TIMEOUT_S)


def parse_kernels(output: str) -> Kernels | None:
    """The kernels on the devices in the output of `info cuda kernels`; None if it has no such table. The
    columns are those of NVIDIA's documentation of cuda-gdb; some versions lack the one of the SMs.
    """
    columns: list[str] = []  # those with dimensions
    kernels = []
    for line in output.splitlines():
        text = line[:_MAX_LINE_CHARS].strip()
        words = text.split()
        if _GRID_COLUMN in words and _BLOCK_COLUMN in words:
            columns = [word for word in words if word.endswith("Dim")]
            continue
        row = _ROW.match(text) if columns else None
        if row is None or row["status"] in _ABSENT_STATUSES:
            continue
        position = row.end()
        dimensions = {}
        for column in columns:
            match = _DIMENSIONS.match(text, position)
            if match is None:
                break
            dimensions[column] = (int(match[1]), int(match[2]), int(match[3]))
            position = match.end()
        name = strip_arguments(text[position:])
        if len(dimensions) == len(columns) and name:
            kernel = Kernel(
                name=name[:MAX_KERNEL_NAME_CHARS],
                device=int(row["device"]),
                grid=dimensions[_GRID_COLUMN],
                block=dimensions[_BLOCK_COLUMN],
            )
            kernels.append(kernel)
    if not columns and _NO_KERNELS not in output:
        return None
    return tuple(kernels[:MAX_KERNELS])


def strip_arguments(invocation: str) -> str:
    """The name of a kernel in its invocation or its declaration.

    >>> strip_arguments("void at::(anonymous namespace)::fill<float, 4>(float*, int)")
    'at::(anonymous namespace)::fill<float, 4>'
    """
    text = invocation.strip().removeprefix("void ")
    depth = 0  # in the arguments of templates
    position = 0
    while position < len(text):
        if text.startswith(_ANONYMOUS, position):
            position += len(_ANONYMOUS)
            continue
        character = text[position]
        if depth == 0 and (character in "( " or text.startswith("<<<", position)):
            return text[:position]
        depth = max(0, depth + (character == "<") - (character == ">"))
        position += 1
    return text


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelOrder:
    command: Command
    pid: int
    start_ticks: int
    ordered_ns: int


class KernelReader(OrderWorker[KernelOrder, tuple[KernelsReply, int]]):
    """Reads the kernels of the ranks of a host one after the other: every debugger takes a core, and
    those before CUDA 12.0 allow no second one.
    """

    def __init__(
        self,
        cuda_gdb: CudaGdb,
        wake: Callable[[], None],
        locks: ProcessLocks,
        preempt_recording: Callable[[str], None],
    ) -> None:
        """``locks`` keep py-spy from attaching to a process at the same time, and so does
        ``preempt_recording``.
        """
        super().__init__("kernels", wake, max_waiting=MAX_WAITING_ORDERS)
        self._cuda_gdb = cuda_gdb
        self._locks = locks
        self._preempt_recording = preempt_recording

    def explain_failure(self, order: KernelOrder, error: str) -> tuple[KernelsReply, int]:
        problem = f"hangwatch failed to read kernels: {error}; please report this"
        return make_kernels_reply(order.command, problem), time.monotonic_ns()

    def execute_order(self, order: KernelOrder) -> tuple[KernelsReply, int]:
        """The reply, and when the kernels were read."""
        reply = make_kernels_reply(order.command)
        key = order.command.key
        if time.monotonic_ns() - order.ordered_ns > MAX_WAIT_S * 1e9:
            reply = replace(reply, error="cuda-gdb took too long for the other ranks of its host")
            return reply, time.monotonic_ns()
        with self._locks.get_lock(key):
            self._preempt_recording(key)
            try:
                kernels = self._cuda_gdb.read_kernels(order.pid, order.start_ticks)
                reply = replace(reply, kernels=kernels)
            except CudaGdbError as error:
                reply = replace(reply, error=str(error))
        return reply, time.monotonic_ns()


def make_kernels_reply(command: Command, error: str | None = None) -> KernelsReply:
    """A reply without kernels yet, as by cuda-gdb."""
    return KernelsReply(key=command.key, request=command.id, source=CUDA_GDB, error=error)
