"""Rank 1 waits in the queue of a manager, whose methods multiprocessing makes by exec: the user's line is the one that calls them."""

import multiprocessing
import os

import earlier_calls
import torch
import torch.distributed as dist


def take_sample(samples):
    open(os.environ.get("PLANTED_AT", os.devnull), "a").close()
    return samples.get()  # PLANTED


def main():
    dist.init_process_group("gloo")
    earlier_calls.make()
    if dist.get_rank() == 1:
        take_sample(multiprocessing.get_context("spawn").Manager().Queue())
    dist.all_reduce(torch.ones(8))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
