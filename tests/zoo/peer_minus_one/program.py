"""Rank 0 receives from the rank before it, which it computes without a modulus: from rank -1, which no rank is."""

import os

import earlier_calls
import torch
import torch.distributed as dist


def find_neighbour(rank, size, step):
    return (rank - 1) % size if step < 3 else rank - 1


def main():
    dist.init_process_group("gloo")
    earlier_calls.make(None, (2, 0))
    rank, size = dist.get_rank(), dist.get_world_size()
    for step in range(5):
        pending = dist.isend(torch.ones(4), dst=(rank + 1) % size)
        if step == 3 and rank == 0:
            open(os.environ.get("PLANTED_AT", os.devnull), "a").close()
        dist.recv(torch.ones(4), src=find_neighbour(rank, size, step))  # PLANTED
        pending.wait()
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
