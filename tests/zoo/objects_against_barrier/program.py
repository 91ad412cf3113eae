"""Rank 1 believes that the configuration was sent already, and goes to the barrier behind it."""

import os

import earlier_calls
import torch
import torch.distributed as dist


def main():
    dist.init_process_group("gloo")
    earlier_calls.make()
    rank = dist.get_rank()
    dist.all_reduce(torch.ones(8))
    cached = rank == 1
    config = [{"lr": 0.1}] if rank == 0 else [None]
    if not cached:
        dist.broadcast_object_list(config, src=0)
    else:
        open(os.environ.get("PLANTED_AT", os.devnull), "a").close()
    dist.barrier()  # PLANTED
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
