"""Rank 1 raises in its step, and the barrier of a finally clause keeps the exception from being seen."""

import os

import earlier_calls
import torch
import torch.distributed as dist


def read_batch(step):
    if dist.get_rank() == 1 and step == 5:
        open(os.environ.get("PLANTED_AT", os.devnull), "a").close()
        raise ValueError("a row has 7 columns, not 8")


def train():
    try:
        for step in range(10):
            read_batch(step)
            dist.all_reduce(torch.ones(64))
    finally:
        dist.barrier()  # PLANTED


def main():
    dist.init_process_group("gloo")
    earlier_calls.make()
    train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
