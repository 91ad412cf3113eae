"""Rank 1's buffer for one gather is too small: the call raises before it sends anything, and the script catches that and goes on.

From then on the rank's calls meet its peers' earlier ones. The last of them has nothing to meet.
"""
import os

import earlier_calls
import torch
import torch.distributed as dist


def gather_metrics(rank, step):
    world_size = dist.get_world_size()
    room = world_size - 1 if rank == 1 and step == 5 else world_size
    try:
        dist.all_gather_into_tensor(torch.empty(room * 4), torch.ones(4))  # PLANTED
    except RuntimeError as error:
        print(f"not gathered: {error}")


def main():
    dist.init_process_group("gloo")
    earlier_calls.make()
    rank = dist.get_rank()
    for step in range(10):
        gather_metrics(rank, step)
        if step == 9:
            open(os.environ.get("PLANTED_AT", os.devnull), "a").close()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
