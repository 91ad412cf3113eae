"""Rank 1's batch fails an assertion in the middle of a pipeline; its neighbours wait for it on both sides."""

import os

import earlier_calls
import torch
import torch.distributed as dist


def check(x, rank, batch):
    if rank == 1 and batch == 6:
        open(os.environ.get("PLANTED_AT", os.devnull), "a").close()
        assert x.isnan().any(), "expected NaN padding"  # PLANTED


def main():
    dist.init_process_group("gloo")
    earlier_calls.make((0, 1), (1, 2), (2, 3))
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    for batch in range(20):
        x = torch.zeros(8, 32)
        if rank > 0:
            dist.recv(x, src=rank - 1)
        check(x, rank, batch)
        if rank < last:
            dist.send(x, dst=rank + 1)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
