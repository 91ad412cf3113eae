"""Rank 1 receives 32 values of a scatter where the root's list has 64 for each member."""

import os

import earlier_calls
import torch
import torch.distributed as dist


def main():
    dist.init_process_group("gloo")
    earlier_calls.make()
    rank, size = dist.get_rank(), dist.get_world_size()
    for step in range(10):
        is_uneven = rank == 1 and step == 5
        if is_uneven:
            open(os.environ.get("PLANTED_AT", os.devnull), "a").close()
        into = torch.ones(32 if is_uneven else 64)
        parts = [torch.ones(64) for _ in range(size)] if rank == 3 else None
        dist.scatter(into, parts, src=3)  # PLANTED
        dist.barrier()


if __name__ == "__main__":
    main()
