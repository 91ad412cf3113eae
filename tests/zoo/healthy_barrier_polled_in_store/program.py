"""The ranks meet at a counter of the store, which they poll. Rank 1 comes late each time, because it computes."""

import os
import time

import earlier_calls
import torch
import torch.distributed as dist


def meet(store, name, size):
    store.add(name, 1)
    while store.add(name, 0) < size:
        time.sleep(0.05)


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
        if rank == 1 and step:
            compute(7)
        meet(store, f"step{step}", size)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
