"""Rank 0 prepares the data under a lock file, on which ranks 1 and 2 wait; then these have their turns by keys of the store."""

import fcntl
import os
import time

import earlier_calls
import torch
import torch.distributed as dist


def work(seconds):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        sum(i * i for i in range(2000))


def prepare(rank):
    with open("data.lock", "w") as file:
        if rank:
            time.sleep(0.5)
        fcntl.flock(file, fcntl.LOCK_EX)
        if not os.path.exists("data"):
            work(9)
            open("data", "w").close()


def main():
    dist.init_process_group("gloo")
    earlier_calls.make()
    rank = dist.get_rank()
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    dist.all_reduce(torch.ones(64))
    if rank < 3:
        prepare(rank)
    dist.barrier()
    if rank:
        store.wait([f"turn{rank}"])
    work(3.5)
    store.set(f"turn{rank + 1}", "1")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
