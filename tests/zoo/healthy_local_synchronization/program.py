"""Pairs make groups of their own, as their members alone do, in an order that differs from rank to rank; rank 1 computes before its."""

import time

import earlier_calls
import torch
import torch.distributed as dist


def compute(seconds):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        torch.ones(200, 200) @ torch.ones(200, 200)


def main():
    dist.init_process_group("gloo")
    earlier_calls.make()
    rank = dist.get_rank()
    if rank == 1:
        compute(8)
    first = rank - rank % 2
    pair = dist.new_group([first, first + 1], use_local_synchronization=True)
    dist.all_reduce(torch.ones(4), group=pair)
    if rank >= 2:
        again = dist.new_group([2, 3], use_local_synchronization=True)
        dist.all_reduce(torch.ones(8), group=again)
    dist.all_reduce(torch.ones(4))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
