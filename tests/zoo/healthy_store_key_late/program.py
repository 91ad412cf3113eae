"""Ranks 0 and 2 wait in the store for the key that rank 3 sets after it has computed for long; rank 1 is at the barrier."""

import datetime
import os
import time

import earlier_calls
import torch
import torch.distributed as dist


def compute(seconds):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        torch.ones(200, 200) @ torch.ones(200, 200)


def main():
    dist.init_process_group("gloo")
    earlier_calls.make()
    rank = dist.get_rank()
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    dist.all_reduce(torch.ones(8))
    if rank == 3:
        compute(9)
        store.set("settings", "1")
    elif rank != 1:
        store.wait(["settings"], datetime.timedelta(minutes=30))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
