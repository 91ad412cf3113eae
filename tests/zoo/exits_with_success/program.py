"""Rank 1 finds its work done already, says so by exit status 0, and the others count on it."""

import os
import sys
import time

import earlier_calls
import torch
import torch.distributed as dist


def main():
    dist.init_process_group("gloo")
    earlier_calls.make()
    rank = dist.get_rank()
    for step in range(20):
        if rank == 1 and step == 12:
            open(os.environ.get("PLANTED_AT", os.devnull), "a").close()
            sys.exit(0)
        time.sleep(0.05)
        dist.all_reduce(torch.ones(64))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
