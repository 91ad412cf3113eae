"""Core dumps of GPUs: which kernels are in them, and that no file does any harm."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hangwatch.agent.environment import run_dir
from hangwatch.agent.node.stacks.gpu_core import GpuCore, GpuCoreError, demangle_name, read_kernels
from hangwatch.model.kernels import MAX_KERNELS, Kernel

from .gpu_cores import FakeKernel, make_core

STUCK = FakeKernel("_Z15hw_stuck_kernelPi", 0x7F2E6FBFF000)
NCCL = FakeKernel(
    "_Z39ncclDevKernel_AllReduce_Sum_f32_RING_LL24ncclDevKernelArgsStorageILm4096EE",
    0x7F2E6FC00000,
    grid=(4, 1, 1),
    block=(512, 1, 1),
)


def write_core(folder: Path, content: bytes) -> Path:
    path = folder / "7.gpucore"
    path.write_bytes(content)
    return path


def test_kernels_have_names_and_dimensions(tmp_path: Path) -> None:
    path = write_core(tmp_path, make_core([STUCK, NCCL], device=3))
    assert read_kernels(path) == (
        Kernel(name="hw_stuck_kernel", device=3, grid=(2, 1, 1), block=(128, 1, 1)),
        Kernel(
            name="ncclDevKernel_AllReduce_Sum_f32_RING_LL",
            device=3,
            grid=(4, 1, 1),
            block=(512, 1, 1),
        ),
    )


def test_kernel_without_a_block_on_the_device_does_not_run(tmp_path: Path) -> None:
    queued = NCCL._replace(resident_blocks=0)
    (kernel,) = read_kernels(write_core(tmp_path, make_core([STUCK, queued])))
    assert kernel.name == "hw_stuck_kernel"
    nothing = STUCK._replace(resident_blocks=0)
    assert len(read_kernels(write_core(tmp_path, make_core([nothing])))) == 0


def test_rows_whose_size_is_not_given(tmp_path: Path) -> None:
    first, _ = read_kernels(write_core(tmp_path, make_core([STUCK, NCCL], says_row_size=False)))
    assert (first.name, first.block) == ("hw_stuck_kernel", (128, 1, 1))


def test_function_at_an_unknown_address_has_no_name(tmp_path: Path) -> None:
    content = make_core([STUCK]).replace(
        STUCK.address.to_bytes(8, "little"), (STUCK.address + 8192).to_bytes(8, "little"), 1
    )
    (kernel,) = read_kernels(write_core(tmp_path, content))
    assert kernel.name == "unknown kernel" and kernel.grid == (2, 1, 1)


def test_number_of_kernels_is_limited(tmp_path: Path) -> None:
    many = [STUCK._replace(address=STUCK.address + 4096 * n) for n in range(3 * MAX_KERNELS)]
    assert len(read_kernels(write_core(tmp_path, make_core(many)))) == MAX_KERNELS


@pytest.mark.parametrize("content", [b"", b"\x7fELF", bytes(4096), b"\x7fELF\x02" + bytes(4096)])
def test_other_files_are_refused(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(GpuCoreError):
        read_kernels(write_core(tmp_path, content))
    with pytest.raises(GpuCoreError, match="wrote no core dump"):
        read_kernels(tmp_path / "absent")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(GpuCoreError, match="not a file"):
        read_kernels(tmp_path / "pipe")


def test_damaged_files_raise_nothing_else(tmp_path: Path) -> None:
    """Bytes are changed at random, mostly in the headers and tables, and files are cut off."""
    original = make_core([STUCK, NCCL])
    chance = random.Random(7)
    for _ in range(1500):
        content = bytearray(original)
        for _ in range(chance.randint(1, 8)):
            value = chance.choice((0, 1, 0x7F, 0x80, 0xFF, chance.randrange(256)))
            content[chance.randrange(len(content))] = value
        if chance.random() < 0.2:
            del content[chance.randrange(len(content)) :]
        try:
            kernels = read_kernels(write_core(tmp_path, bytes(content)))
        except GpuCoreError:
            continue
        assert len(kernels) <= MAX_KERNELS
        assert all(len(kernel.name) <= 256 for kernel in kernels)


@pytest.mark.parametrize(
    ("symbol", "name"),
    [
        ("_Z15hw_stuck_kernelPi", "hw_stuck_kernel"),
        ("_ZL6staticPi", "static"),
        ("_Z4fillIfEvPT_", "fill"),
        ("_ZN2at6native12_GLOBAL__N_14fillIfEEvPT_", "at::native::(anonymous namespace)::fill"),
        ("extern_c_kernel", "extern_c_kernel"),
        ("_Zfoo", "_Zfoo"),
        ("_Z9999x", "x"),
        ("", ""),
    ],
)
def test_names_of_symbols(symbol: str, name: str) -> None:
    assert demangle_name(symbol) == name


# What a driver does: it reads its pipe, writes the file, and aborts.
DRIVER = """
import os, resource, sys
_, hard = resource.getrlimit(resource.RLIMIT_CORE)
resource.setrlimit(resource.RLIMIT_CORE, (hard, hard))
pipe, core, content = [argument.replace("%p", str(os.getpid())) for argument in sys.argv[1:]]
os.mkfifo(pipe)
fd = os.open(pipe, os.O_RDWR)
print(flush=True)
os.read(fd, 1)
os.rename(content, core)
os.abort()
"""


@pytest.fixture
def driver(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process in whose place a driver waits in the run dir ``tmp_path``."""
    content = write_core(tmp_path, make_core([STUCK])).rename(tmp_path / "content")
    paths = [
        str(tmp_path / f"%p{suffix}")
        for suffix in (run_dir.GPU_PIPE_SUFFIX, run_dir.GPU_CORE_SUFFIX)
    ]
    with subprocess.Popen(
        [sys.executable, "-c", DRIVER, *paths, str(content)], stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process
        process.kill()


def test_core_is_requested_read_and_removed(
    tmp_path: Path, driver: subprocess.Popen[bytes]
) -> None:
    core = GpuCore(folder=tmp_path, pid=driver.pid)
    assert core.request_core(1)
    assert driver.wait(10) == -signal.SIGABRT
    (kernel,) = core.take_kernels()
    assert kernel.name == "hw_stuck_kernel"
    assert not list(tmp_path.glob(f"*{run_dir.GPU_CORE_SUFFIX}"))
    with pytest.raises(GpuCoreError, match="wrote no core dump"):
        core.take_kernels()


def test_kernel_writes_no_core_of_the_host(tmp_path: Path, driver: subprocess.Popen[bytes]) -> None:
    assert GpuCore(folder=tmp_path, pid=driver.pid).request_core(1)
    _, status = os.waitpid(driver.pid, 0)
    assert os.WTERMSIG(status) == signal.SIGABRT and not os.WCOREDUMP(status)


def test_nothing_is_requested_without_pipe_reader_or_space(tmp_path: Path) -> None:
    pid = 1 << 22  # no process has it
    core = GpuCore(folder=tmp_path, pid=pid)
    assert not core.request_core()
    pipe = tmp_path / f"{pid}{run_dir.GPU_PIPE_SUFFIX}"
    os.mkfifo(pipe)
    with pytest.raises(GpuCoreError, match="can be requested"):
        core.request_core(1)
    with pytest.raises(GpuCoreError, match="HANGWATCH_RUN_DIR"):
        core.request_core(1 << 60)
    pipe.unlink()
    pipe.write_bytes(b"")
    with pytest.raises(GpuCoreError, match="not the driver's pipe"):
        core.request_core(1)
    assert pipe.read_bytes() == b""
