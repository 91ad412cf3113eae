"""Rank 2 gathers 65 values where the root's list has 64 for each member."""

import os

import earlier_calls
import torch
import torch.distributed as dist


def main():
    dist.init_process_group("gloo")
    earlier_calls.make()
    rank, size = dist.get_rank(), dist.get_world_size()
    for step in range(10):
        is_uneven = rank == 2 and step == 5
        if is_uneven:
            open(os.environ.get("PLANTED_AT", os.devnull), "a").close()
        values = torch.ones(65 if is_uneven else 64)
        into = [torch.ones(64) for _ in range(size)] if rank == 0 else None
        dist.gather(values, into, dst=0)  # PLANTED
        dist.barrier()


if __name__ == "__main__":
    main()
