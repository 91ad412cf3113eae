"""Rank 0 has declared an evaluation of at most 6 seconds, and does not come back from it."""

import os
import time

import earlier_calls
import torch
import torch.distributed as dist

import hangwatch


def evaluate():
    open(os.environ.get("PLANTED_AT", os.devnull), "a").close()
    time.sleep(600)  # PLANTED


def main():
    dist.init_process_group("gloo")
    earlier_calls.make()
    rank = dist.get_rank()
    for step in range(10):
        if rank == 0 and step == 5:
            with hangwatch.phase("evaluate", limit=6):
                evaluate()
        dist.all_reduce(torch.ones(64))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
