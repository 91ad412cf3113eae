"""Reduces over a communicator that torch does not know, beside torch's own: `raw_nccl.py STEPS`, on each rank.

Inference engines make such communicators through libnccl's C interface. Each step reduces over it and then over torch's
group, on the current stream, and checks both sums. RAW_NCCL_SKIP=RANK:STEP lets one rank leave out the first of the two
in one step: then it waits for the others in torch's all_reduce, and they wait for it in the other. Prints
{"ranks": …, "steps": …} on rank 0.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

RANK = int(os.environ["RANK"])
SIZE = int(os.environ["WORLD_SIZE"])
ELEMENTS = 1000
FLOAT32, SUM = 7, 0  # of ncclDataType_t and ncclRedOp_t


class UniqueId(ctypes.Structure):
    """ncclUniqueId."""

    _fields_ = [("internal", ctypes.c_byte * 128)]


def load_nccl() -> ctypes.CDLL:
    """The library that torch has loaded: the loader knows it by this name."""
    nccl = ctypes.CDLL("libnccl.so.2")
    pointer, handle = ctypes.c_void_p, ctypes.c_void_p
    nccl.ncclGetUniqueId.argtypes = [ctypes.POINTER(UniqueId)]
    nccl.ncclCommInitRank.argtypes = [
        ctypes.POINTER(handle),
        ctypes.c_int,
        UniqueId,
        ctypes.c_int,
    ]
    nccl.ncclAllReduce.argtypes = [
        pointer,
        pointer,
        ctypes.c_size_t,
        ctypes.c_int,
        ctypes.c_int,
        handle,
        pointer,
    ]
    nccl.ncclCommDestroy.argtypes = [handle]
    return nccl


def check(result: int) -> None:
    if result:
        raise RuntimeError(f"rank {RANK}: libnccl returned {result}")


class RawCommunicator:
    """All ranks, on the current device. The store carries the unique id from rank 0 to the others."""

    def __init__(self, store: Store) -> None:
        self.nccl = load_nccl()
        self.handle = ctypes.c_void_p()
        unique_id = UniqueId()
        if RANK == 0:
            check(self.nccl.ncclGetUniqueId(ctypes.byref(unique_id)))
            store.set("raw_nccl/unique_id", bytes(unique_id).hex())
        else:
            text = store.get("raw_nccl/unique_id").decode()
            unique_id = UniqueId.from_buffer_copy(bytes.fromhex(text))
        check(self.nccl.ncclCommInitRank(ctypes.byref(self.handle), SIZE, unique_id, RANK))

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Sum a float32 tensor over all ranks in place, on the current stream."""
        stream = torch.cuda.current_stream().cuda_stream
        address, count = tensor.data_ptr(), tensor.numel()
        check(self.nccl.ncclAllReduce(address, address, count, FLOAT32, SUM, self.handle, stream))

    def destroy(self) -> None:
        check(self.nccl.ncclCommDestroy(self.handle))


def is_skipped(step: int) -> bool:
    return os.environ.get("RAW_NCCL_SKIP") == f"{RANK}:{step}"


def expect(tensor: torch.Tensor, value: float) -> None:
    values = tensor.cpu()
    assert torch.equal(values, torch.full((ELEMENTS,), value)), f"rank {RANK}: {values}"


def main() -> None:
    steps = int(sys.argv[1])
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    raw = RawCommunicator(dist.distributed_c10d._get_default_store())
    tensor = torch.zeros(ELEMENTS).to("cuda")
    for step in range(steps):
        tensor.copy_(torch.full((ELEMENTS,), float(RANK + step)))
        total = float(sum(range(SIZE)) + SIZE * step)
        if not is_skipped(step):
            raw.all_reduce(tensor)
            expect(tensor, total)
        dist.all_reduce(tensor)
        expect(tensor, total * SIZE)
    torch.cuda.synchronize()
    if RANK == 0:
        print(json.dumps({"ranks": SIZE, "steps": steps}), flush=True)
    raw.destroy()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
