"""Faults of a device, for the programs here: on the stand-ins of tests/fakegpu, and on a real GPU as far as it can be made
to have them.
"""

from __future__ import annotations

import ctypes
import importlib.util
from pathlib import Path
from types import ModuleType

import torch

_CONTROL = Path(__file__).resolve().parents[3] / "fakegpu" / "control.py"
_ENDLESS_CYCLES = 1 << 50  # a week
_WAIT_GREATER_OR_EQUAL = 0  # CU_STREAM_WAIT_VALUE_GEQ
_HELD: list[torch.Tensor] = []


def _load_control() -> ModuleType:
    specification = importlib.util.spec_from_file_location("fakegpu_control", _CONTROL)
    assert specification is not None and specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


control = _load_control()


def _stream() -> int:
    return int(torch.cuda.current_stream().cuda_stream)


def _sleep_cycles(cycles: int) -> None:
    torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]  # torch has no annotations for it


def launch_endless_kernel() -> None:
    """A kernel on the current stream that never ends."""
    if control.is_available():
        control.launch_endless_kernel(_stream())
    else:
        _sleep_cycles(_ENDLESS_CYCLES)


def launch_sleep_kernel(seconds: float) -> None:
    """A kernel on the current stream that takes that long."""
    if control.is_available():
        control.launch_sleep_kernel(seconds, _stream())
        return
    clock_khz = torch.cuda.get_device_properties(torch.cuda.current_device()).clock_rate
    _sleep_cycles(int(seconds * clock_khz * 1000))


def wait_forever() -> None:
    """The current stream waits for what never happens."""
    if control.is_available():
        control.wait_for_unrecorded_event(_stream())
        return
    _HELD.append(torch.zeros(1, dtype=torch.int32, device="cuda"))
    address = ctypes.c_ulonglong(_HELD[-1].data_ptr())
    stream = ctypes.c_void_p(_stream())
    driver = ctypes.CDLL("libcuda.so.1")
    if error := driver.cuStreamWaitValue32_v2(stream, address, 1, _WAIT_GREATER_OR_EQUAL):
        raise OSError(f"cuStreamWaitValue32 failed with CUDA error {error}")


def stall_network() -> None:
    """This rank's collectives no longer complete, and so no member's. Only on the stand-ins: raises OSError on a GPU."""
    control.stall_collectives()


def slow_network(milliseconds: int) -> None:
    """Each of this rank's collectives takes that much longer. Only on the stand-ins: raises OSError on a GPU."""
    control.slow_collectives(milliseconds)


def break_network() -> None:
    """Collectives stall and the communicators report ncclRemoteError. Only on the stand-ins: raises OSError on a GPU."""
    control.stall_collectives()
    control.raise_async_error()


def spin_while_waiting() -> None:
    """This rank's host uses the CPU while it waits for its device. On a GPU it always does."""
    if control.is_available():
        control.spin_while_waiting()


def fill_memory() -> None:
    """The next large allocation of this process fails with out of memory."""
    if control.is_available():
        control.refuse_allocations()
        return
    torch.cuda.set_per_process_memory_fraction(1e-4)  # other ranks may share the GPU
