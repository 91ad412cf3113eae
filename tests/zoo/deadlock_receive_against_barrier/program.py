"""Rank 1 wants a batch from rank 0 before the barrier, and rank 0 sends it after the barrier."""

import os

import earlier_calls
import torch
import torch.distributed as dist


def main():
    dist.init_process_group("gloo")
    earlier_calls.make(None, (0, 1))
    rank = dist.get_rank()
    dist.barrier()
    batch = torch.ones(32)
    if rank == 1:
        open(os.environ.get("PLANTED_AT", os.devnull), "a").close()
        dist.recv(batch, src=0)
    dist.barrier()
    if rank == 0:
        dist.send(batch, dst=1)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
