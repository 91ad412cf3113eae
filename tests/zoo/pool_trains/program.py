"""A pool of one thread makes the steps, and the main thread waits for each result. In its step, rank 1 takes a lock that nobody releases."""

import os
import threading
from concurrent.futures import ThreadPoolExecutor

import earlier_calls
import torch
import torch.distributed as dist

LOCK = threading.Lock()


def read_statistics(rank, step):
    if rank == 1 and step == 5:
        open(os.environ.get("PLANTED_AT", os.devnull), "a").close()
        LOCK.acquire()
        LOCK.acquire()  # PLANTED


def make_step(rank, step):
    read_statistics(rank, step)
    dist.all_reduce(torch.ones(64))


def main():
    dist.init_process_group("gloo")
    with ThreadPoolExecutor(1) as pool:
        pool.submit(earlier_calls.make).result()
        for step in range(10):
            pool.submit(make_step, dist.get_rank(), step).result()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
