"""Rank 0 tags what it sends with its step, counted from 0; rank 1 counts its steps from 1."""

import os

import torch
import torch.distributed as dist


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    activations = torch.ones(1 << 23)
    dist.barrier()
    for step in range(3):
        if rank < 2:
            open(os.environ.get("PLANTED_AT", os.devnull), "a").close()
            dist.send(activations, dst=1, tag=step) if rank == 0 else dist.recv(activations, src=0, tag=step + 1)  # PLANTED
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
