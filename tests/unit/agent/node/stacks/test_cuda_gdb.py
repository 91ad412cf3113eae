"""What cuda-gdb prints, and that a process continues whatever happens to cuda-gdb."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hangwatch.agent.node.stacks.cuda_gdb import (
    MAX_WAIT_S,
    CudaGdb,
    CudaGdbError,
    KernelOrder,
    KernelReader,
    locate_cuda_gdb,
    parse_kernels,
    strip_arguments,
)
from hangwatch.agent.node.stacks.sampler import ProcessLocks
from hangwatch.agent.node.system.processes import read_stat
from hangwatch.model.kernels import MAX_KERNELS, Kernel
from hangwatch.protocol.commands import Command, CommandKind
from tests.simulation.waiting import wait_for_value, wait_until

HEADER = "  Kernel Parent Dev Grid Status   SMs Mask   GridDim  BlockDim Invocation"
ROW = "*      0      -   3    1 Active 0x00000003   (2,1,1) (128,1,1) hw_stuck_kernel(int*)"
STUCK = Kernel(name="hw_stuck_kernel", device=3, grid=(2, 1, 1), block=(128, 1, 1))


def make_output(*rows: str, header: str = HEADER) -> str:
    return "\n".join(["[New LWP 4712]", "0x00007f in poll () from libc.so.6", header, *rows, ""])


@pytest.mark.parametrize(
    ("row", "kernel"),
    [
        pytest.param(ROW, STUCK, id="in focus"),
        pytest.param(ROW.replace("*", " "), STUCK, id="not in focus"),
        pytest.param(
            "       1      0   0   -7 Active 0x00ffffff (240,10,2) (16, 16, 4) void"
            " at::native::(anonymous namespace)::fill<float, 4>(float*)",
            Kernel(
                name="at::native::(anonymous namespace)::fill<float, 4>",
                grid=(240, 10, 2),
                block=(16, 16, 4),
            ),
            id="of a template",
        ),
    ],
)
def test_kernel_in_the_table(row: str, kernel: Kernel) -> None:
    assert parse_kernels(make_output(row)) == (kernel,)


def test_tables_of_other_versions() -> None:
    old = HEADER.replace("Invocation", "Name Args")
    row = "*      1      -   0    2 Active 0x00ffffff (240,1,1) (128,1,1) acos_main parms=..."
    assert parse_kernels(make_output(row, header=old)) == (
        Kernel(name="acos_main", grid=(240, 1, 1), block=(128, 1, 1)),
    )
    no_mask = HEADER.replace("  SMs Mask", "")
    row = "*    0    -   0 228130   Active  (8,1,1)  (640,1,1) ncclDevKernel_AllGather_RING_LL()"
    (kernel,) = parse_kernels(make_output(row, header=no_mask)) or ()
    assert kernel.is_nccl and kernel.name == "ncclDevKernel_AllGather_RING_LL"
    clusters = HEADER.replace("BlockDim", "ClusterDim BlockDim")
    row = "* 0 - 0 1 Active 0x01 (8,1,1) (2,1,1) (640,1,1) gemm(int)"
    (kernel,) = parse_kernels(make_output(row, header=clusters)) or ()
    assert (kernel.grid, kernel.block) == ((8, 1, 1), (640, 1, 1))


def test_kernels_that_are_not_on_the_device() -> None:
    rows = [ROW.replace("Active", status) for status in ("Pending", "Terminated", "Sleeping")]
    assert parse_kernels(make_output(*rows)) == (STUCK,)
    assert parse_kernels("No CUDA kernels.\n") == ()
    assert parse_kernels(make_output()) == ()


@pytest.mark.parametrize(
    "row",
    [
        "",
        "* 0 - 0",
        "* 0 - 0 1 Active 0x1 (2,1) (128,1,1) short(int)",
        "* 0 - 0 1 Active 0x1 (2,1,1) (128,1,1)",
        f"* 0 - 0 1 Active 0x1 ({'9' * 500},1,1) (128,1,1) huge(int)",
        f"* {'9' * 500} - 0 1 Active 0x1 (2,1,1) (128,1,1) huge(int)",
        "*" * 100_000,
        " " * 100_000 + "x",
        "<" * 5000,
    ],
)
def test_odd_rows_are_left_out(row: str) -> None:
    assert parse_kernels(make_output(row, ROW)) == (STUCK,)


def test_output_is_limited() -> None:
    long = ROW.replace("hw_stuck_kernel", "k" * 5000)
    (kernel,) = parse_kernels(make_output(long)) or ()
    assert len(kernel.name) == 256
    assert len(parse_kernels(make_output(*[ROW] * 1000)) or ()) == MAX_KERNELS
    assert parse_kernels("cuda-gdb: internal error\n") is None


@pytest.mark.parametrize(
    ("invocation", "name"),
    [
        ("kernel(A=0x7fff, n=3)", "kernel"),
        ("kernel<<<(1,1,1),(8,1,1)>>>(n=3)", "kernel"),
        ("ns::kernel<(int)4, float>(n=3)", "ns::kernel<(int)4, float>"),
        ("void cutlass::Kernel2<a::b<c> >(c::Params)", "cutlass::Kernel2<a::b<c> >"),
        ("lonely", "lonely"),
        ("(int)", ""),
    ],
)
def test_name_without_arguments(invocation: str, name: str) -> None:
    assert strip_arguments(invocation) == name


@pytest.fixture
def target() -> Iterator[int]:
    process = subprocess.Popen(["sleep", "60"])
    yield process.pid
    process.kill()
    process.wait()


def write_debugger(folder: Path, script: str) -> str:
    """A cuda-gdb that finds the pid in ``$3``."""
    path = folder / "cuda-gdb"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


def read_kernels(path: str | None, pid: int, timeout_s: float = 10.0) -> tuple[Kernel, ...]:
    cuda_gdb = CudaGdb(path=path, timeout_s=timeout_s)
    return cuda_gdb.read_kernels(pid, read_stat(pid).start_ticks)


def test_kernels_of_a_process(tmp_path: Path, target: int) -> None:
    script = f"echo \"$@\" > {tmp_path}/arguments; cat <<'END'\n{make_output(ROW)}\nEND"
    assert read_kernels(write_debugger(tmp_path, script), target) == (STUCK,)
    expected = f"-nx -p {target} -batch -ex info cuda kernels -ex detach\n"
    assert (tmp_path / "arguments").read_text() == expected


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("echo 'ptrace: Operation not permitted.'", "CAP_SYS_PTRACE"),
        (
            "echo 'warning: odd'; echo; echo 'fatal:  the driver is too old'",
            "the driver is too old",
        ),
        ("exit 3", "no reason given"),
    ],
)
def test_failures_say_why(tmp_path: Path, target: int, script: str, message: str) -> None:
    with pytest.raises(CudaGdbError, match=message):
        read_kernels(write_debugger(tmp_path, script), target)


def test_missing_debugger_and_ended_process(tmp_path: Path, target: int) -> None:
    with pytest.raises(CudaGdbError, match="not installed"):
        read_kernels(None, target)
    with pytest.raises(CudaGdbError, match="cannot be run"):
        read_kernels(str(tmp_path / "absent"), target)
    with pytest.raises(CudaGdbError, match="has ended"):
        CudaGdb(path="/bin/true").read_kernels(target, 1)


def test_stopped_process_is_left_alone(tmp_path: Path, target: int) -> None:
    os.kill(target, 19)  # SIGSTOP
    assert wait_until(lambda: read_stat(target).state == "T", 5.0)
    with pytest.raises(CudaGdbError, match="in state T"):
        read_kernels(write_debugger(tmp_path, f"touch {tmp_path}/started"), target)
    assert not (tmp_path / "started").exists()
    assert read_stat(target).state == "T"


def test_process_continues_after_a_debugger_that_takes_too_long(
    tmp_path: Path, target: int
) -> None:
    script = f"kill -STOP $3; echo $$ > {tmp_path}/pid; trap '' TERM; sleep 60 & wait; sleep 60"
    began = time.monotonic()
    with pytest.raises(CudaGdbError, match=r"more than 0\.5 s.*continued"):
        read_kernels(write_debugger(tmp_path, script), target, timeout_s=0.5)
    assert time.monotonic() - began < 20
    assert wait_until(lambda: read_stat(target).state == "S", 5.0)
    debugger = int((tmp_path / "pid").read_text())
    assert not Path(f"/proc/{debugger}").exists(), "it was reaped"


def test_endless_output_is_not_kept(tmp_path: Path, target: int) -> None:
    with pytest.raises(CudaGdbError, match="more than 1 s"):
        read_kernels(write_debugger(tmp_path, "exec yes"), target, timeout_s=1.0)


def test_debugger_is_found_on_path_and_in_the_toolkit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    (tmp_path / "bin").mkdir()
    path = write_debugger(tmp_path / "bin", "exit 0")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert locate_cuda_gdb() == path
    monkeypatch.delenv("CUDA_HOME")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    assert locate_cuda_gdb() == path


def make_reader(
    path: str | None, locks: ProcessLocks, preempt: Callable[[str], None] = lambda _: None
) -> KernelReader:
    return KernelReader(CudaGdb(path=path), lambda: None, locks, preempt)


def make_order(pid: int, ordered_ns: int) -> KernelOrder:
    command = Command(id="k", kind=CommandKind.KERNELS, key=f"{pid}-1")
    ticks = read_stat(pid).start_ticks
    return KernelOrder(command=command, pid=pid, start_ticks=ticks, ordered_ns=ordered_ns)


def test_order_waits_for_pyspy_and_ends_its_recording(tmp_path: Path, target: int) -> None:
    path = write_debugger(tmp_path, f"cat <<'END'\n{make_output(ROW)}\nEND")
    locks, preempted = ProcessLocks(), list[str]()
    reader = make_reader(path, locks, preempted.append)
    with locks.get_lock(f"{target}-1"):
        assert reader.submit_order(make_order(target, time.monotonic_ns()))
        time.sleep(0.1)
        assert not reader.take_results() and not preempted
    ((reply, _),) = wait_for_value(reader.take_results, "the kernels")
    assert (reply.kernels, reply.error, reply.source) == ((STUCK,), None, "cuda-gdb")
    assert preempted == [f"{target}-1"]


def test_order_that_has_waited_too_long_is_not_executed(target: int) -> None:
    reader = make_reader(None, ProcessLocks())
    late_ns = time.monotonic_ns() - int((MAX_WAIT_S + 1) * 1e9)
    reply, _ = reader.execute_order(make_order(target, late_ns))
    assert "took too long" in str(reply.error)
    reply, _ = reader.execute_order(make_order(target, time.monotonic_ns()))
    assert "not installed" in str(reply.error)
