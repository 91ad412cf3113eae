"""Rank 2 swallows the exception of a bad sample, and with it two collectives. It comes to the barrier too early."""

import os

import earlier_calls
import torch
import torch.distributed as dist


def train_step(rank, step):
    if rank == 2 and step == 5:
        open(os.environ.get("PLANTED_AT", os.devnull), "a").close()
        raise ValueError(f"sample {step} has no label")
    dist.all_reduce(torch.ones(64))
    dist.all_reduce(torch.ones(64))


def main():
    dist.init_process_group("gloo")
    earlier_calls.make()
    rank = dist.get_rank()
    for step in range(10):
        try:
            train_step(rank, step)
        except ValueError as error:
            print(f"skipped: {error}")
    dist.barrier()  # PLANTED
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
