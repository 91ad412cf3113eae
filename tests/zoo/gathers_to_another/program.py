"""Rank 3 gathers to rank 1, all others to rank 0."""

import os

import earlier_calls
import torch
import torch.distributed as dist


def main():
    dist.init_process_group("gloo")
    earlier_calls.make()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for step in range(8):
        target = 1 if rank == 3 and step == 5 else 0
        if target:
            open(os.environ.get("PLANTED_AT", os.devnull), "a").close()
        losses = [torch.empty(1) for _ in range(world_size)] if rank == target else None
        dist.gather(torch.ones(1), losses, dst=target)  # PLANTED
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
