"""Rank 2 takes itself for the one that broadcasts."""

import os

import earlier_calls
import torch
import torch.distributed as dist


def main():
    dist.init_process_group("gloo")
    earlier_calls.make()
    rank = dist.get_rank()
    weights = torch.ones(64)
    for step in range(10):
        source = 2 if rank == 2 and step == 5 else 0
        if source:
            open(os.environ.get("PLANTED_AT", os.devnull), "a").close()
        dist.broadcast(weights, src=source)  # PLANTED
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
