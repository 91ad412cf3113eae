"""The training runs in threads of a pool, unevenly; the main threads poll, one of them at the expense of a CPU."""

import time
from concurrent.futures import ThreadPoolExecutor

import earlier_calls
import torch
import torch.distributed as dist


def make_step(rank, step):
    if step % 3 == rank:
        time.sleep(2.5)
    dist.all_reduce(torch.ones(64))


def poll(future, rank):
    while not future.done():
        if rank == 0:
            sum(range(20_000))
        else:
            time.sleep(0.1)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    with ThreadPoolExecutor(2) as pool:
        pool.submit(earlier_calls.make).result()
        for step in range(6):
            poll(pool.submit(make_step, rank, step), rank)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
