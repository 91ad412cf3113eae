"""Rank 2 meets a bad sample and ends with an exception."""

import os

import earlier_calls
import torch
import torch.distributed as dist


def parse(sample):
    open(os.environ.get("PLANTED_AT", os.devnull), "a").close()
    raise ValueError(f"sample {sample} has no label")  # PLANTED


def main():
    dist.init_process_group("gloo")
    earlier_calls.make()
    rank = dist.get_rank()
    for step in range(10):
        if rank == 2 and step == 5:
            parse(step)
        dist.all_reduce(torch.ones(64))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
