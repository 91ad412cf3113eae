"""Rank 0 averages the loss for its log, and nobody else does."""

import os

import earlier_calls
import torch
import torch.distributed as dist


def main():
    dist.init_process_group("gloo")
    earlier_calls.make()
    rank = dist.get_rank()
    for step in range(10):
        gradients, loss = torch.ones(64), torch.ones(1)
        dist.all_reduce(gradients)
        if rank == 0 and step == 5:
            open(os.environ.get("PLANTED_AT", os.devnull), "a").close()
            dist.all_reduce(loss)  # PLANTED
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
