"""Remote procedure calls beside collectives; a call takes a while."""

import os
import time

import torch
import torch.distributed as dist
import torch.distributed.rpc as rpc


def add(a, b):
    time.sleep(0.3)
    return a + b


def main():
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo")
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=world_size)
    for step in range(10):
        if rank == 0:
            rpc.rpc_sync("worker1", add, args=(step, 1))
        dist.all_reduce(torch.ones(8))
    rpc.shutdown()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
