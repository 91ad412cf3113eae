"""Lets a training program plant a fault at a line of its own. Import it by path; it needs only the standard library.

Where the stand-ins are not loaded (a real GPU, gloo), `is_available()` is false and the other functions raise `OSError`.
"""

from __future__ import annotations

import ctypes
import functools


@functools.cache
def _library() -> ctypes.CDLL:
    library = ctypes.CDLL("libcuda-standin.so")  # found by LD_LIBRARY_PATH, loaded already by torch
    library.fakegpu_plant.argtypes = [ctypes.c_char_p]
    library.fakegpu_plant.restype = None
    library.fakegpu_launch_blocked.argtypes = [ctypes.c_void_p, ctypes.c_double]
    library.fakegpu_launch_blocked.restype = None
    library.fakegpu_wait_never_recorded.argtypes = [ctypes.c_void_p]
    library.fakegpu_wait_never_recorded.restype = None
    library.fakegpu_collectives.restype = ctypes.c_ulong
    library.fakegpu_launches.restype = ctypes.c_ulong
    return library


def is_available() -> bool:
    """Whether this process runs on the stand-ins."""
    try:
        _library()
    except OSError:
        return False
    return True


def launch_endless_kernel(stream: int = 0) -> None:
    """Put a kernel that never ends into a stream (`torch.cuda.Stream.cuda_stream`; 0: the default stream)."""
    _library().fakegpu_launch_blocked(stream, -1.0)


def launch_sleep_kernel(seconds: float, stream: int = 0) -> None:
    """Put a kernel that runs for `seconds` into a stream."""
    _library().fakegpu_launch_blocked(stream, seconds * 1000)


def wait_for_unrecorded_event(stream: int = 0) -> None:
    """Make a stream wait for an event that nobody records. Nothing ends this wait, not even `release`."""
    _library().fakegpu_wait_never_recorded(stream)


def stall_collectives() -> None:
    """Let this rank's collectives never complete, from the next one on. One rank stalls all members of its groups."""
    plant("stall")


def slow_collectives(milliseconds: int) -> None:
    """Let each collective of this rank take `milliseconds` more."""
    plant(f"slow:ms={milliseconds}")


def spin_while_waiting() -> None:
    """Let this process use the CPU while it waits for a stream or an event, as it does on a GPU. Without this, it sleeps."""
    plant("spin")


def refuse_allocations() -> None:
    """Let further device allocations of this process fail with out of memory. torch's cache still serves small ones."""
    plant("oom")


def raise_async_error(code: int = 6) -> None:
    """Let communicators report an asynchronous error: 6 is ncclRemoteError, 2 ncclSystemError."""
    plant(f"async_error:code={code}")


def release() -> None:
    """End all endless kernels and stalls of this process."""
    plant("release")


def plant(specification: str) -> None:
    """Plant faults given as in FAKEGPU_FAULTS (README.md), in this process."""
    _library().fakegpu_plant(specification.encode())


def issued_collectives() -> int:
    """How many collectives and groups this process has issued: the `call` of the next one is one more."""
    return int(_library().fakegpu_collectives())


def launched_kernels() -> int:
    """How many kernels this process has launched."""
    return int(_library().fakegpu_launches())
