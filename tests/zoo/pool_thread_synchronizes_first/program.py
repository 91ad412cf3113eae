"""Rank 1 lets a thread synchronize the metrics' group and waits for it, before the gradients; the others reduce the gradients first."""

import os
from concurrent.futures import ThreadPoolExecutor

import earlier_calls
import torch
import torch.distributed as dist


def reduce(values, group=None):
    dist.all_reduce(values, group=group)  # PLANTED


def main():
    dist.init_process_group("gloo")
    metrics = dist.new_group()
    earlier_calls.make(None, metrics)
    rank = dist.get_rank()
    with ThreadPoolExecutor(1) as pool:
        for step in range(12):
            if rank == 1 and step == 8:
                open(os.environ.get("PLANTED_AT", os.devnull), "a").close()
                pool.submit(reduce, torch.ones(4), metrics).result()
                reduce(torch.ones(32))
            else:
                reduce(torch.ones(32))
                pool.submit(reduce, torch.ones(4), metrics).result()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
