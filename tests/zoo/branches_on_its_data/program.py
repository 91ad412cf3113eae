"""Rank 2's loss is not a number, and only rank 2 sees it and asks for the last good weights."""

import os

import earlier_calls
import torch
import torch.distributed as dist


def main():
    dist.init_process_group("gloo")
    earlier_calls.make()
    rank = dist.get_rank()
    weights, gradients = torch.ones(64), torch.ones(64)
    for step in range(10):
        loss = torch.tensor(float("nan") if rank == 2 and step == 5 else 1.0)
        if loss.isnan():
            open(os.environ.get("PLANTED_AT", os.devnull), "a").close()
            dist.broadcast(weights, src=0)  # PLANTED
        dist.all_reduce(gradients)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
