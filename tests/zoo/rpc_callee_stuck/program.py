"""Rank 0 asks rank 1 by RPC, and the thread there that answers waits on an event that nobody sets. Ranks 1 and 2 are at the barrier."""

import os
import threading

import earlier_calls
import torch.distributed as dist
import torch.distributed.rpc as rpc


def answer():
    open(os.environ.get("PLANTED_AT", os.devnull), "a").close()
    threading.Event().wait()


def ask():
    return rpc.rpc_sync("worker1", answer, timeout=0)  # PLANTED


def main():
    dist.init_process_group("gloo")
    earlier_calls.make()
    rank, size = dist.get_rank(), dist.get_world_size()
    options = rpc.TensorPipeRpcBackendOptions(init_method="env://", _transports=["uv"])
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=size, rpc_backend_options=options)
    if rank == 0:
        ask()
    dist.barrier()
    rpc.shutdown()


if __name__ == "__main__":
    main()
