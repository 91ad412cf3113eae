"""The ranks meet in the barrier that torch's elastic library builds on a store; rank 2 computes before it comes."""

import os
import time

import earlier_calls
import torch
import torch.distributed as dist
from torch.distributed.elastic.utils.store import barrier


def compute(seconds):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        torch.ones(200, 200) @ torch.ones(200, 200)


def main():
    dist.init_process_group("gloo")
    earlier_calls.make()
    rank, size = dist.get_rank(), dist.get_world_size()
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    for step in range(3):
        dist.all_reduce(torch.ones(64))
        if rank == 2 and step:
            compute(7)
        barrier(store, size, f"export{step}", barrier_timeout=1800)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
