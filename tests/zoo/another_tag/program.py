"""Rank 0 tags what it sends with its step, counted from 0; rank 1 counts its steps from 1, and waits for one that never comes."""

import os

import earlier_calls
import torch
import torch.distributed as dist


def main():
    dist.init_process_group("gloo")
    earlier_calls.make(None, (0, 1), first_tag=100)
    rank = dist.get_rank()
    dist.barrier()
    pending = []
    for step in range(3):
        activations = torch.ones(1024)
        if rank < 2 and step == 2:
            open(os.environ.get("PLANTED_AT", os.devnull), "a").close()
        if rank == 0:
            pending.append(dist.isend(activations, dst=1, tag=step))
        if rank == 1:
            dist.recv(activations, src=0, tag=step + 1)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
