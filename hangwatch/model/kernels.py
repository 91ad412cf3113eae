"""The kernels that the GPUs of ranks execute, as a debugger or a core dump of the GPU shows them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime

from .bounds import Count

CUDA_GDB, CORE_DUMP = "cuda-gdb", "core dump"  # the sources of kernels
MAX_KERNELS = 32  # of one process
MAX_KERNEL_NAME_CHARS = 256
_NCCL_PREFIX = "nccl"  # ncclDevKernel_..., before NCCL 2.19 ncclKernel_...

Dimensions = tuple[Count, Count, Count]  # x, y and z


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """One kernel on a device.

    No slots: see `hangwatch.protocol.heartbeat`.
    """

    name: str  # without its arguments
    device: Count = 0  # numbered as the process that launched it does
    grid: Dimensions = (1, 1, 1)  # blocks
    block: Dimensions = (1, 1, 1)  # threads of a block

    @property
    def is_nccl(self) -> bool:
        return self.name.startswith(_NCCL_PREFIX)


Kernels = tuple[Kernel, ...]


def runs_nccl(kernels: Iterable[Kernel]) -> bool:
    return any(kernel.is_nccl for kernel in kernels)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankKernels:
    """The kernels on the devices of one rank, or the ``error`` why they are not known.

    It is evidence of an incident.
    """

    rank: int
    source: str
    taken_at: datetime
    kernels: Kernels = ()
    error: str | None = None
