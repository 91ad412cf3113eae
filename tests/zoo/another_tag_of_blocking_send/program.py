"""Rank 0 sends a block with its step as the tag; rank 1, resumed from a checkpoint, counts its steps one ahead."""

import os

import earlier_calls
import torch
import torch.distributed as dist


def main():
    dist.init_process_group("gloo")
    earlier_calls.make(None, (0, 1), first_tag=100)
    rank = dist.get_rank()
    block = torch.ones(256)
    for step in range(6):
        if rank == 1 and step == 4:
            open(os.environ.get("PLANTED_AT", os.devnull), "a").close()
        if rank == 0:
            dist.send(block, dst=1, tag=step)
        elif rank == 1:
            dist.recv(block, src=0, tag=step + (step >= 4))
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
