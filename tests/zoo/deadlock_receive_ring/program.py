"""Ring attention in which every rank receives from its left before it sends to its right."""

import os

import earlier_calls
import torch
import torch.distributed as dist


def rotate(block, rank, world_size):
    incoming = torch.empty_like(block)
    open(os.environ.get("PLANTED_AT", os.devnull), "a").close()
    dist.recv(incoming, src=(rank - 1) % world_size)  # PLANTED
    dist.send(block, dst=(rank + 1) % world_size)
    return incoming


def main():
    dist.init_process_group("gloo")
    earlier_calls.make(None, (0, 1), (1, 2), (2, 3), (3, 0))
    rank, world_size = dist.get_rank(), dist.get_world_size()
    dist.barrier()
    block = torch.full((4, 16), float(rank))
    for _ in range(world_size - 1):
        block = rotate(block, rank, world_size)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
