"""Rank 3 reduces one element more than its peers. gloo aborts the process, and torchrun ends the others."""

import os

import earlier_calls
import torch
import torch.distributed as dist


def main():
    dist.init_process_group("gloo")
    earlier_calls.make()
    rank = dist.get_rank()
    for step in range(10):
        width = 65 if rank == 3 and step == 7 else 64
        gradients = torch.full((width,), float(rank))
        if width == 65:
            open(os.environ.get("PLANTED_AT", os.devnull), "a").close()
        dist.all_reduce(gradients)  # PLANTED
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
