"""Ranks that end up to six seconds apart, half of them without destroying their process group."""

import time

import earlier_calls
import torch
import torch.distributed as dist


def main():
    dist.init_process_group("gloo")
    earlier_calls.make()
    rank = dist.get_rank()
    for _ in range(20):
        dist.all_reduce(torch.ones(64))
    time.sleep(2 * rank)
    if rank % 2:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
