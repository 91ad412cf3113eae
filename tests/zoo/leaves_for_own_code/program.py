"""Rank 1 goes off into code of its own, and the others wait for it in the all-reduce."""

import os
import time

import earlier_calls
import torch
import torch.distributed as dist


def upload_samples():
    open(os.environ.get("PLANTED_AT", os.devnull), "a").close()
    time.sleep(600)  # PLANTED


def main():
    dist.init_process_group("gloo")
    earlier_calls.make()
    rank = dist.get_rank()
    for step in range(10):
        gradients = torch.full((64,), float(rank))
        if rank == 1 and step == 5:
            upload_samples()
        dist.all_reduce(gradients)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
