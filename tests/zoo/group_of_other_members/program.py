"""Rank 3 read another list of healthy ranks, and makes its group without rank 0."""

import os

import earlier_calls
import torch
import torch.distributed as dist


def healthy_ranks(rank):
    return [1, 2, 3] if rank == 3 else [0, 1, 2, 3]


def main():
    dist.init_process_group("gloo")
    earlier_calls.make()
    rank = dist.get_rank()
    dist.all_reduce(torch.ones(8))
    if rank == 3:
        open(os.environ.get("PLANTED_AT", os.devnull), "a").close()
    group = dist.new_group(healthy_ranks(rank))  # PLANTED
    for _ in range(10):
        dist.all_reduce(torch.ones(64), group=group)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
