"""Rank 2 finds its configuration wrong and leaves by sys.exit with status 2."""

import os
import sys

import earlier_calls
import torch
import torch.distributed as dist


def main():
    dist.init_process_group("gloo")
    earlier_calls.make()
    rank = dist.get_rank()
    dist.all_reduce(torch.ones(8))
    if rank == 2:
        open(os.environ.get("PLANTED_AT", os.devnull), "a").close()
        sys.exit(2)
    for _ in range(10):
        dist.all_reduce(torch.ones(64))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
