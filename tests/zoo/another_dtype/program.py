"""Rank 0 left mixed precision on: it reduces bfloat16 where its peers reduce float32."""

import os

import earlier_calls
import torch
import torch.distributed as dist


def main():
    dist.init_process_group("gloo")
    earlier_calls.make()
    rank = dist.get_rank()
    for step in range(10):
        mixed = rank == 0 and step == 4
        gradients = torch.full((64,), float(rank), dtype=torch.bfloat16 if mixed else torch.float32)
        if mixed:
            open(os.environ.get("PLANTED_AT", os.devnull), "a").close()
        dist.all_reduce(gradients)  # PLANTED
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
