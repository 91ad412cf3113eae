"""Rank 1 repeats a reduction that it takes for failed. The others' calls then meet its earlier ones, unnoticed until the barrier."""
import os

import earlier_calls
import torch
import torch.distributed as dist


def reduce_loss(rank, step):
    loss = torch.ones(1)
    dist.all_reduce(loss)
    if rank == 1 and step == 4:
        dist.all_reduce(loss)


def main():
    dist.init_process_group("gloo")
    earlier_calls.make()
    rank = dist.get_rank()
    for step in range(8):
        reduce_loss(rank, step)
        dist.all_reduce(torch.ones(1))
        dist.all_reduce(torch.ones(1))  # PLANTED
    open(os.environ.get("PLANTED_AT", os.devnull), "a").close()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
