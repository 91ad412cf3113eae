"""Rank 0 evaluates for long, and has declared it. The others wait, and the job ends well."""

import os
import time

import earlier_calls
import torch
import torch.distributed as dist

import hangwatch


def evaluate():
    time.sleep(12)


def main():
    dist.init_process_group("gloo")
    earlier_calls.make()
    rank = dist.get_rank()
    for step in range(10):
        if rank == 0 and step == 5:
            open(os.environ.get("PLANTED_AT", os.devnull), "a").close()
            with hangwatch.phase("evaluate", limit=60):
                evaluate()
        dist.all_reduce(torch.ones(64))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
