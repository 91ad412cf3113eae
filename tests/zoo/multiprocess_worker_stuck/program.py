"""Rank 1 waits for a pool of the package multiprocess, whose worker waits for a lock that nobody releases."""

import os

import earlier_calls
import multiprocess
import torch.distributed as dist

CONTEXT = multiprocess.get_context("fork")
LOCK = CONTEXT.Lock()


def tokenize(text):
    with LOCK:
        return text.split()


def map_dataset(pool):
    open(os.environ.get("PLANTED_AT", os.devnull), "a").close()
    return pool.map(tokenize, ["a b", "c"])  # PLANTED


def main():
    dist.init_process_group("gloo")
    earlier_calls.make()
    if dist.get_rank() == 1:
        LOCK.acquire()
        with CONTEXT.Pool(2) as pool:
            map_dataset(pool)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
