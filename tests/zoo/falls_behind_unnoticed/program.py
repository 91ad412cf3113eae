"""Rank 2 swallows the exception of a bad sample between two all-reduces of equal size, and is a call behind from then on.

Nothing hangs before the barrier behind the loop.
"""
import os

import earlier_calls
import torch
import torch.distributed as dist


def train_step(rank, step):
    dist.all_reduce(torch.ones(64))
    if rank == 2 and step == 3:
        raise ValueError(f"sample {step} has no label")
    dist.all_reduce(torch.ones(64))


def main():
    dist.init_process_group("gloo")
    earlier_calls.make()
    rank = dist.get_rank()
    for step in range(20):
        try:
            train_step(rank, step)
        except ValueError as error:
            print(f"skipped: {error}")
    open(os.environ.get("PLANTED_AT", os.devnull), "a").close()
    dist.barrier()  # PLANTED
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
