"""Rank 2 gathers where all others reduce."""

import os

import earlier_calls
import torch
import torch.distributed as dist


def main():
    dist.init_process_group("gloo")
    earlier_calls.make()
    rank = dist.get_rank()
    loss = torch.tensor([float(rank)])
    for step in range(10):
        if rank == 2 and step == 6:
            losses = torch.empty(dist.get_world_size())
            open(os.environ.get("PLANTED_AT", os.devnull), "a").close()
            dist.all_gather_into_tensor(losses, loss)  # PLANTED
        else:
            dist.all_reduce(loss)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
