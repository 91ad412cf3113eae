"""Rank 0 asks rank 1 by RPC, and the thread there that answers computes for a while. Ranks 1 and 2 are at the barrier."""

import time

import earlier_calls
import torch
import torch.distributed as dist
import torch.distributed.rpc as rpc


def compute(seconds):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        torch.ones(200, 200) @ torch.ones(200, 200)


def main():
    dist.init_process_group("gloo")
    earlier_calls.make()
    rank, size = dist.get_rank(), dist.get_world_size()
    options = rpc.TensorPipeRpcBackendOptions(init_method="env://", _transports=["uv"])
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=size, rpc_backend_options=options)
    if rank == 0:
        rpc.rpc_async("worker1", compute, args=(10,), timeout=0).wait()
    dist.barrier()
    rpc.shutdown()


if __name__ == "__main__":
    main()
