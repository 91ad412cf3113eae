"""Rank 0 has a far larger batch than its peer: it computes for long, and the job ends well."""

import os
import time

import earlier_calls
import torch
import torch.distributed as dist


def compute(seconds):
    end = time.monotonic() + seconds
    x = torch.randn(256, 256)
    while time.monotonic() < end:
        x = torch.tanh(x @ x)


def main():
    dist.init_process_group("gloo")
    earlier_calls.make()
    rank = dist.get_rank()
    for step in range(10):
        if rank == 0 and step == 5:
            open(os.environ.get("PLANTED_AT", os.devnull), "a").close()
            compute(12)
        dist.all_reduce(torch.ones(64))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
