"""Rank 1 leaves out the averaging of one step's gradients, so that its next call meets another of its peers."""
import os

import earlier_calls
import torch
import torch.distributed as dist


def average(gradients):
    dist.all_reduce(gradients)
    gradients /= dist.get_world_size()


def main():
    dist.init_process_group("gloo")
    earlier_calls.make()
    rank = dist.get_rank()
    learning_rate = torch.tensor([0.1])
    for step in range(10):
        gradients = torch.full((64,), float(rank))
        if not (rank == 1 and step == 5):
            average(gradients)
        else:
            open(os.environ.get("PLANTED_AT", os.devnull), "a").close()
        dist.broadcast(learning_rate, src=0)  # PLANTED
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
