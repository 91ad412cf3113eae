"""Rank 1 reads through a null pointer in a native extension."""

import ctypes
import os
import time

import earlier_calls
import torch
import torch.distributed as dist


def main():
    dist.init_process_group("gloo")
    earlier_calls.make()
    rank = dist.get_rank()
    for step in range(30):
        if rank == 1 and step == 20:
            open(os.environ.get("PLANTED_AT", os.devnull), "a").close()
            ctypes.string_at(0)
        time.sleep(0.05)
        dist.all_reduce(torch.ones(64))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
